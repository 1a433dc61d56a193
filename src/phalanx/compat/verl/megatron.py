"""The names of verl's earlier line for Megatron, as its tutorial imports them from several modules of verl.

They are groups whose workers have Megatron's parallel state, Llama's layers and their configuration. ``MegatronWorker``
is beside ``Worker``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from phalanx.compat.verl.single_controller.base.decorator import CheckFailed
from phalanx.compat.verl.single_controller.base.worker import DistGlobalInfo, DistRankInfo
from phalanx.compat.verl.single_controller.ray.classes import RayClassWithInitArgs
from phalanx.compat.verl.single_controller.ray.group import RayWorkerGroup
from phalanx.compat.verl.single_controller.ray.pools import RayResourcePool
from phalanx.parallel import megatron as native

#: This module is imported as verl's packages too, whose submodules are this module as well.
__path__: list[str] = []
_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


class NVMegatronRayWorkerGroup(RayWorkerGroup):
    """A group whose workers initialize Megatron's parallel state in their constructors, as ``MegatronWorker``.

    Attributes:
        tp_size, dp_size, pp_size, cp_size: sizes of the parallel state.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(resource_pool=resource_pool, ray_cls_with_init=ray_cls_with_init, **kwargs)
        self._megatron_rank_info: list[DistRankInfo] = self.execute_all_sync("get_megatron_rank_info")
        sizes: DistGlobalInfo = self.execute_rank_zero_sync("get_megatron_global_info")
        self.tp_size, self.dp_size = sizes.tp_size, sizes.dp_size
        self.pp_size, self.cp_size = sizes.pp_size, sizes.cp_size

    def get_megatron_rank_info(self, rank: int) -> DistRankInfo:
        """Return a rank's coordinates in the parallel state."""
        if not 0 <= rank < self.world_size:
            raise CheckFailed(
                f"rank {rank} of a group of {self.world_size}: expected 0 to {self.world_size - 1}"
            )
        return self._megatron_rank_info[rank]


class ParallelLlamaMLP(native.ParallelLlamaMLP):
    """The gated MLP of Llama, sharded over the tp ranks.

    Args:
        config: configuration with ``hidden_size``, ``intermediate_size`` and ``hidden_act``, as of Hugging Face.
        megatron_config: result of ``init_model_parallel_config``; None for its defaults.
    """

    def __init__(self, config: Any, megatron_config: Any = None) -> None:
        if megatron_config is None:
            megatron_config = init_model_parallel_config({})
        super().__init__(
            config.hidden_size, config.intermediate_size, megatron_config, hidden_act=config.hidden_act
        )
        self.config = config


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
