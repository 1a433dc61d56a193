"""How far generation may run ahead of training: bounded staleness as a state machine. Pure.

Producer -> `Begin(rows)` -> waits -> `Begun(lease)` -> it generates -> `Accept(lease, rows, versions)`, in parts ->
`Accepted` | `Refused`; what it does not accept it drops, or `End` does. Trainer -> `Advance(version)` after each
version it has trained; engines -> `Serve(version)` when they generate with it. The link
(`runtime/links/staleness.py`, `px.StalenessStateMachine`) sends these, owns the clock, and takes rows that are
`Evicted` out of the channel they lie in.

The *lag* of a row is the version in training when it is trained on, minus that of its first token. Rows are
trained on in the order in which they were accepted, `rows_per_version` of them per version, so the lag of a row
is known when it is accepted: the version in training plus the full versions of rows before it. No row is accepted
whose lag would be above `max_lag`.

Two limits hold a `Begin` back. The bound: were all rows under way accepted, its last row would be trained on more
than `max_lag` versions behind. The pace: at most `depth` versions of rows are under way beside the one in training,
however large `max_lag` is, so that lag is what stragglers need and not what is allowed. Neither holds it back while
all rows under way cannot fill the next version: the trainer would wait for ever. Its last rows may then come too
late and be dropped: let `rows_per_version` be a multiple of the rows of a lease where `max_lag` is 0.

Credit is what is not under way: rows that are dropped, filtered, aborted or lost count no more from that moment.
No total since the start enters, so nothing bursts after a restart.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.channels.numbers import whole_number
from phalanx.channels.ready import Ready, ReadyRows
from phalanx.channels.staleness_messages import (
    Accept,
    Accepted,
    Advance,
    Begin,
    Begun,
    Cancel,
    Discard,
    Drop,
    Dropped,
    End,
    Event,
    Evicted,
    Expired,
    Instruction,
    Overdue,
    Refused,
    Serve,
    Tick,
    Withdrawn,
)
from phalanx.errors import DeclarationError, InternalError

STALE: Literal["stale"] = "stale"


@dataclass(frozen=True)
class Lease:
    """Rows that a producer generates: `rows` still run, `accepted` were accepted. `version` is that of new rows when
    it began."""

    number: int
    rows: int
    version: int
    accepted: int = 0
    overdue: bool = False


@dataclass(frozen=True)
class Rows:
    """Where all rows are that leases began: submitted = accepted + dropped + running; accepted = ready + trained."""

    submitted: int
    ready: int
    trained: int
    dropped: int
    running: int

    @property
    def accepted(self) -> int:
        return self.ready + self.trained


@dataclass(frozen=True)
class StalenessState:
    """What is saved. Running leases are in it so that they can be counted as dropped when it is loaded."""

    max_lag: int
    rows_per_version: int
    depth: int
    version: int
    serving: int
    ready: tuple[Ready, ...]
    running: int
    submitted: int
    trained: int
    dropped: dict[str, int]
    lags: dict[int, int]
    next_lease: int


class StalenessStateMachine:
    """The machine.

    Args:
        max_lag: versions that a row may be behind when it is trained on; 0: generation and training take turns.
        rows_per_version: rows that the trainer uses for one version.
        depth: versions of rows under way beside the one in training; a larger one fills more of `max_lag`.

    Raises:
        DeclarationError: a number is too small.
    """

    def __init__(self, max_lag: int, rows_per_version: int, depth: int = 1, *, version: int = 0) -> None:
        lag, rows, ahead, first = map(whole_number, (max_lag, rows_per_version, depth, version))
        if lag is None or rows is None or ahead is None or first is None or min(lag, ahead, rows - 1) < 0:
            raise DeclarationError(
                f"StalenessStateMachine(max_lag={max_lag!r}, rows_per_version={rows_per_version!r}, depth={depth!r},"
                f" version={version!r}): give whole numbers, from 0 for max_lag and depth, from 1 for rows_per_version"
            )
        self.max_lag, self.rows_per_version, self.depth = lag, rows, ahead
        self.version = self.serving = first
        """The version in training, and the one that new rows are generated with."""
        self.dropped: dict[str, int] = {}
        """Rows by reason."""
        self.lags: dict[int, int] = {}
        """Rows trained on, by lag."""
        self._submitted = self._trained = self._next_lease = 0
        self._leases: dict[int, Lease] = {}
        self._ready = ReadyRows(rows_per_version)
        self._begins: dict[Hashable, Begin] = {}

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event in, at `now` seconds of a clock that never goes back; what is to be done, in order.

        Raises:
            ValueError: the event cannot be: more rows than the lease has, a version that is not there yet.
            InternalError: the ticket is that of another request that waits.
        """
        done = [*self._changed(event), *self._start()]
        while (late := self._late(now)) is not None:
            behind = self._behind(late.rows) or "requests that came before it wait"
            del self._begins[late.ticket]
            done += [Expired(late.ticket, behind), *self._start()]
        return done

    @property
    def rows(self) -> Rows:
        dropped = sum(self.dropped.values())
        return Rows(self._submitted, self._ready.rows, self._trained, dropped, self._running)

    @property
    def leases(self) -> tuple[Lease, ...]:
        return tuple(self._leases.values())

    @property
    def waiting(self) -> tuple[Begin, ...]:
        """Producers that wait, in order of arrival."""
        return tuple(self._begins.values())

    @property
    def wake_at(self) -> float | None:
        """When the next deadline passes: send a `Tick` then."""
        deadlines = (begin.deadline for begin in self._begins.values())
        return min((each for each in deadlines if each is not None), default=None)

    @property
    def ready_leases(self) -> frozenset[int]:
        """The leases that accepted rows which wait to be trained on."""
        return frozenset(ready.lease for ready in self._ready)

    def state(self) -> StalenessState:
        return StalenessState(
            self.max_lag,
            self.rows_per_version,
            self.depth,
            self.version,
            self.serving,
            tuple(self._ready),
            self._running,
            self._submitted,
            self._trained,
            dict(self.dropped),
            dict(self.lags),
            self._next_lease,
        )

    @classmethod
    def load(cls, state: StalenessState, *, with_ready: bool = True) -> StalenessStateMachine:
        """A machine that goes on from `state`. What was running is dropped, as "restored".

        `with_ready` False: the rows that were ready were not saved with their channel, and are dropped too.
        """
        machine = cls(state.max_lag, state.rows_per_version, state.depth, version=state.version)
        machine.serving = state.serving
        machine.dropped, machine.lags = dict(state.dropped), dict(state.lags)
        machine._submitted, machine._trained = state.submitted, state.trained
        machine._next_lease = state.next_lease
        machine._ready = ReadyRows(state.rows_per_version, state.ready if with_ready else ())
        gone = state.running + (0 if with_ready else sum(ready.rows for ready in state.ready))
        machine._count_dropped(gone, "restored")
        return machine

    def _changed(self, event: Event) -> list[Instruction]:
        match event:
            case Begin():
                self._begin(event)
                return []
            case Cancel():
                return [Withdrawn(event.ticket, self._begins.pop(event.ticket, None) is not None)]
            case Accept():
                return self._accept(event)
            case Drop():
                return self._drop(event.lease, event.rows, event.reason)
            case End():
                lease = self._leases.pop(event.lease, None)
                return self._let_go(event.lease, lease.rows if lease else 0, event.reason)
            case Discard():
                return self._discard(event)
            case Advance():
                return self._advance(event)
            case Serve():
                self._serve(event.version)
                return []
            case Tick():
                return []

    def _begin(self, begin: Begin) -> None:
        most = (self.max_lag + 1) * self.rows_per_version
        if not 1 <= begin.rows <= most:
            raise ValueError(
                f"begin({begin.rows} rows): give 1 to {most}; with max_lag={self.max_lag} and"
                f" rows_per_version={self.rows_per_version} the last of more would always be too old"
            )
        if begin.ticket in self._begins:
            raise InternalError(f"ticket {begin.ticket!r} of a staleness is that of another that waits")
        self._begins[begin.ticket] = begin

    def _accept(self, event: Accept) -> list[Instruction]:
        lease = self._leases.get(event.lease)
        if lease is None:
            return [Refused(event.lease, tuple(range(event.rows)), "ended")]
        self._check_rows(event.lease, event.rows)
        good: list[int] = []
        before = self._ready.rows
        for place, version in enumerate(self._versions(event)):
            if self.version + (before + len(good)) // self.rows_per_version - version <= self.max_lag:
                self._ready.append(event.lease, lease.accepted + len(good), version)
                good.append(place)
        old = tuple(sorted(set(range(event.rows)).difference(good)))
        self._leases[event.lease] = replace(lease, accepted=lease.accepted + len(good))
        self._shrink(event.lease, event.rows)
        accepted: list[Instruction] = [Accepted(event.lease, tuple(good))] if good else []
        refused: list[Instruction] = [Refused(event.lease, old, STALE)] if old else []
        return [*accepted, *refused, *self._let_go(event.lease, len(old), STALE)]

    def _versions(self, event: Accept) -> Sequence[int]:
        versions = [event.versions] * event.rows if isinstance(event.versions, int) else event.versions
        if len(versions) != event.rows:
            raise ValueError(
                f"accept({event.rows} rows) with {len(versions)} versions: give one for each row"
            )
        if versions and max(versions) > self.version:
            raise ValueError(
                f"accept() of a row of version {max(versions)} while {self.version} is in training: say"
                " advance(version) before rows of that version are generated"
            )
        return versions

    def _drop(self, lease: int, rows: int, reason: str) -> list[Instruction]:
        self._check_rows(lease, rows)
        if lease not in self._leases:
            return []
        self._shrink(lease, rows)
        return self._let_go(lease, rows, reason)

    def _discard(self, event: Discard) -> list[Instruction]:
        removed = self._ready.remove(event.lease, event.start, event.stop)
        return self._let_go(event.lease, removed, event.reason)

    def _advance(self, event: Advance) -> list[Instruction]:
        if event.version <= self.version:
            raise ValueError(f"advance({event.version}) while {self.version} is in training: versions go up")
        most = self._ready.rows
        wanted = (event.version - self.version) * self.rows_per_version
        trained = min(wanted, most) if event.trained is None else event.trained
        if not 0 <= trained <= most:
            raise ValueError(
                f"advance(trained={trained}) of {most} rows that are ready: give as many or fewer"
            )
        for lag, rows in self._ready.train(trained, self.version, event.version - 1).items():
            self.lags[lag] = self.lags.get(lag, 0) + rows
        self._trained += trained
        self.version = event.version
        self.serving = event.version if event.serving else self.serving
        return [*self._evict(), *self._overdue()]

    def _evict(self) -> list[Instruction]:
        done: list[Instruction] = []
        for old in self._ready.evict(self.version, self.max_lag):
            done.append(Evicted(old.lease, old.start, old.stop))
            done += self._let_go(old.lease, old.rows, STALE)
        return done

    def _overdue(self) -> list[Instruction]:
        late = [
            lease
            for lease in self._leases.values()
            if not lease.overdue and lease.version + self.max_lag < self.version
        ]
        for lease in late:
            self._leases[lease.number] = replace(lease, overdue=True)
        return [Overdue(lease.number) for lease in late]

    def _serve(self, version: int) -> None:
        if not self.serving <= version <= self.version:
            raise ValueError(
                f"serve({version}) while engines generate with {self.serving} and {self.version} is in"
                " training: give a version between the two"
            )
        self.serving = version

    def _start(self) -> list[Instruction]:
        """Those who wait and need not, in order of arrival."""
        begun: list[Instruction] = []
        for begin in list(self._begins.values()):
            if self._behind(begin.rows):
                break
            del self._begins[begin.ticket]
            lease = Lease(self._next_lease, begin.rows, self.serving)
            self._next_lease += 1
            self._leases[lease.number] = lease
            self._submitted += begin.rows
            begun.append(Begun(begin.ticket, lease.number, self.serving))
        return begun

    def _behind(self, rows: int) -> str:
        """What rows that begin now would have to wait for, in words; "" if for nothing."""
        if self.serving + self.max_lag < self.version:
            return f"engines still generate with version {self.serving} while {self.version} is in training"
        under_way = self._ready.rows + self._running
        if under_way < self.rows_per_version:
            return ""
        ahead = min(self.depth, self.serving + self.max_lag - self.version)
        if under_way + rows <= (ahead + 1) * self.rows_per_version:
            return ""
        return (
            f"{self._ready.rows} rows are ready and {self._running} running, where {self.rows_per_version}"
            f" make a version and at most {ahead} versions may be ahead"
        )

    def _late(self, now: float) -> Begin | None:
        begins = self._begins.values()
        return next((each for each in begins if each.deadline is not None and each.deadline <= now), None)

    def _check_rows(self, number: int, rows: int) -> None:
        lease = self._leases.get(number)
        if rows < 0 or (lease is not None and rows > lease.rows):
            running = lease.rows if lease else 0
            raise ValueError(
                f"{rows} rows of lease {number}, which has {running} running: give as many or fewer"
            )

    def _shrink(self, number: int, rows: int) -> None:
        lease = self._leases[number]
        if rows == lease.rows:
            del self._leases[number]
        else:
            self._leases[number] = replace(lease, rows=lease.rows - rows)

    def _let_go(self, lease: int, rows: int, reason: str) -> list[Instruction]:
        self._count_dropped(rows, reason)
        return [Dropped(lease, rows, reason)] if rows else []

    def _count_dropped(self, rows: int, reason: str) -> None:
        if rows:
            self.dropped[reason] = self.dropped.get(reason, 0) + rows

    @property
    def _running(self) -> int:
        return sum(lease.rows for lease in self._leases.values())
