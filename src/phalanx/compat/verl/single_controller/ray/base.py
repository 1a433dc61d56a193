"""Everything that ``verl.single_controller.ray.base`` offers; it is made in the modules beside this one."""

from phalanx.compat.verl.single_controller.base.decorator import MAGIC_ATTR as MAGIC_ATTR
from phalanx.compat.verl.single_controller.base.decorator import Dispatch as Dispatch
from phalanx.compat.verl.single_controller.base.dispatch_functions import (
    _padding_size_key as _padding_size_key,
)
from phalanx.compat.verl.single_controller.base.worker import Worker as Worker
from phalanx.compat.verl.single_controller.base.worker_group import ClassWithInitArgs as ClassWithInitArgs
from phalanx.compat.verl.single_controller.base.worker_group import ResourcePool as ResourcePool
from phalanx.compat.verl.single_controller.base.worker_group import WorkerGroup as WorkerGroup
from phalanx.compat.verl.single_controller.ray.calls import func_generator as func_generator
from phalanx.compat.verl.single_controller.ray.classes import RayClassWithInitArgs as RayClassWithInitArgs
from phalanx.compat.verl.single_controller.ray.classes import _unwrap_ray_remote as _unwrap_ray_remote
from phalanx.compat.verl.single_controller.ray.colocated import FusedWorkerCLSName as FusedWorkerCLSName
from phalanx.compat.verl.single_controller.ray.colocated import (
    _bind_workers_method_to_parent as _bind_workers_method_to_parent,
)
from phalanx.compat.verl.single_controller.ray.colocated import (
    _determine_fsdp_megatron_base_class as _determine_fsdp_megatron_base_class,
)
from phalanx.compat.verl.single_controller.ray.colocated import (
    create_colocated_worker_cls as create_colocated_worker_cls,
)
from phalanx.compat.verl.single_controller.ray.colocated import (
    create_colocated_worker_cls_fused as create_colocated_worker_cls_fused,
)
from phalanx.compat.verl.single_controller.ray.colocated import (
    create_colocated_worker_raw_cls as create_colocated_worker_raw_cls,
)
from phalanx.compat.verl.single_controller.ray.group import RayWorkerGroup as RayWorkerGroup
from phalanx.compat.verl.single_controller.ray.group import get_random_string as get_random_string
from phalanx.compat.verl.single_controller.ray.pools import RayResourcePool as RayResourcePool
from phalanx.compat.verl.single_controller.ray.pools import ResourcePoolManager as ResourcePoolManager
from phalanx.compat.verl.single_controller.ray.pools import SubRayResourcePool as SubRayResourcePool
from phalanx.compat.verl.single_controller.ray.pools import extract_pg_from_exist as extract_pg_from_exist
from phalanx.compat.verl.single_controller.ray.pools import get_master_addr_port as get_master_addr_port
from phalanx.compat.verl.single_controller.ray.pools import merge_resource_pool as merge_resource_pool
from phalanx.compat.verl.single_controller.ray.pools import (
    sort_placement_group_by_node_ip as sort_placement_group_by_node_ip,
)
from phalanx.compat.verl.single_controller.ray.pools import split_resource_pool as split_resource_pool

__all__ = ["Worker"]
