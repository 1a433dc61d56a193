"""``px.Restart``: when a broken group is to come back by itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import DeclarationError


@dataclass(frozen=True)
class Restart:
    """``WorkerGroup(..., on_failure=px.Restart(max_restarts=2, window_s=600))``.

    The call in which the group broke raises its error, as always; the next call on the group restarts it first,
    and then runs in the new epoch. When there were ``max_restarts`` within the last ``window_s`` seconds, the
    group stays broken: a failure that comes back each time is not one that restarts mend.

    Raises:
        DeclarationError: a number that makes no sense.
    """

    max_restarts: int = 2
    window_s: float = 600.0

    def __post_init__(self) -> None:
        count, window = self.max_restarts, self.window_s
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise DeclarationError(f"px.Restart(max_restarts={count!r}): expected a whole number, 0 or more")
        if isinstance(window, bool) or not isinstance(window, int | float) or not window > 0:
            raise DeclarationError(f"px.Restart(window_s={window!r}): expected seconds, more than 0")

    def recent(self, restarts: Sequence[float], now: float) -> list[float]:
        """Of the times of restarts, in seconds, those that count at ``now``."""
        return [at for at in restarts if now - at < self.window_s]

    def allows(self, restarts: Sequence[float], now: float) -> bool:
        """Whether one more restart may be made at ``now``."""
        return len(self.recent(restarts, now)) < self.max_restarts
