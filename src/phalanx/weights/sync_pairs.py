"""The pairs of a sync: its source with each of its targets, planned and connected for the current group epochs."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from phalanx.calls.call import Call
from phalanx.calls.future import CallFuture
from phalanx.calls.run_on import run_on
from phalanx.display.tables import Table
from phalanx.errors import DeclarationError, PhalanxError, RemoteCallError, WeightsTransferError
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.weights import weight_handlers
from phalanx.weights.boxes import complete
from phalanx.weights.manifest import HeldTensor, Manifest
from phalanx.weights.name_matching import Fused, Rename, renamer
from phalanx.weights.plan import Locality, Locations, explain_plan, make_plan
from phalanx.weights.transport_interface import SHARED_MEMORY, STORAGE, WITH_DELTAS, transport_choices
from phalanx.weights.versions import Key, Transfer
from phalanx.weights.weight_requests import Connected, ConnectRequest, Description, Side, SyncRequest

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


@dataclass(frozen=True)
class PairOptions:
    """The arguments of ``px.WeightSync`` that its connections depend on."""

    rename: Rename | None
    fused: Sequence[Fused]
    bucket_bytes: int
    transport: str
    delta: bool


@dataclass(eq=False)
class SyncPair:
    """A source and a target that are connected for a plan, as long as both groups are in the same epochs.

    ``known`` is the version that all ranks of the target received over this connection last.
    """

    request: ConnectRequest
    source: SyncSide
    target: SyncSide
    newest: int
    epochs: tuple[Epoch, Epoch]
    known: int | None = None

    @property
    def is_current(self) -> bool:
        """True while both groups are in the epochs of the connection."""
        return (self.source.core.epoch, self.target.core.epoch) == self.epochs

    def explain(self) -> Table:
        """Return a table of the bytes that a sync moves."""
        plan, transports = self.request.plan, self.request.transports
        kept = sum(  # once for all readers
            batch.nbytes(box) * len(batch.pairs)
            for batch in plan.batches
            for box in batch.boxes
            if self.request.delta and transports[box.locality] in WITH_DELTAS
        )
        title = f"weights {self.target.key[1]!r}, {self.source.title} to {self.target.title}"
        return explain_plan(plan, transports, title=title, delta_base=kept)

    def transfers(self, sources: Sequence[int], seconds: Mapping[int, float]) -> Iterator[Transfer]:
        """Yield the bytes by pair of ranks. Shared storage is not moved.

        Args:
            sources: the ranks that sent.
            seconds: seconds of each rank that received.
        """
        targets = list(seconds)
        for (source, target, locality), nbytes in self.request.plan.bytes_by_link().items():
            transport, rank = self.request.transports[locality], targets[target]
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
            side.notify(same, weight_handlers.disconnect, self.request.connection)


def _earlier(side: SyncSide, last: Sequence[Call]) -> tuple[Any, ...]:
    """Return futures that asynchronous ranks wait for: they may begin calls in any order."""
    if not side.core.card.asynchronous or side.core.backend.immediate:
        return ()
    return tuple(CallFuture(call) for call in last if call.core is side.core and not call.over)


def connect_pair(source: SyncSide, target: SyncSide, options: PairOptions) -> SyncPair:
    """Describe both sides, plan, and connect the ranks by the best transports that they can use.

    Raises:
        WeightsMismatch: if the two sides do not fit; it has the table.
        DeclarationError: if a worker publishes, or accepts, no weights of that name, or they cannot be read.
        WeightsTransferError: if the ranks cannot reach each other.
    """
    epochs = source.core.epoch, target.core.epoch
    sources, targets = _describe(source, target)
    rename, fused = options.rename, options.fused
    everything = _complete_manifest([one.manifest for one in sources if one.manifest], rename)
    locations = Locations(tuple(one.location for one in sources), tuple(one.location for one in targets))
    held, wanted = ([one.manifest or everything for one in side] for side in (sources, targets))
    plan = make_plan(held, wanted, locations, rename=rename, fused=fused)
    newest = max(one.number for one in (*sources, *targets))
    is_shared = _check_shared(sources, targets)
    store = sources[0].store.partition("/")[0]
    refusal = ""
    for transports in transport_choices(plan, locations, options.transport, is_shared=is_shared):
        if refusal and transports[Locality.NODE] == SHARED_MEMORY:
            _log.warning(
                "weights %r: no device path from %s to %s, so tensors are sent through host memory: %s",
                target.key[1],
                source.title,
                target.title,
                refusal,
            )
        name = f"{_PROCESS}-{next(_connections)}"
        request = ConnectRequest(
            name, plan, options.bucket_bytes, transports, everything, store, options.delta
        )
        pair = SyncPair(request, source, target, newest, epochs)
        with contextlib.ExitStack() as undo:
            undo.callback(pair.close)
            refusal = _connect_ranks(pair)
            if not refusal:
                undo.pop_all()
                return pair
    raise WeightsTransferError(f"weights {target.key[1]!r} cannot be sent by CUDA IPC: {refusal}")


def _connect_ranks(pair: SyncPair) -> str:
    """Create the endpoints of all ranks; return the reason why a rank cannot use a transport, or ""."""
    connected: list[Connected] = []
    for side in (pair.source, pair.target):
        addresses = {rank: one.address for rank, one in enumerate(connected)}
        request = replace(pair.request, side=side.side, key=side.key, ranks=side.ranks, addresses=addresses)
        connected = _results(side, side.run("connect", weight_handlers.connect, request))
        refusals = [one.refusal for one in connected if one.refusal]
        if refusals:
            return refusals[0]
    return ""


def _describe(source: SyncSide, target: SyncSide) -> list[list[Description]]:
    sides = source, target
    calls = [side.run("describe", weight_handlers.describe, side.side, side.key) for side in sides]
    try:
        return [_results(side, call) for side, call in zip(sides, calls, strict=True)]
    except PhalanxError:
        with contextlib.suppress(PhalanxError):  # Ray prints the error of a result that is never fetched
            calls[1].result(1.0)
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
        as_target(name): HeldTensor(one.dtype, one.shape, complete(one.shape)) for name, one in held.items()
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
