"""``px.StalenessManager``: bounds how far generation runs ahead of training, by leases on rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from phalanx.calls.timeouts import checked
from phalanx.channels.channel import whole_number
from phalanx.channels.hub_client import PROCESS, HubClient, clients
from phalanx.channels.hub_server import HubAddress
from phalanx.channels.live_channels import new_key, own_hubs
from phalanx.channels.request_wait import PendingRequest, active_threads
from phalanx.channels.row_lease import RowLease, checked_answer
from phalanx.channels.staleness_state import StalenessStats
from phalanx.display.tables import Table
from phalanx.errors import DeclarationError, StalenessTimeout
from phalanx.session import session as cluster
from phalanx.wire.value import Reduced


@dataclass(frozen=True)
class StalenessHandle:
    """Serialized form of a staleness manager."""

    key: str
    max_lag: int
    rows_per_version: int
    address: HubAddress | None


class StalenessManager:
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

    Raises:
        DeclarationError: if a number is too small.
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
        given = f"max_lag={max_lag!r}, rows_per_version={rows_per_version!r}, depth={depth!r}, version={version!r}"
        try:
            numbers = [whole_number(each, "(") for each in (max_lag, rows_per_version, depth, version)]
        except ValueError:
            numbers = [-1, -1, -1, -1]
        if min(numbers[0], numbers[1] - 1, numbers[2]) < 0:
            raise DeclarationError(
                f"px.StalenessManager({given}): expected whole numbers, from 0 for max_lag and depth, from 1 for "
                "rows_per_version"
            )
        address = own_hubs.address(cluster.transport(backend))
        self._handle = StalenessHandle(new_key("staleness"), numbers[0], numbers[1], address)
        self._client().request(self._handle.key, "open_staleness", *numbers)

    @classmethod
    def _from_handle(cls, handle: StalenessHandle) -> StalenessManager:
        staleness = cls.__new__(cls)
        staleness._handle = handle
        return staleness

    @property
    def rows_per_version(self) -> int:
        """Rows that the trainer uses for a version."""
        return self._handle.rows_per_version

    @property
    def version(self) -> int:
        """Version in training."""
        return self.stats.version

    @property
    def serving(self) -> int:
        """Version that new rows are generated with."""
        return self.stats.serving

    @property
    def stats(self) -> StalenessStats:
        """Counts of submitted, ready, trained, dropped and running rows, drop reasons, and lags."""
        return self._request("stats")[1]

    def lease(
        self, rows: int, timeout: float | None = None, *, on_overdue: Callable[[], object] | None = None
    ) -> RowLease:
        """Wait until ``rows`` rows may be generated, and count them as running.

        Args:
            rows: number of rows.
            timeout: maximum wait in seconds; None waits without a bound.
            on_overdue: called on a separate thread when the rows become too old while they run, to abort them.

        Raises:
            StalenessTimeout: if training was too far behind during that time. The message names the reason.
            PhalanxError: if the manager was closed, or its owner died.
            ValueError: if the last of so many rows would always be too old.
        """
        pending = self._begin(rows, timeout)
        return self._leased(pending, pending.result(), rows, on_overdue)

    async def lease_async(
        self, rows: int, timeout: float | None = None, *, on_overdue: Callable[[], object] | None = None
    ) -> RowLease:
        """Lease rows in an event loop, as :meth:`lease` does."""
        pending = self._begin(rows, timeout)
        return self._leased(pending, await pending.result_async(), rows, on_overdue)

    def _begin(self, rows: int, timeout: float | None) -> PendingRequest:
        count, timeout = whole_number(rows, "lease(rows"), checked(timeout, "StalenessManager.lease")
        return PendingRequest(self._client(), self._handle.key, "of staleness", timeout, "lease", count)

    def _leased(
        self,
        pending: PendingRequest,
        answer: tuple[Any, ...],
        rows: int,
        on_overdue: Callable[[], object] | None,
    ) -> RowLease:
        match checked_answer(answer):
            case ("leased", number, version):
                return RowLease(pending.client, self._handle.key, number, rows, version, on_overdue)
            case _:
                raise StalenessTimeout(f"lease({rows} rows): {answer[1]}; wait longer, or train")

    def advance(self, version: int, *, trained: int | None = None, serving: bool = True) -> None:
        """Set the version in training.

        Args:
            version: higher than the version before.
            trained: rows that were trained on since the last call; None: ``rows_per_version`` for each version.
            serving: new rows are generated with this version from now on; otherwise :meth:`serve` reports it.

        Raises:
            ValueError: if the version does not increase, or fewer rows are ready than were trained on.
        """
        rows = None if trained is None else whole_number(trained, "advance(trained")
        self._request("advance", whole_number(version, "advance(version"), rows, serving)

    def serve(self, version: int) -> None:
        """Set the version that new rows are generated with.

        Raises:
            ValueError: if it is not between the version served before and the version in training.
        """
        self._request("serve", whole_number(version, "serve(version"))

    def close(self, reason: str = "it was closed") -> None:
        """Reject new leases, also of callers that wait. Running leases continue. Idempotent.

        Raises:
            DeclarationError: if another process created the manager.
        """
        if self._handle.key.split("/")[1] != PROCESS:
            raise DeclarationError("this staleness manager is closed by the process that created it")
        self._client().request(self._handle.key, "close", str(reason))

    def __enter__(self) -> StalenessManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
        versions = f"version {stats.version} in training, {stats.serving} served"
        title = f"staleness: {versions}, at most {self._handle.max_lag} behind"
        return Table(title, ("rows", "count", "more"), table)

    def _request(self, verb: str, *args: Any) -> tuple[Any, ...]:
        return checked_answer(self._client().request(self._handle.key, verb, *args))

    def _client(self) -> HubClient:
        active_threads.note()
        return clients.to(self._handle.key, self._handle.address)

    def __reduce__(self) -> Reduced:
        return _staleness_of, (self._handle,)

    def __repr__(self) -> str:
        handle = self._handle
        return f"<staleness: at most {handle.max_lag} versions of {handle.rows_per_version} rows behind>"


def _staleness_of(handle: StalenessHandle) -> StalenessManager:
    return StalenessManager._from_handle(handle)
