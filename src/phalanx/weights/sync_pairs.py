"""The pairs of a sync: its source with each of its targets, planned and connected for the current group epochs."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from phalanx.calls.call import Call
from phalanx.calls.future import CallFuture, gather
from phalanx.calls.in_flight import calls_of
from phalanx.calls.run_on import run_on
from phalanx.display.tables import Table
from phalanx.errors import CallError, DeclarationError, PhalanxError, WeightsTransferError
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.weights import weight_handlers
from phalanx.weights.boxes import complete
from phalanx.weights.manifest import Manifest
from phalanx.weights.name_matching import Fused, Rename, renamer
from phalanx.weights.plan import Locality, Locations, Side, explain_plan, make_plan
from phalanx.weights.transport_interface import ConnectRequest, SyncRequest
from phalanx.weights.transports import SHARED_MEMORY, STORAGE, WITH_DELTAS, transport_choices
from phalanx.wire.messages import WeightsKey

_log = logging.getLogger("phalanx")
_SYNCS = (": sync", ": send", ": receive")
"""Ends of the titles of the calls of a sync."""


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
    key: WeightsKey
    title: str

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks; for a complete group, the current ranks and the ranks that join."""
        return self.core.epoch.reached if self.fixed is None else self.fixed

    def run(self, title: str, function: Callable[..., Any], *args: Any) -> Call:
        """Run a library function on the ranks.

        A broken group is not recovered: a caller that holds the lock of a sync must not wait for a recovery.
        """
        title = f"weights {self.key[1]!r}: {title}"
        return run_on(self.core, function, *args, ranks=self.ranks, title=title)

    def notify(self, ranks: Sequence[int], function: Callable[..., Any], *args: Any) -> None:
        """Run a library function on the living ranks among ``ranks``. Do not wait, and ignore errors."""
        with contextlib.suppress(PhalanxError):
            if not self.core.closed:
                self.ask(ranks, "px.WeightSync", function, *args)

    def ask(self, ranks: Sequence[int], title: str, function: Callable[..., Any], *args: Any) -> Call:
        """Run a library function on the living ranks among ``ranks``, in any state of the group."""
        epoch = self.core.epoch  # other threads may give the group new ranks
        dead = set(epoch.dead(self.core.backend))
        living = [rank for rank in ranks if rank < len(epoch.endpoints) and rank not in dead]
        return run_on(self.core, function, *args, ranks=living, title=title, checked=False, epoch=epoch)


def checked_group(value: Any, where: str) -> Ranks:
    """Return a group, a role of it, or some of its ranks.

    Raises:
        DeclarationError: if it is none of these.
    """
    if isinstance(getattr(value, "core", None), Group) and value.ranks:
        return value
    raise DeclarationError(
        f"{where} is {value!r}; give a group, a role of it such as group.actor, or some of its ranks such as group[0:2]"
    )


def side_of(ranks: Ranks, side: Side, name: str) -> SyncSide:
    """Return the side of a group, a role, or some ranks.

    Raises:
        DeclarationError: if ``ranks`` is none of these.
    """
    core = checked_group(ranks, f"weights {name!r}: the {side}").core
    fixed = None if tuple(ranks.ranks) == core.epoch.everyone else tuple(ranks.ranks)
    return SyncSide(side, core, fixed, (ranks.role, name), ranks.name)


@dataclass(eq=False)
class SyncPair:
    """A source and a target that are connected for a plan, until the epoch of a group changes."""

    request: ConnectRequest
    source: SyncSide
    target: SyncSide
    newest: int
    epochs: tuple[Epoch, Epoch]

    @property
    def is_current(self) -> bool:
        """True while both groups are in the epochs of the connection."""
        return (self.source.core.epoch, self.target.core.epoch) == self.epochs

    def explain(self) -> Table:
        """Return a table of the bytes that a sync moves."""
        request = self.request
        kept = request.plan.part(
            lambda box: request.delta and request.transports[box.locality] in WITH_DELTAS
        )
        title = f"weights {self.target.key[1]!r}, {self.source.title} to {self.target.title}"
        return explain_plan(request.plan, request.transports, kept, title)

    @property
    def nbytes(self) -> int:
        """Bytes that arrive in a sync, summed over the target ranks. Shared storage is not transferred."""
        request = self.request
        links = request.plan.bytes_by_link().items()
        return sum(nbytes for (*_, locality), nbytes in links if request.transports[locality] != STORAGE)

    def send(self, request: SyncRequest) -> Iterator[Call]:
        """Send the calls of a sync, on the source's group first. Roles of one group have a single call."""
        source, target, handler = self.source, self.target, weight_handlers.sync
        request = request._replace(connection=self.request.connection)
        immediate = source.core.backend.immediate
        if source.core is target.core and not immediate:
            both = replace(source, fixed=tuple(sorted({*source.ranks, *target.ranks})))
            yield both.run("sync", handler, request, ("source", "target"), *_earlier(both))
            return
        sent = source.run("send", handler, request, ("source",), *_earlier(source))
        yield sent
        if not (immediate and sent.has_failed()):  # inline, sources have run: nothing would arrive
            yield target.run("receive", handler, request, ("target",), *_earlier(target))

    def close(self) -> None:
        """Release the endpoints on the ranks that can be reached, without waiting. Their numbers may have changed."""
        for side in (self.source, self.target):
            side.notify(side.core.epoch.reached, weight_handlers.disconnect, self.request.connection)


