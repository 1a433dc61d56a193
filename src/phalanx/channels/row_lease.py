"""``px.channels.RowLease``: rows that a producer may generate."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from phalanx.channels.channel import Channel, whole_number
from phalanx.channels.hub_client import HubClient
from phalanx.dispatch.split import count_rows
from phalanx.errors import DeclarationError, PhalanxError
from phalanx.wire.value import Reduced, Value

_log = logging.getLogger("phalanx")


class RowLease:
    """Rows that may be generated. Rows that are not accepted at the end of the ``with`` block are dropped.

    Attributes:
        rows: number of rows.
        version: version that new rows were generated with when the lease began.
        overdue: True if the rows became too old while they were generated. The producer should stop.
    """

    def __init__(
        self,
        client: HubClient,
        key: str,
        number: int,
        rows: int,
        version: int,
        on_overdue: Callable[[], object] | None,
    ) -> None:
        self._client, self._key, self.number = client, key, number
        self.rows, self.version = rows, version
        self.overdue = False
        self._on_overdue = on_overdue
        client.on_overdue(key, number, self._became_overdue)

    def accept(self, rows: int, versions: int | Sequence[int]) -> tuple[int, ...]:
        """Accept rows for training, without a channel. A lease can be accepted in parts.

        Args:
            rows: number of rows.
            versions: version of the first token of each row, or one version for all rows.

        Returns:
            Positions of the accepted rows, from 0. Hand only these rows to the trainer. Other rows would exceed
            ``max_lag``, or the lease had ended. They are dropped.

        Raises:
            ValueError: if there are more rows than still run, or a version is not in training yet.
        """
        count = whole_number(rows, "accept(rows")
        return self._request("accept", self.number, _row_versions(versions, count))[1]

    def put(
        self, channel: Channel, item: Value, versions: int | Sequence[int], timeout: float | None = None
    ) -> int:
        """Put the rows of an item into a channel. Rows that are too old are dropped.

        The rows count as accepted as soon as the channel contains them. The lease and the channel must belong to one
        process. Rows that the channel drops or loses, or that become too old, free their quota.

        Args:
            channel: channel for the rows.
            item: item made of rows.
            versions: version of the first token of each row, or one version for all rows.
            timeout: maximum wait for capacity in seconds.

        Returns:
            Number of accepted rows.

        Raises:
            ValueError: if the item is not made of rows or has more rows than still run.
            DeclarationError: if the channel belongs to another process or backend than the lease.
            ChannelFull, ChannelClosed: as :meth:`px.Channel.put`. The rows are dropped.
        """
        rows, leased = self._leased(channel, item, versions)
        return min(rows, channel._put_leased(item, timeout, leased))

    async def put_async(
        self, channel: Channel, item: Value, versions: int | Sequence[int], timeout: float | None = None
    ) -> int:
        """Put the rows of an item in an event loop, as :meth:`put` does."""
        rows, leased = self._leased(channel, item, versions)
        return min(rows, await channel._put_leased_async(item, timeout, leased))

    def _leased(
        self, channel: Channel, item: Value, versions: int | Sequence[int]
    ) -> tuple[int, tuple[str, int, tuple[int, ...]]]:
        rows = count_rows(item)
        if rows is None:
            raise ValueError(
                "RowLease.put: the item is not made of rows; pass tensors, arrays, lists or structures of these"
            )
        if channel._client() is not self._client:
            raise DeclarationError(
                f"RowLease.put: channel {channel.name!r} and the staleness belong to different processes or backends; "
                "create both in one process, on one backend"
            )
        return rows, (self._key, self.number, _row_versions(versions, rows))

    def drop(self, rows: int, reason: str) -> None:
        """Drop running rows that were filtered or aborted or that failed. They are counted by reason.

        Raises:
            ValueError: if there are more rows than still run.
        """
        self._request("drop", self.number, whole_number(rows, "drop(rows"), str(reason))

    def end(self, reason: str = "not accepted") -> None:
        """Drop all running rows. Idempotent."""
        self._client.forget(self._key, self.number)
        self._client.send(self._key, "end", self.number, str(reason))

    def _request(self, verb: str, *args: Any) -> tuple[Any, ...]:
        return checked_answer(self._client.request(self._key, verb, *args))

    def _became_overdue(self) -> None:
        self.overdue = True
        if self._on_overdue is not None:  # a callback may call hubs, whose answers arrive on this thread
            threading.Thread(target=self._call_back, args=(self._on_overdue,), daemon=True).start()

    def _call_back(self, on_overdue: Callable[[], object]) -> None:
        try:
            on_overdue()
        except Exception:
            _log.warning("on_overdue of a lease on %d rows failed", self.rows, exc_info=True)

    def __enter__(self) -> RowLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end("not accepted" if error is None else f"{type(error).__name__}: {error}")

    def __reduce__(self) -> Reduced:
        raise DeclarationError(
            "a row lease belongs to the process that leased the rows; pass the px.StalenessManager and lease there"
        )


def _row_versions(versions: Any, rows: int) -> tuple[int, ...]:
    """Return the version of each row.

    Raises:
        ValueError: if ``versions`` is neither a whole number nor a whole number for each row.
    """
    given = versions.tolist() if hasattr(versions, "tolist") else versions
    if not isinstance(given, Iterable) or isinstance(given, str):
        return (whole_number(given, "versions"),) * rows
    numbers = tuple(whole_number(version, "versions") for version in given)
    if len(numbers) != rows:
        raise ValueError(f"{rows} rows with {len(numbers)} versions: expected a version for each row")
    return numbers


def checked_answer(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the answer of a staleness.

    Raises:
        PhalanxError: if the staleness was closed, or its hub died.
    """
    if answer[0] == "gone":
        raise PhalanxError(f"staleness: {answer[1]}")
    return answer
