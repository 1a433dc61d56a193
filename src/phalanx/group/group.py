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
from phalanx.calls.counts import Counts, process
from phalanx.calls.restart_reruns import RerunLog
from phalanx.calls.store_quota import Room
from phalanx.config import settings
from phalanx.declare.bind import BoundClass
from phalanx.display.log_merging import label_of
from phalanx.display.registry_records import GroupRecord, RankRecord
from phalanx.errors import CallError, PhalanxError
from phalanx.group.epoch import Epoch, GroupCard
from phalanx.group.lifecycle import Event, Lifecycle, State
from phalanx.group.options import GroupOptions
from phalanx.group.preemption_notices import NoticeQueue
from phalanx.group.snapshot_placement import Snapshot
from phalanx.pools.pool import ResourcePool
from phalanx.pools.slot_reservation import Tenant
from phalanx.session.session import session
from phalanx.topology.slots import Slot

_FIRST_NUMBER = 1 << 16


class Resync(Protocol):
    """Brings weights to a group whose ranks are new: a sync of which it is a target."""

    def newest(self, key: tuple[str, str]) -> int | None:
        """Return the newest version sent to weights of that role and name; 0: none yet; None: it does not go there."""
        ...

    def doubt(self) -> str:
        """Return why the source may not have the weights any more that it had; "" where it has."""
        ...

    def mend_source(self) -> None:
        """Have its source recovered, if that is broken and has a policy that says so."""
        ...

    def bring(self, to: Group) -> None:
        """Sync the source's present weights to all ranks of a target, joining ranks included.

        Other targets of the sync keep the version that they have.

        Raises:
            PhalanxError: the weights were not transferred.
        """
        ...


