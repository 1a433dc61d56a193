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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

Done = Callable[[tuple[Any, ...]], None]
RequestId = tuple[str, int]
"""Name of a process, and its own number for a request."""
STALE, RESTORED, NOT_SAVED, NOT_PUT = "stale", "restored", "not saved", "could not be put"


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


@dataclass(slots=True)
class LeasedRows:
    """Rows that a producer generates. ``watch`` is answered when they become too old, or the lease ends."""

    peer: str
    rows: int
    version: int
    watch: Done | None = None


@dataclass(slots=True)
class ReadyRows:
    """Accepted rows of a version, which may wait in a channel. Rows of equal versions are not told apart."""

    version: int
    rows: int
    waits: bool


class StalenessState:
    """Leases, accepted rows and versions.

    ``evict(state, surplus)`` has the channels drop ``surplus`` rows of each version, their last ones, which became too
    old, and all rows that are older than ``oldest``.
    """

    def __init__(
        self,
        max_lag: int,
        rows_per_version: int,
        depth: int = 1,
        version: int = 0,
        *,
        evict: Callable[[StalenessState, Counter[int]], None] = lambda state, surplus: None,
    ) -> None:
        self.max_lag, self.rows_per_version, self.depth = max_lag, rows_per_version, depth
        self.version = self.serving = version
        self.restored = False
        self.closed: str | None = None
        self.dropped: Counter[str] = Counter()
        self.lags: Counter[int] = Counter()
        self._evict = evict
        self._submitted = self._trained = self._putting = self._next = 0
        self._ready: list[ReadyRows] = []
        self._taken: list[ReadyRows] = []
        self._leases: dict[int, LeasedRows] = {}
        self._requests: dict[RequestId, tuple[int, Done]] = {}

    # Leases

    def lease(self, request: RequestId, done: Done, rows: int) -> None:
        """Lease rows as soon as training has caught up, answered with ("leased", lease, version).

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
            done(("gone", self.closed))
        else:
            self._requests[request] = rows, done
            self._start()

    def cancel(self, request: RequestId) -> None:
        """Answer a request that still waits with ("behind", reason)."""
        if request in self._requests:
            rows, done = self._requests.pop(request)
            done(("behind", self._delay(rows) or "requests that came before it wait"))
            self._start()

    def watch(self, request: RequestId, done: Done, lease: int) -> None:
        """Answer ("overdue",) once the rows of a lease are too old, or ("over",) once it has ended."""
        found = self._leases.get(lease)
        if found is None:
            done(("over",))
        elif found.version < self.oldest:
            done(("overdue",))
        else:
            found.watch = done

    def accept(self, lease: int, versions: Sequence[int]) -> tuple[int, ...]:
        """Accept rows of a lease without a channel. Return the positions of the accepted rows."""
        if not self._shrink(lease, len(versions), versions):
            return ()
        good = self._admit(versions, waits=False)
        self._start()
        return good

    def begin_put(self, lease: int, versions: Sequence[int]) -> bool:
        """Note that rows of a lease wait at a channel. Return False if the lease has ended."""
        is_open = self._shrink(lease, len(versions), versions)
        self._putting += len(versions) * is_open
        return is_open

    def fail_put(self, rows: int) -> None:
        """Drop rows that a channel did not accept."""
        self._putting -= rows
        self._drop(rows, NOT_PUT)
        self._start()

    def drop(self, lease: int, rows: int, reason: str) -> None:
        """Drop running rows of a lease."""
        if self._shrink(lease, rows):
            self._drop(rows, reason)
            self._start()

    def end(self, lease: int, reason: str) -> None:
        """Drop the running rows of a lease, and forget the lease."""
        if lease in self._leases:
            self._drop(self._forget(lease).rows, reason)
            self._start()

    def peer_died(self, peer: str, why: str) -> None:
        """End the leases and requests of a dead process."""
        reason = f"{display_name(peer)}: {why}"
        for request in [request for request in self._requests if request[0] == peer]:
            self._requests.pop(request)[1](("gone", reason))
        for number in [number for number, lease in self._leases.items() if lease.peer == peer]:
            self.end(number, reason)
        self._start()

    def close(self, reason: str) -> None:
        """Reject new leases. Running leases continue."""
        self.closed = self.closed or reason
        requests, self._requests = self._requests, {}
        for _, done in requests.values():
            done(("gone", reason))

    # Rows in channels

    @property
    def oldest(self) -> int:
        """Oldest version that may be delivered."""
        return self.version - self.max_lag

    def enter(self, versions: Sequence[int]) -> frozenset[int]:
        """Count rows that were put, and return the positions of the rows that are too old."""
        self._putting -= len(versions)
        good = self._admit(versions, waits=True)
        return frozenset(range(len(versions))).difference(good)

    def take(self, versions: Sequence[int]) -> None:
        """Move rows behind the rows that were taken before."""
        for version, rows in _runs(versions):
            _append(self._taken, ReadyRows(version, _extract(self._ready, version, rows, True), False))

    def requeue(self, versions: Sequence[int]) -> None:
        """Move taken rows back in front of the ready rows."""
        for version, rows in reversed(_runs(versions)):
            self._ready.insert(0, ReadyRows(version, _extract(self._taken, version, rows, False), True))

    def remove(self, versions: Sequence[int], reason: str) -> None:
        """Drop ready rows, which frees their quota."""
        found = [_extract(self._ready, version, rows, True) for version, rows in _runs(versions)]
        self._drop(sum(found), reason)
        self._start()

    # Versions

    def advance(self, version: int, trained: int | None = None, serving: bool = True) -> None:
        """Set the version in training. Accepted rows that became too old are dropped.

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
        self._evict(self, self._drop_stale())
        for lease in self._leases.values():
            if lease.watch is not None and lease.version < self.oldest:
                lease.watch(("overdue",))
                lease.watch = None
        self._start()

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
        dropped = sum(self.dropped.values())
        rows = RowCounts(self._submitted, self._count_ready(), self._trained, dropped, self._count_running())
        waiting, lags = len(self._requests), dict(self.lags)
        return StalenessStats(
            self.version, self.serving, rows, waiting, dict(self.dropped), lags, self.restored
        )

    def state(self) -> dict[str, Any]:
        """Return the state to save, with the ready rows that are in no channel."""
        outside = [replace(rows) for rows in self._ready if not rows.waits]
        return {"stats": self.stats(), "outside": outside, "next": self._next}

    def restore(self, state: dict[str, Any], versions: Sequence[int]) -> None:
        """Continue from ``state`` with rows of these ``versions`` in channels. Other rows count as dropped."""
        stats: StalenessStats = state["stats"]
        self.version, self.serving, self._next = stats.version, stats.serving, state["next"]
        self.dropped, self.lags = Counter(stats.dropped), Counter(stats.lags)
        self._submitted, self._trained, self.restored = stats.rows.submitted, stats.rows.trained, True
        self._ready = state["outside"]
        for version, rows in _runs(versions):
            _append(self._ready, ReadyRows(version, rows, True))
        self._drop(stats.rows.running, RESTORED)
        self._drop(stats.rows.ready - self._count_ready(), NOT_SAVED)
        self._start()

    # Transitions

    def _start(self) -> None:
        """Answer the waiting lease requests that need not wait, in order of arrival."""
        while self._requests:
            request, (rows, done) = next(iter(self._requests.items()))
            if self._delay(rows):
                return
            del self._requests[request]
            number, self._next = self._next, self._next + 1
            self._leases[number] = LeasedRows(request[0], rows, self.serving)
            self._submitted += rows
            done(("leased", number, self.serving))

    def _delay(self, rows: int) -> str:
        """Return the reason why a lease has to wait, "" if it does not."""
        if self.serving < self.oldest:
            return f"engines still generate with version {self.serving} while {self.version} is in training"
        ready, running = self._count_ready(), self._count_running()
        if ready + running < self.rows_per_version:
            return ""
        ahead = min(self.depth, self.serving + self.max_lag - self.version)
        if ready + running + rows <= (ahead + 1) * self.rows_per_version:
            return ""
        return (
            f"{ready} rows are ready and {running} running, {self.rows_per_version} rows make a version, and at most "
            f"{ahead} versions may be ahead"
        )

    def _admit(self, versions: Sequence[int], *, waits: bool) -> tuple[int, ...]:
        before, good = self._count_ready(), list[int]()
        for row, version in enumerate(versions):
            lag = self.version + (before + len(good)) // self.rows_per_version - version
            if lag <= self.max_lag:
                good.append(row)
                _append(self._ready, ReadyRows(version, 1, waits))
        self._drop(len(versions) - len(good), STALE)
        return tuple(good)

    def _train(self, rows: int, last: int) -> None:
        """Count the first rows as trained on for the version in training and later ones up to ``last``.

        Rows that are too old were not delivered: they are skipped, and dropped afterwards.
        """
        done = 0
        for ready in (*self._taken, *self._ready):
            while ready.rows and done < rows:
                lag = min(self.version + done // self.rows_per_version, last) - ready.version
                if lag > self.max_lag:
                    break
                step = min(ready.rows, rows - done, self.rows_per_version - done % self.rows_per_version)
                self.lags[lag] += step
                ready.rows -= step
                done += step
        self._trained += done

    def _drop_stale(self) -> Counter[int]:
        """Drop the accepted rows whose lag would exceed ``max_lag``. Return those that wait in channels.

        Later rows move up.
        """
        surplus: Counter[int] = Counter()
        before = stale = 0
        for ready in (*self._taken, *self._ready):
            most = (ready.version - self.oldest + 1) * self.rows_per_version - before
            old = ready.rows - min(ready.rows, max(most, 0))
            surplus[ready.version] += old * ready.waits
            stale += old
            ready.rows -= old
            before += ready.rows
        for line in (self._taken, self._ready):
            line[:] = [ready for ready in line if ready.rows]
        self._drop(stale, STALE)
        return surplus

    def _shrink(self, lease: int, rows: int, versions: Sequence[int] = ()) -> bool:
        """Take rows out of a lease, which ends with its last row. Return False if it has ended before.

        Raises:
            ValueError: if there are more rows than still run, or a version is not in training yet.
        """
        if lease not in self._leases:
            return False
        if versions and max(versions) > self.version:
            raise ValueError(
                f"a row of version {max(versions)} was accepted while version {self.version} is in training; call "
                "advance(version) before rows of that version are generated"
            )
        running = self._leases[lease].rows
        if not 0 <= rows <= running:
            raise ValueError(f"{rows} rows of lease {lease}: expected at most the {running} rows that run")
        self._leases[lease].rows -= rows
        if rows == running:
            self._forget(lease)
        return True

    def _forget(self, lease: int) -> LeasedRows:
        found = self._leases.pop(lease)
        if found.watch is not None:
            found.watch(("over",))
        return found

    def _count_ready(self) -> int:
        return sum(ready.rows for ready in self._taken) + sum(ready.rows for ready in self._ready)

    def _count_running(self) -> int:
        return self._putting + sum(lease.rows for lease in self._leases.values())

    def _drop(self, rows: int, reason: str) -> None:
        if rows:
            self.dropped[reason] += rows


def _runs(versions: Sequence[int]) -> list[tuple[int, int]]:
    """Return consecutive equal versions with their numbers of rows."""
    return [(version, len([*rows])) for version, rows in groupby(versions)]


def _append(line: list[ReadyRows], ready: ReadyRows) -> None:
    """Append rows to a line, to its last entry if that is of the same kind."""
    if line and (line[-1].version, line[-1].waits) == (ready.version, ready.waits):
        line[-1].rows += ready.rows
    else:
        line.append(ready)


def _extract(line: list[ReadyRows], version: int, rows: int, waits: bool) -> int:
    """Remove the first rows of a kind from a line, and return how many of ``rows`` there were."""
    left = rows
    for ready in line:
        if (ready.version, ready.waits) == (version, waits):
            step = min(left, ready.rows)
            ready.rows -= step
            left -= step
    line[:] = [ready for ready in line if ready.rows]
    return rows - left
