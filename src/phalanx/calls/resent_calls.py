"""Calls of a view in another process: if a single rank refused the call, it is sent again, by the newest roster.

Refused calls of several ranks raise StaleEpoch instead: ranks that died may have begun the call.
"""

from __future__ import annotations

from typing import Any

from phalanx.backends.backend_types import FetchFailed, RankOutcome
from phalanx.calls.call_state import Results
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.group.roster import was_refused
from phalanx.wire.messages import ANY_EPOCH, Message

_MOST_REPEATS = 20


class ResentResults(Results):
    """Results of a call of a single rank. If the rank refused the call, it is sent again once its output is needed."""

    __slots__ = ("_at", "_core", "_message", "_number", "_repeats", "_returns")

    def __init__(
        self,
        core: Group,
        epoch: Epoch,
        rank: int,
        message: Message,
        returns: int,
        sent: Results,
    ) -> None:
        super().__init__(core.backend, [sent.reference(0)])
        self._core, self._returns = core, returns
        self._message = message
        self._number = epoch.number
        self._at = rank, epoch.endpoints[rank]
        self._repeats = 0

    def fetch(self, timeout: float | None) -> list[Any]:
        while True:
            try:
                return super().fetch(timeout)
            except FetchFailed:
                if not self._send_again():
                    raise

    def output(self, position: int) -> Any:
        return self.fetch(None)[position]

    def outcome(self, position: int) -> RankOutcome:
        found = super().outcome(position)
        while not found.ok and self._send_again():
            super().wait([position], 1, None)
            found = super().outcome(position)
        return found

    def _send_again(self) -> bool:
        """Send the call again if its rank refused it. Return whether it was sent."""
        found = super().outcome(0)
        if found.ok or self._repeats >= _MOST_REPEATS:
            return False
        if not was_refused(self._core, found, *self._at) or not self._can_run():
            return False
        self._repeats += 1
        self._send()
        return True

    def _can_run(self) -> bool:
        """Return whether a rank may run the call: any independent rank, or the same rank in a later epoch."""
        epoch = self._core.epoch
        if self._core.card.independent:
            return epoch.size > 0
        return epoch.number > self._number and self._at[0] < epoch.size

    def _send(self) -> None:
        core, epoch = self._core, self._core.epoch
        number = ANY_EPOCH if core.card.independent else epoch.number
        message = self._message.unpack()._replace(epoch=number).pack(self._message.refs)
        rank = self._at[0] % epoch.size
        endpoint = epoch.endpoints[rank]
        ticket = core.backend.submit(endpoint, message, self._returns)
        self._number = epoch.number
        self._at = rank, endpoint
        super().__init__(core.backend, [ticket])
