"""Groups of Megatron workers on Ray, of verl's earlier line."""

from __future__ import annotations

from typing import Any

from phalanx.compat.verl.errors import CheckFailed
from phalanx.compat.verl.single_controller.base.worker import DistGlobalInfo, DistRankInfo
from phalanx.compat.verl.single_controller.ray.classes import RayClassWithInitArgs
from phalanx.compat.verl.single_controller.ray.group import RayWorkerGroup
from phalanx.compat.verl.single_controller.ray.pools import RayResourcePool


class NVMegatronRayWorkerGroup(RayWorkerGroup):
    """A group whose workers initialize Megatron's parallel state in their constructors, as ``MegatronWorker``."""

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(resource_pool=resource_pool, ray_cls_with_init=ray_cls_with_init, **kwargs)
        rank_infos = self.execute_all_async("get_megatron_rank_info")
        global_info = self.execute_rank_zero_async("get_megatron_global_info")
        self._megatron_rank_info: list[DistRankInfo] = self._wait(rank_infos)
        self._megatron_global_info: DistGlobalInfo = self._wait(global_info)

    def get_megatron_rank_info(self, rank: int) -> DistRankInfo:
        """Return a rank's coordinates in the parallel state."""
        if not 0 <= rank < self.world_size:
            raise CheckFailed(
                f"rank {rank} of a group of {self.world_size}: expected 0 to {self.world_size - 1}"
            )
        return self._megatron_rank_info[rank]

    def get_megatron_global_info(self) -> DistGlobalInfo:
        """Return the sizes of the parallel state."""
        return self._megatron_global_info

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return self._megatron_global_info.tp_size

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return self._megatron_global_info.dp_size

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return self._megatron_global_info.pp_size

    @property
    def cp_size(self) -> int:
        """Number of context-parallel ranks."""
        return self._megatron_global_info.cp_size
