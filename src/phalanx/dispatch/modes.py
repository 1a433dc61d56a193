"""Planners of dispatch modes: the same to all ranks, elements, rows, and custom pairs of functions."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from phalanx.declare.dispatch_modes import (
    AllToAll,
    CustomMode,
    Direct,
    Dispatch,
    Execute,
    MeshLists,
    MeshMode,
    MeshRows,
    Mode,
    OneToAll,
    RankZero,
    Rows,
)
from phalanx.declare.spec import MethodSpec
from phalanx.dispatch.arguments import Argument, CallInput, check_signature
from phalanx.dispatch.plan import CallPlan, Each, GatherPlan, Same, Target
from phalanx.dispatch.pytree import Leaf, flatten, is_future, node_of, unwrap
from phalanx.dispatch.shardable import Replicate, ops_for
from phalanx.dispatch.split import (
    Cut,
    count_rows,
    even_sizes,
    grouped_sizes,
    refuse_unclear_rows,
    row_ops,
    rows_of,
    split_leaves,
)
from phalanx.errors import DispatchError
from phalanx.topology.balance import balanced_partition
from phalanx.topology.mesh import DP, PP_AS_DP, Mesh
from phalanx.wire.lazy import is_tensor, lazy

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

_SCALARS = (bool, int, float, complex, type(None))


def plan_rank_zero(call: CallInput) -> CallPlan:
    """Only the first rank is called, with the arguments as they are; the call's value is its output."""
    if isinstance(call.mode, CustomMode):
        args, kwargs = next(_plan_custom(call).arguments())
        call = replace(call, args=args, kwargs=kwargs)
    elif isinstance(call.mode, Direct):
        return _refuse_direct(call)
    zero = replace(call, ranks=call.ranks[:1])
    return _unpadded(zero.planned(_same, _one_value(call.mode, 0)), call)


def rank_sets(spec: MethodSpec, target: Target) -> Sequence[tuple[int, ...]]:
    """The ranks that a call of the method must reach together, since they meet in collectives.

    They are the ranks of each dp coordinate for a mesh mode, else each rank alone.

    Raises:
        DispatchError: the group lacks the mesh.
    """
    if not isinstance(spec.mode, MeshMode) or spec.execute is Execute.RANK_ZERO:
        return [(rank,) for rank in range(target.world_size)]
    call = CallInput(spec, target, (), {}, range(target.world_size))
    return _mesh(call).dp_groups(_dp_axes(call))


def _one_value(mode: Mode, position: int) -> GatherPlan:
    return GatherPlan("none", ()) if mode.collect == "none" else GatherPlan("first", (position,))


def _unpadded(plan: CallPlan, call: CallInput) -> CallPlan:
    """The plan with the mask of a call in which nothing is padded, where the method takes a mask."""
    if call.spec.pad_mask is None or call.spec.pad_mask in plan.kwargs:
        return plan
    return replace(plan, kwargs={**plan.kwargs, call.spec.pad_mask: Same(None)})


def _for_leader(leader: int, count: int, argument: Argument) -> Same | Each:
    """Give rows to the leader alone, and None to its peers; give values without rows to all ranks."""
    if not is_future(argument.value) and count_rows(argument.value) is None:
        return _same(argument)
    value = unwrap(argument.value)
    return Each([value if position == leader else None for position in range(count)])


def plan_same(call: CallInput) -> CallPlan:
    """The same arguments to every rank."""
    return call.planned(_same, GatherPlan.of_mode(call.mode, range(len(call.ranks))))


def plan_dealt(call: CallInput) -> CallPlan:
    """Plan a call whose arguments are lists or tuples with an element per rank."""
    world = len(call.ranks)
    return call.planned(
        lambda argument: _dealt(call, argument, world, "world_size", Each),
        GatherPlan.of_mode(call.mode, range(world)),
    )


def _same(argument: Argument) -> Same:
    return Same(unwrap(argument.value))


def _dealt(
    call: CallInput, argument: Argument, count: int, meaning: str, deal: Callable[[Sequence[Any]], Each]
) -> Same | Each:
    value = call.result_of(argument.value) if is_future(argument.value) else argument.value
    if isinstance(value, Replicate):
        return Same(value.value)
    if not isinstance(value, list | tuple) or len(value) != count:
        raise DispatchError(
            f"{call.where}: {argument.name!r} is {_shape(value)}; expected a list or tuple of {meaning} = "
            f"{count} elements, one for each {'rank' if meaning == 'world_size' else 'dp coordinate'}. Wrap "
            "what all shall get whole in px.replicate(...); rows are split by Dispatch.ROWS"
        )
    return deal(list(value))


