"""State changes of groups, recorded while a test runs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

from phalanx.errors import PhalanxError
from phalanx.group.lifecycle import TRANSITIONS, Event, Lifecycle, State


class Step(NamedTuple):
    """An event and the states before and after it. A stale event is of an older epoch."""

    before: State
    event: Event
    after: State
    stale: bool

    @property
    def allowed(self) -> bool:
        """True if the table of transitions has the step."""
        after = self.before if self.stale else TRANSITIONS.get((self.before, self.event))
        return after is self.after


@contextmanager
def noted_steps() -> Generator[list[Step]]:
    """Record the steps of all groups in the block."""
    steps: list[Step] = []
    handle = Lifecycle.handle

    def noting(
        self: Lifecycle, event: Event, epoch: int | None = None, cause: PhalanxError | None = None
    ) -> None:
        before, stale = self.state, epoch is not None and epoch < self.epoch
        handle(self, event, epoch, cause)
        steps.append(Step(before, event, self.state, stale))

    with mock.patch.object(Lifecycle, "handle", noting):
        yield steps
