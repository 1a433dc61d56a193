"""Groups of Megatron workers on Ray, of verl's earlier line."""

from __future__ import annotations

from typing import Any

from phalanx.compat.verl.single_controller.base.megatron.worker_group import MegatronWorkerGroup
from phalanx.compat.verl.single_controller.ray.classes import RayClassWithInitArgs
from phalanx.compat.verl.single_controller.ray.group import RayWorkerGroup
from phalanx.compat.verl.single_controller.ray.pools import RayResourcePool


class NVMegatronRayWorkerGroup(RayWorkerGroup, MegatronWorkerGroup):
    """A group whose workers form Megatron's parallel state in their constructor, as ``MegatronWorker`` ones do."""

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(resource_pool=resource_pool, ray_cls_with_init=ray_cls_with_init, **kwargs)
        self._ask()

    def _ask(self) -> None:
        rank_infos = self.execute_all_async("get_megatron_rank_info")
        global_info = self.execute_rank_zero_async("get_megatron_global_info")
        self._megatron_rank_info = self._wait(rank_infos, "get_megatron_rank_info")
        self._megatron_global_info = self._wait(global_info, "get_megatron_global_info")


class MegatronRayWorkerGroup(NVMegatronRayWorkerGroup):
    """A group whose workers form the parallel state when told: by ``init_megatron(**default_megatron_kwargs)``."""

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        default_megatron_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._default_megatron_kwargs = default_megatron_kwargs or {}
        super().__init__(resource_pool=resource_pool, ray_cls_with_init=ray_cls_with_init, **kwargs)

    def _ask(self) -> None:
        self.init_megatron(self._default_megatron_kwargs)

    def init_megatron(self, default_megatron_kwargs: dict[str, Any] | None = None) -> None:
        """Form the parallel state in the workers, and ask them for it."""
        refs = self.execute_all_async("init_megatron", **(default_megatron_kwargs or {}))
        self._wait(refs, "init_megatron")
        super()._ask()
