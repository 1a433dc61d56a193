"""Names, parameters and defaults of everything that code written for verl uses."""

from __future__ import annotations

import inspect
from typing import Any

from plain import load

NAMES: dict[str, str] = {
    "single_controller": "Worker WorkerGroup ClassWithInitArgs ResourcePool base __version__ __all__",
    "single_controller.base": "Worker WorkerGroup ClassWithInitArgs ResourcePool __all__",
    "single_controller.base.decorator": """MAGIC_ATTR DISPATCH_MODE_FN_REGISTRY Dispatch Execute
        init_predefined_dispatch_mode init_predefined_execute_mode register dispatch_one_to_all dispatch_all_to_all
        dispatch_dp_compute dispatch_dp_compute_data_proto dispatch_dp_compute_data_proto_with_func
        dummy_direct_rollout_call dispatch_nd_compute dispatch_nd_compute_dataproto dispatch_lazy_compute_data_proto
        collect_all_to_all collect_dp_compute collect_dp_compute_data_proto collect_nd_compute
        collect_nd_compute_dataproto collect_lazy_compute_data_proto make_nd_compute_dataproto_dispatch_fn
        get_predefined_dispatch_fn register_dispatch_mode update_dispatch_mode get_predefined_execute_fn
        _check_dispatch_mode _check_execute_mode _materialize_futures _split_args_kwargs_data_proto
        _split_args_kwargs_data_proto_with_auto_padding _concat_data_proto_or_future""",
    "single_controller.base.worker": "Worker WorkerHelper DistRankInfo DistGlobalInfo",
    "single_controller.base.worker_group": "ResourcePool ClassWithInitArgs WorkerGroup check_workers_alive",
    "single_controller.ray": "__all__",
    "single_controller.ray.base": """RayResourcePool SubRayResourcePool ResourcePoolManager RayClassWithInitArgs
        RayWorkerGroup get_random_string func_generator sort_placement_group_by_node_ip extract_pg_from_exist
        split_resource_pool merge_resource_pool create_colocated_worker_cls create_colocated_worker_raw_cls
        create_colocated_worker_cls_fused FusedWorkerCLSName _unwrap_ray_remote _bind_workers_method_to_parent
        _determine_fsdp_megatron_base_class""",
    "protocol": """DataProto DataProtoItem DataProtoFuture BatchData DataProtoConfig pad_dataproto_to_divisor
        unpad_dataproto union_tensor_dict union_numpy_dict list_of_dict_to_dict_of_list fold_batch_dim unfold_batch_dim
        collate_fn serialize_single_tensor serialize_tensordict deserialize_single_tensor deserialize_tensordict
        all_gather_data_proto _padding_size_key""",
    "utils.device": """get_device_name get_device_id get_torch_device get_nccl_backend get_visible_devices_keyword
        get_resource_name is_cuda_available is_npu_available""",
    "utils.ray_utils": "parallel_put ray_noset_visible_devices get_event_loop auto_await",
    "utils.py_functional": """temp_env_var union_two_dict list_of_dict_to_dict_of_list append_to_dict DynamicEnum
        DynamicEnumMeta""",
    "utils.tensordict_utils": """get_tensordict chunk_tensordict concat_tensordict index_select_tensor_dict
        union_tensor_dict make_iterator assign_non_tensor assign_non_tensor_data assign_non_tensor_stack get get_keys
        get_non_tensor_data unwrap_non_tensor_data list_of_dict_to_tensordict pop pop_keys pad_to_divisor unpad
        contiguous maybe_fix_3d_position_ids assert_tensordict_eq concat_nested_tensors""",
    "utils.seqlen_balancing": """get_seqlen_balanced_partitions karmarkar_karp greedy_partition
        log_seqlen_unbalance ceildiv roundup_divisible rearrange_micro_batches get_reverse_idx
        calculate_workload prepare_dynamic_batch restore_dynamic_batch""",
    "utils.transferqueue_utils": "BatchMeta KVBatchMeta tqbridge",
}

OWN = "how it is made inside is our own: private methods of either side"
OWN_NAMES = """Worker._setup_env_cuda_visible_devices Worker._Worker__known WorkerGroup._bound
    RayWorkerGroup._create_worker RayWorkerGroup._get_master_addr_port RayWorkerGroup._init_with_*
    RayWorkerGroup._attach RayWorkerGroup._bound RayWorkerGroup._deal RayWorkerGroup._on_handle
    RayWorkerGroup._role_group RayWorkerGroup._roles RayWorkerGroup._send RayWorkerGroup._start
    RayWorkerGroup._user_class RayWorkerGroup._wait RayResourcePool._places SubRayResourcePool._places
    RayClassWithInitArgs.ray_options DataProto._get_type_info DataProto._like"""
INTENDED: dict[str, str] = {
    **{f"case_names/*.{name}": OWN for name in OWN_NAMES.split()},
    "case_names/*.Worker.get_node_id": "every worker can tell its node: RayClassWithInitArgs(sharing_with=) asks it",
}


def _parameters(value: Any) -> Any:
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return "?"
    return [f"{one.kind.name} {one.name}={_default(one.default)}" for one in found]


def _default(value: Any) -> str:
    return (
        "" if value is inspect.Parameter.empty else repr(value) if _is_plain(value) else type(value).__name__
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | list | tuple | dict | type(None))


def _described(value: Any) -> Any:
    if inspect.isclass(value) or inspect.isroutine(value):
        return [type(value).__name__ == "function", _parameters(value)]
    return repr(value) if isinstance(value, str | bool | int) else type(value).__name__


def _members(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in dir(cls):
        raw = inspect.getattr_static(cls, name)
        if name.startswith("__") and name not in ("__len__", "__getitem__", "__getstate__", "__setstate__"):
            continue
        if isinstance(raw, property):
            found[name] = "property"
        elif inspect.isroutine(raw) or isinstance(raw, staticmethod | classmethod):
            found[name] = [type(raw).__name__, _parameters(getattr(cls, name))]
    return found


def case_names() -> dict[str, Any]:
    """Of each name: whether it is there, and how it is called; of each class, its methods."""
    found: dict[str, Any] = {}
    for module_name, names in NAMES.items():
        module = load(module_name)
        for name in names.split():
            key = f"{module_name}.{name}"
            if not hasattr(module, name):
                found[key] = "missing"
                continue
            value = getattr(module, name)
            if name == "__all__":
                found[key] = sorted(value)
                continue
            found[key] = _described(value)
            if inspect.isclass(value):
                found |= {f"{key}.{member}": what for member, what in _members(value).items()}
    return found
