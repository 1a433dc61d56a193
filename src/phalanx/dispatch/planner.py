"""From a method, a group and the arguments to the plan of the call. Pure: nothing is sent or changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from phalanx.declare.dispatch_modes import CustomMode, Dispatch, Execute, Mode
from phalanx.declare.spec import MethodSpec
from phalanx.dispatch.arguments import Call, check_signature
from phalanx.dispatch.modes import plan_dealt, plan_mode, plan_rank_zero, plan_same, plan_set, rank_sets
from phalanx.dispatch.plan import CallPlan, Target
from phalanx.errors import DispatchError

Materialize = Callable[[Any], Any]
"""Waits for a future and gives its value."""


def plan(
    spec: MethodSpec,
    target: Target,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    ranks: Sequence[int] | None = None,
    materialize: Materialize | None = None,
    handle: Target | None = None,
) -> CallPlan:
    """Decide who is called with what, and how the outputs become the call's value.

    No argument is changed. Row modes whose arguments hold no rows at all give every rank the same and join
    what comes back. With ``Execute.RANK_ZERO`` the first rank gets the arguments as they are (a custom mode:
    the first element of each), and the value is its output.

    Args:
        ranks: the slice of the group that is called, in order; None for all. It then counts as a world of
            its own; mesh modes take slices that cover whole dp coordinates.
        materialize: waits for a future that the mode must see the value of: custom modes, ``balance``,
            ``group_size``, ``pad_mask``, padding where nothing else has rows, a future in place of a list.
        handle: what custom functions get as their group, of the called ranks; ``target`` if not given.

    Raises:
        DispatchError: the arguments do not fit the method or its mode, or the group lacks the mesh.
    """
    if not isinstance(spec.mode, CustomMode):
        check_signature(spec, args, kwargs)
    call = Call(spec, target, args, kwargs, _called(target, ranks), materialize, handle)
    if spec.execute is Execute.RANK_ZERO:
        return plan_rank_zero(call)
    return plan_mode(call)


def plan_one(
    spec: MethodSpec,
    target: Target,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ranks: Sequence[int],
) -> CallPlan:
    """The plan of a call to one rank, or to all ranks of one dp coordinate (a set of :func:`rank_sets`).

    The arguments go there as they are. The value is the output of the one rank, or of the collector.

    Raises:
        DispatchError: the arguments do not fit the method.
    """
    mode = Dispatch.RANK_ZERO if isinstance(spec.mode, CustomMode) else spec.mode
    call = Call(replace(spec, mode=mode), target, args, kwargs, _called(target, ranks))
    check_signature(call.spec, args, kwargs)
    return plan_set(call)


def plan_execute_all(
    target: Target,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    spec: MethodSpec | None = None,
    ranks: Sequence[int] | None = None,
) -> CallPlan:
    """The plan of ``execute_all*("name", ...)``, which pays no heed to the method's mode.

    Arguments are dealt out, one element to each rank, when every one of them is a list of world_size
    elements; otherwise, and where there are none, all ranks get the same.
    """
    called = _called(target, ranks)
    values = [*args, *kwargs.values()]
    deal = bool(values) and all(isinstance(value, list) and len(value) == len(called) for value in values)
    mode = Dispatch.ALL_TO_ALL if deal else Dispatch.ONE_TO_ALL
    call = Call(_named(spec, mode), target, args, kwargs, called)
    check_signature(call.spec, args, kwargs)
    return plan_dealt(call) if deal else plan_same(call)


def plan_execute_rank_zero(
    target: Target,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    spec: MethodSpec | None = None,
    ranks: Sequence[int] | None = None,
) -> CallPlan:
    """The plan of ``execute_rank_zero*("name", ...)``: the first rank, arguments as they are, its value."""
    method = _named(spec, Dispatch.RANK_ZERO, pad_mask=None if spec is None else spec.pad_mask)
    call = Call(method, target, args, kwargs, _called(target, ranks))
    check_signature(call.spec, args, kwargs)
    return plan_rank_zero(call)


def _named(spec: MethodSpec | None, mode: Mode, pad_mask: str | None = None) -> MethodSpec:
    if spec is None:
        return MethodSpec("execute", mode)
    return MethodSpec(spec.name, mode, signature=spec.signature, pad_mask=pad_mask)


def _called(target: Target, ranks: Sequence[int] | None) -> Sequence[int]:
    world = target.world_size
    if ranks is None:
        return range(world)
    outside = [rank for rank in ranks if not 0 <= rank < world]
    if outside or not len(ranks):
        raise DispatchError(
            f"ranks {list(ranks)!r} of a group of {world}: expected at least one rank from 0 to {world - 1}"
        )
    return tuple(ranks)


__all__ = ["Materialize", "plan", "plan_execute_all", "plan_execute_rank_zero", "plan_one", "rank_sets"]
