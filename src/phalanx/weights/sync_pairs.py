"""The pairs of a sync: its source with each of its targets, planned and connected for the current group epochs."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from phalanx.calls.call import Call
from phalanx.calls.future import CallFuture
from phalanx.calls.run_on import run_on
from phalanx.display.tables import Table
from phalanx.errors import DeclarationError, GroupError, PhalanxError, RemoteCallError, WeightsTransferError
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.weights import weight_handlers
from phalanx.weights.boxes import LocalBox, whole
from phalanx.weights.manifest import HeldTensor, Manifest
from phalanx.weights.name_matching import Fused, Rename, renamer
from phalanx.weights.plan import Locality, Locations, Plan, bytes_by_link, explain_plan, make_plan
from phalanx.weights.transport_interface import SHARED_MEMORY, STORAGE, WITH_DELTAS, Side, transport_choices
from phalanx.weights.versions import Key, Transfer
from phalanx.weights.weight_requests import Connected, ConnectRequest, Description, SyncRequest

_log = logging.getLogger("phalanx")
_REFUSAL = f"{DeclarationError.__module__}.{DeclarationError.__qualname__}"
_PROCESS = secrets.token_hex(6)
_connections = itertools.count(1)


class Ranks(Protocol):
    """A group, a role of a group, or some of its ranks."""

    @property
    def core(self) -> Group: ...
    @property
    def role(self) -> str: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def name(self) -> str: ...


@dataclass(frozen=True, eq=False)
class SyncSide:
    """Ranks that publish, or accept, the weights of a role and name. ``fixed`` is None for a complete group."""

    side: Side
    core: Group
    fixed: tuple[int, ...] | None
    key: Key
    title: str

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks; of a complete group, the ranks of this moment and ranks that join."""
        return self.core.epoch.reached if self.fixed is None else self.fixed

    def run(self, title: str, function: Callable[..., Any], *args: Any) -> Call:
        """Run a library function on the ranks.

        The group is not recovered for it: a caller that holds the lock of a sync must not wait for a recovery.
        """
        title = f"weights {self.key[1]!r}: {title}"
        return run_on(self.core, function, *args, ranks=self.ranks, title=title)

    def notify(self, ranks: Sequence[int], function: Callable[..., Any], *args: Any) -> None:
        """Run a library function on the living ranks among ``ranks``, without waiting and without errors."""
        if self.core.closed:
            return
        with contextlib.suppress(PhalanxError):
            living = self.living(ranks)
            run_on(self.core, function, *args, ranks=living, title="px.WeightSync", checked=False)

    def living(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks whose processes have not died."""
        dead = set(self.core.epoch.dead(self.core.backend))
        return [rank for rank in ranks if rank not in dead]


def side_of(ranks: Ranks, side: Side, name: str) -> SyncSide:
    """Return the side of a group, a role, or some ranks.

    Raises:
        DeclarationError: if ``ranks`` is none of these.
    """
    core = getattr(ranks, "core", None)
    if not isinstance(core, Group):
        raise DeclarationError(
            f"px.WeightSync: the {side} is {ranks!r}; give a group, a role of it such as group.actor, or some of its "
            "ranks such as group[0:2]"
        )
    fixed = None if tuple(ranks.ranks) == core.epoch.everyone else tuple(ranks.ranks)
    return SyncSide(side, core, fixed, (ranks.role, name), ranks.name)


@contextlib.contextmanager
def hold_order(pairs: Sequence[SyncPair]) -> Generator[None]:
    """Send calls to the groups of ``pairs`` with no other call between them.

    All threads take the groups in the same order, so that they never wait for each other crosswise.
    """
    cores = {side.core for pair in pairs for side in (pair.source, pair.target)}
    with contextlib.ExitStack() as stack:
        for core in sorted(cores, key=lambda core: (core.name, id(core))):
            stack.enter_context(core.send_lock)
        yield


@dataclass(frozen=True, eq=False)
class SyncPair:
    """A source and a target that are connected for a plan, as long as both groups are in the same epochs."""

    connection: str
    source: SyncSide
    target: SyncSide
    plan: Plan
    transports: Mapping[Locality, str]
    newest: int
    epochs: tuple[Epoch, Epoch]

    @property
    def is_current(self) -> bool:
        """True while both groups are in the epochs of the connection."""
        return (self.source.core.epoch, self.target.core.epoch) == self.epochs

    @property
    def delta_base(self) -> int:
        """Bytes that sources keep for deltas, once for all readers."""
        return sum(
            batch.nbytes(box) * len(batch.pairs)
            for batch in self.plan.batches
            for box in batch.boxes
            if self.transports[box.locality] in WITH_DELTAS
        )

    def transfers(self, sources: Sequence[int], seconds: Mapping[int, float]) -> Iterator[Transfer]:
        """Yield the bytes by pair of ranks. Shared storage is not moved.

        Args:
            sources: the ranks that sent.
            seconds: seconds of each rank that received.
        """
        targets = list(seconds)
        for (source, target, locality), nbytes in bytes_by_link(self.plan).items():
            transport, rank = self.transports[locality], targets[target]
            if transport != STORAGE:
                yield Transfer(sources[source], self.target.title, rank, transport, nbytes, seconds[rank])

    def send(self, request: SyncRequest, last: Sequence[Call]) -> tuple[Call, ...]:
        """Send the calls of a sync, on the source's group first. Roles of one group have a single call.

        Args:
            last: the calls of the sync before, which may be running.
        """
        source, target = self.source, self.target
        handler, immediate = weight_handlers.sync, source.core.backend.immediate
        if source.core is target.core and not immediate:
            both = replace(source, fixed=tuple(sorted({*source.ranks, *target.ranks})))
            return (both.run("sync", handler, request, ("source", "target"), *_earlier(both, last)),)
        sent = source.run("send", handler, request, ("source",), *_earlier(source, last))
        if immediate and sent.has_failed():
            return (sent,)  # its ranks have run: the targets would wait for nothing
        try:
            received = target.run("receive", handler, request, ("target",), *_earlier(target, last))
        except BaseException:
            CallFuture(sent).cancel()
            raise
        return sent, received

    def close(self) -> None:
        """Release the endpoints on the ranks that can be reached, without waiting."""
        for side, epoch in zip((self.source, self.target), self.epochs, strict=True):
            core = side.core
            ranks = side.ranks if core.epoch is epoch else range(core.epoch.size)
            # ranks that are other processes now never had anything
            same = [rank for rank in ranks if core.epoch.takes((rank,), epoch)] if not core.closed else []
            side.notify(same, weight_handlers.disconnect, self.connection)


def _earlier(side: SyncSide, last: Sequence[Call]) -> tuple[Any, ...]:
    """Return futures that asynchronous ranks wait for: they may begin calls in any order."""
    if not side.core.card.asynchronous or side.core.backend.immediate:
        return ()
    return tuple(CallFuture(call) for call in last if call.core is side.core and not call.over)


@dataclass(eq=False)
class PairTable:
    """The pairs of a ``px.WeightSync``, connected on demand and again after a change of epoch. Not thread-safe.

    Fields without a description are arguments of ``px.WeightSync``.
    """

    #: Tables whose ``px.WeightSync`` was garbage-collected. A finalizer may run anywhere, so it makes no calls.
    dropped: ClassVar[deque[PairTable]] = deque()

    source: SyncSide
    targets: Sequence[SyncSide]
    rename: Rename | None
    fused: Sequence[Fused]
    bucket_bytes: int
    transport: str
    delta: bool
    _pairs: dict[SyncSide, SyncPair] = field(default_factory=dict[SyncSide, SyncPair], init=False)

    def connected(self, targets: Sequence[SyncSide] | None = None) -> list[SyncPair]:
        """Return a pair for each target, all current a moment ago.

        Raises:
            WeightsMismatch: if the two sides do not fit; it has the table.
            DeclarationError: if a worker publishes, or accepts, no weights of that name, or they cannot be read.
            WeightsTransferError: if the ranks cannot reach each other.
            GroupClosed, GroupBroken, WorkerDiedError: if a group takes no calls.
        """
        targets = self.targets if targets is None else targets
        try:
            for side in (self.source, *targets):
                side.core.check()
        except GroupError:  # the connections are useless now
            self.close()
            raise
        for target in targets:
            pair = self._pairs.get(target)
            if pair is not None and not pair.is_current:
                self._pairs.pop(target).close()
                pair = None
            if pair is None:
                self._pairs[target] = self._connect(target)
        return [self._pairs[target] for target in targets]

    def _connect(self, target: SyncSide) -> SyncPair:
        """Describe both sides, plan, and connect the ranks by the best transports that they can use."""
        source = self.source
        epochs = source.core.epoch, target.core.epoch
        sources, targets = _describe(source, target)
        complete = _complete_manifest([one.manifest for one in sources if one.manifest], self.rename)
        locations = Locations(tuple(one.location for one in sources), tuple(one.location for one in targets))
        plan = make_plan(
            [one.manifest or complete for one in sources],
            [one.manifest or complete for one in targets],
            locations,
            rename=self.rename,
            fused=self.fused,
        )
        newest = max(one.number for one in (*sources, *targets))
        is_shared = _check_shared(sources, targets)
        refusal = ""
        for transports in transport_choices(plan, locations, self.transport, is_shared=is_shared):
            if refusal and transports[Locality.NODE] == SHARED_MEMORY:
                _log.warning(
                    "weights %r: no device path from %s to %s, so tensors are sent through host memory: %s",
                    target.key[1],
                    source.title,
                    target.title,
                    refusal,
                )
            connection = f"{_PROCESS}-{next(_connections)}"
            pair = SyncPair(connection, source, target, plan, transports, newest, epochs)
            store = sources[0].store.partition("/")[0]
            refusal = self._try_transports(pair, complete, store)
            if not refusal:
                return pair
            pair.close()
        raise WeightsTransferError(f"weights {target.key[1]!r} cannot be sent by CUDA IPC: {refusal}")

    def _try_transports(self, pair: SyncPair, complete: Manifest, store: str) -> str:
        """Create the endpoints of all ranks; return the reason why a rank cannot use a transport, or ""."""
        request = ConnectRequest(
            pair.connection,
            "source",
            pair.source.key,
            pair.source.ranks,
            pair.plan,
            self.bucket_bytes,
            pair.transports,
            store=store,
            delta=self.delta,
        )
        connected: list[Connected] = _results(
            pair.source, pair.source.run("connect", weight_handlers.connect, request)
        )
        if not any(one.refusal for one in connected):
            request = replace(
                request,
                side="target",
                key=pair.target.key,
                ranks=pair.target.ranks,
                complete=complete,
                addresses={rank: one.address for rank, one in enumerate(connected)},
            )
            connected = _results(pair.target, pair.target.run("connect", weight_handlers.connect, request))
        return next((one.refusal for one in connected if one.refusal), "")

    def has(self, pairs: Sequence[SyncPair]) -> bool:
        """Return whether these are the pairs of this moment."""
        return all(self._pairs.get(pair.target) is pair for pair in pairs)

    def explain(self, name: str) -> Table:
        """Return a table of the bytes that a sync moves."""
        tables = [
            explain_plan(
                pair.plan,
                pair.transports,
                title=f"weights {name!r}, {self.source.title} to {pair.target.title}",
                delta_base=pair.delta_base if self.delta else 0,
            )
            for pair in self.connected()
        ]
        if len(tables) == 1:
            return tables[0]
        rows = tuple(row for table in tables for row in table.rows)
        notes = tuple(note for table in tables for note in (table.title, *table.notes))
        return Table(f"weights {name!r} to {len(tables)} groups", tables[0].columns, rows, notes)

    def close(self) -> None:
        """Close all pairs."""
        while self._pairs:
            self._pairs.popitem()[1].close()

    @classmethod
    def close_dropped(cls) -> None:
        """Close the pairs of syncs that were garbage-collected without ``close()``."""
        with contextlib.suppress(IndexError):
            while True:
                cls.dropped.popleft().close()


def _describe(source: SyncSide, target: SyncSide) -> tuple[list[Description], list[Description]]:
    first, second = (
        side.run("describe", weight_handlers.describe, side.side, side.key) for side in (source, target)
    )
    try:
        return _results(source, first), _results(target, second)
    except PhalanxError:
        with contextlib.suppress(PhalanxError):  # Ray prints the error of a result that is never fetched
            second.result(1.0)
        raise


def _results(side: SyncSide, call: Call) -> list[Any]:
    """Return the results of the ranks. A refusal of a rank is raised as the caller's mistake."""
    try:
        return call.result(None)
    except RemoteCallError as error:
        refused = next((failure for failure in error.failures if failure.type_name == _REFUSAL), None)
        if refused is None:
            raise
        raise DeclarationError(f"{side.title}, rank {refused.rank}: {refused.message}") from None


def _complete_manifest(manifests: Sequence[Manifest], rename: Rename | None) -> Manifest:
    """Return the manifest of all tensors of the source, each complete, under the target's names."""
    as_target = renamer(rename)
    held = {name: tensor for manifest in manifests for name, tensor in manifest.items()}
    tensors = {
        as_target(name): HeldTensor(
            one.dtype, one.shape, (LocalBox(whole(one.shape), (0,) * len(one.shape)),)
        )
        for name, one in held.items()
    }
    ties = {as_target(alias): as_target(name) for manifest in manifests for alias, name in manifest.ties}
    return Manifest.of(tensors, {alias: name for alias, name in ties.items() if alias not in tensors})


def _check_shared(sources: Sequence[Description], targets: Sequence[Description]) -> bool:
    """Return whether targets share the storage of the source.

    Raises:
        DeclarationError: if a target wants the storage of a source in another process.
    """
    if not any(one.share for one in targets):
        return False
    alone = [
        index
        for index, one in enumerate(targets)
        if not one.share or index >= len(sources) or sources[index].location.process != one.location.process
    ]
    if alone or len(sources) != len(targets):
        raise DeclarationError(
            f"accept_weights(..., share=True) is for roles of one process: target ranks {alone or 'of another number'} "
            "are no role beside the source; accept the weights without share=True, which copies"
        )
    return True
