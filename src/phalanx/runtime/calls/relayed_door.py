"""The door of a large group: calls go through relays, a few messages for any number of ranks."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.errors import CallTimeout
from phalanx.runtime.calls.door import Arrivals, DirectDoor, Outgoing
from phalanx.runtime.calls.finding import HELD_UP_AFTER_S
from phalanx.runtime.calls.relayed import RelayedArrivals, Sent
from phalanx.runtime.life.epoch import Epoch
from phalanx.topology.relays import plan_relays
from phalanx.transport.base import Transport
from phalanx.transport.relaying import Relaying, Relays
from phalanx.transport.values import Ref
from phalanx.wire.messages import BARE, RUN, Message, is_library_call
from phalanx.wire.outputs import HALVED
from phalanx.wire.relayed import Envelope, Gone, Shares, part_of

_MOST_BEHIND = 64
_log = logging.getLogger("phalanx")


@dataclass(frozen=True)
class Behind:
    """A call that may be under way when the next one is sent."""

    method: str
    arrivals: Arrivals

    def left(self, timeout: float | None) -> bool:
        """Whether ranks are still at it once so many seconds are over."""
        everyone = range(len(self.arrivals))
        return bool(self.arrivals.wait(everyone, len(everyone), timeout)[1])


class RelayedDoor:
    """Calls the ranks of an epoch through its relays, and directly what cannot go through them: streams.

    Ranks run the calls of one sender in order, and relays are other senders than this process. So a call that goes
    another way than those before it is sent once these have ended; what goes directly goes on doing so until then.
    Nobody waits for that in groups of asynchronous ranks, which keep no order, nor in one that takes no calls any more.
    Whoever waits long is told for what, and has waited in vain at the deadline of the call.

    ``name`` is the group's. ``lost`` is called once a relay has ended: it brings all calls to their ends that somebody
    may ask for, and raises where one of them was lost. Else the relays are started anew.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        relaying: Relaying,
        takes_calls: Callable[[], bool],
        lost: Callable[[], None],
        *,
        ordered: bool,
        fan_out: int,
        heads: int,
    ) -> None:
        self._name = name
        self._transport = transport
        self._relaying = relaying
        self._takes_calls = takes_calls
        self._on_lost = lost
        self._ordered = ordered
        self._fan_out = fan_out
        self._heads = heads
        self._direct = DirectDoor(transport)
        self._serials = itertools.count()
        self._relays: Relays | None = None
        self._epoch: Epoch | None = None
        self._shares = Shares(())
        self._order: tuple[int, ...] = ()
        self._behind: list[Behind] = []  # calls that may be under way, by the way that was taken last
        self._way: Relays | None = None
        self._over: deque[tuple[Relays, int, Sequence[int]]] = deque()

    def prepare(self, epoch: Epoch) -> None:
        """Start the relays of an epoch, so that its first call finds them; ends those of another one."""
        if self._epoch is epoch:
            return
        self._let_end()
        self.end()
        tree = plan_relays(epoch.nodes, self._fan_out, self._heads)
        self._relays = self._relaying.relays(tree, epoch.endpoints)
        self._epoch = epoch
        below = [tree.relays[index].ranks for index in tree.head_indices]
        self._shares, self._order = Shares(below), tuple(itertools.chain.from_iterable(below))

    def submit(self, epoch: Epoch, call: Outgoing) -> Arrivals:
        if self._epoch is not None and epoch.number < self._epoch.number:
            return self._direct.submit(epoch, call)  # to ranks that leave, after all their calls
        relays = self._way_of(epoch, call)
        if relays is None:
            arrivals = self._direct.submit(epoch, call)
        else:
            arrivals = self._through(relays, epoch, call)
        if len(call.ranks) == len(epoch.endpoints):
            self._behind.clear()  # a rank that has ended this one has ended those before
        self._behind.append(Behind(call.method, arrivals))
        if len(self._behind) > _MOST_BEHIND:
            self._forget_ended()
        return arrivals

    def _way_of(self, epoch: Epoch, call: Outgoing) -> Relays | None:
        """The relays to take; None: none. Waits where it is another way than that of calls under way."""
        if (
            not self._takes_calls()
        ):  # the library's own, while the group ends: nobody waits for what may never end
            way = self._way if epoch is self._epoch else None
            return way if way is not None and way.gone() is None else None
        if self._way is None and self._behind and self._ordered:
            self._forget_ended()
            if self._behind:
                return None
        way = None
        if call.streaming is None:
            self._replace_lost()
            self.prepare(epoch)
            way = self._relays
        if way is not self._way:
            self._let_end(call)
            self._way = way
        return way

    def _let_end(self, call: Outgoing | None = None) -> None:
        """Wait for the calls behind which ``call`` is sent; without one, for ever.

        Raises:
            CallTimeout: its deadline is over before; nothing was sent.
        """
        told = call is None
        while self._ordered and self._behind:
            first = self._behind[0]
            if call is not None and not told and first.left(self._patience(call, HELD_UP_AFTER_S)):
                told = True
                _log.warning("waiting, not sent yet: %s", self._held_up(call))
            if first.left(None if call is None else self._patience(call)) and call is not None:
                text = f"its timeout is over and nothing was sent: {self._held_up(call)}"
                raise CallTimeout(text, group=self._name, method=call.method)
            del self._behind[0]
        self._behind.clear()

    def _patience(self, call: Outgoing, most: float | None = None) -> float | None:
        """Seconds to wait to the call's deadline; at most so many, or as many as it may stall."""
        found = [] if call.deadline is None else [max(0.0, call.deadline - self._transport.now())]
        if most is not None:
            found += [most] if call.stall_after is None else [most, call.stall_after]
        return min(found, default=None)

    def _held_up(self, call: Outgoing) -> str:
        """What is told whoever waits here, or has waited in vain."""
        left = [one.method for one in self._behind if not one.arrivals.all_ended()]
        return (
            f"group {self._name!r}, {_shown(call.method)}: a method that yields goes to each rank directly, once the "
            "calls before it that went through relays have ended; still under way: "
            f"{', '.join(dict.fromkeys(map(_shown, left)))}. If these wait for what this thread does next, they wait "
            "for ever: begin the stream before them, or in a group of its own, or start the group with "
            "PHALANX_RELAY_FROM=0"
        )

    def _forget_ended(self) -> None:
        self._behind = [one for one in self._behind if not one.arrivals.all_ended()]

    def _replace_lost(self) -> None:
        """See to it that the relays are started anew where one has ended, unless something was lost with it."""
        if self._relays is not None and self._relays.gone() is not None:
            self._on_lost()
            self._behind.clear()
            self._epoch = None

    def _through(self, relays: Relays, epoch: Epoch, call: Outgoing) -> RelayedArrivals:
        envelope, refs = self._envelope(next(self._serials), epoch, call)
        sent: list[Sent] = []
        for head, positions, ranks in self._shares.of(envelope.ranks):
            part, used = part_of(envelope, positions if len(positions) < len(call.ranks) else None, ranks)
            sent.append(Sent(head, positions, relays.send(head, part, [refs[place] for place in used])))
            call.reached += len(positions)
        return RelayedArrivals(
            self._transport,
            relays,
            envelope.serial,
            len(call.ranks),
            sent,
            halved=call.returns == HALVED,
            over=lambda serial, heads: self._over.append((relays, serial, heads)),
        )

    def _envelope(self, serial: int, epoch: Epoch, call: Outgoing) -> tuple[Envelope, list[Ref]]:
        distinct, which = _distinct(call.messages)
        call.nbytes = sum(len(message.data) for message in distinct)
        refs: list[Ref] = []
        at: dict[Any, int] = {}
        messages: list[tuple[bytes, Sequence[int]]] = []
        for data, own in distinct:
            for ref in own:
                if ref not in at:
                    at[ref] = len(refs)
                    refs.append(ref)
            messages.append((data, [at[ref] for ref in own]))
        bare: list[int] = []
        if distinct and distinct[0].data == BARE:
            for rank in call.ranks:
                endpoint = epoch.endpoints[rank]
                bare.append(endpoint.bare_calls)
                endpoint.bare_calls += 1
        ranks = None if tuple(call.ranks) == self._order else list(call.ranks)
        return Envelope(serial, call.role, call.method, call.returns, ranks, messages, which, bare), refs

    def look(self) -> None:
        over, self._over = self._over, deque()
        by_head: dict[int, list[int]] = {}
        for relays, serial, heads in over:
            if relays is self._relays:
                for head in heads:
                    by_head.setdefault(head, []).append(serial)
        relays = self._relays
        if relays is None:
            return
        for head, serials in by_head.items():
            relays.forget(head, serials)
        self._forget_ended()
        if self._takes_calls() and relays.gone() is not None:
            self._on_lost()

    def whereabouts(self) -> list[tuple[str, int, str, int]]:
        """For each relay what it is called, how many ranks it reaches, its host and its process id."""
        return [] if self._relays is None else self._relays.whereabouts()

    def lost(self) -> Gone | None:
        """A relay that is known to have ended."""
        return None if self._relays is None else self._relays.gone()

    def end(self) -> None:
        """End the relays, whatever is under way through them. Idempotent."""
        relays, self._relays, self._epoch, self._way = self._relays, None, None, None
        self._behind.clear()
        if relays is not None:
            relays.end()


def _shown(method: str) -> str:
    if is_library_call(method):
        return "a question of the library's own"
    return "run" if method == RUN else method


def _distinct(messages: Iterable[Message]) -> tuple[list[Message], list[int] | None]:
    """The distinct messages, by identity, and which is whose; None: there is one."""
    found: list[Message] = []
    index: dict[int, int] = {}
    which: list[int] = []
    for message in messages:
        at = index.get(id(message))
        if at is None:
            at = index[id(message)] = len(found)
            found.append(message)
        which.append(at)
    return found, which if len(found) > 1 else None
