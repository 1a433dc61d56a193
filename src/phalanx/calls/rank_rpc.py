"""Functions of the library itself run on ranks, beside the calls of users: also when the group takes no more calls.

They have their place in the order of each rank's calls, and are not counted, traced or compared as those are.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.backends.backend_types import NotReady
from phalanx.calls.compose import encode_body
from phalanx.calls.rank_monitor import RankMonitor
from phalanx.calls.submitter import Outgoing
from phalanx.collect.failures import combine
from phalanx.errors import DeclarationError, PhalanxError, RankReport
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.wire.messages import HOST, Message, RankCall
from phalanx.wire.outputs import OUTPUT
from phalanx.wire.value import Value

_GRACE_S = 0.5
_REFUSAL = f"{DeclarationError.__module__}.{DeclarationError.__qualname__}"


@dataclass(frozen=True)
class PendingRpc:
    """What was sent to some ranks and may not have been answered yet."""

    watch: RankMonitor

    def check(self, seconds: float) -> None:
        """Wait for the answers for a while.

        Raises:
            DeclarationError: a rank refused. One that has not answered yet may still refuse.
            RemoteCallError, WorkerDiedError: anything else went wrong.
        """
        watch = self.watch
        reports = self._reports(seconds)
        refusal = _refusal_in(reports)
        if refusal is not None:
            raise DeclarationError(f"group {watch.group!r}, {refusal}")
        if reports:
            raise combine(watch.group, watch.method, reports)

    def refusal(self) -> str | None:
        """What a rank says that has refused, by a ``DeclarationError``; does not wait."""
        return _refusal_in(self._reports(0))

    def _reports(self, seconds: float) -> list[RankReport]:
        watch = self.watch
        everyone = range(len(watch.ranks))
        answered, _ = watch.arrivals.wait(everyone, len(everyone), seconds)
        return [report for report in map(watch.report, answered) if report is not None]

    def answers(self, seconds: float | None) -> dict[int, Any]:
        """The answer of each rank; where it gave none, the error that says why. None waits as long as it takes."""
        watch = self.watch
        found: dict[int, Any] = {}
        everyone = range(len(watch.ranks))
        _, late = watch.arrivals.wait(everyone, len(everyone), seconds)
        for position, rank in enumerate(watch.ranks):
            if position in late:
                found[rank] = NotReady(f"rank {rank} has not answered: it is at a call")
                continue
            report = watch.report(position)
            if report is None:
                found[rank] = watch.arrivals.output(position)
            else:
                found[rank] = PhalanxError(f"rank {rank}: {report.message}")
        return found


def _refusal_in(reports: Sequence[RankReport]) -> str | None:
    return next((f"rank {one.rank}: {one.message}" for one in reports if one.type_name == _REFUSAL), None)


def ask(
    core: Group,
    what: str,
    ranks: Sequence[int],
    function: Callable[..., Any],
    *args: Value,
    number: int | None = None,
    epoch: Epoch | None = None,
) -> PendingRpc:
    """Have ``function(host, *args)`` run on some ranks, after the calls that were sent to them; does not wait.

    ``what`` names it in errors; ``number`` is that of the call, where ranks are to know it by one of the library's
    own; ``epoch`` is the present one unless another one is given.
    """
    epoch = core.epoch if epoch is None else epoch
    body, refs = encode_body(core.outlet, ((function, *args), {}))
    number = core.new_number() if number is None else number
    data = RankCall(number, epoch.number, "", HOST, True, OUTPUT, False, False, body).pack()
    messages = itertools.repeat(Message(data, refs), len(ranks))
    arrivals = core.door.submit(epoch, Outgoing("", HOST, ranks, messages))
    watch = RankMonitor(
        transport=core.transport,
        group=core.name,
        method=what,
        role="",
        ranks=tuple(ranks),
        endpoints=[epoch.endpoints[rank] for rank in ranks],
        arrivals=arrivals,
        grace_s=_GRACE_S,
        started=core.transport.now(),
        numbers=[number] * len(ranks),
    )
    return PendingRpc(watch)


def gather_before_end(core: Group, seconds: float) -> None:
    """Fetch what was gathered on the ranks, before the ranks' processes end."""
    for gather in list(core.life.before_end):
        with contextlib.suppress(PhalanxError, NotReady, OSError):
            gather(seconds)
    core.life.before_end.clear()