def _shape(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, list | tuple):
        return f"a {name} of {len(value)} elements"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _plan_rows(call: CallInput) -> CallPlan:
    if not isinstance(call.mode, Rows) or not call.mode.function_first:
        return plan_rows(call, over_ranks(call))
    if not call.args or not callable(call.args[0]):
        given = f"{type(call.args[0]).__name__}" if call.args else "nothing"
        raise DispatchError(
            f"{call.where}: the first positional argument is {given}; expected a function, which goes to "
            "all ranks"
        )
    return plan_rows(call, over_ranks(call), whole=0)


def _plan_mesh_lists(call: CallInput) -> CallPlan:
    recipients = _over_mesh(call)
    meaning = " * ".join(f"{axis}_size" for axis in _dp_axes(call))
    return call.planned(
        lambda argument: _dealt(call, argument, recipients.count, meaning, recipients.deal),
        GatherPlan.of_mode(call.mode, recipients.take),
        pieces=recipients.of,
    )


def _dp_axes(call: CallInput) -> tuple[str, ...]:
    return PP_AS_DP if isinstance(call.mode, MeshMode) and call.mode.pp_as_dp else DP


def _over_mesh(call: CallInput) -> Recipients:
    """Return the recipients of each dp coordinate's piece, as positions among the called ranks."""
    mode, mesh, dp_axes = call.mode, _mesh(call), _dp_axes(call)
    groups, collectors = mesh.dp_groups(dp_axes), mesh.collectors(dp_axes)
    leaders = mesh.leaders(dp_axes) if isinstance(mode, MeshMode) and mode.leader_only else None
    if not isinstance(call.ranks, range):
        chosen = _called_coordinates(call, groups)
        groups, collectors = [groups[i] for i in chosen], [collectors[i] for i in chosen]
        leaders = None if leaders is None else [leaders[i] for i in chosen]
    position = {rank: place for place, rank in enumerate(call.ranks)}
    of = [0] * len(call.ranks)
    for piece, ranks in enumerate(groups):
        for rank in ranks:
            of[position[rank]] = piece
    led = None if leaders is None else frozenset(position[rank] for rank in leaders)
    return Recipients(len(groups), of, [position[rank] for rank in collectors], led)


