"""Functions of the library itself run on ranks, beside the calls of users: also when the group takes no more calls.

They have their place in the order of each rank's calls, and are not counted, traced or compared as those are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.errors import DeclarationError, PhalanxError
from phalanx.runtime.calls.compose import encode_body
from phalanx.runtime.calls.watch import Watch
from phalanx.transport.base import FetchFailed, NotReady, Ref
from phalanx.wire.codec import Policy
from phalanx.wire.messages import HOST, OUTPUT, RankCall

if TYPE_CHECKING:
    from phalanx.runtime.groups.core import GroupCore

_GRACE_S = 0.5
_REFUSAL = f"{DeclarationError.__module__}.{DeclarationError.__qualname__}"


@dataclass(frozen=True)
class Asked:
    """What was sent to some ranks and may not have been answered yet."""

    core: GroupCore
    what: str
    ranks: tuple[int, ...]
    refs: tuple[Ref, ...]

    def _watch(self) -> Watch:
        core = self.core
        endpoints = [core.endpoints[rank] for rank in self.ranks]
        return Watch(core.transport, core.name, self.what, "", self.ranks, endpoints, self.refs, _GRACE_S)

    def check(self, seconds: float) -> None:
        """Wait for the answers for a while.

        Raises:
            DeclarationError: a rank refused. One that has not answered yet may still refuse.
            RemoteCallError, WorkerDiedError: anything else went wrong.
        """
        watch = self._watch()
        try:
            watch.values(self.core.now() + seconds, Policy.PRIVATE)
            return
        except NotReady:
            return
        except FetchFailed:
            error = watch.error()[0]
        for report in getattr(error, "failures", ()):
            if report.type_name == _REFUSAL:
                raise DeclarationError(f"group {self.core.name!r}, rank {report.rank}: {report.message}")
        raise error

    def answers(self, seconds: float | None) -> dict[int, Any]:
        """The answer of each rank; where it gave none, the error that says why. None waits as long as it takes."""
        core, watch = self.core, self._watch()
        found: dict[int, Any] = {}
        _, late = core.transport.wait(self.refs, len(self.refs), seconds)
        for position, rank in enumerate(self.ranks):
            if position in late:
                found[rank] = NotReady(f"rank {rank} has not answered: it is at a call")
                continue
            report = watch.report(position)
            if report is None:
                found[rank] = core.transport.fetch([self.refs[position]])[0]
            else:
                found[rank] = PhalanxError(f"rank {rank}: {report.message}")
        return found


def ask(core: GroupCore, what: str, ranks: Sequence[int], function: Callable[..., Any], *args: Any) -> Asked:
    """Have ``function(host, *args)`` run on some ranks, after the calls that were sent to them; does not wait.

    ``what`` names it in errors.
    """
    body, refs = encode_body(core.outlet, ((function, *args), {}))
    data = RankCall(core.new_number(), core.epoch, "", HOST, True, OUTPUT, False, False, body).pack()
    submit, endpoints = core.transport.submit, core.endpoints
    tickets = [submit(endpoints[rank], "", HOST, data, refs) for rank in ranks]
    return Asked(core, what, tuple(ranks), tuple(ticket.value for ticket in tickets))


def gather_before_end(core: GroupCore, seconds: float) -> None:
    """Fetch what profiles and recordings have gathered, before the ranks' processes end."""
    for gather in list(core.gathering):
        with contextlib.suppress(PhalanxError, NotReady, OSError):
            gather(seconds)
    core.gathering.clear()
