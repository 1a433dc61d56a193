"""``px.StalenessManager`` and its leases on rows, which bound how far generation runs ahead of training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from phalanx.channels.channel import Channel
from phalanx.channels.hub import Leased
from phalanx.channels.hub_client import HubObject, PendingRequest
from phalanx.channels.staleness_state import RequestId, StalenessStats
from phalanx.dispatch.split import count_rows
from phalanx.display.tables import Table
from phalanx.errors import DeclarationError, PhalanxError
from phalanx.wire.value import Reduced, Value, checked_number, checked_timeout


def _number(name: str, value: Any, least: int | None = None) -> int:
    """Return ``value`` as a number of rows, or as a version."""
    return checked_number(name, value, least, error=ValueError)


class RowLease:
    """Rows that may be generated. Rows that are not accepted at the end of the ``with`` block are dropped.

    Attributes:
        rows: number of rows.
        version: version in training when the lease began, with which new rows are generated.
    """

    def __init__(self, staleness: StalenessManager, lease: RequestId, rows: int, version: int) -> None:
        self._staleness, self._id, self.rows, self.version = staleness, lease, rows, version

    @property
    def overdue(self) -> bool:
        """True once rows of this version are too old: the producer should stop. Each read sends a request to the hub.

        Raises:
            PhalanxError: if the owner of the manager died.
        """
        return self._staleness.version - self._staleness._max_lag > self.version

    def accept(self, rows: int, versions: int | Sequence[int]) -> tuple[int, ...]:
        """Accept rows for training, without a channel. A lease can be accepted in parts.

        Args:
            rows: number of rows.
            versions: version of the first token of each row, or a single version for all rows.

        Returns:
            Positions of the accepted rows, from 0. Hand only these rows to the trainer. Other rows are dropped, since
            they would exceed ``max_lag``, or the lease had ended.

        Raises:
            ValueError: if there are more rows than still run, or a version is not in training yet.
        """
        count = _number("RowLease.accept: rows", rows, 0)
        return self._staleness._request("accept", self._id, _row_versions(versions, count))

    def put(
        self, channel: Channel, item: Value, versions: int | Sequence[int], timeout: float | None = None
    ) -> int:
        """Put the rows of an item into a channel. Rows that are too old are dropped.

        The rows count as accepted as soon as the channel contains them. The lease and the channel must belong to the
        same process. Rows that the channel drops or loses, or that become too old, free their quota.

        Args:
            channel: channel for the rows.
            item: item made of rows.
            versions: version of the first token of each row, or a single version for all rows.
            timeout: maximum wait for capacity in seconds.

        Returns:
            Number of accepted rows.

        Raises:
            ValueError: if the item is not made of rows or has more rows than still run.
            DeclarationError: if the channel belongs to another process or backend than the lease.
            ChannelFull, ChannelClosed: as :meth:`px.Channel.put`. The rows are dropped.
        """
        leased = self._leased(channel, item, versions)
        return channel._begin_put(item, timeout, leased).result()[1]

    async def put_async(
        self, channel: Channel, item: Value, versions: int | Sequence[int], timeout: float | None = None
    ) -> int:
        """Put the rows of an item in an event loop, as :meth:`put` does."""
        leased = self._leased(channel, item, versions)
        return (await channel._begin_put(item, timeout, leased).result_async())[1]

    def _leased(self, channel: Channel, item: Value, versions: int | Sequence[int]) -> Leased:
        rows = count_rows(item)
        if rows is None:
            raise ValueError(
                "RowLease.put: the item is not made of rows; pass tensors, arrays, lists or structures of these"
            )
        if channel._client() is not self._staleness._client():
            raise DeclarationError(
                f"RowLease.put: channel {channel.name!r} and the staleness belong to different processes or backends; "
                "create both in one process, on one backend"
            )
        return self._staleness._key, self._id, _row_versions(versions, rows)

    def drop(self, rows: int, reason: str) -> None:
        """Drop running rows that were filtered or aborted or that failed. They are counted by reason.

        Raises:
            ValueError: if there are more rows than still run.
        """
        self._staleness._request("drop", self._id, _number("RowLease.drop: rows", rows, 0), str(reason))

    def end(self, reason: str = "not accepted") -> None:
        """Drop all running rows. Idempotent."""
        self._staleness._send("end", self._id, str(reason))

    def __enter__(self) -> RowLease:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end("not accepted" if error is None else f"{type(error).__name__}: {error}")

    def __reduce__(self) -> Reduced:
        raise DeclarationError(
            "a row lease belongs to the process that leased the rows; pass the px.StalenessManager and lease there"
        )


def _row_versions(versions: Any, rows: int) -> tuple[int, ...]:
    """Return the version of each row, from a whole number for all rows or for each row."""
    given = versions.tolist() if hasattr(versions, "tolist") else versions
    if not isinstance(given, Iterable) or isinstance(given, str):
        return (_number("versions", given),) * rows
    numbers = tuple(_number("versions", version) for version in given)
    if len(numbers) != rows:
        raise ValueError(f"{rows} rows with {len(numbers)} versions: expected a version for each row")
    return numbers


class StalenessManager(HubObject):
    """Bounded staleness: producers lease rows before they generate them, and the trainer advances the version.

    The lag of a row is the version in training when the row is trained on, minus the version of its first token. No
    accepted row is delivered with a lag above ``max_lag``. The manager also paces: at most ``depth`` versions of rows
    exist next to the version in training, however large ``max_lag`` is.

    A handle can be passed to methods of any group. The process that creates the manager owns it.

    Args:
        max_lag: maximum lag in versions; 0: generation and training take turns.
        rows_per_version: rows that the trainer uses for a version.
        depth: versions of rows that may exist next to the version in training.
        version: version in training at the beginning.
        backend: "ray" or "inline"; default as for pools.

    Attributes:
        rows_per_version: rows that the trainer uses for a version.

    Raises:
        DeclarationError: if a number is not whole, or too small.
    """

    def __init__(
        self,
        max_lag: int,
        rows_per_version: int,
        depth: int = 1,
        *,
        version: int = 0,
        backend: str | None = None,
    ) -> None:
        numbers = (
            checked_number("StalenessManager: max_lag", max_lag, 0),
            checked_number("StalenessManager: rows_per_version", rows_per_version, 1),
            checked_number("StalenessManager: depth", depth, 0),
            checked_number("StalenessManager: version", version),
        )
        super().__init__("staleness", "of staleness", backend)
        self._max_lag, self.rows_per_version = numbers[:2]
        self._client().request("", "open_staleness", self._key, *numbers)

    @property
    def version(self) -> int:
        """Version in training."""
        return self.stats.version

    @property
    def stats(self) -> StalenessStats:
        """Counts of submitted, ready, trained, dropped and running rows, drop reasons, and lags."""
        return self._request("stats")

    def lease(self, rows: int, timeout: float | None = None) -> RowLease:
        """Wait until ``rows`` rows may be generated, and count them as running.

        Args:
            rows: number of rows.
            timeout: maximum wait in seconds; None waits without a bound.

        Raises:
            StalenessTimeout: if training is too far behind after ``timeout``, or can never catch up (inline, if no
                other thread runs). The message has the reason.
            PhalanxError: if the manager was closed, or its owner died.
            ValueError: if the last of ``rows`` rows would always be too old.
        """
        return self._begin(rows, timeout).result()

    async def lease_async(self, rows: int, timeout: float | None = None) -> RowLease:
        """Lease rows in an event loop, as :meth:`lease` does."""
        return await self._begin(rows, timeout).result_async()

    def _begin(self, rows: int, timeout: float | None) -> PendingRequest[RowLease]:
        count = _number("StalenessManager.lease: rows", rows)
        timeout = checked_timeout(timeout, "StalenessManager.lease")

        def finish(request: RequestId, version: int) -> RowLease:
            return RowLease(self, request, count, version)

        return PendingRequest(self, timeout, finish, "lease", count)

    def advance(self, version: int, *, trained: int | None = None) -> None:
        """Set the version in training. New rows are generated with this version from now on.

        Args:
            version: higher than the version before.
            trained: rows that were trained on since the last call; None: ``rows_per_version`` for each version.

        Raises:
            ValueError: if the version does not increase, or fewer rows are ready than were trained on.
        """
        rows = None if trained is None else _number("StalenessManager.advance: trained", trained)
        self._request("advance", _number("StalenessManager.advance: version", version), rows)

    def close(self, reason: str = "it was closed") -> None:
        """Reject new leases, also of callers that wait. Running leases continue. Idempotent.

        Raises:
            DeclarationError: if another process created the manager.
        """
        self._check_own()
        self._send("close", str(reason))  # its hub may have ended

    def explain(self) -> Table:
        """Return a table of all rows, and the lags of the rows that were trained on."""
        stats = self.stats
        rows = stats.rows
        lags = ", ".join(f"{count} at lag {lag}" for lag, count in sorted(stats.lags.items()))
        dropped = ", ".join(f"{count} {reason}" for reason, count in stats.dropped.items())
        table = (
            ("submitted", rows.submitted, f"{stats.waiting} producers wait"),
            ("running", rows.running, ""),
            ("ready", rows.ready, ""),
            ("trained", rows.trained, lags),
            ("dropped", rows.dropped, dropped),
        )
        title = f"staleness: version {stats.version} in training, at most {self._max_lag} behind"
        return Table(title, ("rows", "count", "more"), table)

    def _closed(self, reason: str) -> PhalanxError:
        return PhalanxError(f"staleness: {reason}")

    def __repr__(self) -> str:
        return f"<staleness: at most {self._max_lag} versions of {self.rows_per_version} rows behind>"
