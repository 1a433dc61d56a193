"""``px.RestartPolicy``, ``px.ReplacePolicy``: when a broken group is recovered automatically, and how. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import DeclarationError


@dataclass(frozen=True)
class RestartPolicy:
    """``WorkerGroup(..., on_failure=px.RestartPolicy(max_restarts=2, window_s=600))``.

    The call in which the group broke raises its error, as always; the next call on the group restarts it first, and
    then runs in the new epoch. After ``max_restarts`` restarts within the last ``window_s`` seconds, the group stays
    broken: restarts do not repair a failure that happens each time.

    Raises:
        DeclarationError: a number that makes no sense.
    """

    max_restarts: int = 2
    window_s: float = 600.0

    def __post_init__(self) -> None:
        _check_count("px.RestartPolicy(max_restarts=", self.max_restarts)
        _check_window("px.RestartPolicy(window_s=", self.window_s)

    def recent(self, restarts: Sequence[float], now: float) -> list[float]:
        """Return the times of restarts, in seconds, that count at ``now``."""
        return [at for at in restarts if now - at < self.window_s]

    def allows(self, restarts: Sequence[float], now: float) -> bool:
        """Return whether another restart is allowed at ``now``."""
        return len(self.recent(restarts, now)) < self.max_restarts


@dataclass(frozen=True)
class ReplacePolicy:
    """``WorkerGroup(..., on_failure=px.ReplacePolicy(max_failures=2, window_s=600))``.

    Like :class:`RestartPolicy`, but only the lost ranks get new processes, by ``px.replace_ranks``: all ranks go back
    to the last ``px.snapshot``. If that is impossible, since there is no snapshot, no rank has a lost state any more,
    or there is no capacity, the group is restarted. A caller that repeats the failed call repeats it from the state of
    the snapshot.

    Args:
        max_failures: within ``window_s`` seconds; after that the group stays broken.
        max_preemptions: number of times that ranks may be lost because their node was drained
            (``px.preemption_notices``), in all; None: no limit.

    Raises:
        DeclarationError: a number that makes no sense.
    """

    max_failures: int = 2
    window_s: float = 600.0
    max_preemptions: int | None = None

    def __post_init__(self) -> None:
        _check_count("px.ReplacePolicy(max_failures=", self.max_failures)
        _check_window("px.ReplacePolicy(window_s=", self.window_s)
        if self.max_preemptions is not None:
            _check_count("px.ReplacePolicy(max_preemptions=", self.max_preemptions)

    def recent(self, failures: Sequence[float], now: float) -> list[float]:
        """Return the times of failures, in seconds, that count at ``now``."""
        return [at for at in failures if now - at < self.window_s]

    def allows(self, failures: Sequence[float], now: float) -> bool:
        """Return whether ranks may be replaced once more at ``now``."""
        return len(self.recent(failures, now)) < self.max_failures

    def allows_preemption(self, count: int) -> bool:
        """Return whether another preemption may be recovered after ``count`` of them."""
        return self.max_preemptions is None or count < self.max_preemptions


def _check_count(what: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise DeclarationError(f"{what}{given!r}): expected a whole number, 0 or more")


def _check_window(what: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
        raise DeclarationError(f"{what}{given!r}): expected seconds, more than 0")
