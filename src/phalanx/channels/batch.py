"""``px.channels.Batch``: items or rows that were taken and not acknowledged yet."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from concurrent.futures import Future, wait
from itertools import groupby
from typing import Any

from phalanx.backends.backend_types import FetchFailed
from phalanx.calls.future import CallFuture
from phalanx.calls.values import StoredPart, StoredParts
from phalanx.channels.channel_state import RowRange, lost_items
from phalanx.channels.hub_client import OWNER_DIED, HubObject, RemoteClient
from phalanx.channels.payloads import source
from phalanx.channels.staleness_state import RequestId
from phalanx.collect.call_values import joined_parts
from phalanx.errors import DeclarationError, DispatchError, ItemsLost
from phalanx.session.session import session
from phalanx.topology.balance import balanced_partition
from phalanx.wire.value import Reduced, Value
from phalanx.worker.exit_hooks import current_closers

_log = logging.getLogger("phalanx")
_endings: dict[Batch, tuple[CallFuture[Any], Future[None]]] = {}
"""Batches of ``ack_with``: the call, and the task that ends the batch."""


class Batch(StoredParts):
    """Items (``take``) or joined rows (``take_rows``) of a channel.

    On the driver, a batch is a handle: as an argument of a group's method, its parts go directly from the processes
    that put them to the ranks. ``value()`` reads it. In a worker, ``with`` yields the value instead of the batch.

    A batch is acknowledged at the end of its ``with`` block, by :meth:`ack`, or when the call of :meth:`ack_with` has
    succeeded. If the block raises, the call fails or the process dies, its items return to the front of the channel.
    """

    def __init__(
        self, channel: HubObject, lease: RequestId, ranges: Sequence[RowRange], joined: bool, short: bool
    ) -> None:
        self._channel, self._lease, self._backend, self._ranges = channel, lease, channel._backend, ranges
        self._client = channel._client()  # the lease ends with its connection
        self._open, self._end = True, ""
        self._value: list[Any] = []
        self.joined, self.backend = joined, channel._backend.name
        self.short = short
        """True if the batch is smaller than requested, since the channel was finished."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(part.rows for part in self._ranges)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return sum(part.nbytes for part in self._ranges)

    def __len__(self) -> int:
        """Return the number of rows if they are joined, else of items."""
        return self.rows if self.joined else len(self._ranges)

    @property
    def parts(self) -> Sequence[StoredPart]:
        """Stored parts, for calls.

        Raises:
            ItemsLost: if bytes of an item were stored and freed by this process; the other items are requeued.
            ChannelClosed, DeclarationError: as :meth:`value`.
        """
        self._check_open()
        try:
            return [self._stored(part) for part in self._ranges]
        except FetchFailed:
            raise self._lose_unreadable() from None

    def _stored(self, part: RowRange) -> StoredPart:
        stop = part.start + part.rows  # an item without rows is a range of one unit
        return StoredPart(source(self._backend, part.item.payload), part.start, stop, part.whole)

    def value(self) -> Value:
        """Return the joined rows or the list of items, in private memory of this process.

        Raises:
            ItemsLost: if a process that stored a part died. The other parts return to the channel.
            DispatchError: if the rows of the items cannot be joined.
            ChannelClosed: if the owner of the channel died before the batch was read.
            DeclarationError: if the batch was acknowledged or requeued before it was read.
        """
        if not self._value:
            self._value.append(self._read())
        return self._value[0]

    def result(self) -> Value:
        """Return the same as :meth:`value`."""
        return self.value()

    def _check_open(self) -> None:
        if self._end:
            raise DeclarationError(
                f"this batch of channel {self._channel.name!r} was {self._end}; use it before that: inside its `with` "
                "block, or call batch.ack_with(future) if a call uses it"
            )
        # stored bytes were freed with the hub, and a fetch of bytes that this process has freed may never return
        is_stored = any(not isinstance(part.item.payload, bytes) for part in self._ranges)
        if is_stored and isinstance(self._client, RemoteClient) and self._client.died:
            raise self._channel._closed(OWNER_DIED[0])

    def _read(self) -> Value:
        try:
            return joined_parts(self.parts, self.joined, self._backend.fetch)
        except FetchFailed:
            raise self._lose_unreadable() from None
        except DispatchError as error:
            raise DispatchError(
                f"channel {self._channel.name!r}: the rows of its items cannot be joined, since the items are not "
                f"alike; put items of one structure, or take them unjoined by take(n). {error}"
            ) from None

    def _lose_unreadable(self) -> ItemsLost:
        """Requeue the readable items, and return the error that names the lost items."""
        self._check_open()  # it may have ended with the call of ack_with()
        unreadable: list[int] = []
        for part in self._ranges:
            try:
                joined_parts([self._stored(part)], False, self._backend.fetch)
            except FetchFailed:
                unreadable.append(part.number)
        self._open, self._end = False, "requeued"
        return lost_items(self._channel.name, self._channel._request("requeue", self._lease, unreadable))

    def ack(self) -> None:
        """Acknowledge the batch: its bytes are freed. Idempotent."""
        if self._open:
            self._finish(is_delivered=True)

    def requeue(self) -> None:
        """Return the items to the front of the channel, in order. Idempotent; no effect after :meth:`ack`."""
        if self._open:
            self._finish(is_delivered=False)

    def ack_with(self, future: CallFuture[Any]) -> None:
        """Acknowledge the batch when a call has succeeded, or requeue it if the call fails. Do not wait.

        The batch cannot be used after the end of the call.

        Raises:
            DeclarationError: if ``future`` is not the future of a call, or the batch was acknowledged or requeued.
        """
        if not isinstance(future, CallFuture) or not self._open:
            raise DeclarationError(
                f"ack_with({type(future).__name__}) of a batch that is {'open' if self._open else 'over'}: pass the "
                "future of a call (group.method.submit(batch)), once"
            )
        self._open = False

        def finish() -> None:
            self._finish(is_delivered=future.exception() is None)

        if self._backend.immediate:  # inline, the call has ended
            finish()
        else:
            ending = session.waiters.submit(finish, future.pending())
            _endings[self] = future, ending
            ending.add_done_callback(lambda _: _endings.pop(self, None))

    def _finish(self, *, is_delivered: bool) -> None:
        self._open, self._end = False, "acknowledged" if is_delivered else "requeued"
        # an acknowledgement to another process is sent with the next request
        send = self._client.send_soon if is_delivered and not self._client.is_local else self._client.send
        send(self._channel._key, "ack" if is_delivered else "requeue", self._lease)

    def __enter__(self) -> Any:
        try:
            return self if current_closers() is None else self.value()
        except BaseException:
            self.requeue()
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.ack()
        else:
            self.requeue()

    def __del__(self) -> None:
        if getattr(self, "_open", False) and not sys.is_finalizing():
            self._client.send_soon(self._channel._key, "requeue", self._lease)
            _log.warning(
                "channel %r: a batch was dropped without ack() or requeue(); its items return to the front. Take in "
                "a `with` block, or call batch.ack() or batch.ack_with(future)",
                self._channel.name,
            )

    def __reduce__(self) -> Reduced:
        raise DeclarationError(
            "a batch of a channel belongs to the process that took it; pass it as an argument of a group's method "
            "(its bytes then go from worker to worker), or send its value()"
        )

    def __repr__(self) -> str:
        content = f"{self.rows} rows" if self.joined else f"{len(self._ranges)} items"
        return f"<batch of channel {self._channel.name}: {content}, {'taken' if self._open else 'over'}>"


