"""The state of a group, shared by all views of it in a process."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, Protocol

from phalanx.backends.backend_types import Backend, Endpoint
from phalanx.calls.restart_reruns import RerunLog
from phalanx.calls.values import StoreQuota
from phalanx.config import settings
from phalanx.declare.bind import BoundClass
from phalanx.display.registry_records import GroupRecord, RankRecord
from phalanx.errors import CallError, PhalanxError
from phalanx.group.epoch import Epoch, GroupHandle, Snapshot
from phalanx.group.lifecycle import Event, Lifecycle, State, first_line
from phalanx.group.options import GroupOptions
from phalanx.group.preemption_notices import NoticeQueue
from phalanx.pools.pool import ResourcePool
from phalanx.pools.slot_reservation import Tenant
from phalanx.session.session import Counts, session
from phalanx.topology.slots import Slot

_FIRST_NUMBER = 1 << 16
_REMEMBERED = 1000


class Resync(Protocol):
    """A weight sync, as far as a target group with new ranks needs it."""

    def newest(self, key: tuple[str, str]) -> int | None:
        """Return the newest version sent to the weights ``key`` (role, name); 0: none yet; None: not a target."""
        ...

    def doubt(self) -> str:
        """Return the reason why the source may not have its weights any more; "" if it has."""
        ...

    def mend_source(self) -> None:
        """Recover the source, if it is broken and its policy allows."""
        ...

    def bring(self, to: Group) -> None:
        """Sync the source's present weights to all ranks of a target, joining ranks included.

        Other targets of the sync keep their version.

        Raises:
            PhalanxError: if the weights were not transferred.
        """
        ...


class Group:
    """State of a group, and its changes. This class sends no calls, waits for nothing and starts no processes.

    The functions of ``phalanx.calls`` and ``phalanx.members`` act on it. ``owner`` is False in a view that came from
    another process.

    Attributes:
        pool: the pool of the ranks; set only in the process that made the group.
        tenant: the group as its pool knows it; set like ``pool``.
    """

    pool: ResourcePool
    tenant: Tenant

    def __init__(
        self, handle: GroupHandle, backend: Backend, size: int, *, owner: bool, number: int = 0
    ) -> None:
        self.handle = handle
        self.name = handle.name
        self.backend = backend
        self.owner = owner
        #: Id of the owner's run; "" of a detached group that was attached.
        self.run = session.run_id if owner else ""

        # Definition, set by the process that owns the group.
        self.options = GroupOptions()
        self.roles: Mapping[str, BoundClass] = {}
        #: True if this process made the group, on one of its pools.
        self.has_pool = False
        #: Keys of the resources reserved in addition to the slots, by slot.
        self.extras: dict[Slot, str] = {}

        # State.
        self.lifecycle = Lifecycle(handle.name, epoch=number, owner=owner)
        self.epoch = Epoch(number, size)
        #: Unix time of the last change of state or epoch, in seconds.
        self.changed = time.time()
        self._lock = threading.RLock()

        # Calls.
        #: Held while a call is sent to its ranks; hold it to send several calls without others in between.
        self.send_lock = threading.RLock()
        #: The calls that were sent and are not known to have ended, by number, the oldest first.
        self.recent: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        #: Those whose ranks were chosen as the least busy: they count until they end, also without a future.
        self.chosen: set[Any] = set()
        configured = settings()
        self.max_in_flight = configured.max_in_flight
        self.reruns = RerunLog()
        self.counts = Counts(session.counts)
        #: The pins of ``px.engines.sticky``, by role and margin.
        self.pins: dict[tuple[str, float], Any] = {}
        self.room = StoreQuota(backend)
        self.inline_bytes = configured.inline_bytes
        self.debug = configured.debug
        self.grace_s = configured.grace_s
        #: True if living ranks are worth keeping: a failed call interrupts its busy ranks before it stops them. Set by
        #: a policy that replaces ranks, by the first snapshot, and in views.
        self.spare = False
        #: Returns a number for a call. The first is random: several processes may call a group, and its ranks identify
        #: calls by number.
        self.new_number = itertools.count(secrets.randbits(40) * _FIRST_NUMBER + _FIRST_NUMBER).__next__

        # Members.
        #: Held while members change.
        self.changing = threading.RLock()
        #: True while the holder of ``changing`` may call the group without recovering it first.
        self.is_changed_here = False
        self._preparing: int | None = None
        #: The last snapshot of the ranks' states, and its epoch.
        self.snapshot: Snapshot | None = None
        self.snapshot_epoch = -1
        #: The known notices of draining nodes.
        self.notices = NoticeQueue(handle.name)
        #: Times of recoveries by its policy, in seconds on the backend's clock.
        self.recoveries: list[float] = []
        #: Time of the next try to move ranks off draining nodes, and the reason why the last try moved none.
        self.move_after = 0.0
        self.stays_because = ""
        #: Functions that fetch data gathered on the ranks, within a number of seconds; called before processes end.
        self.before_end: list[Callable[[float], None]] = []

        # Weights.
        #: The syncs that send weights to new ranks before they get calls.
        self.syncs: weakref.WeakSet[Resync] = weakref.WeakSet()
        #: The newest versions of weights that its roles had, and published, by (role, name); sent to new processes.
        self.had_weights: dict[tuple[str, str], int] = {}
        self.published_weights: dict[tuple[str, str], int] = {}
        #: Versions of the weights of its roles, as text, by ``role.name``.
        self.weights: dict[str, str] = {}

        # Views in other processes.
        #: True if another process owns the group, and publishes its roster.
        self.is_view = False
        #: Key of the published roster for views; "" if the group was never serialized, or is detached.
        self.roster_key = ""
        #: The record of a detached group as it was last published, or read by ``px.attach``.
        self.detached_record: bytes | None = None
        #: True if the ranks may have been replaced, so that a view reads the roster before its next call.
        self.is_doubtful = False
        #: Keys of the last processes that were asked to leave: calls that they had not begun are sent again.
        self.departed: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The processes of the ranks; empty while they are being started."""
        return self.epoch.endpoints

    @property
    def world_size(self) -> int:
        return self.epoch.size

    @property
    def needs_care(self) -> bool:
        """True if ``members.recovery.ensure_ready`` may have to act before a call is planned."""
        return (
            self.lifecycle.state is State.BROKEN
            or self.notices.urgent
            or self.is_view
            or len(self.recent) >= self.max_in_flight
        )

    @property
    def closed(self) -> bool:
        """True if the group takes no calls because it was closed, here or by its owner."""
        return self.lifecycle.state in (State.CLOSING, State.CLOSED)

    def forget(self, call: Any) -> None:
        """Count a call no longer as in flight."""
        self.recent.pop(call.number, None)
        self.chosen.discard(call)

    def check(self) -> Epoch:
        """Return the epoch to which a call can be sent now.

        Raises:
            GroupClosed, GroupBroken: if the group takes no calls.
        """
        epoch = self.epoch  # read before the state: after it, the epoch may lack processes
        state = self.lifecycle.state
        prepared = state is State.RESTARTING and self._preparing == threading.get_ident()
        if state is not State.READY and not prepared:
            self.lifecycle.check_callable()
        return epoch

    @contextlib.contextmanager
    def preparing(self) -> Generator[None]:
        """Return a context in which this thread may call ranks before the group takes other calls."""
        self._preparing = threading.get_ident()
        try:
            yield
        finally:
            self._preparing = None

    @contextlib.contextmanager
    def as_it_is(self) -> Generator[None]:
        """Return a context that holds ``changing``, in which calls of this thread do not recover or move the group."""
        with self.changing:
            before, self.is_changed_here = self.is_changed_here, True
            try:
                yield
            finally:
                self.is_changed_here = before

    def check_current(self, epoch: Epoch, ranks: Sequence[int], method: str) -> None:
        """Check that the ranks of a call are still the processes that it was made for.

        Raises:
            StaleEpoch: if a rank was replaced.
        """
        if self.epoch is not epoch and not self.epoch.has_kept(ranks, epoch):
            raise self.lifecycle.stale_error(epoch.number, method)

    def enter(self, endpoints: Sequence[Endpoint]) -> Epoch:
        """Begin the epoch of the lifecycle with these processes."""
        with self._lock:
            self.epoch = Epoch(self.lifecycle.epoch, len(endpoints), tuple(endpoints))
            self.weights = {}
        self._tell()
        return self.epoch

    def started(self) -> None:
        """Note that all ranks have started.

        Raises:
            PhalanxError: if the group broke in the meantime, by the failure of a rank that stayed.
        """
        with self._lock:
            if self.lifecycle.state is State.BROKEN:
                raise self.lifecycle.cause or self.lifecycle.broken_error()
            self.lifecycle.handle(Event.STARTED)
        self._tell()

    def change(self, endpoints: Sequence[Endpoint], size: int, *, joining: bool = False) -> Epoch:
        """Begin the next epoch, in which ranks join or leave while the others continue to work.

        Raises:
            GroupClosed, GroupBroken: if the group takes no calls.
        """
        with self._lock:
            self.lifecycle.check_callable()
            self.lifecycle.handle(Event.MEMBERS)
            number, stopped = self.lifecycle.epoch, self.epoch.stopped
            self.epoch = Epoch(number, size, tuple(endpoints), joining, stopped=stopped)
            self.snapshot = None  # taken of the previous ranks
        self._tell()
        return self.epoch

    def follow(self, endpoints: Sequence[Endpoint], number: int) -> None:
        """Continue with the ranks of an epoch that the owner, in another process, has begun."""
        with self._lock:
            if self.closed:
                return
            self.lifecycle.handle(Event.FOLLOW, number)
            self.epoch = Epoch(number, len(endpoints), tuple(endpoints))
            self.is_doubtful = False
        self._tell()

    def begin_restart(self, gone: Collection[int] | None = None) -> Epoch:
        """Leave the present epoch, and return it; until :meth:`enter` the next epoch has no processes.

        ``gone`` are the ranks that get new processes, if not all do: calls of the other ranks continue.

        Raises:
            GroupClosed: if the group is closed.
        """
        with self._lock:
            if self.closed:
                self.lifecycle.check_callable()
            left = self.epoch
            self.lifecycle.handle(Event.RESTART)
            here = enumerate(left.endpoints[: left.size] if gone is not None else ())
            stay = [None if rank in (gone or ()) else endpoint for rank, endpoint in here]
            self.epoch = Epoch(self.lifecycle.epoch, left.size, stay=stay)
        self._tell()
        return left

    def broken(self, cause: PhalanxError, epoch: Epoch | None = None) -> None:
        """Break the group because of a failure: it takes no more calls.

        A failure of an earlier epoch has no effect, unless the present epoch has kept the ranks that caused it.
        """
        with self._lock:
            number = self.lifecycle.epoch if epoch is None else epoch.number
            ranks = cause.cause_ranks if isinstance(cause, CallError) else ()
            if epoch is not None and epoch is not self.epoch and ranks and self.epoch.takes(ranks, epoch):
                number = self.lifecycle.epoch
            self.lifecycle.handle(Event.BREAK, number, cause)
        self._tell()

    def begin_close(self) -> bool:
        """Take no more calls. Return False if the group is closed or closing already."""
        with self._lock:
            first = not self.closed
            self.lifecycle.handle(Event.CLOSE)
        self._tell()
        return first

    def finish_close(self) -> None:
        """Note that the processes of the group have ended, and its slots are free."""
        with self._lock:
            if self.lifecycle.state is State.CLOSING:
                self.lifecycle.handle(Event.CLOSED)
                self._tell()

    def resyncs(self) -> dict[tuple[str, str], list[Resync]]:
        """Return the syncs that can resync the group's weights, by role and name of the weights."""
        found: dict[tuple[str, str], list[Resync]] = {}
        for key, number in [*self.had_weights.items()]:
            sent = {sync: newest for sync in list(self.syncs) if (newest := sync.newest(key)) is not None}
            # A newer sync may replace the sync that sent them.
            found[key] = [sync for sync in sent if sent[sync] >= number] or [s for s in sent if not sent[s]]
        return found

    def note_weights(self, role: str, name: str, text: str) -> None:
        """Note the result of a sync of a role's weights, for status displays."""
        with self._lock:
            self.weights = {**self.weights, (f"{role}.{name}" if role else name): text}
        self._publish()

    def _tell(self) -> None:
        self.changed = time.time()
        self._publish()

    def _publish(self) -> None:
        """Publish the changed state for the CLI, if this process made the group."""
        if self.has_pool and not self.backend.immediate:
            session.publisher.changed(self)

    def record(self) -> GroupRecord:
        """Return the record of the present state for the CLI."""
        handle, life = self.handle, self.lifecycle
        return GroupRecord(
            run=session.run_id,
            number=handle.number,
            name=handle.name,
            state=life.state.value,
            epoch=life.epoch,
            pool=handle.pool,
            changed=self.changed,
            weights=dict(self.weights),
            label=handle.label,
            roles=dict(handle.classes),
            methods={role: sorted(methods) for role, methods in handle.methods.items()},
            detached=handle.detached,
            cause=first_line(life.cause) if life.cause is not None else None,
            ranks=tuple(_rank_record(rank, endpoint) for rank, endpoint in enumerate(self.epoch.endpoints)),
        )


def _rank_record(rank: int, endpoint: Endpoint) -> RankRecord:
    facts = endpoint.facts
    slot = facts.slot
    accelerator = ",".join(slot.accelerator_ids) or None
    return RankRecord(rank, slot.node_id, slot.host, facts.pid, accelerator, facts.log, facts.side)
