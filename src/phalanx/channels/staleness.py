"""``px.StalenessManager``: how far generation may run ahead of training, kept by leases on rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from phalanx.calls.timeouts import checked
from phalanx.channels.lease_expiry import overdue_of
from phalanx.channels.payloads import PROCESS
from phalanx.channels.requests import answered, answered_async, others
from phalanx.channels.row_lease import RowLease, counted, failed
from phalanx.channels.service_client import Address, port_to, served
from phalanx.channels.services import Port, services
from phalanx.channels.staleness_server import Paced, StalenessService
from phalanx.channels.staleness_state import StalenessState
from phalanx.channels.staleness_state import StalenessStateMachine as Machine
from phalanx.display.tables import Table
from phalanx.errors import DeclarationError, StalenessTimeout
from phalanx.session import session as cluster
from phalanx.wire.value import Reduced

_numbers = itertools.count(1)


@dataclass(frozen=True)
class StalenessCard:
    """What a handle on a staleness is made from."""

    key: str
    max_lag: int
    rows_per_version: int
    depth: int
    backend: str
    address: Address | None


class StalenessManager:
    """Producers take leases on rows before they generate them; the trainer says which version it is at.

    The lag of a row is the version in training when it is trained on, minus that of its first token. No accepted row
    has a lag above ``max_lag``, given that rows are trained on in the order in which they were accepted. It paces: at
    most ``depth`` versions of rows are under way beside the one in training, however large ``max_lag`` is.

    A handle can be passed to methods of any groups; whoever made it owns it, and it ends with that process.

    Args:
        max_lag: versions that a row may be behind; 0: generation and training take turns.
        rows_per_version: rows that the trainer uses for one version.
        depth: versions of rows under way beside the one in training.
        version: the one in training at the beginning.
        backend: "ray" or "inline"; default as for pools.

    Raises:
        DeclarationError: a number is too small.
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
        self._serve(Machine(max_lag, rows_per_version, depth, version=version), backend)

    def _serve(self, machine: Machine, backend: str | None, *, restored: bool = False) -> None:
        transport = cluster.transport(backend)
        address, due_sooner = served(transport)
        key = f"staleness/{PROCESS}/{next(_numbers)}"
        service = StalenessService(key, machine, due_sooner=due_sooner, alone=transport.immediate)
        service.restored = restored
        services.add(service)
        self._card = StalenessCard(
            key, machine.max_lag, machine.rows_per_version, machine.depth, transport.name, address
        )

    @classmethod
    def _from_card(cls, card: StalenessCard) -> StalenessManager:
        staleness = cls.__new__(cls)
        staleness._card = card
        return staleness

    @classmethod
    def load(
        cls, state: StalenessState, *, with_ready: bool = False, backend: str | None = None
    ) -> StalenessManager:
        """One that goes on from what :meth:`save` gave. Leases that ran then are dropped, as "restored".

        Args:
            state: what ``save()`` gave.
            with_ready: whether the rows that were accepted and not trained on are there again; else they are dropped
                too, and their credit is back.
            backend: as for a new one.
        """
        staleness = cls.__new__(cls)
        staleness._serve(Machine.load(state, with_ready=with_ready), backend, restored=True)
        return staleness

    @property
    def card(self) -> StalenessCard:
        """What its handles are made from."""
        return self._card

    def save(self) -> StalenessState:
        """All that it is, as a value that pickles."""
        return self._asked("state")

    @property
    def rows_per_version(self) -> int:
        """Rows that the trainer uses for one version."""
        return self._card.rows_per_version

    @property
    def version(self) -> int:
        """The version in training."""
        return self._look().version

    @property
    def serving(self) -> int:
        """The version that new rows are generated with."""
        return self._look().serving

    @property
    def paced(self) -> Paced:
        """Rows submitted, ready, trained, dropped and running; those dropped by reason, those trained on by lag."""
        return self._look()

    def begin(
        self, rows: int, timeout: float | None = None, *, on_overdue: Callable[[], object] | None = None
    ) -> RowLease:
        """Wait until ``rows`` rows may be generated, and count them as running.

        Args:
            rows: how many.
            timeout: seconds to wait at most; None waits as long as it takes.
            on_overdue: called, on a thread of the library's own, when these rows have become too old while they still
                run: abort them.

        Raises:
            StalenessTimeout: training was too far behind for all of that time; the message says how far.
            PhalanxError: it was closed, or its owner is gone.
            ValueError: the last of so many rows would always be too old.
        """
        rows = counted(rows, "begin", "rows")
        port, reply, timeout = self._begin(rows, timeout)
        what = answered(self._card.key, port, reply, timeout, "begin", "of staleness")
        return self._lease(port, what, rows, on_overdue)

    async def begin_async(
        self, rows: int, timeout: float | None = None, *, on_overdue: Callable[[], object] | None = None
    ) -> RowLease:
        """The same as :meth:`begin`, awaited."""
        rows = counted(rows, "begin_async", "rows")
        port, reply, timeout = self._begin(rows, timeout)
        what = await answered_async(self._card.key, port, reply, timeout)
        return self._lease(port, what, rows, on_overdue)

    def _begin(self, rows: int, timeout: float | None) -> tuple[Port, Any, float | None]:
        timeout = checked(timeout, "StalenessManager.begin")
        port = self._port()
        overdue_of(port, self._card.key)
        return port, port.ask(self._card.key, "begin", rows, timeout), timeout

    def _lease(self, port: Port, what: Any, rows: int, on_overdue: Callable[[], object] | None) -> RowLease:
        match what:
            case ("begun", lease, version):
                return RowLease(self._card.key, port, lease, rows, version, on_overdue)
            case ("expired", behind):
                raise StalenessTimeout(f"begin({rows} rows): {behind}; wait longer, or train")
            case _:
                raise failed(what)

    def advance(self, version: int, *, trained: int | None = None, serving: bool = True) -> None:
        """Version ``version`` is in training from now on.

        Args:
            version: higher than before.
            trained: rows that were trained on since the last time; None: ``rows_per_version`` for each version.
            serving: whether new rows are generated with it from now on; else that is said by :meth:`serve`.

        Raises:
            ValueError: versions go up, and no more rows are trained on than were ready.
        """
        rows = None if trained is None else counted(trained, "advance", "trained")
        self._asked("advance", counted(version, "advance", "version"), rows, serving)

    def serve(self, version: int) -> None:
        """New rows are generated with ``version`` from now on.

        Raises:
            ValueError: it is older than the one before, or newer than the one in training.
        """
        self._asked("serve", counted(version, "serve", "version"))

    def close(self, reason: str = "it was closed") -> None:
        """Let no rows begin any more: whoever waits in ``begin`` is told. Leases that run go on. Idempotent.

        Raises:
            DeclarationError: another process made it.
        """
        service = services.get(self._card.key)
        if not isinstance(service, StalenessService):
            raise DeclarationError("this staleness belongs to the process that made it, which closes it")
        service.close(str(reason))

    def __enter__(self) -> StalenessManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def explain(self) -> Table:
        """Where all rows are, and how old those were that were trained on."""
        look = self._look()
        rows = look.rows
        table = (
            ("submitted", rows.submitted, f"{look.waiting} producers wait"),
            ("running", rows.running, ""),
            ("ready", rows.ready, ""),
            ("trained", rows.trained, ", ".join(f"{n} at lag {lag}" for lag, n in sorted(look.lags.items()))),
            ("dropped", rows.dropped, ", ".join(f"{n} {reason}" for reason, n in look.dropped.items())),
        )
        versions = f"version {look.version} in training, {look.serving} served"
        title = f"staleness: {versions}, at most {self._card.max_lag} behind"
        return Table(title, ("rows", "count", "more"), table)

    def _look(self) -> Paced:
        return self._asked("look")

    def _asked(self, verb: str, *args: Any) -> Any:
        what = self._port().ask(self._card.key, verb, *args).future.result()
        if isinstance(what, tuple) and what[0] in ("gone", "wrong"):
            raise failed(what)
        return what

    def _port(self) -> Port:
        port = port_to(self._card.key, self._card.address)
        others.note()
        return port

    def __reduce__(self) -> Reduced:
        return StalenessManager._from_card, (self._card,)

    def __repr__(self) -> str:
        card = self._card
        return f"<staleness: at most {card.max_lag} versions of {card.rows_per_version} rows behind>"
