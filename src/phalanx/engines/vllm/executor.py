"""What leads vLLM's workers, in the process of an engine beside its rank: ``distributed_executor_backend``.

Imported by vLLM, in that process and where it is started.
"""

from __future__ import annotations

from typing import Any

from phalanx.engines.vllm.shared_memory import disown_queues, disown_semaphores
from phalanx.engines.vllm.vllm_imports import find

__all__ = ["Executor"]

_Base: Any = find("vllm.v1.executor.multiproc_executor.MultiprocExecutor")


class Executor(_Base):
    """vLLM's own, whose process takes part in what its workers are asked to do about shared memory."""

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """See vLLM."""
        if method == "phalanx_disown":
            disown_queues()
            disown_semaphores()
        return super().collective_rpc(method, *args, **kwargs)
