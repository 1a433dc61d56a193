"""``px.RestartPolicy``, ``px.ReplacePolicy``: when a broken group is to come back by itself, and how. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import DeclarationError


@dataclass(frozen=True)
class RestartPolicy:
    """``WorkerGroup(..., on_failure=px.RestartPolicy(max_restarts=2, window_s=600))``.

    The call in which the group broke raises its error, as always; the next call on the group restarts it first,
    and then runs in the new epoch. When there were ``max_restarts`` within the last ``window_s`` seconds, the
    group stays broken: a failure that comes back each time is not one that restarts mend.

    Raises:
        DeclarationError: a number that makes no sense.
    """

    max_restarts: int = 2
    window_s: float = 600.0

    def __post_init__(self) -> None:
        _check_count("px.RestartPolicy(max_restarts=", self.max_restarts)
        _check_window("px.RestartPolicy(window_s=", self.window_s)

    def recent(self, restarts: Sequence[float], now: float) -> list[float]:
        """Of the times of restarts, in seconds, those that count at ``now``."""
        return [at for at in restarts if now - at < self.window_s]

    def allows(self, restarts: Sequence[float], now: float) -> bool:
        """Return whether one more restart may be made at ``now``."""
        return len(self.recent(restarts, now)) < self.max_restarts


@dataclass(frozen=True)
class ReplacePolicy:
    """``WorkerGroup(..., on_failure=px.ReplacePolicy(max_failures=2, window_s=600))``.

    As :class:`RestartPolicy`, but only the lost ranks get new processes, by ``px.replace_ranks``: all go back to
    the last ``px.snapshot``. Where that cannot be, since there is none, no rank holds a lost state any more, or there
    is no room, the group is restarted. Whoever repeats the call that failed repeats it from the state of the snapshot.

    Args:
        max_failures: within ``window_s`` seconds; after that the group stays broken.
        max_preemptions: how often ranks may be lost whose node was announced to go (``px.preemption_notices``), in
            all; None: as often as that happens.

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
        """Of the times of failures, in seconds, those that count at ``now``."""
        return [at for at in failures if now - at < self.window_s]

    def allows(self, failures: Sequence[float], now: float) -> bool:
        """Return whether ranks may be replaced once more at ``now``."""
        return len(self.recent(failures, now)) < self.max_failures

    def allows_preemption(self, count: int) -> bool:
        """Return whether one more may be mended after ``count`` of them."""
        return self.max_preemptions is None or count < self.max_preemptions


def _check_count(what: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise DeclarationError(f"{what}{given!r}): expected a whole number, 0 or more")


def _check_window(what: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
        raise DeclarationError(f"{what}{given!r}): expected seconds, more than 0")