def _earlier(side: SyncSide) -> list[CallFuture[Any]]:
    """Return the running syncs that asynchronous ranks must wait for, since they may begin calls in any order.

    All groups then begin syncs in the order of sending, so that no two ranks wait for each other in different syncs.
    """
    calls = calls_of(side.core) if side.core.handle.asynchronous else ()
    return [CallFuture(call) for call in calls if call.method.endswith(_SYNCS) and not call.all_ended()]


def connect_pair(
    source: SyncSide,
    rename: Rename | None,
    fused: Sequence[Fused],
    bucket_bytes: int,
    transport: str,
    delta: bool,
    target: SyncSide,
) -> SyncPair:
    """Describe both sides, plan, and connect the ranks by the best transports that they can use.

    Raises:
        WeightsMismatch: if the two sides do not fit; it has the table.
        DeclarationError: if a worker publishes, or accepts, no weights of that name, or they cannot be read.
        WeightsTransferError: if the ranks cannot reach each other.
    """
    epochs = source.core.epoch, target.core.epoch
    sources, targets = _results(
        *(
            (side, side.run("describe", weight_handlers.describe, side.side, side.key))
            for side in (source, target)
        )
    )
    everything = _complete_manifest([one.manifest for one in sources if one.manifest], rename)
    held, wanted = ([one.manifest or everything for one in side] for side in (sources, targets))
    locations = Locations(*(tuple(one.location for one in side) for side in (sources, targets)))
    plan = make_plan(held, wanted, locations, rename=rename, fused=fused)
    newest = max(one.number for one in (*sources, *targets))
    is_shared = any(one.share for one in targets)
    store = sources[0].store.partition("/")[0]
    refusal: WeightsTransferError | None = None
    for transports in transport_choices(plan, locations, transport, is_shared=is_shared):
        if refusal and transports[Locality.NODE] == SHARED_MEMORY:
            text = "weights %r: no device path from %s to %s, so tensors are sent through host memory: %s"
            _log.warning(text, target.key[1], source.title, target.title, refusal)
        connection = secrets.token_hex(8)
        request = ConnectRequest(connection, plan, bucket_bytes, transports, everything, store, delta)
        pair = SyncPair(request, source, target, newest, epochs)
        with contextlib.ExitStack() as undo:
            undo.callback(pair.close)
            refusal = _connect_ranks(pair)
            if refusal is None:
                undo.pop_all()
                return pair
    raise WeightsTransferError(f"weights {target.key[1]!r} cannot be sent from device to device: {refusal}")


def _connect_ranks(pair: SyncPair) -> WeightsTransferError | None:
    """Create the endpoints of all ranks; return the error of a rank that cannot use a device path."""
    addresses: dict[int, Any] = {}
    for side in (pair.source, pair.target):
        request = replace(pair.request, side=side.side, key=side.key, ranks=side.ranks, addresses=addresses)
        (answers,) = _results((side, side.run("connect", weight_handlers.connect, request)))
        addresses = dict(enumerate(answers))
        for answer in answers:
            if isinstance(answer, WeightsTransferError):
                return answer
    return None


def _results(*calls: tuple[SyncSide, Call]) -> list[list[Any]]:
    """Return the results of each call, by rank. A ``DeclarationError`` of a rank is raised as the caller's."""
    try:
        return gather(*(CallFuture(call) for _, call in calls))
    except PhalanxError:
        for side, call in calls:
            with contextlib.suppress(PhalanxError):  # Ray prints the error of a result that is never fetched
                call.result(1.0)
            for failure in call.error.failures if isinstance(call.error, CallError) else ():
                if isinstance(failure.exception, DeclarationError):
                    raise DeclarationError(f"{side.title}, rank {failure.rank}: {failure.message}") from None
        raise


def _complete_manifest(manifests: Sequence[Manifest], rename: Rename | None) -> Manifest:
    """Return the manifest of all tensors of the source, each complete, under the target's names."""
    as_target = renamer(rename)
    tensors = {
        as_target(name): replace(tensor, boxes=complete(tensor.shape))
        for manifest in manifests
        for name, tensor in manifest.items()
    }
    ties = {as_target(alias): as_target(name) for manifest in manifests for alias, name in manifest.ties}
    return Manifest.of(tensors, {alias: name for alias, name in ties.items() if alias not in tensors})
