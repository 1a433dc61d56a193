"""What an engine's weights have to look like, and how a version of them is put into it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from phalanx.engines.vllm.vllm_imports import find
from phalanx.errors import WeightsError

__all__ = ["expected_weights", "reload"]


def expected_weights(folder: str, dtype: torch.dtype, *, trust_remote_code: bool) -> dict[str, torch.Tensor]:
    """Every tensor of the model in ``folder`` by its name in a checkpoint, without memory; tied ones under each name.

    A sync compares what its source has with these before a byte moves: vLLM does not come back from a load that fails.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # only engines need it

    auto_config: Any = AutoConfig
    auto_model: Any = AutoModelForCausalLM
    config = auto_config.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = auto_model.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    kept = set(model.state_dict())
    found.update((name, one) for name, one in model.named_buffers() if name in kept)
    return {name: torch.empty_like(one, device="meta") for name, one in found.items()}


def reload(worker: Any, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
    """In vLLM's worker: take all weights anew, layer by layer, each into the memory that it has.

    Raises:
        WeightsError: the model has parameters that none of these reached.
    """
    model = worker.model_runner.get_model()
    # It warns of layers that have nothing to load, in every sync; what is missing is looked for below.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    wanted = {name for name, _ in model.named_parameters()}
    with find("vllm.config.set_current_vllm_config")(worker.vllm_config):
        find("vllm.model_executor.model_loader.reload.initialize_layerwise_reload")(model)
        loaded = model.load_weights(pairs)
        find("vllm.model_executor.model_loader.reload.finalize_layerwise_reload")(
            model, worker.model_runner.model_config
        )
    missing = sorted(wanted - loaded) if loaded is not None else []
    if missing:
        raise WeightsError(
            f"vLLM put nothing into {len(missing)} of its parameters: {', '.join(missing[:5])}"
        )
