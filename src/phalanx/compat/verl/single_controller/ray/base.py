"""The names of ``verl.single_controller.ray.base``, from the modules of this package."""

# ruff: noqa: F401
from phalanx.compat.verl.single_controller.ray.classes import (
    FusedWorkerCLSName,
    RayClassWithInitArgs,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
)
from phalanx.compat.verl.single_controller.ray.group import RayWorkerGroup
from phalanx.compat.verl.single_controller.ray.pools import (
    RayResourcePool,
    ResourcePoolManager,
    SubRayResourcePool,
    merge_resource_pool,
    sort_placement_group_by_node_ip,
    split_resource_pool,
)
