"""What groups of Megatron workers know of the parallel state."""

from __future__ import annotations

from typing import Any

from phalanx.compat.verl.errors import CheckFailed
from phalanx.compat.verl.single_controller.base.worker import DistGlobalInfo, DistRankInfo
from phalanx.compat.verl.single_controller.base.worker_group import ResourcePool, WorkerGroup


class MegatronWorkerGroup(WorkerGroup):
    """A group with ``tp_size, pp_size, dp_size, cp_size`` and the place of each rank."""

    def __init__(self, resource_pool: ResourcePool | None, **kwargs: Any) -> None:
        super().__init__(resource_pool=resource_pool, **kwargs)
        self._megatron_rank_info: list[DistRankInfo] | None = None
        self._megatron_global_info: DistGlobalInfo | None = None

    def init_megatron(self, default_megatron_kwargs: dict[str, Any] | None = None) -> None:
        """Form the parallel state in the workers; for groups whose workers have not."""
        raise NotImplementedError(
            "form the parallel state in the worker's constructor, or override init_megatron"
        )

    def get_megatron_rank_info(self, rank: int) -> DistRankInfo:
        """The place of a rank in the parallel state."""
        if not 0 <= rank < self.world_size:
            raise CheckFailed(
                f"rank {rank} of a group of {self.world_size}: expected 0 to {self.world_size - 1}"
            )
        return self._known(self._megatron_rank_info)[rank]

    def get_megatron_global_info(self) -> DistGlobalInfo:
        """The sizes of the parallel state."""
        return self._known(self._megatron_global_info)

    def _known(self, info: Any) -> Any:
        if info is None:
            raise CheckFailed(
                "the parallel state of the workers is not known yet; call init_megatron(...) first"
            )
        return info

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.get_megatron_global_info().tp_size

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.get_megatron_global_info().dp_size

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return self.get_megatron_global_info().pp_size

    @property
    def cp_size(self) -> int:
        """Number of context-parallel ranks."""
        return self.get_megatron_global_info().cp_size
