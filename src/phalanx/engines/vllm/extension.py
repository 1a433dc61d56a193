"""What vLLM's workers can do for us, where they live in processes of their own: ``worker_extension_cls``, and the name
of what leads them there.
"""

from __future__ import annotations

from phalanx.engines.vllm.shared_memory import disown_queues, disown_semaphores, unlink_shared_memory
from phalanx.engines.vllm.vllm_weights import reload
from phalanx.engines.vllm.weight_segment import opened

__all__ = ["EXECUTOR", "NAME", "WorkerExtension"]

NAME = f"{__name__}.WorkerExtension"
EXECUTOR = "phalanx.engines.vllm.executor.Executor"


class WorkerExtension:
    """Mixed into vLLM's worker."""

    def phalanx_load(self, told: str) -> None:
        """Take all weights anew from a segment; see :func:`phalanx.engines.vllm.weight_segment.opened`."""
        reload(self, opened(told))

    def phalanx_disown(self) -> None:
        """Take the names from what this process made; see :mod:`phalanx.engines.vllm.shared_memory`."""
        disown_queues()
        disown_semaphores()

    def phalanx_unlink(self) -> None:
        """Take the names from what this process has in /dev/shm."""
        unlink_shared_memory()
