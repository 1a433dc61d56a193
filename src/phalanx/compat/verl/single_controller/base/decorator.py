"""``@register`` and the dispatch modes: the names of ``verl.single_controller.base.decorator``.

The functions of each mode are in a table that users may change: ``DISPATCH_MODE_FN_REGISTRY``. They are defined in
``dispatch_functions``, and can be imported from this module, too.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial, wraps
from typing import Any

from phalanx.compat.verl import overlay
from phalanx.compat.verl.single_controller.base.dispatch_functions import (  # noqa: F401 verl has them all here
    Arguments,
    collect_all_to_all,
    collect_dp_compute,
    collect_dp_compute_data_proto,
    collect_lazy_compute_data_proto,
    collect_megatron_compute,
    collect_megatron_compute_data_proto,
    collect_nd_compute,
    collect_nd_compute_dataproto,
    dispatch_all_to_all,
    dispatch_dp_compute,
    dispatch_dp_compute_data_proto,
    dispatch_dp_compute_data_proto_with_func,
    dispatch_lazy_compute_data_proto,
    dispatch_megatron_compute,
    dispatch_megatron_compute_data_proto,
    dispatch_nd_compute,
    dispatch_nd_compute_dataproto,
    dispatch_one_to_all,
    dummy_direct_rollout_call,
    each,
    is_future,
)
from phalanx.errors import DeclarationError

#: Name of the attribute of a registered function that has its modes.
MAGIC_ATTR = "attrs_3141562937"


class CheckFailed(DeclarationError, AssertionError):
    """A wrong declaration or option, for which verl has an assertion."""


class Dispatch(Enum):
    """Dispatch modes, with verl's numbers: the split of arguments and the join of results."""

    RANK_ZERO = 0
    ONE_TO_ALL = 1
    ALL_TO_ALL = 2
    DP_COMPUTE = 3
    DP_COMPUTE_PROTO = 4
    DP_COMPUTE_PROTO_WITH_FUNC = 5
    DP_COMPUTE_METRIC = 6
    DIRECT_ROLLOUT_METHOD = 7
    # Modes of verl's earlier line.
    MEGATRON_COMPUTE = 8
    MEGATRON_COMPUTE_PROTO = 9


class Execute(Enum):
    """Execute modes: the ranks that run a method."""

    ALL = 0
    RANK_ZERO = 1


#: The functions ``dispatch_fn`` and ``collect_fn`` of a mode, by these names.
ModeFunctions = dict[str, Callable[..., Any]]


