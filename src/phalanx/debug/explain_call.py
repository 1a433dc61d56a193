"""``group.method.explain(...)``: the description of a call by its plan, without encoding its messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from phalanx.api.selection import Selection
from phalanx.calls.future import CallFuture
from phalanx.calls.values import Readonly, StoredParts, StoredValue
from phalanx.declare.register import MethodSpec
from phalanx.dispatch.plan import CallPlan, Each, Same
from phalanx.dispatch.pytree import flatten, is_future
from phalanx.dispatch.shardable import Marker
from phalanx.display.tables import Table
from phalanx.errors import DispatchError
from phalanx.group.group import Group
from phalanx.topology.mesh import DP, PP_AS_DP, Mesh, axes_text
from phalanx.wire.value import Value

_SHOWN_RANKS = 32
Argument = Same | Each


@dataclass(frozen=True)
class ArgumentInfo:
    """An argument of a call.

    Attributes:
        name: name of the parameter.
        value: description, such as "tensor float32 [8, 4]".
        given: distribution over the ranks: "the same to all", "rows split", "one element each" and so on.
        travels: transfer: "by value", "by reference, rank to rank", "stored before (px.put)" and so on.
    """

    name: str
    value: str
    given: str
    travels: str


@dataclass(frozen=True)
class RankInfo:
    """A rank's part of a call.

    Attributes:
        rank, host: number and node of the rank.
        place: coordinates of the rank, if the call uses a mesh.
        returns: "kept" if the output goes into the result, else "dropped".
        start, stop: range of the caller's rows, ``stop`` not included; None if no rows are split, or if they are not
            consecutive.
        rows: number of rows; None if no rows are split, or if it depends on the result of another call.
        given_rows: number of rows that reach the method, including padding.
        order: indices of the caller's rows, if they are not consecutive.
    """

    rank: int
    host: str
    place: dict[str, int] | None
    returns: str
    start: int | None = None
    stop: int | None = None
    rows: int | None = None
    given_rows: int | None = None
    order: tuple[int, ...] | None = None

    def rows_text(self) -> str | None:
        """Return the rows as text, such as "0:2 (padded to 4)"; None without rows."""
        if self.rows is None:
            return None
        text = f"{self.start}:{self.stop}"
        if self.order is not None:
            text = ", ".join(map(str, self.order[:6]))
            text += f", ... ({len(self.order)} rows)" if len(self.order) > 6 else ""
        return text if self.given_rows == self.rows else f"{text} (padded to {self.given_rows})"


@dataclass(frozen=True)
class CallExplanation:
    """The plan of a call. ``str()`` is for terminals, a notebook shows HTML, ``to_dict()`` is for programs."""

    call: str
    mode: str
    waits: bool
    arguments: tuple[ArgumentInfo, ...]
    ranks: tuple[RankInfo, ...]
    collected: str
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data, with every rank."""
        return asdict(self)

    def tables(self) -> tuple[Table, ...]:
        """Return tables of the arguments, if there are any, and of the first ranks, with the call and its result."""
        shown, more = self.ranks[:_SHOWN_RANKS], len(self.ranks) - _SHOWN_RANKS
        columns = {
            "rank": [rank.rank for rank in shown],
            "host": [rank.host or None for rank in shown],
            "mesh": [axes_text(rank.place or {}) or None for rank in shown],
            "rows": [rank.rows_text() for rank in shown],
            "output": [rank.returns for rank in shown],
        }
        known = {name: cells for name, cells in columns.items() if any(cell is not None for cell in cells)}
        rest = [f"and {more} more ranks; .to_dict() has all of them."] if more > 0 else []
        notes = (*rest, f"Result: {self.collected}.", *self.notes)
        names = ("argument", "value", "given to ranks", "travels")
        rows = tuple((a.name, a.value, a.given, a.travels) for a in self.arguments)
        count = f"{len(self.ranks)} rank{'' if len(self.ranks) == 1 else 's'}"
        end = "waits for the result" if self.waits else "returns a CallFuture"
        title = f"{self.call} by {self.mode} on {count}; {end}. Nothing was sent"
        cells = zip(*known.values(), strict=True)
        ranks = Table("Ranks" if rows else title, tuple(known), tuple(cells), notes)
        return (Table(title, names, rows), ranks) if rows else (ranks,)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables()))

    def __rich__(self) -> Any:
        from rich.console import Group  # only where something is shown

        return Group(*self.tables())

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self.tables())  # pyright: ignore[reportPrivateUsage]


