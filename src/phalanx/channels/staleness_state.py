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

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

Done = Callable[[tuple[Any, ...]], None]
Token = tuple[Any, ...]
"""Key of a channel with the number of an item, or "lease" with the number of a lease and its running rows."""
STALE, RESTORED, NOT_SAVED, NOT_PUT = "stale", "restored", "not saved", "could not be put"


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
    serving: int
    """Version that new rows are generated with."""
    rows: RowCounts
    waiting: int
    """Producers that wait for a lease."""
    dropped: dict[str, int]
    """Rows by reason."""
    lags: dict[int, int]
    """Trained rows by lag."""
    restored: bool = False
    """True if the state was restored and no version has been in training since."""


@dataclass(slots=True, eq=False)
class LeaseRequest:
    """A producer that waits for a lease."""

    peer: str
    rows: int
    done: Done


@dataclass(slots=True)
class LeasedRows:
    """Rows that a producer generates."""

    peer: str
    rows: int
    version: int
    overdue: bool = False


@dataclass(slots=True)
class ReadyRows:
    """Accepted rows ``start`` to ``stop`` of an item or a lease, with the same version."""

    token: Token
    start: int
    stop: int
    version: int
    place: int
    """Position of the first row in the order of acceptance."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    def part(self, start: int, stop: int) -> ReadyRows:
        """Return the rows ``start`` to ``stop``."""
        return replace(self, start=start, stop=stop, place=self.place + start - self.start)


class StalenessState:
    """Leases, accepted rows and versions. ``overdue(peer, lease)`` is called for running leases that are too old."""

    def __init__(
        self,
        max_lag: int,
        rows_per_version: int,
        depth: int = 1,
        version: int = 0,
        *,
        overdue: Callable[[str, int], None] = lambda peer, lease: None,
    ) -> None:
        self.max_lag, self.rows_per_version, self.depth = max_lag, rows_per_version, depth
        self.version = self.serving = version
        self.restored = False
        self.closed: str | None = None
        self.dropped: Counter[str] = Counter()
        self.lags: Counter[int] = Counter()
        self._overdue = overdue
        self._submitted = self._trained = self._putting = self._places = self._next = 0
        self._ready: list[ReadyRows] = []
        self._taken: list[ReadyRows] = []
        self._leases: dict[int, LeasedRows] = {}
        self._requests: deque[LeaseRequest] = deque()

    # Leases

    def lease(self, peer: str, rows: int, done: Done) -> LeaseRequest | None:
        """Lease rows, answered with ("leased", lease, version). Return the request if it waits.

        Raises:
            ValueError: if the last of the rows would always be too old.
        """
        most = (self.max_lag + 1) * self.rows_per_version
        if not 1 <= rows <= most:
            raise ValueError(
                f"lease({rows} rows): expected 1 to {most} rows with max_lag={self.max_lag} and "
                f"rows_per_version={self.rows_per_version}; the last of more rows would always be too old"
            )
        request = LeaseRequest(peer, rows, done)
        if self.closed is not None:
            done(("gone", self.closed))
        else:
            self._requests.append(request)
            self._start()
        return request if request in self._requests else None

    def cancel(self, request: LeaseRequest) -> None:
        """Answer a request that still waits with ("behind", reason)."""
        if request in self._requests:
            self._requests.remove(request)
            request.done(("behind", self._delay(request.rows) or "requests that came before it wait"))
            self._start()

    def accept(self, lease: int, versions: Sequence[int]) -> tuple[int, ...]:
        """Accept rows of a lease without a channel. Return the positions of the accepted rows."""
        if lease not in self._leases:
            return ()
        token = ("lease", lease, self._leases[lease].rows)
        self._check_versions(versions)
        self._shrink(lease, len(versions))
        good = self._admit(token, versions)
        self._start()
        return good

    def begin_put(self, lease: int, versions: Sequence[int]) -> bool:
        """Note that rows of a lease wait at a channel. Return False if the lease has ended."""
        if lease not in self._leases:
            return False
        self._check_versions(versions)
        self._shrink(lease, len(versions))
        self._putting += len(versions)
        return True

    def fail_put(self, rows: int) -> None:
        """Drop rows that a channel did not accept."""
        self._putting -= rows
        self._drop(rows, NOT_PUT)
        self._start()

    def drop(self, lease: int, rows: int, reason: str) -> None:
        """Drop running rows of a lease."""
        if lease in self._leases:
            self._shrink(lease, rows)
            self._drop(rows, reason)
            self._start()

    def end(self, lease: int, reason: str) -> None:
        """Drop the running rows of a lease, and forget the lease."""
        found = self._leases.pop(lease, None)
        if found is not None:
            self._drop(found.rows, reason)
            self._start()

    def peer_died(self, peer: str, reason: str) -> None:
        """End the leases and requests of a dead process."""
        self._requests = deque(request for request in self._requests if request.peer != peer)
        for number in [number for number, lease in self._leases.items() if lease.peer == peer]:
            self.end(number, reason)
        self._start()

    def close(self, reason: str) -> None:
        """Reject new leases. Running leases continue."""
        self.closed = self.closed or reason
        requests, self._requests = self._requests, deque()
        for request in requests:
            request.done(("gone", reason))

    # Rows in channels

    @property
    def oldest(self) -> int:
        """Oldest version that may be delivered."""
        return self.version - self.max_lag

    def enter(self, token: Token, versions: Sequence[int]) -> frozenset[int]:
        """Count rows that were put, and return the positions of the rows that are too old."""
        self._putting -= len(versions)
        good = self._admit(token, versions)
        return frozenset(range(len(versions))).difference(good)

    def take(self, token: Token, start: int, stop: int) -> None:
        """Move rows behind the rows that were taken before."""
        self._ready, found = _extract(self._ready, token, start, stop)
        self._taken += found

    def requeue(self, token: Token, start: int, stop: int) -> None:
        """Move taken rows back to their places."""
        self._taken, found = _extract(self._taken, token, start, stop)
        self._ready = sorted([*self._ready, *found], key=lambda rows: rows.place)

    def remove(self, token: Token, start: int, stop: int, reason: str) -> None:
        """Drop accepted rows, which frees their quota."""
        self._ready, ready = _extract(self._ready, token, start, stop)
        self._taken, taken = _extract(self._taken, token, start, stop)
        self._drop(sum(rows.rows for rows in (*ready, *taken)), reason)
        self._start()

    # Versions

    def advance(self, version: int, trained: int | None = None, serving: bool = True) -> list[ReadyRows]:
        """Set the version in training. Return the accepted rows that became too old and were dropped.

        Raises:
            ValueError: if the version does not increase, or fewer rows are ready than were trained on.
        """
        if version <= self.version:
            raise ValueError(
                f"advance({version}) while version {self.version} is in training: versions increase"
            )
        ready = self._count_ready()
        wanted = (version - self.version) * self.rows_per_version
        rows = min(wanted, ready) if trained is None else trained
        if not 0 <= rows <= ready:
            raise ValueError(f"advance(trained={rows}): expected at most the {ready} rows that are ready")
        self._train(rows, version - 1)
        self.version = version
        self.serving = version if serving else self.serving
        self.restored = False
        stale = self._evict()
        for number, lease in self._leases.items():
            if not lease.overdue and lease.version < self.oldest:
                lease.overdue = True
                self._overdue(lease.peer, number)
        self._start()
        return stale

    def serve(self, version: int) -> None:
        """Set the version that new rows are generated with.

        Raises:
            ValueError: if it is not between the version served before and the version in training.
        """
        if not self.serving <= version <= self.version:
            raise ValueError(f"serve({version}): expected a version from {self.serving} to {self.version}")
        self.serving = version
        self._start()

    # Reports

    def stats(self) -> StalenessStats:
        """Return counts and versions."""
        running = self._putting + sum(lease.rows for lease in self._leases.values())
        dropped = sum(self.dropped.values())
        rows = RowCounts(self._submitted, self._count_ready(), self._trained, dropped, running)
        waiting, lags = len(self._requests), dict(self.lags)
        return StalenessStats(
            self.version, self.serving, rows, waiting, dict(self.dropped), lags, self.restored
        )

    def state(self) -> dict[str, Any]:
        """Return the state to save."""
        stats = self.stats()
        accepted = sorted((*self._taken, *self._ready), key=lambda rows: rows.place)
        return {"stats": stats, "accepted": [replace(rows) for rows in accepted], "next": self._next}

    def restore(self, state: dict[str, Any], accepted: Sequence[ReadyRows]) -> None:
        """Continue from ``state`` with the ``accepted`` rows that still exist. Other rows count as dropped."""
        stats: StalenessStats = state["stats"]
        self.version, self.serving, self._next = stats.version, stats.serving, state["next"]
        self.dropped, self.lags = Counter(stats.dropped), Counter(stats.lags)
        self._submitted, self._trained, self.restored = stats.rows.submitted, stats.rows.trained, True
        self._ready = list(accepted)
        self._places = max((rows.place + rows.rows for rows in accepted), default=0)
        self._drop(stats.rows.running, RESTORED)
        self._drop(stats.rows.ready - self._count_ready(), NOT_SAVED)
        self._start()

    # Transitions

    def _start(self) -> None:
        """Answer the waiting lease requests that need not wait, in order of arrival."""
        while self._requests and not self._delay(self._requests[0].rows):
            request = self._requests.popleft()
            number, self._next = self._next, self._next + 1
            self._leases[number] = LeasedRows(request.peer, request.rows, self.serving)
            self._submitted += request.rows
            request.done(("leased", number, self.serving))

    def _delay(self, rows: int) -> str:
        """Return the reason why a lease has to wait, "" if it does not."""
        if self.serving < self.oldest:
            return f"engines still generate with version {self.serving} while {self.version} is in training"
        ready = self._count_ready()
        running = self._putting + sum(lease.rows for lease in self._leases.values())
        if ready + running < self.rows_per_version:
            return ""
        ahead = min(self.depth, self.serving + self.max_lag - self.version)
        if ready + running + rows <= (ahead + 1) * self.rows_per_version:
            return ""
        return (
            f"{ready} rows are ready and {running} running, {self.rows_per_version} rows make a version, and at most "
            f"{ahead} versions may be ahead"
        )

    def _admit(self, token: Token, versions: Sequence[int]) -> tuple[int, ...]:
        before, good = self._count_ready(), list[int]()
        for row, version in enumerate(versions):
            if self.version + (before + len(good)) // self.rows_per_version - version > self.max_lag:
                continue
            good.append(row)
            last = self._ready[-1] if self._ready else None
            if last is not None and (last.token, last.stop, last.version) == (token, row, version):
                last.stop = row + 1
            else:
                self._ready.append(ReadyRows(token, row, row + 1, version, self._places))
            self._places += 1
        self._drop(len(versions) - len(good), STALE)
        return tuple(good)

    def _train(self, rows: int, last: int) -> None:
        """Count the first rows as trained on for the version in training and later ones up to ``last``.

        Rows that are too old were not delivered: they are skipped, and dropped afterwards.
        """
        done = 0
        for line in (self._taken, self._ready):
            place = 0
            while place < len(line) and done < rows:
                first = line[place]
                lag = min(self.version + done // self.rows_per_version, last) - first.version
                if lag > self.max_lag:
                    place += 1
                    continue
                step = min(first.rows, rows - done, self.rows_per_version - done % self.rows_per_version)
                self.lags[lag] += step
                line[place] = first.part(first.start + step, first.stop)
                if not line[place].rows:
                    line.pop(place)
                done += step
        self._trained += done

    def _evict(self) -> list[ReadyRows]:
        """Drop the accepted rows whose lag would exceed ``max_lag``. Later rows move up."""
        stale: list[ReadyRows] = []
        before = 0
        for name in ("_taken", "_ready"):
            kept: list[ReadyRows] = []
            for rows in getattr(self, name):
                most = (rows.version - self.oldest + 1) * self.rows_per_version - before
                middle = rows.start + min(rows.rows, max(most, 0))
                kept += [rows.part(rows.start, middle)] if rows.start < middle else []
                stale += [rows.part(middle, rows.stop)] if middle < rows.stop else []
                before += middle - rows.start
            setattr(self, name, kept)
        self._drop(sum(rows.rows for rows in stale), STALE)
        return stale

    def _shrink(self, lease: int, rows: int) -> None:
        running = self._leases[lease].rows
        if not 0 <= rows <= running:
            raise ValueError(f"{rows} rows of lease {lease}: expected at most the {running} rows that run")
        self._leases[lease].rows -= rows
        if rows == running:
            del self._leases[lease]

    def _check_versions(self, versions: Sequence[int]) -> None:
        if versions and max(versions) > self.version:
            raise ValueError(
                f"a row of version {max(versions)} was accepted while version {self.version} is in training; call "
                "advance(version) before rows of that version are generated"
            )

    def _count_ready(self) -> int:
        return sum(rows.stop - rows.start for rows in self._taken) + sum(
            rows.stop - rows.start for rows in self._ready
        )

    def _drop(self, rows: int, reason: str) -> None:
        if rows:
            self.dropped[reason] += rows


def _extract(
    line: list[ReadyRows], token: Token, start: int, stop: int
) -> tuple[list[ReadyRows], list[ReadyRows]]:
    """Return the other rows, and the rows ``start`` to ``stop`` of a token."""
    others: list[ReadyRows] = []
    found: list[ReadyRows] = []
    for rows in line:
        first, last = max(rows.start, start), min(rows.stop, stop)
        if rows.token != token or first >= last:
            others.append(rows)
            continue
        others += [rows.part(*part) for part in ((rows.start, first), (last, rows.stop)) if part[0] < part[1]]
        found.append(rows.part(first, last))
    return others, found