def order_rows(ranges: Sequence[RowRange], shards: int) -> Sequence[RowRange]:
    """Return the rows so that even shards have similar total lengths; 0 shards: by ascending length.

    Rows of equal length keep their order when they are sorted.

    Raises:
        DispatchError: if shards are balanced, and a length is negative.
    """
    rows = [(part, row) for part in ranges for row in range(part.start, part.start + part.rows)]
    lengths = [part.item.lengths[row] for part, row in rows]
    if shards:
        parts = balanced_partition(lengths, shards, equal_counts=True)
        order = [row for part in sorted(parts, key=len, reverse=True) for row in part]
    else:
        order = sorted(range(len(rows)), key=lengths.__getitem__)
    places = list(enumerate(rows[row] for row in order))
    ordered: list[RowRange] = []
    # Consecutive rows of an item form a slice.
    for (part, _), run in groupby(places, key=lambda each: (each[1][0], each[1][1] - each[0])):
        numbers = [number for _, (_, number) in run]
        ordered.append(part._replace(start=numbers[0], stop=numbers[-1] + 1))
    return ordered or ranges  # items without rows stay, for their dtype and shape


def end_with_calls() -> None:
    """Wait until the batches whose calls have ended are acknowledged or requeued."""
    wait([ending for future, ending in [*_endings.values()] if future.done()])
