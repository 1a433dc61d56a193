"""Plan calls by dispatch mode: equal arguments, list elements or rows for ranks, rank 0 only, custom functions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phalanx.declare.dispatch_modes import Collect, Dispatch, Execute, Kind, Mode
from phalanx.declare.register import MethodSpec
from phalanx.dispatch.plan import (
    CallInput,
    CallPlan,
    Each,
    GatherPlan,
    Materialize,
    Same,
    Target,
    check_signature,
    result_of,
)
from phalanx.dispatch.pytree import Builder, Flat, Leaf, described, flatten, is_future, unwrap
from phalanx.dispatch.shardable import Replicate
from phalanx.dispatch.split import Cut, even_sizes, refuse_unclear_rows, row_ops, rows_of, split_leaves
from phalanx.errors import DispatchError
from phalanx.topology.balance import balanced_partition
from phalanx.topology.mesh import DP, PP_AS_DP, Mesh
from phalanx.wire.value import is_tensor

_SCALARS = (bool, int, float, complex, type(None))


def plan(
    spec: MethodSpec,
    target: Target,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    ranks: Sequence[int] | None = None,
    materialize: Materialize = result_of,
    handle: Target | None = None,
) -> CallPlan:
    """Return the plan of a call: its ranks, their arguments, and how the outputs become the result.

    The arguments are not changed. In row modes, if no argument has rows, every rank gets the same arguments and the
    outputs are joined. With ``Execute.RANK_ZERO`` the first rank gets the unchanged arguments (in a custom mode: the
    first element of each), and its output is the result.

    Args:
        ranks: slice of the group to call, in order; None: all ranks. The call treats the slice as a group of its size;
            in mesh modes it has to cover complete dp coordinates.
        materialize: waits for a future if the mode must read its value: for custom modes, ``balance``, ``group_size``,
            padding if no other argument has rows, a future in place of a list.
        handle: group that is passed to custom functions; default: ``target``.

    Raises:
        DispatchError: if the arguments do not fit the method or its mode, or the group lacks the mesh.
    """
    if spec.mode.kind != "custom":
        check_signature(spec, args, kwargs)
    called = range(target.world_size) if ranks is None else tuple(ranks)
    call = CallInput(spec, target, args, kwargs, called, materialize, handle)
    return _plan_rank_zero(call) if spec.execute is Execute.RANK_ZERO else _PLANNERS[spec.mode.kind](call)


def plan_one(
    spec: MethodSpec, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Sequence[int]
) -> CallPlan:
    """Return the plan of a call on a single rank, or on all ranks of a dp coordinate (a set of :func:`rank_sets`).

    The arguments are passed unchanged. The result is the output of the single rank, or of the collector.

    Raises:
        DispatchError: if the arguments do not fit the method.
    """
    if spec.mode.kind == "custom":
        spec = replace(spec, mode=Dispatch.RANK_ZERO)
    check_signature(spec, args, kwargs)
    call = CallInput(spec, target, args, kwargs, tuple(ranks))
    if len(ranks) == 1 or spec.mode.mesh is None:
        return _plan_rank_zero(call)
    return _planned(call, _same(call), _over_mesh(call), collect="first")


def dealt_or_same(count: int, values: Sequence[Any]) -> Mode:
    """Return the mode of ``execute_all*("name", ...)``, which does not depend on the method's mode.

    If all arguments are lists of ``count`` elements, each rank gets its elements; otherwise, and without arguments, all
    ranks get the same arguments.
    """
    deal = bool(values) and all(isinstance(value, list) and len(value) == count for value in values)
    return Dispatch.ALL_TO_ALL if deal else Dispatch.ONE_TO_ALL


def rank_sets(spec: MethodSpec, target: Target) -> Sequence[tuple[int, ...]]:
    """Return the sets of ranks that a call must reach together, since they meet in collectives.

    For a mesh mode, a set has the ranks of a dp coordinate; otherwise each rank is a set.

    Raises:
        DispatchError: if the group lacks the mesh.
    """
    if spec.mode.mesh is None or spec.execute is Execute.RANK_ZERO:
        return [(rank,) for rank in range(target.world_size)]
    call = CallInput(spec, target, (), {}, range(target.world_size))
    return _mesh(call).dp_groups(_dp_axes(call))


@dataclass(frozen=True)
class Recipients:
    """Assignment of ``count`` shards to ranks: the rank at position ``p`` of the call's ranks gets shard ``of[p]``.

    If ``of`` is a range, position ``p`` gets shard ``p``. ``take`` are the positions whose outputs are collected, in
    the order of the shards.
    """

    count: int
    of: Sequence[int]
    take: Sequence[int]

    def spread(self, by_shard: Sequence[Any]) -> Sequence[Any]:
        """Return a list by position, given a list by shard. Peers share the same object."""
        return by_shard if isinstance(self.of, range) else [by_shard[i] for i in self.of]


def _recipients(call: CallInput) -> Recipients:
    """Return the recipients of the shards: the called ranks, or the dp coordinates of the mode's mesh."""
    return _each_rank(len(call.ranks)) if call.mode.mesh is None else _over_mesh(call)


