"""Classes with their arguments and Ray options."""

from __future__ import annotations

from typing import Any

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


def merge_runtime_env(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any]:
    """Both; where they disagree the second wins, variable by variable."""
    merged = {**(first or {}), **(second or {})}
    variables = {**(first or {}).get("env_vars", {}), **(second or {}).get("env_vars", {})}
    return {**merged, "env_vars": variables} if variables else merged
