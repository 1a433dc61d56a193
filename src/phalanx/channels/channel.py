"""``px.Channel``: a queue between processes, with backpressure, acknowledgements and exact counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, get_args

from phalanx.channels.batch import Batch, order_rows
from phalanx.channels.channel_state import By, ChannelStatus, Depth, ItemCounts, channel_error, limit_text
from phalanx.channels.hub import Leased, StoredPayload
from phalanx.channels.hub_client import OWNER_DIED, HubObject, PendingRequest, reclaim
from phalanx.channels.live_channels import find_published, live_channels
from phalanx.channels.payloads import Lengths, leave, leave_at_exit, pack
from phalanx.channels.staleness_state import RequestId, display_name
from phalanx.display.tables import Table
from phalanx.display.text_format import size
from phalanx.errors import ChannelClosed, ChannelError, ChannelFull, DeclarationError
from phalanx.session.session import session
from phalanx.wire.value import Value, checked_choice, checked_number, checked_timeout


class Channel(HubObject):
    """A queue between processes, with backpressure and acknowledgements.

    A handle can be passed as an argument to methods of any group. The process that creates the channel owns it: the
    channel ends with its ``with`` block, :meth:`close`, ``px.shutdown()``, ``ray.shutdown()`` or that process. Large
    items stay in the process that put them until they are delivered. If that process dies, they are lost: counted, and
    reported once as ``ItemsLost`` to the next take. The items of each producer keep their order.

    Args:
        maxsize: maximum number of waiting items or bytes, at which ``put`` waits; None: no bound.
        by: unit of ``maxsize``, "items" or "bytes".
        name: name for messages and :meth:`find`, unique in the run.
        handoff: a rank that is closed moves its items to the hub of the channel instead of waiting for their delivery.
        lengths: for ``take_rows(balance=)`` and ``sort=``: a key of the items, or a function of an item, that gives
            a number for each row. It is evaluated by the producer.
        backend: "ray" or "inline"; default as for pools.

    Attributes:
        name: name of the channel, unique in the run.

    Raises:
        DeclarationError: if an argument is wrong, or a channel of that name is open.
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
        bound = None if maxsize is None else checked_number("Channel: maxsize", maxsize, 1)
        checked_choice("px.Channel: by", by, get_args(By))
        super().__init__("channel", name, backend)
        self._limit, self._handoff, self._lengths = limit_text(bound, by), handoff, lengths
        live_channels.open(self, bound, by)

    @classmethod
    def find(cls, name: str, *, backend: str | None = None) -> Channel:
        """Return a handle of the open channel of that name, in any process of the run.

        Raises:
            ChannelError: if no channel of that name is open.
        """
        channel = find_published(session.get_backend(backend), name)
        if channel is None:
            raise ChannelError(
                f"px.Channel.find({name!r}): no channel of that name is open in this run; create it with "
                f"px.Channel(name={name!r}), or pass the handle as an argument",
                channel=name,
            )
        return channel

    def put(self, item: Value, timeout: float | None = None) -> int:
        """Put an item, and wait for capacity if the channel is full.

        Args:
            item: any value that can be an argument of a call.
            timeout: maximum wait in seconds; 0 fails immediately; None waits without a bound.

        Returns:
            Position of the item in the order of all items, from 0.

        Raises:
            ChannelFull: if there was no capacity in time, or there never can be (inline, if no other thread runs).
            ChannelClosed: if the channel accepts no items any more.
            DispatchError: if the item cannot be pickled, or the object store has no capacity for it.
        """
        return self._begin_put(item, timeout).result()[0]

    async def put_async(self, item: Value, timeout: float | None = None) -> int:
        """Put an item in an event loop, as :meth:`put` does.

        A put that is cancelled may have been delivered; ``timeout`` is exact.
        """
        return (await self._begin_put(item, timeout).result_async())[0]

    def put_many(self, items: Iterable[Value], timeout: float | None = None) -> list[int]:
        """Put several items without waiting for each. Return their positions.

        Raises:
            ChannelFull, ChannelClosed: as :meth:`put`, at the first item that was not accepted. Items before it are
                in the channel; a later item is in the channel only if it was accepted by then.
            DispatchError: if an item cannot be pickled. Items are in the channel if they were accepted by then.
        """
        pending: list[PendingRequest[tuple[int, int]]] = []
        try:
            pending.extend(self._begin_put(item, timeout) for item in items)  # keeps the puts before an error
            return [put.result()[0] for put in pending]
        except BaseException:
            for put in pending:
                if not put.future.done():
                    put.withdraw()
            raise

    def _begin_put(
        self, item: Value, timeout: float | None, leased: Leased | None = None
    ) -> PendingRequest[tuple[int, int]]:
        """Begin to put an item, or rows of a staleness lease. The result is (position, number of accepted rows)."""
        timeout = checked_timeout(timeout, "Channel.put")
        packed = pack(self, item, self._lengths)
        pending = PendingRequest(self, timeout, lambda _, answer: answer, "put", packed, leased)
        if isinstance(packed[0], StoredPayload):
            pending.future.add_done_callback(partial(_reclaim_unless_accepted, packed[0]))
            leave_at_exit(self, self._handoff)
        return pending

    def get(self, timeout: float | None = None) -> Value:
        """Take the next item, and acknowledge it.

        Args:
            timeout: maximum wait in seconds; 0 takes an item that waits already; None waits without a bound.

        Raises:
            ChannelEmpty: if there was no item in time, or there never can be (inline, if no other thread runs).
            ChannelClosed: if there is no item, and none will come.
            ItemsLost: once, if items were lost with the process that stored them. Further takes continue.
        """
        batch = self.take(1, timeout)
        with batch:
            return batch.value()[0]

    async def get_async(self, timeout: float | None = None) -> Value:
        """Take the next item in an event loop, as :meth:`get` does."""
        with ExitStack() as stack:
            batch = await self.take_async(1, timeout)
            stack.push(batch)
            return (await asyncio.to_thread(batch.value))[0]

    def take(self, n: int = 1, timeout: float | None = None, *, at_least: int | None = None) -> Batch:
        """Take the next ``n`` items as a batch, fewer if the channel was finished.

        Args:
            n: number of items.
            timeout: maximum wait in seconds.
            at_least: number of items that suffice, default ``n``.

        Raises:
            ChannelEmpty: if there were not enough items in time. Nothing is taken.
            ChannelClosed: if there is no item, and none will come.
            ItemsLost: once, if items were lost with the process that stored them. Further takes continue.
        """
        return self._begin_take(n, False, timeout, at_least).result()

    async def take_async(
        self, n: int = 1, timeout: float | None = None, *, at_least: int | None = None
    ) -> Batch:
        """Take items in an event loop, as :meth:`take` does."""
        return await self._begin_take(n, False, timeout, at_least).result_async()

    def take_rows(
        self, n: int, timeout: float | None = None, *, balance: int | None = None, sort: bool = False
    ) -> Batch:
        """Take ``n`` rows from items of any size, fewer if the channel was finished.

        An item with more rows is split, and its other rows stay in front. Rows of several items are joined.

        Args:
            n: number of rows.
            timeout: maximum wait in seconds.
            balance: number of even shards (ranks, or dp coordinates, of the group that gets the batch). The rows are
                reordered so that the total ``lengths`` of the shards are similar. No byte of an item is read.
            sort: sort the rows by their ``lengths``, which may be any number that orders them, such as a prompt index.
                Batches then do not depend on the order in which producers finish.

        Raises:
            ChannelEmpty: if there were not enough rows in time. Nothing is taken.
            ChannelClosed: if there is no row, and none will come.
            ChannelError: if the next item is not made of rows.
            ItemsLost: once, if items were lost with the process that stored them. Further takes continue.
        """
        return self._begin_take(n, True, timeout, shards=self._shards(balance, sort)).result()

    async def take_rows_async(
        self, n: int, timeout: float | None = None, *, balance: int | None = None, sort: bool = False
    ) -> Batch:
        """Take rows in an event loop, as :meth:`take_rows` does."""
        return await self._begin_take(n, True, timeout, shards=self._shards(balance, sort)).result_async()

    def _begin_take(
        self, n: Any, joined: bool, timeout: float | None, at_least: Any = None, shards: int | None = None
    ) -> PendingRequest[Batch]:
        timeout = checked_timeout(timeout, "Channel.take")
        count = checked_number("Channel.take_rows: n" if joined else "Channel.take: n", n, 1)
        enough = count if at_least is None else checked_number("Channel.take: at_least", at_least, 1)

        def finish(lease: RequestId, answer: tuple[Any, bool]) -> Batch:
            ranges, short = answer
            batch = Batch(self, lease, ranges, joined, short)
            if shards is not None:
                try:
                    batch._ranges = order_rows(ranges, shards)
                except BaseException:
                    batch.requeue()
                    raise
            return batch

        return PendingRequest(self, timeout, finish, "take", count, joined, min(enough, count))

    def _shards(self, balance: int | None, sort: bool) -> int | None:
        """Return the number of shards to balance, 0 to sort the rows, None to keep their order."""
        if balance is None and not sort:
            return None
        if balance is not None and sort:
            raise DeclarationError(
                f"channel {self.name!r}: take_rows(balance={balance}, sort=True): pass one of the two"
            )
        if self._lengths is None:
            order = "sort=True" if sort else f"balance={balance}"
            raise DeclarationError(
                f"channel {self.name!r}: take_rows({order}): the rows have no lengths to order them by; create the "
                "channel with px.Channel(lengths=<a key of the items, or a function of an item>)"
            )
        return 0 if balance is None else checked_number("Channel.take_rows: balance", balance, 1)

    def __iter__(self) -> Iterator[Any]:
        """Yield items, each taken and acknowledged, until the channel is finished and empty, or closed.

        Raises:
            ChannelClosed: if its owner died.
        """
        with _end_of_loop():
            while True:
                yield self.get()

    async def __aiter__(self) -> AsyncIterator[Any]:
        with _end_of_loop():
            while True:
                yield await self.get_async()

    def drop(self, reason: str, numbers: Iterable[int] | None = None) -> int:
        """Drop all waiting items, or the items at positions ``numbers``. Return the number of dropped row ranges."""
        if numbers is not None:
            numbers = [checked_number("Channel.drop: numbers", number) for number in numbers]
        return self._request("drop", str(reason), numbers)

    def finish(self) -> None:
        """Accept no further items. Takes return the waiting items, and then raise ``ChannelClosed``."""
        self._request("finish")

    def leave(self, timeout: float | None = None, *, handoff: bool = False) -> None:
        """Reject further puts of this process, and wait until the channel needs none of its items.

        Args:
            timeout: maximum wait in seconds.
            handoff: move the items of this process to the hub instead of waiting for their delivery.

        Raises:
            ChannelFull: if items of this process are still needed after the timeout.
        """
        timeout = checked_timeout(timeout, "Channel.leave")
        needed = leave(self._client(), self, handoff, timeout)
        if needed:
            raise channel_error(
                ChannelFull,
                self.name,
                f"{needed} items of this process are needed after {timeout:g} s; take them, wait longer, or move them "
                "to the hub by leave(handoff=True)",
            )

    def close(self, reason: str = "it was closed") -> None:
        """End the channel: waiting items are dropped, and every waiting caller gets ``ChannelClosed``. Idempotent.

        Raises:
            DeclarationError: if another process created the channel.
        """
        self._check_own("; a producer can leave() it, and any process can finish() it")
        live_channels.close(self, str(reason))

    def __len__(self) -> int:
        """Return the number of waiting items, 0 after the end of the channel: ``list(channel)`` begins with it."""
        try:
            return self.depth.waiting
        except ChannelClosed:
            return 0

    def __bool__(self) -> bool:
        return True

    @property
    def depth(self) -> Depth:
        """Fill level, numbers of waiting callers, and the rate."""
        return self.status.depth

    @property
    def items(self) -> ItemCounts:
        """Counts of items: submitted = delivered + dropped + lost + waiting + taken."""
        return self.status.items

    @property
    def rows(self) -> ItemCounts:
        """Counts of rows."""
        return self.status.rows

    @property
    def status(self) -> ChannelStatus:
        """Depth and counts of the same moment."""
        return self._request("status")

    def explain(self) -> Table:
        """Return a table of counts, the age of the oldest item, and the rate. It can be called at any time."""
        status = self.status
        depth, items, rows = status.depth, status.items, status.rows
        title = f"channel {self.name}: {self._limit} may wait"
        oldest = f", the oldest for {depth.oldest_item:.1f} s" if depth.waiting else ""
        waiting = f"{depth.waiting_rows} rows, {size(depth.waiting_bytes)}{oldest}"
        delivered = f"{rows.delivered} rows, {depth.delivered_per_second:.1f} items/s"
        dropped = ", ".join(f"{count} {reason}" for reason, count in status.reasons.items())
        lines = (
            ("waiting", depth.waiting, waiting),
            ("taken, not acknowledged", items.taken, f"{depth.leases} leases"),
            ("puts that wait for room", depth.puts, ""),
            ("takes that wait for items", depth.takes, ""),
            ("put so far", items.submitted, f"{rows.submitted} rows"),
            ("delivered", items.delivered, delivered),
            ("dropped", items.dropped, dropped),
            ("lost with a process", items.lost, f"{rows.lost} rows"),
        )
        notes = [f"{display_name(peer)}: {count} open leases" for peer, count in status.consumers.items()]
        return Table(title, ("what", "items", "more"), lines, tuple(notes))

    def _closed(self, reason: str) -> ChannelClosed:
        error = channel_error(ChannelClosed, self.name, reason)
        error.owner_died = reason in OWNER_DIED
        return error

    def __repr__(self) -> str:
        return f"<channel {self.name}: {self._limit} may wait>"


@contextmanager
def _end_of_loop() -> Generator[None]:
    """Suppress the end of a channel that was finished or closed, but not the death of its owner."""
    try:
        yield
    except ChannelClosed as error:
        if error.owner_died:
            raise


def _reclaim_unless_accepted(payload: StoredPayload, future: Future[Any]) -> None:
    """Free the bytes of an item that the channel did not accept."""
    if future.exception() is not None or future.result()[0] < 0:
        reclaim(payload.number)
