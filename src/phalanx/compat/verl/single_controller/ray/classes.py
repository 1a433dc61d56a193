"""Classes with their arguments and Ray options."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from phalanx.compat.verl.single_controller.base.worker_group import ClassWithInitArgs


def _unwrap_ray_remote(cls: Any) -> Any:
    """The user's class, of one that may be decorated with ``@ray.remote``."""
    metadata = getattr(cls, "__ray_metadata__", None)
    if metadata is None:
        return getattr(cls, "__ray_actor_class__", cls)
    return getattr(metadata.modified_class, "__ray_actor_class__", metadata.modified_class)


class RayClassWithInitArgs(ClassWithInitArgs):
    """A class, usually decorated with ``@ray.remote``, with the arguments that each rank makes it with."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self._options: dict[str, Any] = {}
        self._additional_resource: dict[str, float] = {}

    def set_additional_resource(self, additional_resource: dict[str, float]) -> None:
        """Custom resources that each rank takes beside its slot."""
        self._additional_resource = additional_resource

    def update_options(self, options: dict[str, Any]) -> None:
        """Ray options of the ranks, as ``Class.options(...)`` takes them; a ``runtime_env`` is merged."""
        merged = merge_runtime_env(self._options.get("runtime_env"), options.get("runtime_env"))
        self._options.update(options)
        if merged:
            self._options["runtime_env"] = merged

    def ray_options(self) -> dict[str, Any]:
        """Options of ``@ray.remote`` on the class, and above them those of ``update_options``."""
        declared = {
            k: v for k, v in (getattr(self.cls, "_default_options", None) or {}).items() if v is not None
        }
        given = {**declared, **self._options}
        runtime_env = merge_runtime_env(declared.get("runtime_env"), self._options.get("runtime_env"))
        if runtime_env:
            given["runtime_env"] = runtime_env
        if self._additional_resource:
            given["resources"] = {**(given.get("resources") or {}), **self._additional_resource}
        return given

    def __call__(
        self,
        placement_group: PlacementGroup,
        placement_group_bundle_idx: int,
        use_gpu: bool = True,
        num_gpus: float = 1,
        sharing_with: Any = None,
        device_name: str = "cuda",
    ) -> Any:
        """One Ray actor of the class, by itself, in a bundle or beside the actor ``sharing_with``."""
        remote = self.cls if hasattr(self.cls, "__ray_metadata__") else ray.remote(self.cls)
        if sharing_with is not None:
            node = ray.get(sharing_with.get_node_id.remote())
            devices = ray.get(sharing_with.get_cuda_visible_devices.remote())
            where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            return remote.options(scheduling_strategy=where).remote(
                *self.args, cuda_visible_devices=devices, **self.kwargs
            )
        options: dict[str, Any] = {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group, placement_group_bundle_index=placement_group_bundle_idx
            ),
            **self._options,
        }
        declared = getattr(remote, "_default_options", None) or {}
        if declared.get("num_cpus") is None:
            options.setdefault("num_cpus", 0)  # else Ray wants a whole CPU while it starts the actor
        if use_gpu and device_name == "npu":
            options["resources"] = {"NPU": num_gpus}
        elif use_gpu:
            options["num_gpus"] = num_gpus
        if self._additional_resource:
            options["resources"] = {**options.get("resources", {}), **self._additional_resource}
        return remote.options(**options).remote(*self.args, **self.kwargs)


def merge_runtime_env(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any]:
    """Both; where they disagree the second wins, variable by variable."""
    merged = {**(first or {}), **(second or {})}
    variables = {**(first or {}).get("env_vars", {}), **(second or {}).get("env_vars", {})}
    return {**merged, "env_vars": variables} if variables else merged
