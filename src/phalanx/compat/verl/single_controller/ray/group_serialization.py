"""Serialization of groups: in another process a group calls the same workers, and does not own them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from phalanx.backends.ray.cluster import Connection
from phalanx.compat.verl.single_controller.base.worker_group import WorkerGroup
from phalanx.compat.verl.single_controller.ray.calls import GroupMethod, func_generator

_OF_THIS_PROCESS = ("_checker_thread", "_connection", "wg_dict", "_calls", "_made")
"""Attributes that are not serialized."""


def reduce_group(group: Any) -> Any:
    """Return the value of a group's ``__reduce__``."""
    state = {
        key: value
        for key, value in group.__dict__.items()
        if key not in _OF_THIS_PROCESS and not isinstance(value, WorkerGroup | GroupMethod)
    }
    return _rebuild, (type(group), state, list(group.wg_dict or ()))


def _rebuild(cls: type[Any], state: dict[str, Any], roles: list[str]) -> Any:
    group = cls.__new__(cls)
    group.__dict__.update(
        state,
        _checker_thread=None,
        _connection=Connection(),
        wg_dict=None,
        _calls=None,
        _made=threading.local(),
    )
    _bind_again(group)
    if roles:
        group.fuse(roles)
    return group


def _bind_again(group: Any) -> None:
    bind: Callable[..., Any] = group._bind_worker_method
    cls = group._user_class
    if group.sub_cls_name:
        group.method_names = bind(getattr(cls, "raw_cls_dict")[group.sub_cls_name], func_generator)  # noqa: B009
        return
    group.method_names = bind(cls, func_generator)
    for name, alias in getattr(cls, "role_methods", {}).get(group._role, {}).items():
        setattr(group, name, getattr(group, alias))
