"""``VllmRollout``: vLLM's engine as a role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.engines.calls import EngineCall
from phalanx.engines.engine import RolloutEngine
from phalanx.engines.leaves import Prefix, Prompt, Sampling
from phalanx.engines.vllm.library import prepare
from phalanx.errors import DeclarationError

__all__ = ["VllmRollout"]

_OURS = ("model", "async_scheduling", "distributed_executor_backend", "logits_processors")


class VllmRollout(RolloutEngine):
    """vLLM generates: an engine in the process of each rank, or, by ``tensor_parallel_size=``, over ranks in a row.

    Args:
        model: folder of the model: its configuration, and its weights, unless ``load_format="dummy"``.
        weights: the name under which the engine accepts weights; None for those of the folder only.
        seed: of the answers that name none; None for others in every run.
        engine_options: of vLLM's ``EngineArgs``: ``dtype``, ``max_model_len``, ``kv_cache_memory_bytes`` and so on.

    Raises:
        DeclarationError: there is no vLLM here, or an option that this engine sets itself.
    """

    def __init__(
        self,
        model: str,
        weights: str | None = "policy",
        *,
        seed: int | None = None,
        **engine_options: Any,
    ) -> None:
        for name in _OURS:
            if name in engine_options:
                raise DeclarationError(
                    f"VllmRollout({name}=...): this engine sets {name} itself; leave it out"
                )
        size = engine_options.get("tensor_parallel_size", 1)
        if not isinstance(size, int) or size < 1 or self.world_size % size:
            raise DeclarationError(
                f"VllmRollout(tensor_parallel_size={size!r}): expected a number that divides the group's "
                f"{self.world_size} ranks"
            )
        prepare()
        from phalanx.engines.vllm.starting import start  # torch: in the ranks

        self._follows = self.rank % size != 0
        started = start(str(model), engine_options, rank=self.rank, seeds=seed is not None)
        self.register_mesh("engine", {"dp": self.rank // size, "tp": self.rank % size})
        self.serve(started.machine, weights=weights, seed=seed)
        if weights is not None:
            from phalanx.engines.vllm.weights import expected_weights  # torch: in the ranks

            trusted = bool(engine_options.get("trust_remote_code", False))
            wanted = expected_weights(str(model), started.dtype, trust_remote_code=trusted)
            self.accept_weights(weights, wanted, load=started.load)

    def _call(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling],
        prefix: Sequence[Prefix] | None,
        ids: Sequence[str] | None,
        *,
        tokens: bool = False,
    ) -> EngineCall:
        """Of several tp ranks the first answers; what the others give is not looked at."""
        if self._follows:
            return super()._call([], [], None, None, tokens=tokens)
        return super()._call(prompts, sampling, prefix, ids, tokens=tokens)
