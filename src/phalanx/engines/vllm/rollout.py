"""``VllmRollout`` and ``AsyncVllmRollout``: vLLM's engine as a role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from phalanx.declare.dispatch_modes import Dispatch
from phalanx.declare.register import register
from phalanx.declare.weight_declarations import WeightsDeclared
from phalanx.engines.calls import EngineCall
from phalanx.engines.endpoint_auth import choose_key
from phalanx.engines.engine import RolloutEngine
from phalanx.engines.engine_types import Endpoint, Prefix, Prompt, SamplingParams
from phalanx.engines.tokenization import check_folder, decoder, tokenizer_of
from phalanx.engines.vllm.vllm_imports import prepare
from phalanx.errors import DeclarationError

if TYPE_CHECKING:
    from phalanx.engines.vllm.endpoint import Server  # vLLM's own packages: in the ranks

__all__ = ["AsyncVllmRollout", "VllmRollout"]

_OURS = ("model", "async_scheduling", "distributed_executor_backend", "logits_processors")
_OURS_BESIDE = (*_OURS, "worker_extension_cls", "data_parallel_size")


class VllmRollout(RolloutEngine):
    """vLLM generates: an engine in the process of each rank, or, by ``tensor_parallel_size=``, over ranks in a row.

    Args:
        model: folder of the model: its configuration, and its weights, unless ``load_format="dummy"``.
        weights: the name under which the engine accepts weights; None for those of the folder only.
        seed: of the answers that name none; None for others in every run.
        tokenizer: a folder, or a tokenizer: prompts and stops may then be texts, and answers have ``text``.
        engine_options: of vLLM's ``EngineArgs``: ``dtype``, ``max_model_len``, ``kv_cache_memory_bytes`` and so on.

    Raises:
        DeclarationError: there is no vLLM here, an option that this engine sets itself, or ranks of one engine lie on
            several nodes.
    """

    def __init__(
        self,
        model: str,
        weights: str | None = "policy",
        *,
        seed: int | None = None,
        tokenizer: Any = None,
        **engine_options: Any,
    ) -> None:
        _check_options("VllmRollout", engine_options, _OURS)
        size = engine_options.get("tensor_parallel_size", 1)
        if not isinstance(size, int) or size < 1 or self.world_size % size:
            raise DeclarationError(
                f"VllmRollout(tensor_parallel_size={size!r}): expected a number that divides the group's "
                f"{self.world_size} ranks"
            )
        prepare()
        check_folder("model", model)
        from phalanx.engines.vllm.engine_start import start  # torch: in the ranks

        self._follows = self.rank % size != 0
        text = tokenizer_of(tokenizer)
        started = start(
            str(model), engine_options, rank=self.rank, seeds=seed is not None, text=decoder(text)
        )
        self.register_mesh("engine", {"dp": self.rank // size, "tp": self.rank % size})
        encode = None if text is None else text.encode
        self.serve(started.machine, weights=weights, seed=seed, encode=encode)
        _accept(self, model, weights, started, engine_options)

    def _call(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        prefix: Sequence[Prefix] | None,
        ids: Sequence[str] | None,
        *,
        tokens: bool = False,
    ) -> EngineCall:
        """Of several tp ranks the first answers; what the others give is not looked at."""
        if self._follows:
            return super()._call([], [], None, None, tokens=tokens)
        return super()._call(prompts, sampling, prefix, ids, tokens=tokens)


class AsyncVllmRollout(RolloutEngine):
    """vLLM generates in processes of its own, one engine for each rank, and may serve others by HTTP meanwhile.

    Each rank is the client of its engine; with ``px.ResourcePool(..., accelerators_per_slot=4)`` an engine has four
    accelerators. ``px.engines.endpoints(group)`` gives the URLs and tokens of vLLM's OpenAI-compatible servers.

    Args:
        model, weights, seed: as of :class:`VllmRollout`.
        tokenizer: a folder: prompts and stops may then be texts, answers have ``text``, and so has the server.
        serve: whether each engine has a server.
        host: address at which the server listens. The default serves processes of the same node only; "0.0.0.0" serves
            other nodes too, by plain HTTP.
        port: port of the server. 0 takes a free port.
        token: key that every request needs, of 16 characters or more. None generates a key for each engine.
        server_options: of vLLM's ``vllm serve``, such as ``{"enable_auto_tool_choice": True}``.
        engine_options: of vLLM's ``AsyncEngineArgs``; ``tensor_parallel_size`` is the number of the slot's
            accelerators, unless it is said.

    Raises:
        DeclarationError: if vLLM is not installed, this engine sets an option itself, ``token`` is too short, or
            ``VLLM_SERVER_DEV_MODE`` is set.
    """

    def __init__(
        self,
        model: str,
        weights: str | None = "policy",
        *,
        seed: int | None = None,
        tokenizer: str | None = None,
        serve: bool = True,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        server_options: dict[str, Any] | None = None,
        **engine_options: Any,
    ) -> None:
        _check_options("AsyncVllmRollout", engine_options, _OURS_BESIDE)
        key = choose_key(token) if serve else ""
        prepare()
        check_folder("model", model)
        from phalanx.engines.vllm.engine_start import start_beside  # torch: in the ranks

        options = {"tensor_parallel_size": self._accelerators(), **engine_options}
        if tokenizer is not None:
            options |= {"tokenizer": str(tokenizer), "skip_tokenizer_init": False}
        text = tokenizer_of(tokenizer)
        # Before the engine, which takes half a minute: what cannot be served is known at once.
        self._server = _server(str(model), host, port, key, server_options) if serve else None
        try:
            started = start_beside(
                str(model), options, seeds=seed is not None, coming=self._coming, text=decoder(text)
            )
        except BaseException:
            if self._server is not None:
                self._server.close()
            raise
        self._core = started.core
        self._endpoint: Endpoint | None = None
        encode = None if text is None else text.encode
        self.serve(started.machine, weights=weights, seed=seed, encode=encode)
        try:
            if self._server is not None:
                self._endpoint = self._core.wait(self._server.start(self._core.llm))
            _accept(self, model, weights, started, options)
        except BaseException:
            self.close()
            raise

    def _accelerators(self) -> int:
        context = self._context
        return 1 if context.device_type == "cpu" else max(1, len(context.accelerator_ids))

    def _coming(self) -> int:
        return WeightsDeclared.of(self._context).coming.get((self.role, self._weights or ""), 0)

    @register(Dispatch.ONE_TO_ALL, needs_weights=False)
    async def endpoint(self) -> Endpoint | None:
        """Where this rank's engine is served; see ``px.engines.endpoints``."""
        return self._endpoint

    def close(self) -> None:
        """End the server, all answers, and the engine's processes."""
        server, self._server = self._server, None
        if server is not None:
            self._endpoint = None
            self._core.wait(server.stop(), 10.0)
        super().close()


def _server(model: str, host: str, port: int, key: str, options: dict[str, Any] | None) -> Server:
    from phalanx.engines.vllm.endpoint import Server  # torch's and vLLM's own packages: in the ranks

    return Server(model, host, port, key, options or {})


def _check_options(name: str, options: dict[str, Any], ours: Sequence[str]) -> None:
    for one in ours:
        if one in options:
            raise DeclarationError(f"{name}({one}=...): this engine sets {one} itself; leave it out")


def _accept(
    worker: RolloutEngine, model: str, weights: str | None, started: Any, options: dict[str, Any]
) -> None:
    if weights is None:
        return
    if started.load is None:  # they come to the engine's first rank
        worker.accept_weights(weights, {}, load=_nothing)
        return
    from phalanx.engines.vllm.vllm_weights import expected_weights  # torch: in the ranks

    trusted = bool(options.get("trust_remote_code", False))
    wanted = expected_weights(str(model), started.dtype, trust_remote_code=trusted)
    worker.accept_weights(weights, wanted, load=started.load)


def _nothing(pairs: Any) -> None:
    """Load nothing: there is nothing."""
    list(pairs)