def _pair(dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> ModeFunctions:
    return {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


#: Functions of each mode. Replacing an entry changes the groups that are created afterwards.
DISPATCH_MODE_FN_REGISTRY: dict[Any, ModeFunctions] = {
    Dispatch.RANK_ZERO: _pair(dispatch_all_to_all, collect_all_to_all),
    Dispatch.ONE_TO_ALL: _pair(dispatch_one_to_all, collect_all_to_all),
    Dispatch.ALL_TO_ALL: _pair(dispatch_all_to_all, collect_all_to_all),
    Dispatch.DP_COMPUTE: _pair(dispatch_dp_compute, collect_dp_compute),
    Dispatch.DP_COMPUTE_PROTO: _pair(dispatch_dp_compute_data_proto, collect_dp_compute_data_proto),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: _pair(
        dispatch_dp_compute_data_proto_with_func, collect_dp_compute_data_proto
    ),
    Dispatch.DP_COMPUTE_METRIC: _pair(dispatch_dp_compute_data_proto, collect_dp_compute),
    Dispatch.DIRECT_ROLLOUT_METHOD: _pair(dummy_direct_rollout_call, dummy_direct_rollout_call),
    Dispatch.MEGATRON_COMPUTE: _pair(dispatch_megatron_compute, collect_megatron_compute),
    Dispatch.MEGATRON_COMPUTE_PROTO: _pair(
        dispatch_megatron_compute_data_proto, collect_megatron_compute_data_proto
    ),
}


def get_predefined_dispatch_fn(dispatch_mode: Any) -> ModeFunctions:
    """Return the ``{"dispatch_fn", "collect_fn"}`` pair of a mode. Raises KeyError for an unknown mode."""
    return DISPATCH_MODE_FN_REGISTRY[dispatch_mode]


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> ModeFunctions:
    """Return a mode that splits rows over the dp ranks that the workers registered for ``mesh_name``."""
    return _pair(
        partial(dispatch_lazy_compute_data_proto, mesh_name),
        partial(collect_lazy_compute_data_proto, mesh_name),
    )


def _check_dispatch_mode(dispatch_mode: Any) -> None:
    if isinstance(dispatch_mode, dict):
        for key in ("dispatch_fn", "collect_fn"):
            if key not in dispatch_mode:
                raise CheckFailed(
                    f"key {key} should be in dispatch_mode if it is a dictionary: a mode of your own has functions "
                    f"dispatch_fn(group, *args, **kwargs) and collect_fn(group, output), but got {dispatch_mode!r}"
                )
    elif not isinstance(dispatch_mode, Dispatch):
        raise CheckFailed(
            f"dispatch_mode must be a Dispatch or a Dict. Got {dispatch_mode}; expected one of "
            f"{', '.join(Dispatch.__members__)}, or a dict with dispatch_fn and collect_fn"
        )


def _check_execute_mode(execute_mode: Any) -> None:
    if not isinstance(execute_mode, Execute):
        raise CheckFailed(
            f"execute_mode must be a Execute. Got {execute_mode}; expected Execute.ALL or Execute.RANK_ZERO"
        )


def registered_methods(cls: type) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Yield name, function and modes of each registered method of a class."""
    for name in dir(cls):
        method = getattr(cls, name, None)
        modes = getattr(method, MAGIC_ATTR, None)
        if callable(method) and modes is not None:
            yield name, method, modes


def _materialize_futures(*args: Any, **kwargs: Any) -> Arguments:
    """Return the arguments with each ``DataProtoFuture`` replaced by its value."""
    return each(lambda given: given.get() if is_future(given) else given, args, kwargs)


def references_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return Ray's references of all ``DataProtoFuture`` arguments of a call."""
    return [ref for value in (*args, *kwargs.values()) if is_future(value) for ref in value.futures]


def register(
    dispatch_mode: Any = Dispatch.ALL_TO_ALL,
    execute_mode: Any = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a worker method callable through its group.

    Args:
        dispatch_mode: one of ``Dispatch``, or a dict of ``dispatch_fn`` and ``collect_fn``.
        execute_mode: ``Execute.ALL`` or ``Execute.RANK_ZERO``.
        blocking: ``False`` makes the call return Ray's references, or a ``DataProtoFuture``.
        materialize_futures: whether the worker waits for arguments that are a ``DataProtoFuture``.

    Raises:
        CheckFailed: if a mode is neither of these (also an AssertionError).
    """
    _check_dispatch_mode(dispatch_mode)
    _check_execute_mode(execute_mode)
    attributes = {"dispatch_mode": dispatch_mode, "execute_mode": execute_mode, "blocking": blocking}

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        if overlay.active():  # imported here, because verl's module imports this one
            queue = importlib.import_module("verl.utils.transferqueue_utils")
            function = queue.tqbridge(dispatch_mode=dispatch_mode)(function)
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def inner(*args: Any, **kwargs: Any) -> Any:
                if materialize_futures:
                    args, kwargs = _materialize_futures(*args, **kwargs)
                return await function(*args, **kwargs)
        else:

            @wraps(function)
            def inner(*args: Any, **kwargs: Any) -> Any:
                if materialize_futures:
                    args, kwargs = _materialize_futures(*args, **kwargs)
                return function(*args, **kwargs)

        setattr(inner, MAGIC_ATTR, attributes)
        return inner

    return decorator