def finished_result(future: CallFuture[Any] | StoredParts) -> Value:
    """Return the value of a future on which the plan depends, without waiting.

    Raises:
        DispatchError: if the future is not done.
    """
    if isinstance(future, StoredParts) or future.done():
        return future.result()
    raise DispatchError(
        f"explain(): how this call is split depends on the value of {future!r}, which is not done, and "
        "explain() does not wait; call it again when the future is done, or pass future.result()"
    )


def explain_call(
    selection: Selection,
    spec: MethodSpec,
    plan: CallPlan,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> CallExplanation:
    """Describe the call of a plan. ``args`` and ``kwargs`` are the caller's arguments."""
    mode, mesh = spec.mode, None
    if mode.mesh is not None and plan.gather.collect != "first":
        mesh = selection.mesh(mode.mesh)
    replicated = "The method is declared replicated: debug mode compares the outputs of all ranks"
    return CallExplanation(
        call=f"{selection.name}.{spec.name}",
        mode=repr(mode),
        waits=spec.blocking,
        arguments=tuple(_arguments(selection.core, spec, plan, args, kwargs)),
        ranks=tuple(_ranks(selection.core, plan, mesh)),
        collected=_collected(plan, spec, mesh),
        notes=(*([replicated] if spec.replicated else []), *([_streams(plan)] if spec.streams else [])),
    )


def _streams(plan: CallPlan) -> str:
    """Describe the output of a method that yields."""
    ranks = [plan.ranks[position] for position in range(len(plan.ranks)) if plan.keeps(position)]
    if not ranks:
        return "The method yields, and no item leaves its rank"
    items = "items" if plan.gather.collect == "first" else "(rank, item)"
    of = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    one_by_one = f".stream(...) gives {items} of {of} as they are made"
    return f"The method yields: an output is the list of a rank's items; {one_by_one}"


def _ranks(core: Group, plan: CallPlan, mesh: Mesh | None) -> Iterator[RankInfo]:
    """Describe each rank, with its rows if rows are split and the plan has their number."""
    gather, shards, rows_by_shard = plan.gather, plan.shards or (), dict[int, int]()
    if plan.rows is not None:
        rows_by_shard = dict(zip(shards, plan.rows, strict=True))
    starts = [0, *accumulate(rows_by_shard[shard] for shard in range(len(rows_by_shard)))]
    trims = zip(gather.take, gather.trim or (), strict=False)
    padded = {shards[position]: given for position, (given, _) in trims} if shards else {}
    for position, rank in enumerate(plan.ranks):
        rows: dict[str, Any] = {}
        if rows_by_shard:
            shard = shards[position]
            start, stop = starts[shard : shard + 2]
            rows = {"rows": rows_by_shard[shard], "given_rows": padded.get(shard, rows_by_shard[shard])}
            order = gather.order
            rows |= {"start": start, "stop": stop} if order is None else {"order": tuple(order[start:stop])}
        host = core.endpoints[rank].facts.slot.host if rank < len(core.endpoints) else ""  # it has none now
        place = None if mesh is None else dict(mesh.coordinates(rank))
        yield RankInfo(rank, host, place, "kept" if plan.keeps(position) else "dropped", **rows)


def _arguments(
    core: Group, spec: MethodSpec, plan: CallPlan, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[ArgumentInfo]:
    names = spec.positional_names
    given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    planned: dict[int | str, Argument] = {**dict(enumerate(plan.args)), **plan.kwargs}
    for key, argument in planned.items():
        name = key if isinstance(key, str) else names[key] if key < len(names) else f"argument {key + 1}"
        if key in given and spec.mode.kind != "custom":
            value = described(given[key])
        else:
            value = f"made by {getattr(spec.mode.dispatch_fn, '__name__', 'the mode')}"
        values = [argument.value] if isinstance(argument, Same) else argument.values
        travels = _travels(core, values[0]) if values else "by value"
        yield ArgumentInfo(name, value, _given(spec, plan, argument), travels)


def described(value: Value) -> str:
    """Describe a value in a few words: "tensor float32 [8, 4]", "dict of 2"."""
    if isinstance(value, Marker):
        return described(value.value)
    if isinstance(value, CallFuture):
        return f"future of {value.group}.{value.call.method}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    name = type(value).__name__
    if isinstance(shape, tuple) and dtype is not None:
        return f"{name} {str(dtype).removeprefix('torch.')} {list(shape)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"{name} of {value.bit_length()} bits"
    if isinstance(value, bool | int | float | str | bytes | None):
        text = repr(value)
        is_long = isinstance(value, str | bytes) and len(text) > 30
        return f"{name} of length {len(value)}" if is_long else text  # type: ignore[arg-type]
    return f"{name} of {len(value)}" if isinstance(value, list | tuple | dict | set) else name


def _given(spec: MethodSpec, plan: CallPlan, argument: Argument) -> str:
    if isinstance(argument, Same):
        return "the same to all" if len(plan.ranks) > 1 else "as it is"
    if spec.mode.kind == "custom" or plan.shards is None:
        return "one element each"
    kind = "rows split" if plan.gather.rows is not None or plan.gather.collect == "join" else "elements dealt"
    return f"{kind} into {len(set(plan.shards))} shards"


def _travels(core: Group, value: Value) -> str:
    """Describe how a value reaches the ranks."""
    future = next((leaf.value for leaf in flatten(value, "")[0] if is_future(leaf.value)), None)
    if future is not None:
        if isinstance(future, StoredParts):
            is_there = future.backend == core.backend.name
        else:
            is_there = future.parts(core.backend) is not None
        return "by reference, rank to rank" if is_there else "through the driver"
    if isinstance(value, StoredValue):
        return "stored before (px.put)"
    if isinstance(value, Readonly):
        return "stored once, read without a copy"
    return "as a reference" if isinstance(value, core.backend.ref_types) else "by value"


def _collected(plan: CallPlan, spec: MethodSpec, mesh: Mesh | None) -> str:
    """Describe how outputs become the result."""
    gather = plan.gather
    if gather.collect == "none":
        return "None: no output leaves its rank"
    if gather.collect == "first":
        return f"the output of rank {plan.ranks[gather.take[0]]} itself"
    if callable(gather.collect):
        name = getattr(gather.collect, "__name__", "collect_fn")
        return f"{name}(group, outputs), called with all {len(gather.take)} outputs"
    whose = "by rank" if mesh is None else f"by dp, from {_output_axes(mesh, spec)}"
    count = f"{len(gather.take)} output{'' if len(gather.take) == 1 else 's'}"
    if gather.collect == "list":
        return f"a list of {count} {whose}"
    text = f"the rows of {count} joined, {whose}"
    text += ", in the caller's order" if gather.order is not None else ""
    text += ", without the padding" if gather.trim is not None else ""
    return text + "; metadata once if all ranks agree, else per shard"


def _output_axes(mesh: Mesh, spec: MethodSpec) -> str:
    """Return the coordinates whose outputs are collected, such as "tp=0, last pp (pp=1)"."""
    dp = PP_AS_DP if spec.mode.pp_as_dp else DP
    others = [axis for axis in mesh.axes if axis not in dp]
    last = f"last pp (pp={mesh.size('pp') - 1})"
    named = [f"{axis}=0" for axis in others if axis != "pp"] + ([last] if "pp" in others else [])
    return ", ".join(named) or "every rank"
