"""``group.method.explain(...)``: describes a call by its plan, without making its messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from phalanx.api.selection import Selection
from phalanx.calls.future import CallFuture
from phalanx.calls.values import Readonly, StoredValue
from phalanx.declare.dispatch_modes import CustomMode, DispatchMode, MeshMode
from phalanx.declare.spec import MethodSpec
from phalanx.dispatch.plan import CallPlan, Each, FuturePiece, Same
from phalanx.dispatch.pytree import node_of
from phalanx.dispatch.shardable import Replicate
from phalanx.display.explanation import ArgumentFacts, CallExplanation, RankFacts
from phalanx.errors import DispatchError
from phalanx.group.group import Group
from phalanx.topology.mesh import DP, PP_AS_DP, Mesh
from phalanx.wire.codec import large_leaves, nbytes_of
from phalanx.wire.value import Value

_MARKERS = (FuturePiece, StoredValue, Readonly)
_BY_REFERENCE = (CallFuture, FuturePiece, StoredValue)


def finished_result(future: CallFuture[Any]) -> Value:
    """The value of a future that planning must see; explaining a call waits for nothing.

    Raises:
        DispatchError: it is not here yet.
    """
    if future.done():
        return future.result()
    raise DispatchError(
        f"explain(): how this call is split depends on the value of {future!r}, which is not here yet, and "
        "explaining a call waits for nothing; ask again when it is done, or pass future.result()"
    )


def explain_call(
    selection: Selection,
    spec: MethodSpec,
    plan: CallPlan,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> CallExplanation:
    """Describe the call of a plan. ``args`` and ``kwargs`` are the arguments as they were given."""
    mesh = _mesh_of(selection, spec, plan)
    mode = spec.mode
    return CallExplanation(
        call=f"{selection.name}.{spec.name}",
        mode=repr(mode) if isinstance(mode, DispatchMode) else f"custom mode {mode.name}",
        waits=spec.blocking,
        arguments=tuple(_arguments(selection.core, spec, plan, args, kwargs)),
        ranks=_ranks(selection, spec, plan, mesh),
        collected=_collected(plan, spec, mesh),
        notes=(
            *([_REPLICATED] if spec.replicated else []),
            *([_streams(plan)] if spec.streams else []),
        ),
    )


_REPLICATED = "The method is declared replicated: debug mode compares the outputs of all ranks"


def _streams(plan: CallPlan) -> str:
    """What a method that yields gives, and how it can be had sooner."""
    ranks = [plan.ranks[position] for position in range(len(plan.ranks)) if plan.keeps(position)]
    items = "items" if plan.gather.how == "value" else "(rank, item)"
    of = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    if not ranks:
        return "The method yields, and no item leaves its rank"
    one_by_one = f".stream(...) gives {items} of {of} as they are made"
    return f"The method yields: an output is the list of a rank's items; {one_by_one}"


def _ranks(
    selection: Selection, spec: MethodSpec, plan: CallPlan, mesh: Mesh | None
) -> tuple[RankFacts, ...]:
    endpoints = selection.core.endpoints
    facts = [
        RankFacts(
            rank=rank,
            host=endpoints[rank].facts.slot.host,
            place=None if mesh is None else dict(mesh.coordinates(rank)),
            start=None,
            stop=None,
            rows=None,
            given_rows=None,
            order=None,
            returns="kept" if plan.keeps(position) else "dropped",
        )
        for position, rank in enumerate(plan.ranks)
    ]
    return tuple(_with_rows(facts, spec, plan))


def _with_rows(ranks: Sequence[RankFacts], spec: MethodSpec, plan: CallPlan) -> Iterator[RankFacts]:
    """Add the rows of the caller that each rank gets, if rows are split and the plan has their number."""
    pieces = plan.pieces
    if pieces is None or plan.rows is None:
        yield from ranks
        return
    sizes = _piece_sizes(plan, pieces, plan.rows)
    starts = [0, *accumulate(rows for rows, _ in sizes)]
    for position, (facts, piece) in enumerate(zip(ranks, pieces, strict=True)):
        rows, padded = sizes[piece]
        if _left_out(plan, spec, position):
            yield facts
        elif plan.gather.order is None:
            start = starts[piece]
            yield replace(facts, start=start, stop=start + rows, rows=rows, given_rows=padded)
        else:
            order = tuple(plan.gather.order[starts[piece] : starts[piece] + rows])
            yield replace(facts, rows=rows, given_rows=padded, order=order)


def _piece_sizes(plan: CallPlan, pieces: Sequence[int], rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return the rows of each piece without and with padding."""
    real = dict(zip(pieces, rows, strict=True))
    taken = zip(plan.gather.take, plan.gather.trim or (), strict=False)
    padded = real | {pieces[position]: given for position, (given, _) in taken}
    return [(real[piece], padded[piece]) for piece in range(len(real))]


