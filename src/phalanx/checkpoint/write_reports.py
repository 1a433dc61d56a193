"""What the threads of ranks that write a staged save tell, and how the driver waits for their end."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.backends.backend_types import NotReady
from phalanx.calls.call import Call
from phalanx.calls.run_on import run_on
from phalanx.checkpoint.storage.storage import place_at
from phalanx.checkpoint.worker import checkpoint_handlers as questions
from phalanx.checkpoint.worker.checkpoint_requests import RankFiles, note_of
from phalanx.errors import CallCancelled, CheckpointError, GroupClosed, PhalanxError
from phalanx.group.epoch import Epoch
from phalanx.weights.sync_sides import Ranks

__all__ = ["Notes"]

_LOOK_S = (0.005, 0.1)
"""How often the driver looks for the notes of ranks' threads: at first, and at last."""
_ASK_S = 2.0
"""How often it asks the ranks themselves."""
_REST_S = 60.0
"""How long it waits for threads that are to stop: what they still write then, the next save removes."""


class Notes:
    """Those of one group's ranks for one step.

    Args:
        group: whose ranks write.
        epoch: of them, as they were told to.
        step: number of the step.
        folder: where their threads leave a note when they have ended.
    """

    def __init__(self, group: Ranks, epoch: Epoch, step: int, folder: str) -> None:
        self._group, self._epoch, self._step = group, epoch, step
        self._folder = folder
        self._place = place_at(folder)
        self._due = time.monotonic() + _ASK_S
        self._asked: Call | None = None

    def wait(self, cancelled: Callable[[], bool]) -> list[RankFiles]:
        """What each rank wrote, once all have.

        Raises:
            CheckpointError: a rank could not write, or is gone.
            GroupClosed: the group was closed.
            CallCancelled: ``cancelled()`` is true.
        """
        found: dict[int, RankFiles] = {}
        pause, last = _LOOK_S
        while True:
            if cancelled():
                raise CallCancelled(
                    f"the save of step {self._step} was cancelled; the steps before are whole",
                    group=self._group.core.name,
                )
            left = [index for index in range(len(self._group.ranks)) if index not in found]
            gone = {index: self._loss(index) for index in left}
            answers = self._answers(left)
            for index in left:
                data = self._place.read(note_of(index))
                told = answers.get(index) if data is None else pickle.loads(data)
                if told is not None:
                    found[index] = self._told(index, told)
                elif gone[index]:
                    raise CheckpointError(gone[index])
            if len(found) == len(self._group.ranks):
                break
            time.sleep(pause)
            pause = min(2 * pause, last)
        self._place.remove_folder("")
        return [found[index] for index in range(len(found))]

    def rest(self) -> None:
        """Have the threads stop, and wait until none of them writes any more."""
        left = set(range(len(self._group.ranks)))
        until = time.monotonic() + _REST_S
        asked: Call | None = None
        with contextlib.suppress(PhalanxError):  # a group that is closed or broken takes no questions
            asked = run_on(
                self._group.core,
                questions.rest,
                self._folder,
                ranks=self._group.ranks,
                title="px.save",
                checked=False,
                epoch=self._epoch,
            )
        while left and time.monotonic() < until:
            answers: dict[int, Any] = {}
            if asked is not None:
                with contextlib.suppress(PhalanxError):
                    answers = asked.answers(_LOOK_S[1])
            else:
                time.sleep(_LOOK_S[1])
            for index in list(left):
                answer = answers.get(self._group.ranks[index], NotReady(""))
                if not isinstance(answer, Exception) or self._noted(index) or not self._alive(index):
                    left.discard(index)

    def _noted(self, index: int) -> bool:
        with contextlib.suppress(PhalanxError):
            return self._place.size(note_of(index)) is not None
        return False

    def _alive(self, index: int) -> bool:
        return self._group.core.transport.alive(self._epoch.endpoints[self._group.ranks[index]])

    def _answers(self, left: Sequence[int]) -> dict[int, RankFiles | str]:
        """What the ranks of these places have answered by now; does not wait.

        Ranks whose notes do not come are asked: on a full disk there may be no room for one. They answer between
        their calls, and so later than by a note.
        """
        if time.monotonic() < self._due:
            return {}
        ranks = [self._group.ranks[index] for index in left]
        found: dict[int, Any] = {}
        # Of a group that is closed, or has lost a rank: that is seen apart.
        with contextlib.suppress(PhalanxError):
            if self._asked is None:
                self._asked = run_on(
                    self._group.core,
                    questions.told,
                    self._folder,
                    ranks=ranks,
                    title="px.save",
                    checked=False,
                )
            found = self._asked.answers(0.0)
        if not any(isinstance(one, NotReady) for one in found.values()):
            self._asked, self._due = None, time.monotonic() + _ASK_S
        places = {self._group.ranks[index]: index for index in left}
        return {
            places[rank]: one
            for rank, one in found.items()
            if rank in places and isinstance(one, RankFiles | str)
        }

    def _told(self, index: int, told: RankFiles | str) -> RankFiles:
        if isinstance(told, RankFiles):
            return told
        raise CheckpointError(
            f"rank {self._group.ranks[index]} of {self._group.name!r} could not write step {self._step}: {told}"
        )

    def _loss(self, index: int) -> str:
        """Why nothing is to be expected of a rank any more; asked before its note is looked for."""
        core, rank = self._group.core, self._group.ranks[index]
        if core.closed:
            raise GroupClosed(
                f"group {core.name!r} was closed before step {self._step} was written", group=core.name
            )
        if self._alive(index):
            return ""
        return (
            f"rank {rank} of {self._group.name!r} died while it wrote step {self._step}; that step is not "
            "saved, those before are whole"
        )
