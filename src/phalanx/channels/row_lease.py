"""Rows that whoever generates them has leased: what becomes of them is said here."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from phalanx.channels.channel import Channel
from phalanx.channels.lease_expiry import overdue_of
from phalanx.channels.numbers import whole_number
from phalanx.channels.requests import answered_async
from phalanx.channels.services import Port, of_one_process
from phalanx.channels.staleness_server import Lies
from phalanx.dispatch.split import count_rows, take_rows
from phalanx.errors import DeclarationError, PhalanxError
from phalanx.session.wait_threads import waiters
from phalanx.wire.value import Reduced, Value

_log = logging.getLogger("phalanx")
_NOT_PUT = "could not be put"


class RowLease:
    """Rows that may be generated. What is not accepted when the ``with`` block ends is dropped, and its credit is back.

    ``version`` is that of new rows when it began.
    """

    def __init__(
        self,
        key: str,
        port: Port,
        number: int,
        rows: int,
        version: int,
        on_overdue: Callable[[], object] | None,
    ) -> None:
        self._key, self._port, self.number = key, port, number
        self.rows, self.version = rows, version
        self.overdue = False
        """Whether its rows became too old while they ran: whoever generates them should stop."""
        self._on_overdue = on_overdue
        overdue_of(port, key).add(self)

    def accept(self, rows: int, versions: int | Sequence[int]) -> tuple[int, ...]:
        """Rows are ready to be trained on; in as many parts as one likes.

        Args:
            rows: how many.
            versions: of their first tokens: one for all, or one for each.

        Returns:
            The places, from 0, of those that were accepted: hand only these to the trainer. The others would be
            trained on more than ``max_lag`` versions behind, or the lease had ended; they are dropped.

        Raises:
            ValueError: more rows than still run, or a version that is not in training yet.
        """
        return self._asked("accept", self.number, counted(rows, "accept", "rows"), _versions_of(versions))[1]

    def put(
        self,
        channel: Channel,
        item: Value,
        versions: int | Sequence[int],
        timeout: float | None = None,
    ) -> int:
        """Accept the rows of an item, and put those that were accepted into a channel.

        The channel's rows are followed, if both were made by one process: those that it loses or drops give their
        credit back, and those that become too old are dropped from it, or do not come in; as do those that were on
        their way when this process ended.

        Returns:
            How many rows were put.

        Raises:
            ValueError: as for :meth:`accept`, or the item is not made of rows.
            ChannelFull, ChannelClosed: the rows could not be put; they are dropped.
        """
        some, lies = _accepted_of(
            item, self._asked("offer", self.number, _rows_of(item), _versions_of(versions))
        )
        if lies is None:
            return 0
        try:
            if of_one_process(self._key, channel.card.key):
                channel.put_followed(some, timeout, (self._key, lies))
            else:
                channel.put(some, timeout)
                self._asked("unfollowed", lies)
        except BaseException:
            self._port.say(self._key, "discard", lies, _NOT_PUT)
            raise
        return lies.stop - lies.start

    async def put_async(
        self, channel: Channel, item: Value, versions: int | Sequence[int], timeout: float | None = None
    ) -> int:
        """The same as :meth:`put`, awaited."""
        reply = self._port.ask(self._key, "offer", self.number, _rows_of(item), _versions_of(versions))
        told = _checked(await answered_async(self._key, self._port, reply, None))
        some, lies = _accepted_of(item, told)
        if lies is None:
            return 0
        try:
            if of_one_process(self._key, channel.card.key):
                await channel.put_followed_async(some, timeout, (self._key, lies))
            else:
                await channel.put_async(some, timeout)
                self._port.say(self._key, "unfollowed", lies)
        except BaseException:
            self._port.say(self._key, "discard", lies, _NOT_PUT)
            raise
        return lies.stop - lies.start

    def drop(self, rows: int, reason: str) -> None:
        """Some of its rows will never be: filtered, aborted, failed. Counted under the reason.

        Raises:
            ValueError: more rows than still run.
        """
        self._asked("drop", self.number, counted(rows, "drop", "rows"), str(reason))

    def end(self, reason: str = "not accepted") -> None:
        """Drop what still runs. Idempotent."""
        self._port.say(self._key, "end", self.number, str(reason))

    def _asked(self, verb: str, *args: Any) -> Any:
        return _checked(self._port.ask(self._key, verb, *args).future.result())

    def became_overdue(self) -> None:
        """Note that its rows are too old."""
        self.overdue = True
        if self._on_overdue is not None:  # which may ask homes: not on the thread that brings their answers
            waiters.submit(functools.partial(_tell, self._on_overdue, self.rows))

    def __enter__(self) -> RowLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end("not accepted" if error is None else f"{type(error).__name__}: {error}")

    def __reduce__(self) -> Reduced:
        raise DeclarationError(
            "a lease on rows belongs to the process that began it; pass the px.StalenessManager and begin there"
        )


def _tell(on_overdue: Callable[[], object], rows: int) -> None:
    try:
        on_overdue()
    except Exception:  # of the user: nobody else would hear of it
        _log.warning("on_overdue of a lease on %d rows failed", rows, exc_info=True)


def counted(given: Any, verb: str, name: str) -> int:
    """A number of rows, or of a version.

    Raises:
        ValueError: it is no whole number.
    """
    number = whole_number(given)
    if number is None:
        raise ValueError(f"{verb}({name}={given!r}): give a whole number")
    return number


def _versions_of(versions: Any) -> int | list[int]:
    """Versions of first tokens, one for all rows or one for each; tensors and arrays are taken as lists."""
    given = versions.tolist() if hasattr(versions, "tolist") else versions
    if (one := whole_number(given)) is not None:
        return one
    numbers = [whole_number(each) for each in given] if isinstance(given, Iterable) else [None]
    good = [each for each in numbers if each is not None]
    if len(good) < len(numbers):
        raise ValueError(f"versions={versions!r}: give one whole number for all rows, or one for each")
    return good


def _rows_of(item: Value) -> int:
    rows = count_rows(item)
    if rows is None:
        raise ValueError(
            "RowLease.put: the item is not made of rows; give tensors, arrays, lists or structures of such"
        )
    return rows


def _accepted_of(item: Value, told: Any) -> tuple[Value, Lies | None]:
    """The rows of an item that were accepted, and what they are called; None where none was."""
    _, places, lies = told
    if not places:
        return None, None
    return (item if len(places) == count_rows(item) else take_rows(item, places)), lies


def _checked(what: Any) -> Any:
    if what[0] in ("gone", "wrong"):
        raise failed(what)
    return what


def failed(what: Any) -> Exception:
    """The error that a home told of."""
    if what[0] == "wrong":
        return ValueError(what[1])
    return PhalanxError(f"staleness: {what[1]}")
