"""``px.Channel``: items pass from some processes to others, in order, counted, and never dropped in silence."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterable, Iterator
from types import TracebackType
from typing import Any

from phalanx.calls.timeouts import checked
from phalanx.channels.batch import Batch
from phalanx.channels.channel_server import Look
from phalanx.channels.channel_snapshots import By, Depth
from phalanx.channels.channel_state import ChannelHome
from phalanx.channels.channel_table import channel_table, limit_of
from phalanx.channels.item_accounting import Tally
from phalanx.channels.leaked_leases import dropped
from phalanx.channels.live_channels import ChannelCard, is_own, open_channels, published_key
from phalanx.channels.payloads import InStore, Lengths, Packed, kept, pack
from phalanx.channels.producer_exit import Listener, leave, leave_at_close
from phalanx.channels.replies import (
    accepted_number,
    at_least_one,
    check_order,
    closed,
    ordered,
    to_drop,
    untaken,
)
from phalanx.channels.requests import answered, answered_async, others, take_back
from phalanx.channels.saved_channels import SavedChannel, loaded, saved
from phalanx.channels.service_client import port_to
from phalanx.channels.services import Port, Reply
from phalanx.channels.state_server import Follow
from phalanx.display.tables import Table
from phalanx.errors import ChannelClosed, ChannelError, DeclarationError
from phalanx.session import session as cluster
from phalanx.wire.value import Reduced, Value


class Channel:
    """Items pass through it from the processes that put them to those that take them.

    A handle can be passed as an argument to methods of any groups; whoever made the channel owns it, and its home is
    there: it ends with ``with``, :meth:`close`, ``px.shutdown()``, ``ray.shutdown()`` or that process. Large items
    stay where they were put until they are delivered; the home holds order, counts and small items. When a process
    dies, the large items that it put are lost: counted, and raised once as ``ItemsLost`` at the next take. The order
    of each producer is kept.

    Args:
        maxsize: how much may wait, in items or bytes; then ``put`` waits. None: any number.
        by: what ``maxsize`` counts: "items" or "bytes".
        name: for messages and :meth:`find`; one per run.
        handoff: a rank that is closed hands the items it has over to the home, in place of waiting for a while until
            they are delivered.
        lengths: for ``take_rows(balance=)`` and ``sort=``: a key of the items, or a function of an item, which gives
            one number for each row. It is looked up where the item is put.
        backend: "ray" or "inline"; default as for pools.

    Raises:
        DeclarationError: an argument is wrong, or a channel of that name is open.
    """

    def __init__(
        self,
        maxsize: int | None = None,
        by: By = "items",
        name: str | None = None,
        *,
        handoff: bool = False,
        lengths: Lengths | None = None,
        backend: str | None = None,
    ) -> None:
        self._set(open_channels.make(ChannelHome(maxsize, by), name, handoff, lengths, backend))

    def _set(self, card: ChannelCard) -> None:
        self._card = card
        self._transport = cluster.transport(card.backend)

    @classmethod
    def _from_card(cls, card: ChannelCard) -> Channel:
        channel = cls.__new__(cls)
        channel._set(card)
        return channel

    @classmethod
    def find(cls, name: str, *, backend: str | None = None) -> Channel:
        """A handle on the open channel of that name, in any process of the run.

        Raises:
            ChannelError: there is none.
        """
        transport = cluster.transport(backend)
        found = transport.published(published_key(transport, name))
        if found is None:
            raise ChannelError(
                f"px.Channel.find({name!r}): no channel of that name is open in this run; make it with "
                f"px.Channel(name={name!r}), or pass the handle as an argument",
                channel=name,
            )
        return cls._from_card(pickle.loads(found))

    def save(self) -> SavedChannel:
        """All that waits or is taken, with its bytes, its order and the counts: a value that pickles.

        Only the owner can. What goes on meanwhile is in it or not.

        Raises:
            ChannelError: bytes of it cannot be read, or another process made it.
        """
        one = open_channels.get(self._card.key)
        if one is None:
            raise ChannelError(
                f"channel {self.name!r} is closed, or belongs to another process, which can save it",
                channel=self.name,
            )
        return saved(one)

    @classmethod
    def load(cls, state: SavedChannel, *, backend: str | None = None) -> Channel:
        """A channel that goes on from what :meth:`save` gave; this process has its bytes.

        Raises:
            DeclarationError: a channel of that name is open.
        """
        machine = loaded(state, cluster.transport(backend))
        return cls._from_card(open_channels.make(machine, state.name, state.handoff, state.lengths, backend))

    @property
    def card(self) -> ChannelCard:
        """What its handles are made from."""
        return self._card

    @property
    def name(self) -> str:
        """Its name, one per run."""
        return self._card.name

    def put(self, item: Value, timeout: float | None = None) -> int:
        """Put one item; wait for room if the channel is full.

        Args:
            item: anything that could be an argument of a call.
            timeout: seconds to wait for room at most; 0 refuses at once; None waits as long as it takes.

        Returns:
            Its number in the order of all items, from 0.

        Raises:
            ChannelFull: there was no room in time, or none could ever come (inline, where nothing else runs).
            ChannelClosed: the channel takes nothing any more.
            DispatchError: the item cannot be pickled, or the object store has no room for it.
        """
        return self.put_followed(item, timeout, None)

    def put_followed(self, item: Value, timeout: float | None, follow: Follow | None) -> int:
        """The same as :meth:`put`, of rows that a staleness follows."""
        port, packed, reply, timeout = self._begin_put(item, timeout, follow)
        try:
            return accepted_number(
                self.name, self._limit(), answered(self._card.key, port, reply, timeout, "put", self.name)
            )
        except BaseException:
            take_back(self._card.key, port, packed, reply)
            raise

    async def put_async(self, item: Value, timeout: float | None = None) -> int:
        """The same as :meth:`put`, awaited."""
        return await self.put_followed_async(item, timeout, None)

    async def put_followed_async(self, item: Value, timeout: float | None, follow: Follow | None) -> int:
        """The same as :meth:`put_followed`, awaited."""
        port, packed, reply, timeout = self._begin_put(item, timeout, follow)
        try:
            return accepted_number(
                self.name, self._limit(), await answered_async(self._card.key, port, reply, timeout)
            )
        except BaseException:
            take_back(self._card.key, port, packed, reply)
            raise

    def _begin_put(
        self, item: Value, timeout: float | None, follow: Follow | None
    ) -> tuple[Port, Packed, Reply, float | None]:
        timeout = checked(timeout, "Channel.put")
        port = self._port()
        packed = pack(self._card.key, self._transport, item, self._card.lengths)
        if isinstance(packed.payload, InStore):
            leave_at_close(self._card)
        offer = (packed.payload, packed.nbytes, packed.rows, timeout, packed.lengths, follow)
        reply = port.ask(self._card.key, "put", *offer)
        return port, packed, reply, timeout

    def get(self, timeout: float | None = None) -> Value:
        """Take the next item, and acknowledge it.

        Args:
            timeout: seconds to wait at most; 0 gives what is there now; None waits as long as it takes.

        Raises:
            ChannelEmpty: there was none in time, or none could ever come (inline, where nothing else runs).
            ChannelClosed: there is none, and none will come.
            ItemsLost: items went with the process that had them; told once. Take on.
        """
        batch = self.take(1, timeout)
        value = batch.value()[0]
        batch.ack()
        return value

    async def get_async(self, timeout: float | None = None) -> Value:
        """The same as :meth:`get`, awaited."""
        batch = await self.take_async(1, timeout)
        value = (await asyncio.to_thread(batch.value))[0]
        batch.ack()
        return value

    def take(self, n: int = 1, timeout: float | None = None) -> Batch:
        """Take the next ``n`` items; fewer only where the channel was finished. See :class:`Batch` for the rest.

        Raises:
            ChannelEmpty: there were not as many in time. Nothing is taken.
            ChannelClosed: there are none, and none will come.
            ItemsLost: items went with the process that had them; told once. Take on.
        """
        return self._take(at_least_one(n, "take"), None, timeout)

    def take_rows(
        self, n: int, timeout: float | None = None, *, balance: int | None = None, sort: bool = False
    ) -> Batch:
        """Take ``n`` rows out of items of any size: one that has more is cut, the rest of it stays in front.

        Fewer only where the channel was finished. Rows of several items are joined as results of ranks are.

        Args:
            n: how many rows.
            timeout: seconds to wait at most.
            balance: as many pieces as the batch will be cut into (the ranks, or dp coordinates, of the group that
                gets it): its rows are put into an order in which the ``lengths`` of even pieces sum up to about the
                same. No byte of an item is read for it.
            sort: its rows are put into ascending order of their ``lengths``, which may then be any number that orders
                them, such as that of the prompt: batches do not depend then on who was first.

        Raises:
            ChannelEmpty: there were not as many in time. Nothing is taken.
            ChannelClosed: there are none, and none will come.
            ChannelError: the next item is not made of rows.
            ItemsLost: items went with the process that had them; told once. Take on.
        """
        check_order(self.name, self._card.lengths, balance, sort)
        return ordered(self._take(None, at_least_one(n, "take_rows"), timeout), balance, sort)

    async def take_async(self, n: int = 1, timeout: float | None = None) -> Batch:
        """The same as :meth:`take`, awaited."""
        return await self._take_async(at_least_one(n, "take_async"), None, timeout)

    async def take_rows_async(
        self, n: int, timeout: float | None = None, *, balance: int | None = None, sort: bool = False
    ) -> Batch:
        """The same as :meth:`take_rows`, awaited."""
        check_order(self.name, self._card.lengths, balance, sort)
        return ordered(
            await self._take_async(None, at_least_one(n, "take_rows_async"), timeout), balance, sort
        )

    def _take(self, items: int | None, rows: int | None, timeout: float | None) -> Batch:
        timeout = checked(timeout, "Channel.take")
        port = self._port()
        reply = port.ask(self._card.key, "take", items, rows, timeout)
        what = answered(self._card.key, port, reply, timeout, "take", self.name)
        return self._batch(port, what, items, rows)

    async def _take_async(self, items: int | None, rows: int | None, timeout: float | None) -> Batch:
        timeout = checked(timeout, "Channel.take_async")
        port = self._port()
        reply = port.ask(self._card.key, "take", items, rows, timeout)
        return self._batch(port, await answered_async(self._card.key, port, reply, timeout), items, rows)

    def _batch(self, port: Port, what: Any, items: int | None, rows: int | None) -> Batch:
        if what[0] != "given":
            raise untaken(self.name, what, items, rows)
        _, lease, parts, short = what
        channel = (self._card.key, self.name)
        return Batch(channel, port, self._transport, lease, parts, rows is not None, short)

    def __iter__(self) -> Iterator[Any]:
        """Items, each taken and acknowledged when it is given, until the channel is finished and empty."""
        while True:
            try:
                yield self.get()
            except ChannelClosed:
                return

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            try:
                item = await self.get_async()
            except ChannelClosed:
                return
            yield item

    def drop(self, reason: str, numbers: Iterable[int] | None = None) -> int:
        """Let go of all that waits, or of these items of it; how many it were. They are counted under the reason."""
        return self._asked("drop", *to_drop(reason, numbers))[1]

    def finish(self) -> None:
        """Take no further items in: whoever takes gets what is there, and then ``ChannelClosed``."""
        self._asked("finish")

    def leave(self, timeout: float | None = None, *, handoff: bool = False) -> None:
        """Put no more from this process, and wait until the channel needs nothing of it: so that it may end.

        Args:
            handoff: have the home copy what this process has, in place of waiting until all of it is delivered.
            timeout: seconds to wait at most.

        Raises:
            ChannelError: something of it is still needed.
        """
        if not leave(self._port(), self._card.key, handoff, checked(timeout, "Channel.leave")):
            raise ChannelError(
                f"channel {self.name!r}: {kept.count(self._card.key)} items of this process are not delivered yet; "
                "take them, wait longer, or leave with handoff=True",
                channel=self.name,
            )

    def close(self, reason: str = "it was closed") -> None:
        """End it: what waits is dropped and counted, whoever waits is told. Idempotent; only the owner can.

        Raises:
            DeclarationError: another process made it.
        """
        one = open_channels.get(self._card.key)
        if one is None:
            if is_own(self._card.key):
                return
            raise DeclarationError(
                f"channel {self.name!r} belongs to the process that made it, which closes it; a producer can leave() "
                "it, and anybody can finish() it"
            )
        one.service.close(str(reason))
        open_channels.closed(self._card.key)

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """Items that wait."""
        return self._look().depth.waiting

    def __bool__(self) -> bool:
        return True

    @property
    def depth(self) -> Depth:
        """How full it is, who waits, for how long, and how fast it flows."""
        return self._look().depth

    @property
    def items(self) -> Tally:
        """Where all items are that were put: submitted = delivered + dropped + lost + waiting + taken."""
        return self._look().items

    @property
    def rows(self) -> Tally:
        """The same of their rows."""
        return self._look().rows

    def explain(self) -> Table:
        """What waits, who waits, how old, how fast: a table for people, also while others use it."""
        return channel_table(self.name, self._limit(), self._look())

    def _limit(self) -> str:
        return limit_of(self._card.maxsize, self._card.by)

    def _look(self) -> Look:
        what = self._port().ask(self._card.key, "look").future.result()
        if isinstance(what, Look):
            return what
        raise closed(self.name, what[1])

    def _asked(self, verb: str, *args: Any) -> Any:
        what = self._port().ask(self._card.key, verb, *args).future.result()
        if what[0] == "gone":
            raise closed(self.name, what[1])
        return what

    def _port(self) -> Port:
        """The way to its home from here."""
        dropped.give_back()
        key = self._card.key
        port = port_to(key, self._card.address)
        port.hear(key, Listener(key))
        others.note()
        return port

    def __reduce__(self) -> Reduced:
        return Channel._from_card, (self._card,)

    def __repr__(self) -> str:
        return f"<channel {self.name}: {self._limit()} may wait>"
