"""``group.method.explain(...)``: the messages of a call are made as for sending it, and then only looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.declare.modes import CustomMode, DispatchMode
from phalanx.declare.spec import MethodSpec
from phalanx.dispatch.plan import CallPlan, Each, FuturePiece, Same
from phalanx.errors import DispatchError
from phalanx.runtime.calls.compose import Outlet, messages
from phalanx.runtime.calls.counts import Book
from phalanx.runtime.calls.future import CallFuture
from phalanx.runtime.calls.store import Room
from phalanx.runtime.calls.values import Readonly, StoredValue
from phalanx.runtime.groups.selection import Selection
from phalanx.runtime.tools.incoming import Incoming, described, futures_in
from phalanx.runtime.tools.pieces import Pieces
from phalanx.show.explanation import ArgumentFacts, CallExplanation, Hop, RankFacts
from phalanx.show.sizes import size as size_text
from phalanx.topology.mesh import DP, PP_AS_DP, Mesh
from phalanx.transport.base import Ref, StoreSpace, Transport
from phalanx.wire.bundle import Bundle
from phalanx.wire.codec import Encoded, large_leaves, nbytes_of
from phalanx.wire.messages import DESCRIBED, OUTPUT, RankCall

_A_NUMBER = 1 << 55  # as long as those of calls, so that messages are as long as theirs
_BY_REFERENCE = (CallFuture, FuturePiece, StoredValue)
_MESH_MODES = frozenset(
    {"MESH", "MEGATRON_COMPUTE", "MEGATRON_COMPUTE_PROTO", "MEGATRON_PP_AS_DP", "MEGATRON_PP_AS_DP_PROTO"}
)


@dataclass(frozen=True)
class _Unstored:
    """Stands for what would be stored: a value, or the values of a bundle."""

    sizes: tuple[int, ...]

    def read(self, part: bytes | int | None) -> int:
        """Bytes that a rank reads of it: all, or those of one part."""
        return self.sizes[part] if isinstance(part, int) else sum(self.sizes)


class _LookedAt(Room):
    """Refuses what a call refuses, and waits for nothing."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.note: str | None = None

    def _wait_for(self, nbytes: int, space: StoreSpace, what: str) -> None:
        if space.free < nbytes:
            self.note = (
                f"The object store of this node has {size_text(max(0, space.free))} free of "
                f"{size_text(space.capacity)}: the call would wait until others have ended"
            )


@dataclass(frozen=True)
class _DryOutlet(Outlet):
    """Stores nothing."""

    put_aside: list[int] = field(default_factory=list[int])
    awaited: list[CallFuture[Any]] = field(default_factory=list[CallFuture[Any]])

    def put(self, encoded: Encoded | Bundle) -> Ref:
        values = encoded.values if isinstance(encoded, Bundle) else (encoded,)
        found = _Unstored(tuple(value.nbytes for value in values))
        self.put_aside.extend(found.sizes)
        return found

    def value_of(self, future: CallFuture[Any]) -> Any:
        if future.done():
            return future.result()
        self.awaited.append(future)
        return None


def finished_result(future: CallFuture[Any]) -> Any:
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
    *,
    bare: bool,
) -> CallExplanation:
    """What a call by this plan would do; ``bare`` says that it would go without a message.

    Raises:
        DispatchError: an argument cannot be pickled, or what is to be stored is larger than the object store.
    """
    dry = _Dry(selection, spec, plan, bare)
    mesh = _mesh_of(selection, spec, plan)
    pieces = Pieces.of_plan(plan, dry.incoming, spec)
    ranks = tuple(
        _rank_facts(dry, plan, pieces, position, selection.core.endpoints[rank].facts.slot.host, mesh)
        for position, rank in enumerate(plan.ranks)
    )
    mode = spec.mode
    return CallExplanation(
        call=f"{selection.name}.{spec.name}",
        mode=repr(mode) if isinstance(mode, DispatchMode) else f"custom mode {mode.name}",
        waits=spec.blocking,
        arguments=tuple(_arguments(dry, plan, args, kwargs)),
        ranks=ranks,
        hops=_hops(dry, plan, ranks),
        collected=_collected(plan, spec, mesh),
        notes=tuple(dry.notes()),
    )