def _left_out(plan: CallPlan, spec: MethodSpec, position: int) -> bool:
    """Whether the rank is a peer of a leader that alone gets the rows."""
    if not isinstance(spec.mode, MeshMode) or not spec.mode.leader_only:
        return False
    columns = [a for a in (*plan.args, *plan.kwargs.values()) if isinstance(a, Each)]
    return all(column.values[position] is None for column in columns)


def _arguments(
    core: Group, spec: MethodSpec, plan: CallPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[ArgumentFacts]:
    names = spec.positional_names
    custom = isinstance(spec.mode, CustomMode)
    given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    body_is_stored = _body_bytes(plan, core.inline_bytes) > core.inline_bytes
    for key, argument in {**dict(enumerate(plan.args)), **plan.kwargs}.items():
        name = names[key] if isinstance(key, int) and key < len(names) else str(key)
        shown = described(given[key]) if key in given and not custom else _made(spec, key)
        yield ArgumentFacts(
            name if isinstance(key, str) or key < len(names) else f"argument {key + 1}",
            shown,
            _given(spec, plan, argument, key),
            _travel(core, plan, argument, body_is_stored),
            _nbytes(argument),
        )


def described(value: Value) -> str:
    """What a value is, in a few words: "tensor float32 [8, 4]", "dict of 2"."""
    if isinstance(value, Replicate | Readonly):
        return described(value.value)
    if isinstance(value, CallFuture):
        return f"future of {value.group}.{value.call.method}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    name = type(value).__name__
    if shape is not None and dtype is not None:
        return f"{name} {str(dtype).removeprefix('torch.')} {list(shape)}"
    if isinstance(value, bool | int | float | str | bytes | None):
        text = repr(value)
        return text if len(text) <= 30 else f"{name} of length {len(value)}"  # type: ignore[arg-type]
    return f"{name} of {len(value)}" if isinstance(value, list | tuple | dict | set) else name


def _made(spec: MethodSpec, key: int | str) -> str:
    if key == spec.pad_mask:
        return "mask of real rows"
    return f"made by {getattr(getattr(spec.mode, 'dispatch_fn', None), '__name__', 'the mode')}"


def _given(spec: MethodSpec, plan: CallPlan, argument: Same | Each, key: int | str) -> str:
    if isinstance(argument, Same):
        return "the same to all" if len(plan.ranks) > 1 else "as it is"
    if key == spec.pad_mask:
        return "made by the call, one each"
    if isinstance(spec.mode, CustomMode) or plan.pieces is None:
        return "one element each"
    kind = "rows split" if plan.gather.rows is not None or plan.gather.how == "rows" else "elements dealt"
    return f"{kind} into {len(set(plan.pieces))} pieces"


def _travel(core: Group, plan: CallPlan, argument: Same | Each, body_is_stored: bool) -> str:
    first = argument.value if isinstance(argument, Same) else next(iter(argument.values), None)
    future = next(_futures(first), None)
    if future is not None:
        return "through the driver" if future.parts(core.transport) is None else "by reference, rank to rank"
    if isinstance(first, StoredValue):
        return "stored before (px.put)"
    if isinstance(first, Readonly):
        return "stored once, read without a copy"
    if isinstance(first, core.transport.ref_types()):
        return "as a reference"
    if isinstance(argument, Same) and _has_each(plan) and large_leaves(first, core.inline_bytes):
        return "stored once"
    if not body_is_stored:
        return "in the message"
    return "stored, once per piece" if _has_each(plan) else "stored once"


def _has_each(plan: CallPlan) -> bool:
    return any(isinstance(argument, Each) for argument in (*plan.args, *plan.kwargs.values()))


def _body_bytes(plan: CallPlan, inline_bytes: int) -> int:
    """Return the bytes of the largest message body, without large tensors that are stored once for all ranks."""
    arguments = (*plan.args, *plan.kwargs.values())
    same = [argument.value for argument in arguments if isinstance(argument, Same)]
    columns = [argument.values for argument in arguments if isinstance(argument, Each)]
    if not columns:
        return sum(nbytes_of(value, _BY_REFERENCE) for value in same)
    stored = {id(leaf) for value in same for leaf in large_leaves(value, inline_bytes)}
    shared = sum(nbytes_of(value, _BY_REFERENCE, stored) for value in same)
    distinct = {tuple(map(id, values)): values for values in zip(*columns, strict=True)}
    pieces = [sum(nbytes_of(value, _BY_REFERENCE) for value in values) for values in distinct.values()]
    return shared + max(pieces, default=0)


def leaves_of(value: Value, kinds: type | tuple[type, ...]) -> Iterator[Any]:
    """Return the objects of some types in a value; tuples, dicts and dataclasses are searched, as in planning."""
    if isinstance(value, kinds):
        yield value
        return
    node = None if isinstance(value, _MARKERS) else node_of(value)
    if node is not None:
        for child in node.values:
            yield from leaves_of(child, kinds)


def _futures(value: Value) -> Iterator[CallFuture[Any]]:
    """Return the futures in a value, also if only a piece of the future is in it."""
    for leaf in leaves_of(value, (CallFuture, FuturePiece)):
        yield leaf.future if isinstance(leaf, FuturePiece) else leaf


def _nbytes(argument: Same | Each) -> int | None:
    """Return the bytes of an argument; None if results of other calls are in it."""
    values = [argument.value] if isinstance(argument, Same) else list(argument.values)
    different = list({id(value): value for value in values}.values())
    if any(next(_futures(value), None) is not None for value in different):
        return None
    stored = {id(s): s.nbytes for value in different for s in leaves_of(value, StoredValue)}
    return sum(stored.values()) + sum(nbytes_of(value, _BY_REFERENCE) for value in different)


def _mesh_of(selection: Selection, spec: MethodSpec, plan: CallPlan) -> Mesh | None:
    """The mesh that the call is split over, if it is."""
    mode = spec.mode
    if not isinstance(mode, MeshMode) or plan.gather.how == "value":
        return None
    return selection.mesh(mode.mesh)


def _collected(plan: CallPlan, spec: MethodSpec, mesh: Mesh | None) -> str:
    gather = plan.gather
    if gather.how == "none":
        return "None: no output leaves its rank"
    if gather.how == "value":
        return f"the output of rank {plan.ranks[gather.take[0]]} itself"
    if gather.how == "custom":
        name = getattr(gather.collect_fn, "__name__", "collect_fn")
        return f"what {name}(group, outputs) makes of all {len(gather.take)} outputs"
    whose = "by rank" if mesh is None else f"by dp, from {_from_axes(mesh, spec)}"
    count = f"{len(gather.take)} output{'' if len(gather.take) == 1 else 's'}"
    if gather.how == "list":
        return f"a list of {count} {whose}"
    text = f"the rows of {count} joined, {whose}"
    text += ", in the caller's order" if gather.order is not None else ""
    text += ", without the padding" if gather.trim is not None else ""
    return text + "; settings once where all agree, else by piece"


def _from_axes(mesh: Mesh, spec: MethodSpec) -> str:
    """The coordinates whose outputs count, such as "tp=0, last pp"."""
    dp = PP_AS_DP if isinstance(spec.mode, MeshMode) and spec.mode.pp_as_dp else DP
    others = [axis for axis in mesh.axes if axis not in dp]
    last = f"last pp (pp={mesh.size('pp') - 1})"
    named = [f"{axis}=0" for axis in others if axis != "pp"] + ([last] if "pp" in others else [])
    return ", ".join(named) or "every rank"
