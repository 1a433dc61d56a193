"""State machine of bounded staleness: bounds on the versions of rows, and a quota of rows. Pure.

A producer leases rows, generates them, and accepts them or puts them into a channel. The trainer takes them and
advances the version. The lag of a row is the version in training when the row is trained on, minus its own version.
Rows are trained on in the order in which they were taken, then in the order of acceptance, ``rows_per_version`` for
each version. A row is accepted only if its lag will not exceed ``max_lag``. A row that becomes too old is dropped.

Two limits delay a lease. The bound: its last row would be too old if all earlier rows were trained on. The pace: at
most ``depth`` versions of rows exist next to the version in training. Neither applies while all rows together cannot
fill the next version, since the trainer would wait forever. Rows that are dropped free their quota immediately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from phalanx.errors import PhalanxError, StalenessTimeout

Done = Callable[[Any], None]
RequestId = tuple[str, int]
"""Name of a process, and its own number for a request."""
SavedState = dict[str, Any]
"""State of a channel or a staleness in a snapshot."""
Outcome = Literal["delivered", "dropped", "lost"]
_LONGEST_REASON, _MOST_REASONS = 200, 100
STALE, RESTORED, NOT_SAVED, NOT_PUT = "stale", "restored", "not saved", "could not be put"
_OWN_REASONS = (STALE, RESTORED, NOT_SAVED, NOT_PUT)


class Gone(PhalanxError):
    """Answer to a request: the object has ended, for the reason in the message."""


def count_reason(reasons: Counter[str], reason: str, number: int) -> None:
    """Add ``number`` to the count of a reason. Long texts are cut, and later reasons of very many share a count."""
    text = reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."
    is_kept = text in _OWN_REASONS or text in reasons or len(reasons) < _MOST_REASONS
    reasons[text if is_kept else "other reasons"] += number


def display_name(peer: str) -> str:
    """Return the name of a process without its serial number."""
    return peer.rpartition("#")[0] or peer


@dataclass(frozen=True)
class RowCounts:
    """Counts of leased rows: submitted = accepted + dropped + running; accepted = ready + trained."""

    submitted: int
    ready: int
    trained: int
    dropped: int
    running: int

    @property
    def accepted(self) -> int:
        """Rows that were accepted and not dropped."""
        return self.ready + self.trained


@dataclass(frozen=True)
class StalenessStats:
    """Versions and counts of a staleness manager."""

    version: int
    """Version in training."""
    rows: RowCounts
    waiting: int
    """Producers that wait for a lease."""
    dropped: dict[str, int]
    """Dropped rows by reason."""
    lags: dict[int, int]
    """Trained rows by lag."""
    restored: bool = False
    """True if the state was restored and no version has been in training since."""


@dataclass(slots=True, eq=False)
class Item:
    """An item of a channel, or accepted rows without a channel.

    The process that put it stores the bytes, unless the payload contains them.
    """

    request: RequestId
    payload: Any
    nbytes: int
    rows: int | None
    lengths: tuple[float, ...] = ()
    versions: Sequence[int] = ()
    bounded: StalenessState | None = None
    """Staleness that the rows were leased from; ``versions`` has the version of each row."""
    number: int = -1
    """Position in the order of all items."""
    open_units: int = 0
    outcome: Outcome = "delivered"
    """Worst outcome of the units that have ended."""
    at: float = 0.0
    stale: set[int] = field(default_factory=set)
    """Rows that the staleness found too old."""

    @property
    def holder(self) -> str | None:
        """Process that stores the bytes, None if the payload contains them."""
        return None if isinstance(self.payload, bytes) else self.request[0]

    def is_stale(self, row: int) -> bool:
        """Return whether a row must not be delivered."""
        return self.bounded is not None and (row in self.stale or self.versions[row] < self.bounded.oldest)


Row = tuple[Item, int]


class ReadyRows:
    """Rows without a channel, in states that were saved before: they can be unpickled, and count as not saved."""


@dataclass(eq=False)
class StalenessState:
    """Leases, accepted rows and versions. ``evict`` makes the channels drop rows that became too old."""

    max_lag: int
    rows_per_version: int
    depth: int = 1
    version: int = 0
    evict: Callable[[], None] = lambda: None
    coming: int = 0
    """Version that a sync sends: engines may have it before it is in training."""
    restored: bool = False
    closed: str | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    lags: Counter[int] = field(default_factory=Counter)
    _submitted: int = 0
    _ready: dict[Row, tuple[int, int]] = field(default_factory=dict)
    """Accepted rows with their places in the order of training: (0, n) for rows that were taken, else (1, n)."""
    _places: Iterator[int] = field(default_factory=count)
    _leases: dict[RequestId, int] = field(default_factory=dict)
    """Running rows of each lease. Rows whose put waits at a channel are a lease with the name of the put."""
    _requests: dict[RequestId, tuple[int, Done]] = field(default_factory=dict)
    """Waiting requests for leases: rows, and the receiver of the answer."""

    # Leases

    def lease(self, request: RequestId, done: Done, rows: int) -> None:
        """Lease rows as soon as training has caught up, under the name ``request``.

        The answer is the version in training, or an error.

        Raises:
            ValueError: if the last of the rows would always be too old.
        """
        most = (self.max_lag + 1) * self.rows_per_version
        if not 1 <= rows <= most:
            raise ValueError(
                f"lease({rows} rows): expected 1 to {most} rows with max_lag={self.max_lag} and "
                f"rows_per_version={self.rows_per_version}; the last of more rows would always be too old"
            )
        if self.closed is not None:
            done(Gone(self.closed))
        else:
            self._requests[request] = rows, done
            self._start()

    def cancel(self, request: RequestId, note: str = "") -> None:
        """Answer a request that still waits with an error, which ends with ``note``."""
        if request in self._requests:
            rows, done = self._requests.pop(request)
            reason = (
                f"{self._delay(rows) or 'earlier requests are waiting'}; wait longer, or train and advance(), as "
                f"px.WeightSync(staleness=) does{note}"
            )
            done(StalenessTimeout(f"lease({rows} rows): {reason}"))
            self._start()

    def withdraw(self, request: RequestId) -> None:
        """Cancel a request, or end the lease that was granted."""
        self.cancel(request)
        self.end(request, "its producer was interrupted")

    def accept(self, lease: RequestId, versions: Sequence[int]) -> tuple[int, ...]:
        """Accept rows of a lease without a channel. Return the positions of the accepted rows."""
        is_open = self._shrink(lease, len(versions), versions)
        return self._admit(Item(lease, b"", 0, len(versions), (), versions, self)) if is_open else ()

    def begin_put(self, lease: RequestId, put: RequestId, versions: Sequence[int]) -> bool:
        """Note that rows of a lease wait at a channel. Return False if the lease has ended."""
        is_open = self._shrink(lease, len(versions), versions)
        if is_open and versions:
            self._leases[put] = len(versions)
        return is_open

    def drop(self, lease: RequestId, rows: int, reason: str) -> None:
        """Drop running rows of a lease."""
        if self._shrink(lease, rows):
            self._drop(rows, reason)

    def end(self, lease: RequestId, reason: str) -> None:
        """Drop the running rows of a lease, and forget the lease."""
        if lease in self._leases:
            self._drop(self._leases.pop(lease), reason)

    def peer_died(self, peer: str, why: str) -> None:
        """End the leases and requests of a dead process."""
        reason = f"{display_name(peer)}: {why}"
        for request in [request for request in self._requests if request[0] == peer]:
            self._requests.pop(request)[1](Gone(reason))
        for lease in [lease for lease in self._leases if lease[0] == peer]:
            self.end(lease, reason)
        self._start()

    def close(self, reason: str) -> None:
        """Reject new leases. Running leases continue."""
        self.closed = self.closed or reason
        requests, self._requests = self._requests, {}
        for _, done in requests.values():
            done(Gone(reason))

    # Rows in channels

    @property
    def oldest(self) -> int:
        """Oldest version that may be delivered."""
        return self.version - self.max_lag

    def enter(self, item: Item) -> None:
        """Count the rows of an item that was put, and mark the rows that are too old."""
        del self._leases[item.request]
        self._admit(item)

    def move(self, item: Item, start: int, stop: int, *, taken: bool) -> None:
        """Move taken rows behind the rows that were taken before, or requeued rows in front of all waiting rows."""
        rows = range(start, stop)
        for row in rows if taken else reversed(rows):
            if (item, row) in self._ready:
                place = next(self._places)
                self._ready[item, row] = (0, place) if taken else (1, -place)

    def remove(self, item: Item, start: int, stop: int, reason: str) -> None:
        """Drop the ready rows among rows ``start`` to ``stop``, which frees their quota."""
        self._drop(sum(self._ready.pop((item, row), None) is not None for row in range(start, stop)), reason)

    # Versions

    def advance(self, version: int, trained: int | None = None) -> None:
        """Set the version in training. Accepted rows that became too old are dropped.

        Raises:
            ValueError: if the version does not increase, or fewer rows are ready than were trained on.
        """
        if version <= self.version:
            raise ValueError(
                f"advance({version}) while version {self.version} is in training: versions increase"
            )
        ready = len(self._ready)
        wanted = (version - self.version) * self.rows_per_version
        rows = min(wanted, ready) if trained is None else trained
        if not 0 <= rows <= ready:
            raise ValueError(f"advance(trained={rows}): expected 0 to {ready}, the rows that are ready")
        self._train(rows, version - 1)
        self.version = version
        self.restored = False
        self._drop_stale()
        self.evict()
        self._start()

    def expect(self, version: int) -> None:
        """Note that a sync sends a version: rows of it may arrive before the end of the sync is known here."""
        self.coming = max(self.coming, version)

    # Reports

    def stats(self) -> StalenessStats:
        """Return counts and versions."""
        ready, trained, dropped = len(self._ready), self.lags.total(), self.dropped.total()
        rows = RowCounts(self._submitted, ready, trained, dropped, self._count_running())
        waiting, reasons, lags = len(self._requests), dict(self.dropped), dict(self.lags)
        return StalenessStats(self.version, rows, waiting, reasons, lags, self.restored)

    def state(self) -> SavedState:
        """Return the state to save. Ready rows are saved with their items, in channels."""
        return {"stats": self.stats()}

    def restore(self, state: SavedState, rows: Iterable[Row]) -> None:
        """Continue from ``state`` with rows of items. Other rows count as dropped."""
        stats: StalenessStats = state["stats"]
        self.version = stats.version
        self.dropped, self.lags = Counter(stats.dropped), Counter(stats.lags)
        self._submitted, self.restored = stats.rows.submitted, True
        for item, row in rows:
            if not item.is_stale(row):  # a stale row was taken, and was trained on
                self._ready[item, row] = 1, next(self._places)
        self._drop(stats.rows.running, RESTORED)
        again = len(self._ready) - stats.rows.ready  # rows that were trained on, and are delivered once more
        self._submitted += max(0, again)
        self._drop(max(0, -again), NOT_SAVED)
        self._start()

    # Transitions

    def _start(self) -> None:
        """Answer the waiting lease requests that need not wait, in order of arrival."""
        while self._requests:
            request, (rows, done) = next(iter(self._requests.items()))
            if self._delay(rows):
                return
            del self._requests[request]
            self._leases[request] = rows
            self._submitted += rows
            done(self.version)

    def _delay(self, rows: int) -> str:
        """Return the reason why a lease has to wait, "" if it does not."""
        ready, running = len(self._ready), self._count_running()
        if ready + running < self.rows_per_version:
            return ""
        ahead = min(self.depth, self.max_lag)
        if ready + running + rows <= (ahead + 1) * self.rows_per_version:
            return ""
        return (
            f"{ready} rows are ready and {running} running, {self.rows_per_version} rows make a version, and at most "
            f"{ahead} versions may be ahead"
        )

    def _ordered(self) -> list[Row]:
        """Return the accepted rows in the order of training."""
        return sorted(self._ready, key=self._ready.__getitem__)

    def _is_late(self, version: int, place: int) -> bool:
        """Return whether the lag of a row would exceed ``max_lag``, with ``place`` rows in front of it."""
        return self.version + place // self.rows_per_version - version > self.max_lag

    def _admit(self, item: Item) -> tuple[int, ...]:
        """Count rows as ready, and return the positions of the accepted rows."""
        for row, version in enumerate(item.versions):
            if self._is_late(version, len(self._ready)):
                item.stale.add(row)
            else:
                self._ready[item, row] = 1, next(self._places)
        self._drop(len(item.stale), STALE)
        return tuple(row for row in range(len(item.versions)) if row not in item.stale)

    def _train(self, rows: int, last: int) -> None:
        """Count the first rows as trained on for the version in training and later ones up to ``last``.

        Rows that are too old were not delivered: they are skipped, and dropped afterwards.
        """
        done = 0
        for item, row in self._ordered():
            if done == rows:
                break
            trained = min(self.version + done // self.rows_per_version, last)
            lag = max(0, trained - item.versions[row])
            if lag <= self.max_lag:
                del self._ready[item, row]
                self.lags[lag] += 1
                done += 1

    def _drop_stale(self) -> None:
        """Drop the accepted rows whose lag would exceed ``max_lag``, and mark them in items. Later rows move up."""
        kept = dropped = 0
        for item, row in self._ordered():
            if self._is_late(item.versions[row], kept):
                del self._ready[item, row]
                item.stale.add(row)
                dropped += 1
            else:
                kept += 1
        self._drop(dropped, STALE)

    def _shrink(self, lease: RequestId, rows: int, versions: Sequence[int] = ()) -> bool:
        """Take rows out of a lease, which ends with its last row. Return False if it has ended before.

        Raises:
            ValueError: if there are more rows than still run, or a version is not in training yet.
        """
        if lease not in self._leases:
            return False
        if versions and max(versions) > max(self.version, self.coming):
            raise ValueError(
                f"a row of version {max(versions)} was accepted while version {self.version} is in training; call "
                "advance(version) before rows of that version are generated"
            )
        running = self._leases[lease]
        if rows > running:
            raise ValueError(f"{rows} rows of a lease: expected at most the {running} rows that run")
        self._leases[lease] -= rows
        if rows == running:
            del self._leases[lease]
        return True

    def _count_running(self) -> int:
        return sum(self._leases.values())

    def _drop(self, rows: int, reason: str) -> None:
        """Count dropped rows, whose quota is free for others."""
        if rows:
            count_reason(self.dropped, reason, rows)
            self._start()
