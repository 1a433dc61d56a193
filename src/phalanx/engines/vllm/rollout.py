"""``VllmRollout``: vLLM's engine as a role."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.declare.dispatch_modes import Dispatch
from phalanx.declare.register import register
from phalanx.declare.weight_declarations import WeightsDeclared
from phalanx.engines.engine import RolloutEngine
from phalanx.engines.engine_types import Endpoint
from phalanx.engines.vllm.endpoint import EndpointServer, choose_key
from phalanx.engines.vllm.vllm_imports import prepare
from phalanx.engines.vocabulary import check_folder, decoder, load_tokenizer
from phalanx.errors import DeclarationError

if TYPE_CHECKING:
    from phalanx.engines.vllm.vllm_runner import VllmRunner  # torch: in the ranks

_SET_HERE = (
    "model",
    "async_scheduling",
    "data_parallel_size",
    "distributed_executor_backend",
    "logits_processors",
    "worker_extension_cls",
)


class VllmRollout(RolloutEngine):
    """vLLM generates: an engine for each rank, in processes of its own, optionally with an HTTP server.

    With ``px.ResourcePool(..., accelerators_per_slot=4)`` an engine has four accelerators.
    ``px.engines.endpoints(group)`` returns the URLs and keys of the servers, vLLM's OpenAI-compatible servers.

    Args:
        model: folder of the model: its configuration, and its weights, unless ``load_format="dummy"``.
        weights: name under which the engine accepts weights; None for constant weights of the folder.
        seed: seed of answers that have none; None for others in every run.
        tokenizer: a folder, or a tokenizer: prompts and stops can then be texts, and answers have ``text``. The server
            needs a folder for texts.
        serve: whether each engine has a server.
        host: address of the server. The default serves processes of the same node only; "0.0.0.0" serves other nodes
            too, by plain HTTP.
        port: port of the server. 0 takes a free port.
        token: key that every request needs, of 16 characters or more. None generates a key for each engine.
        server_options: options of ``vllm serve``, such as ``{"enable_auto_tool_choice": True}``.
        engine_options: options of vLLM's ``AsyncEngineArgs``: ``dtype``, ``max_model_len``, ``kv_cache_memory_bytes``
            and so on. ``tensor_parallel_size`` defaults to the number of the slot's accelerators.

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
        tokenizer: Any = None,
        serve: bool = False,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        server_options: dict[str, Any] | None = None,
        **engine_options: Any,
    ) -> None:
        for name in _SET_HERE:
            if name in engine_options:
                raise DeclarationError(f"VllmRollout({name}=...): this engine sets {name}; leave it out")
        if not serve and (token is not None or server_options):
            raise DeclarationError(
                "VllmRollout has options of a server: expected serve=True, or none of them"
            )
        key = choose_key(token) if serve else ""
        prepare()
        check_folder("model", model)
        from phalanx.engines.vllm.vllm_runner import VllmRunner  # torch: in the ranks

        options = {"tensor_parallel_size": self._count_accelerators(), **engine_options}
        if serve and isinstance(tokenizer, str | Path):
            options |= {"tokenizer": str(tokenizer), "skip_tokenizer_init": False}
        tokenizer = load_tokenizer(tokenizer)
        # Before the engine, which starts in half a minute: wrong options of the server are reported at once.
        self._server = EndpointServer(str(model), host, port, key, server_options or {}) if serve else None
        self._endpoint: Endpoint | None = None
        try:
            runner = VllmRunner(
                str(model),
                options,
                decoder(tokenizer),
                seeds=seed is not None,
                next_version=lambda: self._next_version(weights),
            )
        except BaseException:
            if self._server is not None:
                self._server.close()
            raise
        self._vllm = runner
        encode = None if tokenizer is None else tokenizer.encode
        self.serve(runner, weights=weights, seed=seed, encode=encode)
        try:
            if self._server is not None:
                self._endpoint = runner.wait(self._server.start(runner.llm))
            if weights is not None:
                self._accept(runner, str(model), weights, bool(options.get("trust_remote_code", False)))
        except BaseException:
            self.close()
            raise

    def _accept(self, runner: VllmRunner, model: str, weights: str, trust_remote_code: bool) -> None:
        from phalanx.engines.vllm.vllm_weights import expected_weights  # torch: in the ranks

        expected = expected_weights(model, runner.dtype, trust_remote_code=trust_remote_code)
        self.accept_weights(weights, expected, load=runner.load)

    def _count_accelerators(self) -> int:
        context = self._context
        return 1 if context.device_type == "cpu" else max(1, len(context.accelerator_ids))

    def _next_version(self, weights: str | None) -> int:
        return WeightsDeclared.of(self._context).coming.get((self.role, weights or ""), 0)

    @register(Dispatch.ONE_TO_ALL, needs_weights=False)
    async def endpoint(self) -> Endpoint | None:
        """Return the endpoint of this rank's engine; see ``px.engines.endpoints``."""
        return self._endpoint

    def close(self) -> None:
        """End the server, all answers, and the engine's processes."""
        server, self._server = self._server, None
        if server is not None:
            self._endpoint = None
            self._vllm.wait(server.stop(), 10.0)
        super().close()