class _Dry:
    """The messages of a call, of which only sizes are kept."""

    def __init__(self, selection: Selection, spec: MethodSpec, plan: CallPlan, bare: bool) -> None:
        core = selection.core
        self.spec = spec
        self.bare = bare
        self.room = _LookedAt(core.transport)
        self.outlet = _DryOutlet(core.transport, core.outlet.inline_bytes, Book(), self.room)
        self.incoming = Incoming(core.transport)
        self.in_messages: list[int] = []
        self.from_store: list[int] = []
        self.stored_bodies = 0
        returns = DESCRIBED if not spec.blocking and plan.gather.how == "rows" else OUTPUT
        header = RankCall(
            _A_NUMBER,
            core.epoch.number,
            selection.role,
            spec.name,
            True,
            returns,
            spec.readonly,
            spec.to_device,
            None,
        )
        if bare:
            self.in_messages = self.from_store = [0] * len(plan.ranks)
            return
        known = _stored_before(plan)
        for data, refs in messages(self.outlet, plan, header, core.epoch.node_of):
            self.in_messages.append(len(data))
            body = RankCall.unpack(data).body
            self.stored_bodies += not isinstance(body, bytes)
            different = {id(ref): ref for ref in refs}
            unstored = [ref for ref in different.values() if isinstance(ref, _Unstored)]
            self.from_store.append(
                sum(ref.read(body if ref is refs[-1] else None) for ref in unstored)
                + sum(known.get(key, 0) for key in different)
            )

    @property
    def splits(self) -> bool:
        """Whether ranks get different bodies."""
        return 0 < self.stored_bodies < len(self.in_messages)

    def notes(self) -> Iterator[str]:
        if self.room.note:
            yield self.room.note
        for future in self.outlet.awaited:
            yield f"{future!r} comes through the driver, which would wait for it; its bytes are not counted"
        if self.spec.replicated:
            yield "The method is declared replicated: debug mode compares the outputs of all ranks"


def _stored_before(plan: CallPlan) -> dict[int, int]:
    """Sizes of what px.put stored, by the id of its reference."""
    found: dict[int, int] = {}
    for argument in (*plan.args, *plan.kwargs.values()):
        for value in (argument.value,) if isinstance(argument, Same) else argument.values:
            for leaf in futures_in(value, StoredValue):
                found[id(leaf.ref)] = leaf.nbytes
    return found


def _rank_facts(
    dry: _Dry, plan: CallPlan, pieces: Pieces, position: int, host: str, mesh: Mesh | None
) -> RankFacts:
    rank = plan.ranks[position]
    args, kwargs = plan.arguments_of(position)
    peer_bytes, sources = dry.incoming.of((*args, *kwargs.values()))
    facts = RankFacts(
        rank=rank,
        host=host,
        place=None if mesh is None else dict(mesh.coordinates(rank)),
        start=None,
        stop=None,
        rows=None,
        given_rows=None,
        order=None,
        message_bytes=dry.in_messages[position],
        store_bytes=dry.from_store[position],
        peer_bytes=peer_bytes,
        sources=sources,
        returns="kept" if plan.keeps(position) else "dropped",
    )
    if pieces.of is None or _left_out(plan, dry.spec, position):
        return facts
    piece = pieces.of[position]
    start, rows, given = pieces.starts[piece], pieces.sizes[piece], pieces.given[piece]
    if pieces.order is None:
        return replace(facts, start=start, stop=start + rows, rows=rows, given_rows=given)
    return replace(facts, rows=rows, given_rows=given, order=tuple(pieces.order[start : start + rows]))


def _left_out(plan: CallPlan, spec: MethodSpec, position: int) -> bool:
    """Whether the rank is a peer of a leader that alone gets the rows."""
    if not getattr(spec.mode, "leader_only", False):
        return False
    columns = [a for a in (*plan.args, *plan.kwargs.values()) if isinstance(a, Each)]
    return all(column.values[position] is None for column in columns)


