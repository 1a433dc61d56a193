"""What a consumer has taken and not acknowledged yet: a handle on parts that lie where they were put."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from types import TracebackType
from typing import Any

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import FetchFailed
from phalanx.calls.future import CallFuture
from phalanx.calls.stored_rows import StoredPart, StoredParts
from phalanx.channels.channel_messages import Loss
from phalanx.channels.channel_server import GivenPart
from phalanx.channels.leaked_leases import Dropped, dropped
from phalanx.channels.losses import in_words
from phalanx.channels.payloads import unpack, unpacked_ref
from phalanx.channels.row_balance import balanced_order, runs_of
from phalanx.channels.services import Port
from phalanx.collect.join import join_rows
from phalanx.dispatch.split import slice_rows
from phalanx.errors import DeclarationError, DispatchError, ItemsLost
from phalanx.session.wait_threads import waiters
from phalanx.wire.codec import Policy
from phalanx.wire.value import Reduced, Value
from phalanx.worker.exit_hooks import current_closers


class Batch(StoredParts):
    """What one take of a channel gave: its rows joined (``take_rows``), or a list of items (``take``).

    On the driver it is a handle: given to a method of a group, its parts go from the processes that put them to the
    ranks, cut as the method's mode has it; ``value()`` reads it here. As the target of a ``with`` block in a worker it
    is the value.

    It is taken and not delivered until it is acknowledged: at the end of the ``with`` block that it is used in, if
    that did not raise; by :meth:`ack`; or when the call of :meth:`ack_with` has succeeded. Else its items go back to
    the front of the channel, in order; as they do if this process dies.
    """

    def __init__(
        self,
        channel: tuple[str, str],
        port: Port,
        transport: Backend,
        lease: int,
        given: Sequence[GivenPart],
        joined: bool,
        short: bool,
    ) -> None:
        self._key, self._name = channel
        self._port = port
        self._transport = transport
        self._lease = lease
        self._given = given
        self._open = True
        self._over = ""
        dropped.watch()
        self._value: list[Any] = []
        self.joined = joined
        self.short = short
        """Whether it is less than was asked for, since the channel was finished."""

    @property
    def rows(self) -> int:
        """Rows of all its parts."""
        return sum(part.rows for part in self._given)

    @property
    def nbytes(self) -> int:
        """Bytes of all its parts."""
        return sum(part.nbytes for part in self._given)

    def __len__(self) -> int:
        """Rows where these are joined, else items."""
        return self.rows if self.joined else len(self._given)

    def balance(self, pieces: int) -> None:
        """Put its rows into an order in which so many even pieces are about equally long."""
        self._reorder(balanced_order(self._lengths(), pieces))

    def sort(self) -> None:
        """Put its rows into ascending order of their lengths, equal ones as they came."""
        lengths = self._lengths()
        self._reorder(sorted(range(len(lengths)), key=lengths.__getitem__))

    def _lengths(self) -> list[float]:
        return [length for part in self._given for length in part.lengths]

    def _reorder(self, order: Sequence[int]) -> None:
        rows = [(part, part.start + at) for part in self._given for at in range(part.rows)]
        ordered: list[GivenPart] = []
        for start, stop in runs_of(order):
            for part, some in groupby(rows[start:stop], key=lambda row: row[0]):
                numbers = [number for _, number in some]
                ordered.append(_cut(part, numbers[0], numbers[-1] + 1))
        self._given = ordered or self._given  # items of no rows at all stay, for what they are made of

    @property
    def parts(self) -> Sequence[StoredPart]:
        self._check_held()
        return [
            StoredPart(
                part.payload
                if isinstance(part.payload, bytes)
                else unpacked_ref(self._transport, part.payload),
                part.start,
                part.start + part.rows,  # an item of no rows is a cut of one unit
                part.whole,
            )
            for part in self._given
        ]

    @property
    def backend(self) -> str:
        return self._transport.name

    def value(self) -> Value:
        """The rows, joined, or the list of items; in private memory of this process, read once.

        Raises:
            ItemsLost: a process that had some of it is gone. What is left of it is back in the channel.
            DeclarationError: it was acknowledged or given back before it was read.
        """
        if not self._value:
            self._check_held()
            self._value.append(self._read())
        return self._value[0]

    def _check_held(self) -> None:
        """Of what is over the bytes may be gone, or others have them: small items would be here all the same."""
        if self._over:
            raise DeclarationError(
                f"this batch of channel {self._name!r} was {self._over}; use it before that: inside of its `with` "
                "block, or say batch.ack_with(future) where a call goes on with it"
            )

    def result(self) -> Value:
        """The same as :meth:`value`."""
        return self.value()

    def _read(self) -> Value:
        try:
            if not self.joined:
                return [self._read_part(part, Policy.PRIVATE) for part in self._given]
            if len(self._given) == 1 and self._given[0].whole:
                return self._read_part(self._given[0], Policy.PRIVATE)
            return join_rows([self._read_part(part, Policy.VIEW) for part in self._given])
        except FetchFailed:
            self._give_back(self._unreadable())
            raise self._lost() from None
        except DispatchError as error:
            raise DispatchError(
                f"channel {self._name!r}: the rows of its items cannot be joined, since these are not alike; put items "
                f"of one structure, or take them as they are by take(n). {error}"
            ) from None

    def _read_part(self, part: GivenPart, policy: Policy) -> Value:
        if part.whole:
            return unpack(self._transport, part.payload, policy)
        cut = slice_rows(unpack(self._transport, part.payload, Policy.VIEW), part.start, part.stop)
        return cut if policy is Policy.VIEW else join_rows([cut])

    def _unreadable(self) -> frozenset[int]:
        gone: set[int] = set()
        for part in self._given:
            try:
                unpack(self._transport, part.payload, Policy.VIEW)
            except FetchFailed:
                gone.add(part.number)
        return frozenset(gone)

    def _lost(self) -> ItemsLost:
        """What the home says of it, so that nobody else is told a second time."""
        reply = self._port.ask(self._key, "take", 1, None, 0.0)
        kind, *rest = reply.future.result()
        if kind == "lost":
            return lost(self._name, rest[0])
        if kind == "given":
            self._port.say(self._key, "back", rest[0], frozenset())
        return lost(self._name, ())

    def ack(self) -> None:
        """It is delivered: the processes that have its bytes let go of them. Idempotent."""
        if self._open:
            self._open, self._over = False, "acknowledged"
            self._port.say(self._key, "ack", self._lease)

    def give_back(self) -> None:
        """Its items wait at the front of the channel again, in order. Idempotent; nothing after :meth:`ack`."""
        self._give_back(frozenset())

    def _give_back(self, unreadable: frozenset[int]) -> None:
        if self._open:
            self._open, self._over = False, "given back"
            self._port.say(self._key, "back", self._lease, unreadable)

    def ack_with(self, future: CallFuture[Any]) -> None:
        """Acknowledge it when this call has succeeded; give it back if the call fails. Does not wait.

        Raises:
            DeclarationError: that is no future, or it was acknowledged or given back before.
        """
        if not isinstance(future, CallFuture) or not self._open:
            raise DeclarationError(
                f"ack_with({type(future).__name__}) of a batch that is {'open' if self._open else 'over'}: give the "
                "future of a call (group.method.submit(batch)), once"
            )
        self._open = False
        port, key, lease = self._port, self._key, self._lease

        def ended() -> None:
            if future.exception() is None:
                port.say(key, "ack", lease)
            else:
                port.say(key, "back", lease, frozenset())

        if self._transport.immediate:  # it has ended
            ended()
        else:
            waiters.submit(ended, future.pending())

    def __enter__(self) -> Any:
        try:
            return self if current_closers() is None else self.value()
        except BaseException:
            self.give_back()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.ack()
        else:
            self.give_back()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            dropped.add(Dropped(self._port, self._key, self._name, self._lease))

    def __reduce__(self) -> Reduced:
        raise DeclarationError(
            "a batch of a channel belongs to the process that took it; pass it as an argument of a group's method (its "
            "bytes then go from worker to worker), or send its value()"
        )

    def __repr__(self) -> str:
        what = f"{self.rows} rows" if self.joined else f"{len(self._given)} items"
        return f"<batch of channel {self._name}: {what}, {'taken' if self._open else 'over'}>"


def _cut(part: GivenPart, start: int, stop: int) -> GivenPart:
    """Some of its rows, with their share of its bytes."""
    rows = stop - start
    nbytes = part.nbytes * rows // max(1, part.rows)
    whole = part.whole and rows == part.rows
    return replace(part, start=start, stop=stop, rows=rows, nbytes=nbytes, whole=whole, lengths=())


def lost(channel: str, losses: Sequence[Loss]) -> ItemsLost:
    """The error that says which items are gone with which processes."""
    told = in_words(losses)
    error = ItemsLost(
        f"channel {channel!r}: items are lost with the process that had their bytes: {told or 'part of this batch'}. "
        "The others can be taken; to keep items longer than the process that put them, drain it before it is closed, "
        "or make the channel with handoff=True",
        channel=channel,
    )
    error.losses = tuple(losses)
    return error
