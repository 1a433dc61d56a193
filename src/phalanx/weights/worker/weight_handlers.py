"""What a driver has ranks do for its syncs; see `phalanx.worker.handlers`."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from phalanx.errors import WeightsTransferError
from phalanx.weights.planning.locality import Place
from phalanx.weights.planning.version_table import Weights
from phalanx.weights.worker.weight_requests import (
    Asked,
    ConnectRequest,
    Description,
    Joined,
    Side,
    SyncRequest,
    TookPart,
)
from phalanx.wire.messages import STORE_VARIABLE

if TYPE_CHECKING:  # a driver needs the names of these functions, and nothing of what they run on
    from phalanx.weights.worker.bucket_store import OnShelf, RankShelf
    from phalanx.worker.worker_runtime import WorkerRuntime


def tear(host: WorkerRuntime, asked: Asked, number: int) -> None:
    """The sync of that version failed on another rank: nobody has it."""
    host.weights.tear((asked.role, asked.name), number)


def state(host: WorkerRuntime, asked: Asked) -> Weights:
    """Of which version the weights are.

    Raises:
        DeclarationError: the role accepts none of that name.
    """
    key = asked.role, asked.name
    host.weights.accepted(key)
    return host.weights.of(key)


def describe(host: WorkerRuntime, asked: Asked) -> Description:
    """What this rank has of the weights."""
    from phalanx.weights.worker.weight_routes import is_placed, read  # torch: where there are weights

    book, key = host.weights, (asked.role, asked.name)
    place, number = _place(host), book.newest(key)
    store = os.environ.get(STORE_VARIABLE, "")
    if asked.side == "source":
        return Description(read(book.published(key)).manifest, place, number, store=store)
    accepted = book.accepted(key)
    placed = is_placed(accepted)
    if accepted.model is None:
        return Description(None, place, number, accepted.share, load=True, store=store, placed=placed)
    loads = accepted.load is not None
    return Description(read(accepted).manifest, place, number, accepted.share, loads, store, placed)


def _place(host: WorkerRuntime) -> Place:
    """Ranks of one node reach each other's memory if they have a kernel, a network namespace and a user in common."""
    namespace = os.stat("/proc/self/ns/net").st_ino if os.path.exists("/proc/self/ns/net") else 0
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    node = f"{host.context.node_id}/{boot}/{namespace}/{os.getuid()}"
    return Place(node, f"{node}/{os.getpid()}")


def join(host: WorkerRuntime, *orders: ConnectRequest) -> list[Joined]:
    """Make this rank's ends for each order; what was made for an earlier one of the same weights is given back."""
    return [_join(host, order) for order in orders]


def _join(host: WorkerRuntime, order: ConnectRequest) -> Joined:
    from phalanx.weights.worker.source import SourceRank  # torch: where there are weights
    from phalanx.weights.worker.target import TargetRank

    book, index = host.weights, order.ranks.index(host.context.rank)
    if order.asked.side == "source":
        made = SourceRank(book, order, index, _shelf(host))
        book.ends["source", order.key] = made
        return Joined(order.plan.digest, made.address)
    beside = book.ends.get(("source", order.key))
    reading = None if beside is None else beside.reading
    book.ends["target", order.key] = TargetRank(book, order, index, _shelf(host), reading)
    return Joined(order.plan.digest)


def _shelf(host: WorkerRuntime) -> RankShelf:
    from phalanx.weights.worker.bucket_store import RankShelf  # torch: where there are weights

    return RankShelf(host.put, host.fetch)


def leave(host: WorkerRuntime, *keys: str) -> None:
    """Give back what was made for these keys."""
    for side in ("source", "target"):
        for key in keys:
            made = host.weights.ends.pop((side, key), None)
            if made is not None:
                made.close()


def store(host: WorkerRuntime, sync: SyncRequest, *before: object) -> OnShelf:
    """Put into the object store what this source sends through it; ``before`` as of :func:`take_part`."""
    source = host.weights.ends.get(("source", sync.key))
    if source is None:
        raise _no_ends(sync)
    try:
        return source.store(sync)
    except BaseException:
        leave(host, sync.key)
        raise


def take_part(
    host: WorkerRuntime,
    sync: SyncRequest,
    sides: Sequence[Side],
    stored: Sequence[OnShelf] = (),
    *before: object,
) -> TookPart:
    """Send and receive a version, as far as this rank is source and target of it, and is asked as such.

    ``stored`` is what each source has put into the object store, ``before`` what earlier calls gave that this one had
    to wait for. After an error this rank's ends are gone.
    """
    ends = host.weights.ends
    source, target = (ends.get((side, sync.key)) if side in sides else None for side in ("source", "target"))
    try:
        given = dict(enumerate(stored))
        if source is not None and target is not None:
            return _both(source, target, sync, given)
        if source is not None:
            return TookPart(source.send(sync), None)
        if target is not None:
            return TookPart(None, target.receive(sync, given))
        raise _no_ends(sync)
    except BaseException:
        leave(host, sync.key)
        raise


def _both(source: Any, target: Any, sync: SyncRequest, given: dict[int, OnShelf]) -> TookPart:
    """What comes from other ranks can only be taken while what goes to others is given."""
    sending = _Beside(lambda: source.send(sync))
    try:
        arrived = target.receive(sync, given)
    except BaseException as error:
        source.close()
        sending.end()
        if isinstance(error, WeightsTransferError) and sending.failed_first:
            sending.result()
        raise
    return TookPart(sending.result(), arrived)


class _Beside:
    """Something done on a thread beside the rank's own."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="phalanx-weights", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error

    @property
    def failed_first(self) -> bool:
        """Whether it raised something else than that a peer is gone: what others are lost by."""
        return self._error is not None and not isinstance(self._error, WeightsTransferError)

    def end(self) -> None:
        """Wait until it is over, however it went."""
        self._thread.join()

    def result(self) -> Any:
        """What it gave. Raises what it raised."""
        self.end()
        if self._error is not None:
            raise self._error
        return self._value


def _no_ends(sync: SyncRequest) -> WeightsTransferError:
    return WeightsTransferError(
        "this rank has no ends for this sync any more: an earlier one failed, or another driver took its place; sync "
        f"again (version {sync.number})"
    )