def _each_rank(count: int) -> Recipients:
    return Recipients(count, range(count), range(count))


def _over_mesh(call: CallInput) -> Recipients:
    mesh, dp_axes = _mesh(call), _dp_axes(call)
    groups, collectors = mesh.dp_groups(dp_axes), mesh.collectors(dp_axes)
    if not isinstance(call.ranks, range):
        chosen = _called_coordinates(call, groups)
        groups, collectors = [groups[i] for i in chosen], [collectors[i] for i in chosen]
    position = {rank: place for place, rank in enumerate(call.ranks)}
    of = [0] * len(call.ranks)
    for shard, ranks in enumerate(groups):
        for rank in ranks:
            of[position[rank]] = shard
    return Recipients(len(groups), of, [position[rank] for rank in collectors])


def _called_coordinates(call: CallInput, groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of the dp coordinates whose ranks are called.

    Raises:
        DispatchError: if only some ranks of a coordinate are called.
    """
    called = frozenset(call.ranks)
    for ranks in groups:
        here = called.intersection(ranks)
        if here and len(here) < len(ranks):
            raise DispatchError(
                f"{call.where}: called on ranks {sorted(here)} of the dp coordinate {list(ranks)}, whose ranks meet in "
                "collectives: call all of them, or call group[i] or group.any, which call one coordinate"
            )
    return [index for index, ranks in enumerate(groups) if called.issuperset(ranks)]


def _dp_axes(call: CallInput) -> tuple[str, ...]:
    return PP_AS_DP if call.mode.pp_as_dp else DP


def _mesh(call: CallInput) -> Mesh:
    name, world = call.mode.mesh or "default", call.target.world_size
    try:
        mesh = call.target.mesh(name)
    except DispatchError as error:
        raise DispatchError(f"{call.where} splits over the mesh {name!r}: {error}") from None
    if mesh.world_size != world:
        raise DispatchError(
            f"{call.where}: mesh {name!r} is {mesh!r} of {mesh.world_size} ranks, but the group has {world}; "
            "give the group a mesh over all of its ranks"
        )
    return mesh


def _planned(
    call: CallInput,
    given: Sequence[Same | Each],
    recipients: Recipients,
    *,
    collect: Collect | None = None,
    cut: Cut | None = None,
    split: bool = False,
    shared: tuple[Any, ...] = (),
) -> CallPlan:
    """Return the plan of a call.

    Args:
        given: the arguments by rank, in the order of ``call.arguments()``.
        collect: replaces ``collect`` of the mode, unless the mode drops all outputs.
        cut: the rows of each shard; None: the number of rows is unknown, or there are none.
        split: True if the recipients get separate shards.
        shared: as in ``CallPlan``.
    """
    own = call.mode.collect
    chosen = own if collect is None or own == "none" else collect
    take = recipients.take[: int(chosen == "first")] if chosen in ("none", "first") else recipients.take
    trim = order = rows = taken_rows = None
    if cut is not None:
        rows, padded = recipients.spread(cut.sizes), recipients.spread(cut.given)
        taken_rows = [rows[position] for position in take]
        if padded != rows:
            trim = [(padded[position], rows[position]) for position in take]
        order = cut.order if chosen == "join" else None
    # Positions are ranks only if the complete group is called.
    ranks = None if isinstance(call.ranks, range) else [call.ranks[position] for position in take]
    count = len(call.args)
    return CallPlan(
        call.ranks,
        tuple(given[:count]),
        dict(zip(call.kwargs, given[count:], strict=True)),
        GatherPlan(chosen, take, trim, order, taken_rows, ranks),
        rows,
        shared,
        recipients.of if split else None,
    )


def _same(call: CallInput) -> list[Same | Each]:
    return [Same(value) for value in (*call.args, *call.kwargs.values())]


def _plan_rank_zero(call: CallInput) -> CallPlan:
    """Plan a call on the first rank only, with unchanged arguments and its output as the result."""
    if call.mode.kind == "custom":
        args, kwargs = next(_plan_custom(call).arguments())
        call = replace(call, args=args, kwargs=kwargs)
    return _planned(replace(call, ranks=call.ranks[:1]), _same(call), _each_rank(1), collect="first")


def _plan_lists(call: CallInput) -> CallPlan:
    """Plan a call whose arguments are lists or tuples with an element per rank or dp coordinate."""
    recipients, meshed = _recipients(call), call.mode.mesh is not None
    size = " * ".join(f"{axis}_size" for axis in _dp_axes(call)) if meshed else "world_size"

    def dealt(name: str, value: Any) -> Same | Each:
        value = call.materialize(value) if is_future(value) else value
        if isinstance(value, Replicate):
            return Same(value.value)
        if not isinstance(value, list | tuple) or len(value) != recipients.count:
            raise DispatchError(
                f"{call.where}: {name!r} is {described(value)}; expected a list or tuple of {size} = "
                f"{recipients.count} elements, one for each {'dp coordinate' if meshed else 'rank'}. Use "
                "px.replicate(...) to pass one value to all of them; Dispatch.ROWS splits rows"
            )
        return Each(recipients.spread([unwrap(element) for element in value]))

    return _planned(call, [dealt(*given) for given in call.arguments()], recipients, split=meshed)


def _plan_custom(call: CallInput) -> CallPlan:
    call, world = call.settled(), len(call.ranks)
    function: Any = call.mode.dispatch_fn
    maker = getattr(function, "__name__", None) or f"dispatch of {call.mode.name}"
    given = {key: _shallow(unwrap(value)) for key, value in call.kwargs.items()}
    result = function(call.handle or call.target, *(_shallow(unwrap(value)) for value in call.args), **given)
    pair = isinstance(result, tuple | list) and len(result) == 2
    if not pair or not isinstance(result[0], tuple | list) or not isinstance(result[1], Mapping):
        raise DispatchError(
            f"{call.where}: {maker} returned {described(result)}; expected a pair (args, kwargs) "
            "of a tuple or list and a dict, in which every value is a list with one element per rank"
        )

    def column(name: str, value: Any) -> Each:
        if not isinstance(value, list | tuple) or len(value) != world:
            raise DispatchError(
                f"{call.where}: {maker} made {name!r} {described(value)}; expected a list "
                f"of world_size = {world} elements, one for each rank"
            )
        return Each([unwrap(element) for element in value])

    call = replace(call, args=tuple(result[0]), kwargs=dict(result[1]))
    return _planned(call, [column(*made) for made in call.arguments()], _each_rank(world))


def _shallow(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, list | dict) else value


def _plan_rows(call: CallInput) -> CallPlan:
    """Plan a call whose rows are split over the recipients. Rows of futures are split by the ranks that get them."""
    mode, pad = call.mode, call.spec.pad_to_multiple
    recipients, parts = _recipients(call), _Parts.of(call)
    if parts.futures and (mode.balance or mode.group_size > 1 or (pad and parts.rows is None)):
        call = call.settled()  # these options need the rows, or their number to remove padding
        parts = _Parts.of(call)
    # Without rows, only futures have rows, or every rank gets the same.
    cut = None if parts.rows is None else _cut(call, recipients.count, parts.rows)
    given = parts.given(recipients, cut or Cut([0] * recipients.count))
    split = cut is not None or parts.futures
    return _planned(call, given, recipients, cut=cut, split=split, shared=parts.shared)


@dataclass(frozen=True)
class _Parts:
    """Arguments of a call, each flattened into leaves and the function that builds it.

    ``rows`` is the number of rows without those of futures, ``expected`` this number or, if it is None, the number that
    a future knows. ``shared`` are leaves without rows, which all shards contain.
    """

    leaves: Sequence[tuple[Any, list[Leaf], Builder]]
    rows: int | None
    expected: int | None
    futures: bool
    shared: tuple[Any, ...]

    @classmethod
    def of(cls, call: CallInput) -> _Parts:
        leaves = [(value, *_flattened(call, name, value)) for name, value in call.arguments()]
        every = [leaf for _, found, _ in leaves for leaf in found]
        refuse_unclear_rows(every, call.where)
        shared = {
            id(leaf.value): unwrap(leaf.value)
            for _, found, build in leaves
            if build is not next and any(_differs(leaf) for leaf in found)
            for leaf in found
            if not _differs(leaf) and not isinstance(leaf.value, _SCALARS)
        }
        futures, rows = [leaf.value for leaf in every if is_future(leaf.value)], rows_of(every, call.where)
        counts = [rows, *(getattr(future, "__phalanx_rows__", None) for future in futures)]
        expected = next((number for number in counts if number is not None), None)
        return cls(leaves, rows, expected, bool(futures), tuple(shared.values()))

    def given(self, recipients: Recipients, cut: Cut) -> list[Same | Each]:
        """Return the value of each argument for all ranks, or its shards."""
        return [
            Each(recipients.spread(split_leaves(leaves, build, cut, self.expected)))
            if any(map(_differs, leaves))
            else Same(unwrap(value))
            for value, leaves, build in self.leaves
        ]


def _flattened(call: CallInput, name: str, value: Any) -> Flat:
    try:
        return flatten(value, name)
    except DispatchError as error:
        raise DispatchError(f"{call.where}: {error}") from None


def _differs(leaf: Leaf) -> bool:
    """Return whether the leaf has rows or is a future, so that its shards differ."""
    return is_future(leaf.value) or row_ops(leaf.value) is not None


def _cut(call: CallInput, count: int, rows: int) -> Cut:
    mode, pad = call.mode, call.spec.pad_to_multiple
    if rows % mode.group_size:
        raise DispatchError(
            f"{call.where}: {rows} rows cannot be kept in groups of group_size = {mode.group_size}; give a "
            f"multiple of {mode.group_size} rows"
        )
    if mode.balance is None:
        sizes = [groups * mode.group_size for groups in even_sizes(rows // mode.group_size, count)]
        return Cut(sizes, pad_to_multiple=pad)
    try:
        indices = balanced_partition(_lengths(call, mode.balance, rows), count, group_size=mode.group_size)
    except DispatchError as error:
        name = getattr(mode.balance, "__name__", mode.balance)
        raise DispatchError(f"{call.where}, balance={name}: {error}") from error
    return Cut([len(part) for part in indices], indices, pad)


def _lengths(call: CallInput, balance: str | Callable[..., Any], rows: int) -> list[float]:
    """Return a length per row, from the column or function of ``balance``."""
    if callable(balance):
        found = balance(*(unwrap(v) for v in call.args), **{k: unwrap(v) for k, v in call.kwargs.items()})
    else:
        found = _named(call, balance)
    lengths = found.tolist() if hasattr(found, "tolist") else found
    if hasattr(lengths, "to_pylist"):
        lengths = lengths.to_pylist()
    if not isinstance(lengths, list | tuple) or len(lengths) != rows:
        raise DispatchError(f"got {described(found)}; expected one number for each of the {rows} rows")
    return [length.item() if isinstance(length, np.generic) else length for length in lengths]


def _named(call: CallInput, name: str) -> Any:
    """Return the argument ``name``, or ``argument[name]`` of the first argument with such a key."""
    arguments = {argument: unwrap(value) for argument, value in call.arguments()}
    if name in arguments:
        return arguments[name]
    for value in arguments.values():
        found = None
        if isinstance(value, Mapping):  # a defaultdict would get the key
            found = value.get(name)
        elif not is_tensor(value) and not isinstance(value, type):  # torch warns of such an index
            with suppress(Exception):
                found = value[name]
        if found is not None:
            return found
    raise DispatchError(
        "it is neither an argument nor a key of one (arguments: "
        f"{', '.join(arguments) or 'none'}); pass it, or balance by a function of the arguments"
    )


_PLANNERS: dict[Kind, Callable[[CallInput], CallPlan]] = {
    "same": lambda call: _planned(call, _same(call), _each_rank(len(call.ranks))),
    "lists": _plan_lists,
    "rows": _plan_rows,
    "rank zero": _plan_rank_zero,
    "custom": _plan_custom,
}