def _called_coordinates(call: CallInput, groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the dp coordinates of which all ranks are called.

    Raises:
        DispatchError: part of a coordinate is called.
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


def _mesh(call: CallInput) -> Mesh:
    name = call.mode.mesh if isinstance(call.mode, MeshMode) else "default"
    world = call.target.world_size
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


def _refuse_direct(call: CallInput) -> CallPlan:
    raise DispatchError(
        f"{call.where}: the method cannot be called through the group; it serves rollout clients that "
        "talk to a rank directly. Declare it with another mode, such as Dispatch.ONE_TO_ALL, to call it here"
    )


def _plan_custom(call: CallInput) -> CallPlan:
    call, mode = call.settled(), cast("CustomMode", call.mode)
    given_args = [_shallow(unwrap(value)) for value in call.args]
    given_kwargs = {key: _shallow(unwrap(value)) for key, value in call.kwargs.items()}
    result = mode.dispatch_fn(call.handle or call.target, *given_args, **given_kwargs)
    args, kwargs = _checked_result(call, mode, result)
    dealt = replace(call, args=args, kwargs=kwargs)
    world = len(call.ranks)
    return dealt.planned(
        lambda argument: _checked_column(call, mode, argument, world),
        GatherPlan.of_mode(mode, range(world)),
    )


def _shallow(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, list | dict) else value


def _checked_result(call: CallInput, mode: CustomMode, result: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    pair = isinstance(result, tuple | list) and len(result) == 2
    if not pair or not isinstance(result[0], tuple | list) or not isinstance(result[1], Mapping):
        raise DispatchError(
            f"{call.where}: {_function_name(mode)} returned {_shape(result)}; expected a pair (args, kwargs) "
            "of a tuple or list and a dict, in which every value is a list with one element per rank"
        )
    return tuple(result[0]), dict(result[1])


def _checked_column(call: CallInput, mode: CustomMode, argument: Argument, world: int) -> Each:
    value = argument.value
    if not isinstance(value, list | tuple) or len(value) != world:
        raise DispatchError(
            f"{call.where}: {_function_name(mode)} made {argument.name!r} {_shape(value)}; expected a list "
            f"of world_size = {world} elements, one for each rank"
        )
    return Each([unwrap(element) for element in value])


def _function_name(mode: CustomMode) -> str:
    return getattr(mode.dispatch_fn, "__name__", None) or f"dispatch of {mode.name}"


@dataclass(frozen=True)
class Recipients:
    """To whom the pieces go: ``of[p]`` is the piece of the rank at position ``p`` of the call's ranks.

    A range for ``of`` says that position ``p`` gets piece ``p``. ``take`` are the positions whose outputs are
    joined, in the order of the pieces. ``leaders``, where given, are the positions that get a piece at all;
    their peers get None instead.
    """

    count: int
    of: Sequence[int]
    take: Sequence[int]
    leaders: frozenset[int] | None = None

    def deal(self, pieces: Sequence[Any]) -> Each:
        """Assign a piece to each rank; peers share the same object."""
        if self.leaders is not None:
            return Each([pieces[i] if p in self.leaders else None for p, i in enumerate(self.of)])
        return Each(self.spread(pieces))

    def spread(self, by_piece: Sequence[Any]) -> Sequence[Any]:
        """Return the metadata of each piece, by position."""
        return by_piece if isinstance(self.of, range) else [by_piece[i] for i in self.of]


def over_ranks(call: CallInput) -> Recipients:
    """A piece for each called rank."""
    everybody = range(len(call.ranks))
    return Recipients(len(call.ranks), everybody, everybody)


def plan_rows(call: CallInput, recipients: Recipients, whole: int | str | None = None) -> CallPlan:
    """Rows split over the recipients; the argument at ``whole`` goes to all as it is."""
    mode = call.mode if isinstance(call.mode, MeshMode) else None
    uneven = mode is not None and (mode.balance is not None or mode.group_size > 1)
    if uneven or call.spec.pad_mask is not None:
        call = call.settled()
    taken = _TakenApart.of(call, whole)
    if taken.rows is None and call.spec.pad_to_multiple is not None and taken.futures:
        call = call.settled()  # padding can only be undone if the rows are counted here
        taken = _TakenApart.of(call, whole)
    known = (
        taken.rows is not None
    )  # else only futures have rows, or nothing has any: then every rank gets the same
    cut = (
        Cut([0] * recipients.count) if taken.rows is None else _cut(call, mode, recipients.count, taken.rows)
    )
    plan = call.planned(
        lambda argument: taken.given(argument, recipients, cut),
        _gather_plan(call, recipients, cut) if known else GatherPlan.of_mode(call.mode, recipients.take),
        recipients.spread(cut.sizes) if known else None,
        taken.shared,
        recipients.of if known or taken.futures else None,
    )
    if call.spec.pad_mask is None:
        return plan
    mask = recipients.deal(_masks(cut)) if known else Same(None)
    return replace(plan, kwargs={**plan.kwargs, call.spec.pad_mask: mask})


@dataclass(frozen=True)
class _TakenApart:
    """The arguments of a call, leaf by leaf."""

    leaves: Mapping[int | str, tuple[list[Leaf], Callable[..., Any]]]
    whole: int | str | None
    rows: int | None
    futures: bool
    shared: tuple[Any, ...]

    @classmethod
    def of(cls, call: CallInput, whole: int | str | None) -> _TakenApart:
        leaves = {a.key: _flattened(call, a) for a in call.arguments() if a.key != whole}
        every = [leaf for found, _ in leaves.values() for leaf in found]
        refuse_unclear_rows(every, call.where)
        shared = {
            id(leaf.value): unwrap(leaf.value)
            for found, build in leaves.values()
            if build is not next and any(_differs(leaf) for leaf in found)
            for leaf in found
            if not _differs(leaf) and not isinstance(leaf.value, _SCALARS)
        }
        futures = any(is_future(leaf.value) for leaf in every)
        return cls(leaves, whole, rows_of(every, call.where), futures, tuple(shared.values()))

    def given(self, argument: Argument, recipients: Recipients, cut: Cut) -> Same | Each:
        """Return the pieces of an argument for the ranks."""
        if argument.key == self.whole:
            return Same(unwrap(argument.value))
        leaves, build = self.leaves[argument.key]
        if not any(_differs(leaf) for leaf in leaves):
            return Same(unwrap(argument.value))
        return recipients.deal(split_leaves(leaves, build, cut, self.rows))


def _flattened(call: CallInput, argument: Argument) -> tuple[list[Leaf], Callable[..., Any]]:
    try:
        return flatten(argument.value, argument.name)
    except DispatchError as error:
        raise DispatchError(f"{call.where}: {error}") from None


def _differs(leaf: Leaf) -> bool:
    """Return whether each piece has another value of the leaf."""
    return is_future(leaf.value) or row_ops(leaf) is not None


def _cut(call: CallInput, mode: MeshMode[Any] | None, count: int, rows: int) -> Cut:
    pad = call.spec.pad_to_multiple
    if mode is None:
        return Cut(even_sizes(rows, count), pad_to_multiple=pad)
    group_size = mode.group_size
    if rows % group_size:
        raise DispatchError(
            f"{call.where}: {rows} rows cannot be kept in groups of group_size = {group_size}; give a "
            f"multiple of {group_size} rows"
        )
    if mode.balance is None:
        sizes = even_sizes(rows, count) if group_size == 1 else grouped_sizes(rows, count, group_size)
        return Cut(sizes, pad_to_multiple=pad)
    lengths = _lengths(call, mode.balance, rows)
    indices = balanced_partition(lengths, count, group_size=group_size)
    return Cut([len(part) for part in indices], indices, pad)


def _gather_plan(call: CallInput, recipients: Recipients, cut: Cut) -> GatherPlan:
    sizes = recipients.spread(cut.sizes)
    real = (
        sizes if recipients.take == range(len(sizes)) else [sizes[position] for position in recipients.take]
    )
    trim = None
    if cut.pad_to_multiple is not None and any(size % cut.pad_to_multiple for size in real):
        given = recipients.spread(cut.given)
        trim = [(given[position], sizes[position]) for position in recipients.take]
    return GatherPlan.of_mode(call.mode, recipients.take, rows=real, trim=trim, order=cut.order)


def _masks(cut: Cut) -> list[torch.Tensor]:
    return [torch.arange(given) < real for given, real in zip(cut.given, cut.sizes, strict=True)]


def _lengths(call: CallInput, balance: str | Callable[..., Any], rows: int) -> list[float]:
    """Return a length per row, from the key or function that the mode balances by."""
    if callable(balance):
        found = balance(*(unwrap(v) for v in call.args), **{k: unwrap(v) for k, v in call.kwargs.items()})
        source = f"the balance function {getattr(balance, '__name__', balance)!s}"
    else:
        found, source = _find_key(call, balance), f"balance={balance!r}"
    lengths = found.tolist() if hasattr(found, "tolist") else found
    if hasattr(lengths, "to_pylist"):
        lengths = lengths.to_pylist()
    numbers = isinstance(lengths, list | tuple) and all(isinstance(n, int | float) for n in lengths)
    if not numbers or len(lengths) != rows:
        raise DispatchError(
            f"{call.where}: {source} gives {_described(found)}; expected one number for each of the "
            f"{rows} rows"
        )
    return list(lengths)


def _find_key(call: CallInput, key: str) -> Any:
    arguments = list(call.arguments())
    for argument in arguments:
        if argument.name == key:
            return unwrap(argument.value)
    for argument in arguments:
        found = _inside(unwrap(argument.value), key)
        if found is not None:
            return found
    names = ", ".join(argument.name for argument in arguments) or "none"
    raise DispatchError(
        f"{call.where}: balance={key!r} is neither an argument nor a key or field in one (arguments: "
        f"{names}); pass it, or balance by a function of the arguments"
    )


def _inside(value: Any, key: str) -> Any:
    """Return the item of ``value`` under ``key``, at any depth; None where it does not."""
    if ops_for(value) is not None:
        return value[key] if key in _columns(value) else None
    node = node_of(value)
    if node is None:
        return None
    steps = (f"[{key!r}]", f".{key}")
    for step, child in zip(node.steps, node.values, strict=True):
        found = child if step in steps else _inside(child, key)
        if found is not None:
            return found
    return None


def _columns(value: Any) -> Sequence[Any]:
    """Return the column names of a value with rows, a TensorDict or an Arrow table."""
    if is_tensor(value) or isinstance(value, list | np.ndarray):
        return ()
    names = getattr(value, "column_names", None)
    if names is None and callable(getattr(value, "keys", None)):
        names = list(value.keys())
    return names or ()


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    return f"{type(value).__name__} of length {len(value)}" if hasattr(value, "__len__") else repr(value)


_PLANNERS: dict[type[Mode], Callable[[CallInput], CallPlan]] = {
    OneToAll: plan_same,
    AllToAll: plan_dealt,
    RankZero: plan_rank_zero,
    Rows: _plan_rows,
    MeshRows: lambda call: plan_rows(call, _over_mesh(call)),
    MeshLists: _plan_mesh_lists,
    Direct: _refuse_direct,
    CustomMode: _plan_custom,
}


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
    """Plan the ranks and arguments of a call, and how the outputs become the call's value.

    No argument is changed. Row modes whose arguments have no rows at all give every rank the same arguments and join
    the outputs. With ``Execute.RANK_ZERO`` the first rank gets the arguments unchanged (a custom mode: the first
    element of each), and the value is its output.

    Args:
        ranks: the slice of the group that is called, in order; None for all. It then counts as a world of
            its own; mesh modes take slices that cover whole dp coordinates.
        materialize: waits for a future if the mode must read its value: custom modes, ``balance``, ``group_size``,
            ``pad_mask``, padding if no other argument has rows, a future in place of a list.
        handle: the group passed to custom functions, of the called ranks; default ``target``.

    Raises:
        DispatchError: the arguments do not fit the method or its mode, or the group lacks the mesh.
    """
    if not isinstance(spec.mode, CustomMode):
        check_signature(spec, args, kwargs)
    call = CallInput(spec, target, args, kwargs, _called(target, ranks), materialize, handle)
    return plan_rank_zero(call) if spec.execute is Execute.RANK_ZERO else _PLANNERS[type(call.mode)](call)


def plan_one(
    spec: MethodSpec,
    target: Target,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ranks: Sequence[int],
) -> CallPlan:
    """Plan a call to a single rank, or to all ranks of a dp coordinate (a set of :func:`rank_sets`).

    The arguments are passed unchanged. The value is the output of the single rank, or of the collector.

    Raises:
        DispatchError: the arguments do not fit the method.
    """
    if isinstance(spec.mode, CustomMode):
        spec = replace(spec, mode=Dispatch.RANK_ZERO)
    check_signature(spec, args, kwargs)
    call = CallInput(spec, target, args, kwargs, _called(target, ranks))
    if len(ranks) == 1 or not isinstance(spec.mode, MeshMode):
        return plan_rank_zero(call)
    mesh, dp_axes, members = _mesh(call), _dp_axes(call), list(ranks)
    collector = next(members.index(rank) for rank in mesh.collectors(dp_axes) if rank in members)
    leader = next(members.index(rank) for rank in mesh.leaders(dp_axes) if rank in members)
    given = functools.partial(_for_leader, leader, len(members)) if spec.mode.leader_only else _same
    return _unpadded(call.planned(given, _one_value(spec.mode, collector)), call)


def plan_execute_all(
    spec: MethodSpec,
    target: Target,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    ranks: Sequence[int] | None = None,
) -> CallPlan:
    """Plan ``execute_all*("name", ...)``, which ignores the method's mode.

    Arguments are dealt out, an element to each rank, if every argument is a list of world_size elements; otherwise, and
    without arguments, all ranks get the same.
    """
    world = target.world_size if ranks is None else len(ranks)
    values = [*args, *kwargs.values()]
    deal = bool(values) and all(isinstance(value, list) and len(value) == world for value in values)
    mode = Dispatch.ALL_TO_ALL if deal else Dispatch.ONE_TO_ALL
    plain = replace(spec, mode=mode, execute=Execute.ALL, pad_mask=None)
    return plan(plain, target, args, kwargs, ranks=ranks)


def plan_execute_rank_zero(
    spec: MethodSpec,
    target: Target,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    ranks: Sequence[int] | None = None,
) -> CallPlan:
    """Plan ``execute_rank_zero*("name", ...)``: the first rank, arguments as they are, its value."""
    return plan(replace(spec, mode=Dispatch.RANK_ZERO), target, args, kwargs, ranks=ranks)


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
