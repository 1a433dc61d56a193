"""Conversion of a plain configuration to Megatron's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from phalanx.compat.verl.errors import CheckFailed

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def _dtype(given: Any) -> torch.dtype:
    if isinstance(given, torch.dtype):
        return given
    found = _DTYPES.get(str(given))
    if found is None:
        raise CheckFailed(f"param_dtype={given!r}: expected one of {', '.join(_DTYPES)}")
    return found


def init_model_parallel_config(config: Mapping[str, Any]) -> Any:
    """Return Megatron's ``ModelParallelConfig`` from a mapping or an OmegaConf node.

    ``param_dtype`` may be a name ("fp32", "bf16", "fp16"). Entries that megatron-core's class does not have
    (``pipeline_model_parallel_rank``, ...) are left out: they describe the rank, not the model. Weights are
    initialized on the CPU if there is no GPU.

    Raises:
        CheckFailed: if ``param_dtype`` is unknown.
    """
    from megatron.core import ModelParallelConfig

    names = {field.name for field in dataclasses.fields(ModelParallelConfig) if field.init}
    given = {name: config[name] for name in config if name in names and config[name] is not None}
    dtype = _dtype(config.get("param_dtype") or config.get("params_dtype") or "fp32")
    defaults: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "use_cpu_initialization": not torch.cuda.is_available(),
    }
    return ModelParallelConfig(**{**defaults, **given, "params_dtype": dtype})