class Group:
    """Fields of a group, and the changes of its state. It sends nothing, waits for nothing and starts nothing.

    The functions of ``phalanx.calls`` and ``phalanx.members`` act on it. ``owner`` is False in a view that came from
    another process.

    Attributes:
        pool: that the ranks run on; only in the process that made the group on it.
        tenant: the group as its pool knows it; as ``pool``.
    """

    pool: ResourcePool
    tenant: Tenant

    def __init__(self, card: GroupCard, backend: Backend, size: int, *, owner: bool, number: int = 0) -> None:
        self.card = card
        self.name = card.name
        self.backend = backend
        self.owner = owner
        #: Id of the run whose process owns it; "" of a detached group that was attached.
        self.run = session.run_id if owner else ""

        # Made of. Set by the process that owns it.
        self.options = GroupOptions()
        self.roles: Mapping[str, BoundClass] = {}
        #: True if this process made the group, on a pool of its own.
        self.has_pool = False
        #: Keys of the reserved resources beside the slots' own, by slot.
        self.extras: dict[Slot, str] = {}

        # State.
        self.lifecycle = Lifecycle(card.name, epoch=number, owner=owner)
        self.epoch = Epoch(number, size)
        #: When its state or its epoch changed, as a Unix time.
        self.changed = time.time()
        self._lock = threading.RLock()
        self._behind = 0  # ranks that the epoch before a restart had

        # Calls.
        #: Held while a call is sent to its ranks; hold it to send several calls without others in between.
        self.send_lock = threading.RLock()
        #: Weak references to the calls that were sent, the oldest first; appended by the sender.
        self.recent: deque[weakref.ref[Any]] = deque()
        #: By number, the calls whose rank was chosen for having the fewest: (epoch, ranks, results).
        self.chosen: dict[int, tuple[Epoch, Sequence[int], Any]] = {}
        self.max_in_flight = settings().max_in_flight
        self.reruns = RerunLog()
        self.counts = Counts(process)
        #: The pins of ``px.engines.sticky``, by role and margin.
        self.pins: dict[tuple[str, float], Any] = {}
        self.room = Room(backend)
        self.inline_bytes = settings().inline_bytes
        self.debug = settings().debug
        self.grace_s = settings().grace_s
        #: Whether living ranks are worth keeping: those of a failed call are interrupted before they are stopped. Set
        #: by a policy that replaces ranks, by the first snapshot, and in views.
        self.spare = False
        #: Returns a number for a call. Not from 1: several processes may call one group, and its ranks tell the calls
        #: apart by number.
        self.new_number = itertools.count(secrets.randbits(40) * _FIRST_NUMBER + _FIRST_NUMBER).__next__

        # Members.
        #: Held while members change.
        self.changing = threading.RLock()
        #: True while the holder of ``changing`` may call the group without recovering it first.
        self.is_changed_here = False
        self._preparing: int | None = None
        #: The question to ranks that leave, until they have answered.
        self.leaving: Any = None
        #: The last snapshot of the ranks' states, and its epoch.
        self.snapshot: Snapshot | None = None
        self.snapshot_epoch = -1
        #: The known notices of draining nodes.
        self.notices = NoticeQueue(card.name)
        #: When it was recovered by its policy, on the backend's clock.
        self.recoveries: list[float] = []
        #: Until when ranks on nodes that go are left there, and why.
        self.move_after = 0.0
        self.stays_because = ""
        #: Fetch data gathered on the ranks, within a number of seconds; called before their processes end.
        self.before_end: list[Callable[[float], None]] = []

        # Weights.
        #: The syncs that send weights to new ranks before they get calls.
        self.syncs: weakref.WeakSet[Resync] = weakref.WeakSet()
        #: The newest versions of weights that its roles had, and published, by (role, name); restarts know of them.
        self.had_weights: dict[tuple[str, str], int] = {}
        self.published_weights: dict[tuple[str, str], int] = {}
        #: Of which version the weights of its roles are, in words, by ``role.name``.
        self.weights: dict[str, str] = {}

        # Views of it in other processes.
        #: Where they find the newest roster; "" where the group never travelled, or is detached.
        self.roster_key = ""
        #: The record of a detached group as it was last published, or read by ``px.attach``.
        self.detached_record: bytes | None = None
        #: Of such a view: whether the ranks may be others than it knows.
        self.is_doubtful = False
        #: By rank, an epoch: processes that came with it or later, and ended, had finished their calls.
        self.in_peace_since: dict[int, int] = {}

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The processes that are the ranks now; empty while they are being started."""
        return self.epoch.endpoints

    @property
    def world_size(self) -> int:
        return self.epoch.size

    @property
    def is_view(self) -> bool:
        """True if it is a view of a group that another process owns, and publishes the roster of."""
        return bool(self.roster_key) and not self.owner

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

    def make_on(
        self, pool: ResourcePool, tenant: Tenant, roles: Mapping[str, BoundClass], options: GroupOptions
    ) -> None:
        """Store the classes and options of the ranks, and the pool that they run on."""
        self.pool, self.tenant, self.has_pool = pool, tenant, True
        self.roles, self.options = roles, options

    def check(self) -> Epoch:
        """Return the epoch to which a call can be sent now.

        Raises:
            GroupClosed, GroupBroken: the group takes no calls.
        """
        epoch = self.epoch  # before the state, so that an epoch without processes is not taken
        state = self.lifecycle.state
        prepared = state is State.RESTARTING and self._preparing == threading.get_ident()
        if state is not State.READY and not prepared:
            self.lifecycle.check_callable()
        return epoch

    @contextlib.contextmanager
    def preparing(self) -> Generator[None]:
        """Let this thread call ranks that are there, before the group takes the calls of others."""
        self._preparing = threading.get_ident()
        try:
            yield
        finally:
            self._preparing = None

    @contextlib.contextmanager
    def as_it_is(self) -> Generator[None]:
        """Hold ``changing``. Calls of this thread in this context do not trigger a recovery or move of the group."""
        with self.changing:
            before, self.is_changed_here = self.is_changed_here, True
            try:
                yield
            finally:
                self.is_changed_here = before

    def check_current(self, epoch: Epoch, ranks: Sequence[int], method: str) -> None:
        """Check that the ranks of a call are still the processes that it was made for.

        Raises:
            StaleEpoch: they are not.
        """
        if self.epoch is not epoch and not self.epoch.has_kept(ranks, epoch):
            raise self.lifecycle.stale_error(epoch.number, method)

    def enter(self, endpoints: Sequence[Endpoint]) -> Epoch:
        """Begin the epoch that the lifecycle is in, with these processes."""
        with self._lock:
            number = self.lifecycle.epoch
            self.epoch = Epoch(number, len(endpoints), endpoints)
            self.weights = {}
            ended = [*_numbered(endpoints, number), *range(len(endpoints), self._behind)]
            self.in_peace_since.update(dict.fromkeys(ended, number))
            self._behind = 0
        self._tell()
        return self.epoch

    def started(self) -> None:
        """Note that all ranks are there.

        Raises:
            PhalanxError: the failure by which the group broke meanwhile, of a call of a rank that stayed.
        """
        with self._lock:
            if self.lifecycle.state is State.BROKEN:
                raise self.lifecycle.cause or self.lifecycle.broken_error()
            self._handle(Event.STARTED)

    def change(self, endpoints: Sequence[Endpoint], size: int, *, joining: bool = False) -> Epoch:
        """Begin the next epoch with ranks that come or go, while the others are at work.

        Raises:
            GroupClosed, GroupBroken: the group takes no calls.
        """
        with self._lock:
            self.lifecycle.check_callable()
            stopped = self.epoch.stopped
            self.lifecycle.handle(Event.MEMBERS)
            self.epoch = Epoch(self.lifecycle.epoch, size, endpoints, joining=joining)
            self.epoch.stopped = stopped
            _numbered(endpoints, self.epoch.number)
            self.snapshot = None  # of other ranks
        self._tell()
        return self.epoch

    def follow(self, endpoints: Sequence[Endpoint], number: int) -> None:
        """Go on with the ranks of an epoch that the owner, in another process, has begun."""
        with self._lock:
            if self.closed:
                return
            self.lifecycle.handle(Event.FOLLOW, number)
            self.epoch = Epoch(number, len(endpoints), endpoints)
            self.is_doubtful = False
        self._tell()

    def begin_restart(self, size: int | None = None, gone: Collection[int] | None = None) -> Epoch:
        """Leave the present epoch, and return it; until :meth:`enter` the next epoch has no processes.

        ``size`` is the number of ranks of the next epoch, if it changes. ``gone`` are the ranks that get new processes,
        if not all do: calls of the other ranks continue.

        Raises:
            GroupClosed: the group is closed.
        """
        with self._lock:
            if self.closed:
                self.lifecycle.check_callable()
            left = self.epoch
            self._behind = max(self._behind, len(left.endpoints))
            self.lifecycle.handle(Event.RESTART)
            here = enumerate(left.endpoints[: left.size] if gone is not None else ())
            stay = [None if rank in (gone or ()) else endpoint for rank, endpoint in here]
            self.epoch = Epoch(self.lifecycle.epoch, left.size if size is None else size, stay=stay)
        self._tell()
        return left

    def broken(self, cause: PhalanxError, epoch: Epoch | None = None) -> None:
        """Note that the group takes no more calls, and why.

        Reports of an earlier epoch have no effect, unless they are about a rank that the present epoch has kept.
        """
        with self._lock:
            number = self.lifecycle.epoch if epoch is None else epoch.number
            ranks = cause.cause_ranks if isinstance(cause, CallError) else ()
            if epoch is not None and epoch is not self.epoch and ranks and self.epoch.takes(ranks, epoch):
                number = self.lifecycle.epoch
            self._handle(Event.BREAK, number, cause)

    def begin_close(self) -> bool:
        """Take no more calls. Return False if the group is closed or closing already."""
        with self._lock:
            first = not self.closed
            self._handle(Event.CLOSE)
            return first

    def finish_close(self) -> None:
        """Note that nothing of the group is left."""
        with self._lock:
            if self.lifecycle.state is State.CLOSING:
                self._handle(Event.CLOSED)

    def _handle(self, event: Event, epoch: int | None = None, cause: PhalanxError | None = None) -> None:
        with self._lock:
            self.lifecycle.handle(event, epoch, cause)
            self._tell()

    def resyncs(self) -> dict[tuple[str, str], list[Resync]]:
        """Return the syncs that the group's weights came from, by role and name of the weights."""
        found: dict[tuple[str, str], list[Resync]] = {}
        for key, number in self.had_weights.items():
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
        """Have the changed state published for the commands, by the process that made the group."""
        if self.has_pool and not self.backend.immediate:
            session.publisher.changed(self)

    @property
    def fully_closed(self) -> bool:
        """True if nothing of the group is left."""
        return self.lifecycle.state is State.CLOSED

    def record(self) -> GroupRecord:
        """Return the present state for the commands."""
        card, life = self.card, self.lifecycle
        return GroupRecord(
            run=session.run_id,
            number=card.number,
            name=card.name,
            state=life.state.value,
            epoch=life.epoch,
            pool=card.pool,
            changed=self.changed,
            weights=dict(self.weights),
            label=label_of(card.classes.items()),
            roles=dict(card.classes),
            methods={role: sorted(methods) for role, methods in card.methods.items()},
            detached=card.detached,
            cause=str(life.cause).partition("\n")[0] if life.cause is not None else None,
            ranks=tuple(_rank_record(rank, endpoint) for rank, endpoint in enumerate(self.epoch.endpoints)),
        )


def _numbered(endpoints: Sequence[Endpoint], number: int) -> list[int]:
    """Note with which epoch new processes came, and return their ranks."""
    new = [rank for rank, endpoint in enumerate(endpoints) if endpoint.since < 0]
    for rank in new:
        endpoints[rank].since = number
    return new


def _rank_record(rank: int, endpoint: Endpoint) -> RankRecord:
    facts = endpoint.facts
    slot = facts.slot
    accelerator = ",".join(slot.accelerator_ids) or None
    return RankRecord(rank, slot.node_id, slot.host, facts.pid, accelerator, facts.log, facts.side)
