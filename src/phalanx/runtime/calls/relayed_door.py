"""The door of a large group: calls go through relays, a few messages for any number of ranks."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from phalanx.runtime.calls.door import Arrivals, DirectDoor, Outgoing
from phalanx.runtime.calls.relayed import RelayedArrivals, Sent
from phalanx.runtime.life.epoch import Epoch
from phalanx.topology.relays import plan_relays
from phalanx.transport.base import Transport
from phalanx.transport.relaying import Relaying, Relays
from phalanx.transport.values import Ref
from phalanx.wire.messages import BARE, Message
from phalanx.wire.outputs import HALVED
from phalanx.wire.relayed import Envelope, Gone, Shares, part_of

_MOST_BEHIND = 64


class RelayedDoor:
    """Calls the ranks of an epoch through its relays, and directly what cannot go through them: streams.

    Ranks run the calls of one sender in order, and relays are other senders than this process. So what goes directly
    begins on a rank once the calls before it that went through relays have ended there, and what follows goes directly
    too until it has ended; nobody waits for that here, where the backend can have it so. Nor is anything held back in
    groups of asynchronous ranks, which keep no order, and in one that takes no calls any more.

    One thread at a time has its ``turn`` to choose a way and to send: what the library asks of ranks is sent by any
    thread, beside the calls of users.

    ``lost`` is called once a relay has ended: it brings all calls to their ends that somebody may ask for, and raises
    where one of them was lost. Else the relays are started anew.
    """

    def __init__(
        self,
        transport: Transport,
        relaying: Relaying,
        takes_calls: Callable[[], bool],
        lost: Callable[[], None],
        *,
        turn: AbstractContextManager[Any],
        ordered: bool,
        fan_out: int,
        heads: int,
    ) -> None:
        self._transport = transport
        self._relaying = relaying
        self._takes_calls = takes_calls
        self._on_lost = lost
        self._ordered = ordered
        self._fan_out = fan_out
        self._heads = heads
        self._direct = DirectDoor(transport)
        self._turn = turn
        self._serials = itertools.count()
        self._relays: Relays | None = None
        self._epoch: Epoch | None = None
        self._shares = Shares(())
        self._order: tuple[int, ...] = ()
        self._behind: list[Arrivals] = []  # calls that may be under way, by the way that was taken last
        self._way: Relays | None = None
        #: While calls go directly: those through relays that these wait for, and what sends them so.
        self._before: list[Arrivals] = []
        self._later: DirectDoor | None = None
        #: Calls that nobody asks for any more, as they are collected; and of the present relays, by head: each is told
        #: with its next call, or by the second look from now on.
        self._over: deque[tuple[Relays, int, Sequence[int]]] = deque()
        self._unsaid: dict[int, list[int]] = {}

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
        if not self._takes_calls():  # the library's own: nobody waits for what may never end
            way = self._way if epoch is self._epoch else None
            return self._sent(
                way if way is not None and way.gone() is None else None, epoch, call, self._direct
            )
        with self._turn:
            relays = self._way_of(epoch, call)
            return self._sent(relays, epoch, call, self._later or self._direct)

    def _sent(self, relays: Relays | None, epoch: Epoch, call: Outgoing, direct: DirectDoor) -> Arrivals:
        if relays is None:
            arrivals = direct.submit(epoch, call)
        else:
            arrivals = self._through(relays, epoch, call)
        if len(call.ranks) == len(epoch.endpoints):
            self._behind.clear()  # a rank that has ended this one has ended those before
        self._behind.append(arrivals)
        if len(self._behind) > _MOST_BEHIND:
            self._forget_ended()
        return arrivals

    def _way_of(self, epoch: Epoch, call: Outgoing) -> Relays | None:
        """The relays to take; None: none."""
        if self._way is None and self._behind and self._ordered:
            self._forget_ended()
            if self._behind:
                return None
        self._replace_lost()
        way = None
        if call.streaming is None:
            self.prepare(epoch)
            way = self._relays
        if way is None:
            self._go_directly()
        elif way is not self._way:
            self._behind, self._before, self._later = self._before, [], None
        self._way = way
        return way

    def _go_directly(self) -> None:
        """See to it that what is sent now begins after what went through relays, and is still under way."""
        relays = self._way
        self._forget_ended()
        if relays is None or not self._behind or not self._ordered:
            return
        sent = [part for one in self._behind if isinstance(one, RelayedArrivals) for part in one.sent_as]
        later = relays.after(sent)
        if later is None:
            self._let_end()
            return
        self._before, self._behind = self._behind, []
        self._later = DirectDoor(self._transport, later)

    def _let_end(self) -> None:
        if self._ordered:
            for arrivals in (*self._before, *self._behind):
                arrivals.wait(range(len(arrivals)), len(arrivals), None)
        self._let_go()

    def _let_go(self) -> None:
        self._behind, self._before, self._later = [], [], None

    def _forget_ended(self) -> None:
        self._behind = [arrivals for arrivals in self._behind if not arrivals.all_ended()]
        self._before = [arrivals for arrivals in self._before if not arrivals.all_ended()]
        if not self._before:
            self._later = None

    def _replace_lost(self) -> None:
        """See to it that the relays are started anew where one has ended, unless something was lost with it."""
        if self._relays is not None and self._relays.gone() is not None:
            self._on_lost()
            self._let_go()
            self._epoch = None

    def _through(self, relays: Relays, epoch: Epoch, call: Outgoing) -> RelayedArrivals:
        envelope, refs = self._envelope(next(self._serials), epoch, call)
        self._behind = [
            one for one in self._behind if not (isinstance(one, RelayedArrivals) and one.returned)
        ]
        self._note_over(relays)
        sent: list[Sent] = []
        for head, positions, ranks in self._shares.of(envelope.ranks):
            part, used = part_of(envelope, positions if len(positions) < len(call.ranks) else None, ranks)
            part = part._replace(over=self._unsaid.pop(head, ()))
            sent.append(Sent(head, positions, relays.send(head, part, [refs[place] for place in used])))
            call.reached = [*call.reached, *positions]
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
        relays = self._relays
        if relays is None:
            return
        unsaid, self._unsaid = self._unsaid, {}
        for head, serials in unsaid.items():
            relays.forget(head, serials)
        self._forget_ended()
        self._note_over(relays)
        if self._takes_calls() and relays.gone() is not None:
            self._on_lost()

    def _note_over(self, relays: Relays) -> None:
        with contextlib.suppress(IndexError):  # there is none left
            while True:
                of, serial, heads = self._over.popleft()
                for head in heads if of is relays else ():
                    self._unsaid.setdefault(head, []).append(serial)

    def whereabouts(self) -> list[tuple[str, int, str, int]]:
        """For each relay what it is called, how many ranks it reaches, its host and its process id."""
        return [] if self._relays is None else self._relays.whereabouts()

    def lost(self) -> Gone | None:
        """A relay that is known to have ended."""
        return None if self._relays is None else self._relays.gone()

    def end(self) -> None:
        """End the relays, whatever is under way through them. Idempotent."""
        relays, self._relays, self._epoch, self._way = self._relays, None, None, None
        self._unsaid = {}
        self._let_go()
        if relays is not None:
            relays.end()


@contextlib.contextmanager
def _collector_at_rest() -> Generator[None]:
    """No collection of garbage meanwhile: tens of thousands of messages cause many, which find nothing."""
    at_work = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if at_work:
            gc.enable()


def _distinct(messages: Iterable[Message]) -> tuple[list[Message], list[int] | None]:
    """The distinct messages, by identity, and which is whose; None: there is one."""
    with _collector_at_rest():
        messages = list(messages)
    if messages and messages.count(messages[0]) == len(messages):  # no loop of Python's own
        return messages[:1], None
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
