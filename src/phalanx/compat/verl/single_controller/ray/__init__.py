"""Groups on Ray: the names of ``verl.single_controller.ray``."""

from phalanx.compat.verl.single_controller.ray.classes import (
    RayClassWithInitArgs,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
)
from phalanx.compat.verl.single_controller.ray.group import RayWorkerGroup
from phalanx.compat.verl.single_controller.ray.pools import (
    RayResourcePool,
    ResourcePoolManager,
    SubRayResourcePool,
)

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "SubRayResourcePool",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
]
