"""The standbys of a group: processes that have imported what its ranks have, and become ranks in place of lost ones."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.execution.standing_by import Imported, imported, stand_by
from phalanx.runtime.calls.compose import encode_body
from phalanx.runtime.groups.ask import Asked, ask
from phalanx.runtime.groups.core import GroupCore
from phalanx.runtime.life.lifecycle import State
from phalanx.runtime.life.standing import allowed, assigned, berths, told
from phalanx.runtime.pools.pool import ResourcePool
from phalanx.runtime.session.background import Background
from phalanx.topology.slots import Slot
from phalanx.transport.values import Endpoint, Lost, Ref, Reservation, SpawnRequest
from phalanx.wire.codec import encode
from phalanx.wire.messages import ANY_EPOCH, HOST, RankCall
from phalanx.wire.outputs import OUTPUT

__all__ = ["Standbys"]

_LOOK_EVERY_S = 0.25
_ANSWER_WITHIN_S = 10.0
_MAKING_WITHIN_S = 5.0
_log = logging.getLogger("phalanx")


@dataclass(eq=False)
class Berth:
    """What one standby holds: a share of a slot, as a tenant of the pool; and its process, while there is one."""

    name: str
    number: int
    slot: Slot
    ends: Callable[[], None]
    endpoint: Endpoint | None = None
    preparing: Ref | None = None
    world_size: int = 1

    @property
    def state(self) -> str:
        """ "ready", "starting", or "missing"."""
        if self.endpoint is None:
            return "missing"
        return "ready" if self.preparing is None else "starting"

    def close(self) -> None:
        """End it with all others: its pool is closed."""
        self.ends()


class Standbys:
    """Of one group. A standby is on the node of the slot of which it has a share, and can become any rank there.

    It asks the backend for nothing of that slot: the pool's books keep its share. So it belongs to no slot when it
    becomes a rank, and the share is that of the standby that is made in its place.
    """

    def __init__(
        self,
        core: GroupCore,
        pool: ResourcePool,
        classes: Mapping[str, type],
        request: Callable[[], SpawnRequest],
        wanted: int,
        window_s: float,
    ) -> None:
        self._core = core
        self._pool = pool
        self._classes = encode(dict(classes)).to_bytes()
        self._request = request
        self._wanted = wanted
        self._window_s = window_s
        self._lock = threading.RLock()
        self._making = threading.Lock()  # held while one is started
        self._berths: list[Berth] = []
        self._asked: Asked | None = None
        self._like = Imported()
        self._lost_at: list[float] = []
        self._why = ""
        self.closed = False

    def begin(self) -> None:
        """See to it that there are as many as are wanted, from now on; does not wait for them.

        Raises:
            PlacementError: the slots have no shares for them.
        """
        if self.closed:
            return
        if not self._berths:
            self._book()
        if self._core.transport.immediate:
            self.tend()
            return
        if self._asked is None:  # before any call of the user's, which may take long
            self._asked = ask(self._core, "standbys", [0], imported)
        keeper.add(self)

    def _book(self) -> None:
        pool, core = self._pool, self._core
        slots = [slot for slot in pool.slots if not pool.holdings[slot.pool].grown]
        nodes = core.transport.nodes_of(slots, self._reservations())
        free = [pool.holdings[slot.pool].free_shares(slot) for slot in slots]
        chosen = [slots[one] for one in berths(core.name, nodes, free, self._wanted)]
        made = [
            Berth(f"{core.name} standby {index}", core.card.number, slot, self.close)
            for index, slot in enumerate(chosen)
        ]
        try:
            for berth in made:
                pool.claim(berth, [berth.slot])
        except BaseException:
            for berth in made:
                pool.unclaim(berth, [berth.slot])
            raise
        self._berths = made

    def take(self, places: Mapping[int, Slot]) -> dict[int, Endpoint]:
        """The processes that become some ranks, whose slots are known; of those without one, nothing is said."""
        core, pool = self._core, self._pool
        with self._lock:
            self._look()
            there = {
                one: berth.endpoint for one, berth in enumerate(self._berths) if berth.endpoint is not None
            }
            if not there or self.closed:
                return {}
            self._learn(list(places.values()))
            # Ray would tell a process that it starts in a slot what accelerators the slot has; this one is told by us.
            known = {rank: slot for rank, slot in places.items() if pool.holdings[slot.pool].knows(slot)}
            nodes = core.transport.nodes_of(list(known.values()), self._reservations())
            ready = [one for one in there if self._berths[one].state == "ready"]
            chosen = assigned(
                dict(zip(known, nodes, strict=True)),
                {one: endpoint.facts.slot.node_id for one, endpoint in there.items()},
                ready,
            )
            for one in chosen.values():
                self._berths[one].endpoint = self._berths[one].preparing = None
            self._tell()
        return {rank: self._as_rank(there[one], places[rank]) for rank, one in chosen.items()}

    def _learn(self, slots: Sequence[Slot]) -> None:
        """Ask for the accelerators of slots that have moved; that takes them whole, so nobody else may be on them."""
        holdings = self._pool.holdings
        unknown = [slot for slot in slots if not holdings[slot.pool].knows(slot)]
        own = self._core.card.number
        if unknown and all(one.number == own for slot in unknown for one in holdings[slot.pool].groups[slot]):
            try:
                self._pool.locate()
            except Exception as error:  # whatever it is: ranks there get new processes
                _log.warning("group %r: the devices of slots are not known: %s", self._core.name, error)

    def _as_rank(self, endpoint: Endpoint, slot: Slot) -> Endpoint:
        ids = self._pool.holdings[slot.pool].accelerators.get(slot, ())
        facts = endpoint.facts._replace(slot=replace(endpoint.facts.slot, accelerator_ids=ids))
        return replace(endpoint, slot=slot, facts=facts)

    def tend(self) -> None:
        """Look after them once: those that are gone are noted, and made anew while the group is ready."""
        if not self._making.acquire(blocking=False):
            return
        try:
            with self._lock:
                self._look()
            for berth, node in self._due():
                self._make(berth, node)
        finally:
            self._making.release()
        with self._lock:
            self._look()
            self._tell()

    def _look(self) -> None:
        transport = self._core.transport
        if not transport.connected():
            return
        for berth in self._berths:
            if berth.endpoint is None:
                continue
            if not transport.alive(berth.endpoint):
                self._lose(berth, "it died")
            elif berth.preparing is not None and transport.wait([berth.preparing], 1, 0.0)[0]:
                outcome = transport.outcome(berth.preparing)
                berth.preparing = None
                if outcome.failure is not None:
                    self._lose(berth, outcome.failure.report.message.partition("\n")[0])
                elif outcome.lost is not None:
                    self._lose(berth, _words(outcome.lost))

    def _lose(self, berth: Berth, why: str) -> None:
        endpoint, berth.endpoint, berth.preparing = berth.endpoint, None, None
        if endpoint is not None:
            self._core.transport.kill([endpoint])
        self._lost_at.append(self._core.transport.now())
        self._why = why
        _log.warning("%s is lost: %s", berth.name, why)

    def _due(self) -> list[tuple[Berth, str]]:
        """Which are to be made now, each with its node."""
        core = self._core
        missing = [berth for berth in self._berths if berth.endpoint is None]
        if not missing or self.closed or core.lifecycle.state is not State.READY:
            return []
        if not core.transport.connected():
            return []
        if not allowed(self._lost_at, core.transport.now(), self._window_s, self._wanted):
            return []
        nodes = core.transport.nodes_of([berth.slot for berth in missing], self._reservations())
        going = {node.node_id for node in core.transport.going_nodes()}
        return [(berth, node) for berth, node in zip(missing, nodes, strict=True) if node not in going]

    def _make(self, berth: Berth, node: str) -> None:
        core = self._core
        self._learn_imports()
        try:
            request = replace(self._request(), slots=(berth.slot,), nodes=(node,), resources={}, names=None)
            (endpoint,) = core.transport.spawn(request)
        except Exception as error:  # whatever it is: the group works without
            if not self.closed:
                self._lose(berth, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            return
        with self._lock:
            if self.closed:
                core.transport.kill([endpoint])
                return
            core.transport.attend([endpoint])
            berth.endpoint, berth.preparing = endpoint, self._prepare(endpoint)
            self._tell()

    def _learn_imports(self) -> None:
        if self._asked is not None and not self._like.modules:
            (answer,) = self._asked.answers(_ANSWER_WITHIN_S).values()
            if isinstance(answer, Imported):
                self._like = answer

    def _prepare(self, endpoint: Endpoint) -> Ref:
        core = self._core
        body, refs = encode_body(core.outlet, ((stand_by, self._classes, self._like), {}))
        data = RankCall(core.new_number(), ANY_EPOCH, "", HOST, True, OUTPUT, False, False, body).pack()
        return core.transport.submit(endpoint, "", HOST, data, refs).value

    def close(self) -> None:
        """End them, and give their shares back. Idempotent."""
        self.closed = True
        began = self._making.acquire(timeout=_MAKING_WITHIN_S)  # else whoever makes one ends it
        try:
            with self._lock:
                endpoints = [berth.endpoint for berth in self._berths if berth.endpoint is not None]
                left, self._berths = self._berths, []
            self._core.transport.kill(endpoints)
            for berth in left:
                self._pool.unclaim(berth, [berth.slot])
        finally:
            if began:
                self._making.release()

    def __str__(self) -> str:
        return told([berth.state for berth in self._berths], self._why)

    def notes(self) -> tuple[str, ...]:
        """What there is to say of them, for people."""
        where = [
            f"{berth.name}: pid {there.facts.pid} on {there.facts.slot.host}, a share of {berth.slot}"
            for berth in list(self._berths)
            if (there := berth.endpoint) is not None  # once: it may become a rank at any moment
        ]
        return (str(self), *where)

    def _tell(self) -> None:
        life = self._core.life
        text = str(self)
        if life.standbys != text and not self.closed:
            life.standbys = text
            if life.on_change is not None:
                life.on_change()

    def _reservations(self) -> dict[str, Reservation]:
        return {name: holding.reservation for name, holding in self._pool.holdings.items()}


def _words(lost: Lost) -> str:
    return f"{lost.reason} ({lost.exit})" if lost.exit else lost.reason


class _Keeper:
    """One thread per process makes standbys, for as long as a group is to have some."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Standbys] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._background = Background("phalanx-standbys", self._turn)

    def add(self, standbys: Standbys) -> None:
        with self._lock:
            self._all.add(standbys)
        self._background.begin()

    def _turn(self) -> float | None:
        with self._lock:
            there = [one for one in self._all if not one.closed]
            self._all = weakref.WeakSet(there)
        while there:
            one = there.pop()
            try:
                one.tend()
            except Exception:  # of the backend, while it shuts down: the others have their turn
                _log.debug("looking after standbys failed", exc_info=True)
            del one  # and not held beyond its turn
        return _LOOK_EVERY_S if self._all else None


keeper = _Keeper()
