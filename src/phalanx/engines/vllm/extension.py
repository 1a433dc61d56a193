"""What vLLM's workers can do for us, where they live in processes of their own: ``worker_extension_cls``."""

from __future__ import annotations

from phalanx.engines.vllm.kept import opened
from phalanx.engines.vllm.shared_memory import unlink_shared_memory
from phalanx.engines.vllm.weights import reload

__all__ = ["NAME", "WorkerExtension"]

NAME = f"{__name__}.WorkerExtension"


class WorkerExtension:
    """Mixed into vLLM's worker."""

    def phalanx_load(self, told: str) -> None:
        """Take all weights anew from a segment; see :func:`phalanx.engines.vllm.kept.opened`."""
        reload(self, opened(told))

    def phalanx_unlink(self) -> list[str]:
        """Take the names from what this process has in /dev/shm; gives them."""
        return unlink_shared_memory()