def _arguments(
    dry: _Dry, plan: CallPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[ArgumentFacts]:
    names = dry.spec.positional_names
    custom = isinstance(dry.spec.mode, CustomMode)
    given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    for key, argument in {**dict(enumerate(plan.args)), **plan.kwargs}.items():
        name = names[key] if isinstance(key, int) and key < len(names) else str(key)
        shown = described(given[key]) if key in given and not custom else _made(dry.spec, key)
        yield ArgumentFacts(
            name if isinstance(key, str) or key < len(names) else f"argument {key + 1}",
            shown,
            _given(dry.spec, plan, argument, key),
            _travel(dry, plan, argument),
            _nbytes(dry, argument),
        )


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


def _travel(dry: _Dry, plan: CallPlan, argument: Same | Each) -> str:
    values = [argument.value] if isinstance(argument, Same) else argument.values
    first = values[0] if len(values) else None
    found = next(iter(futures_in(first, (CallFuture, FuturePiece))), None)
    if found is not None:
        future = found.future if isinstance(found, FuturePiece) else found
        rows = isinstance(found, FuturePiece)
        parts = future.row_parts(dry.outlet.transport) if rows else future.parts(dry.outlet.transport)
        return "through the driver" if parts is None else "by reference, rank to rank"
    if isinstance(first, StoredValue):
        return "stored before (px.put)"
    if isinstance(first, Readonly):
        return "stored once, read without a copy"
    if isinstance(first, dry.outlet.transport.ref_types()):
        return "as a reference"
    if dry.bare or not dry.stored_bodies:
        body = "in the message"
    else:
        body = "in the message or stored, by size of the piece" if dry.splits else "stored, once per piece"
    if isinstance(argument, Each):
        return body
    everything_same = not any(isinstance(a, Each) for a in (*plan.args, *plan.kwargs.values()))
    if everything_same:
        return "stored once" if dry.stored_bodies else body
    return "stored once" if large_leaves(argument.value, dry.outlet.inline_bytes) else body


def _nbytes(dry: _Dry, argument: Same | Each) -> int | None:
    values = [argument.value] if isinstance(argument, Same) else list(argument.values)
    different = list({id(value): value for value in values}.values())
    by_reference, _ = dry.incoming.of(different, once=True)
    if by_reference is None:
        return None
    stored = {id(s): s.nbytes for value in different for s in futures_in(value, StoredValue)}
    return by_reference + sum(stored.values()) + sum(nbytes_of(value, _BY_REFERENCE) for value in different)


def _hops(dry: _Dry, plan: CallPlan, ranks: Sequence[RankFacts]) -> tuple[Hop, ...]:
    count = len(dry.outlet.put_aside)
    hosts = len({rank.host for rank in ranks})
    messages_, reads = dry.in_messages, dry.from_store
    hops = [
        Hop(
            "driver -> store",
            sum(dry.outlet.put_aside),
            0,
            f"{count} value{'' if count == 1 else 's'}, each once",
        ),
        Hop("driver -> ranks", sum(messages_), max(messages_, default=0), _of_messages(dry)),
        Hop(
            "store -> ranks",
            sum(reads),
            max(reads, default=0),
            f"by shared memory on {hosts} host{'s'[: hosts > 1]}",
        ),
    ]
    if any(rank.sources for rank in ranks):
        fetched = [rank.peer_bytes for rank in ranks]
        known = [nbytes for nbytes in fetched if nbytes is not None]
        complete = len(known) == len(fetched)
        text = "results of other calls, none of it through the driver"
        hops.append(
            Hop("rank -> rank", sum(known) if complete else None, max(known) if complete else None, text)
        )
    kept = sum(rank.returns == "kept" for rank in ranks)
    hops.append(
        Hop(
            "ranks -> driver",
            None,
            None,
            f"outputs of {kept} of {len(ranks)} ranks; not known before the call",
        )
    )
    return tuple(hops)


def _of_messages(dry: _Dry) -> str:
    if dry.bare:
        return "a call without arguments goes without a message"
    return "a message for each rank" + ("" if dry.stored_bodies else ", with the arguments in it")


def _mesh_of(selection: Selection, spec: MethodSpec, plan: CallPlan) -> Mesh | None:
    """The mesh that the call is split over, if it is."""
    mode = spec.mode
    if not isinstance(mode, DispatchMode) or mode.name not in _MESH_MODES or plan.gather.how == "value":
        return None
    return selection.mesh(mode.mesh or "default")


def _collected(plan: CallPlan, spec: MethodSpec, mesh: Mesh | None) -> str:
    gather = plan.gather
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
    return text + "; outputs without rows as a list"


def _from_axes(mesh: Mesh, spec: MethodSpec) -> str:
    """The coordinates whose outputs count, such as "tp=0, last pp"."""
    dp = PP_AS_DP if "PP_AS_DP" in getattr(spec.mode, "name", "") else DP
    others = [axis for axis in mesh.axes if axis not in dp]
    last = f"last pp (pp={mesh.size('pp') - 1})"
    named = [f"{axis}=0" for axis in others if axis != "pp"] + ([last] if "pp" in others else [])
    return ", ".join(named) or "every rank"
