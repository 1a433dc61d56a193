"""Classes with their arguments and Ray options."""

from __future__ import annotations

from typing import Any

from phalanx.compat.verl.single_controller.base.worker_group import ClassWithInitArgs


def _unwrap_ray_remote(cls: Any) -> Any:
    """Return the user's class, without ``@ray.remote``."""
    metadata = getattr(cls, "__ray_metadata__", None)
    return cls if metadata is None else metadata.modified_class.__bases__[0]


class RayClassWithInitArgs(ClassWithInitArgs):
    """A class, usually decorated with ``@ray.remote``, with constructor arguments."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self._options: dict[str, Any] = {}
        self._additional_resource: dict[str, float] = {}

    def set_additional_resource(self, additional_resource: dict[str, float]) -> None:
        """Set custom resources that each rank takes besides its slot."""
        self._additional_resource = additional_resource

    def update_options(self, options: dict[str, Any]) -> None:
        """Update the ranks' Ray options, as in ``Class.options(...)``. A ``runtime_env`` is merged."""
        merged = merge_runtime_env(self._options.get("runtime_env"), options.get("runtime_env"))
        self._options.update(options)
        if merged:
            self._options["runtime_env"] = merged

    def ray_options(self) -> dict[str, Any]:
        """Return the options of ``@ray.remote``, overridden by the options of ``update_options``."""
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
    """Merge two runtime environments. The second overrides the first, variable by variable."""
    merged = {**(first or {}), **(second or {})}
    variables = {**(first or {}).get("env_vars", {}), **(second or {}).get("env_vars", {})}
    return {**merged, "env_vars": variables} if variables else merged
