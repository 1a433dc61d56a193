"""One group's part of a step: ranks are asked what they have, told who writes what, and what they wrote is listed."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.calls.call import Call
from phalanx.checkpoint.checkpoint_rpc import Count, ask_same, outputs_of, send_each
from phalanx.checkpoint.storage.steps import StepWriter
from phalanx.checkpoint.storage.tensor_index import CATALOGUE, Catalogue
from phalanx.checkpoint.storage.write_plan import Offer, Spread, catalogue_of, spread
from phalanx.checkpoint.torch_metadata import METADATA, torch_metadata
from phalanx.checkpoint.worker import checkpoint_handlers as questions
from phalanx.checkpoint.worker.checkpoint_requests import RankFiles, WriteFiles, file_of, title_of
from phalanx.checkpoint.write_reports import Notes
from phalanx.display.byte_format import size
from phalanx.errors import CheckpointError, DeclarationError
from phalanx.group.group import Group
from phalanx.weights.sync_sides import Ranks

__all__ = ["GroupSave"]


@dataclass(frozen=True)
class _Begun:
    """What was sent: plans and folders by role."""

    plans: Mapping[str, Spread]
    folders: Mapping[str, str]


class _Turn:
    """One step at a time: the save of a second one waits until the first one's threads have ended.

    A run may have several views of one group, which are parts of one step.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._writer: StepWriter | None = None
        self._count = 0

    def take(self, writer: StepWriter) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._writer is None or self._writer is writer)
            self._writer = writer
            self._count += 1

    def give(self) -> None:
        with self._changed:
            self._count -= 1
            if not self._count:
                self._writer = None
                self._changed.notify_all()


_turns: weakref.WeakKeyDictionary[Group, dict[str, _Turn]] = weakref.WeakKeyDictionary()
"""By role."""


class GroupSave:
    """What a group writes into a step that somebody else opens, and commits after :meth:`finish`.

        with open_step(path, step) as writer:
            save = GroupSave(group, writer)
            save.begin()
            save.finish()
            writer.commit()

    Args:
        group: a group, a role of it, or some of its ranks.
        writer: of the step.
        prefix: of the folders that it makes there, such as "groups/policy/"; each role has one.
        cancelled: set by whoever wants a staged save to end before it is written.
        count: counts each rank that has staged or written; None: a bar of this group's own.
    """

    def __init__(
        self,
        group: Ranks,
        writer: StepWriter,
        prefix: str = "",
        cancelled: threading.Event | None = None,
        count: Count | None = None,
    ) -> None:
        self._group = group
        self._writer = writer
        self._prefix = prefix
        self._epoch = group.core.epoch
        self._begun: _Begun | None = None
        self._call: Call | None = None
        self._turn = _turns.setdefault(group.core, {}).setdefault(group.role, _Turn())
        self._has_turn = False
        self._notes: Notes | None = None
        self._cancelled = threading.Event() if cancelled is None else cancelled
        self._count = count
        self.nbytes = 0

    @property
    def title(self) -> str:
        """For traces and bars."""
        return f"save {self._group.name!r} step {self._writer.step}"

    def begin(self, *, staged: bool = False) -> None:
        """Plan, and have the ranks begin to write.

        Args:
            staged: return when each rank has copied what it is to write; threads write it. Else the ranks write in a
                call of theirs, which :meth:`finish` waits for.

        Raises:
            CheckpointError: the workers have no state, contradict each other, or changed it under way.
            As ``CallFuture.result``.
        """
        self._turn.take(self._writer)
        self._has_turn = True
        try:
            self._epoch = self._group.core.epoch
            plans = self._plans()
            folders = {role: self._writer.part(self._prefix + title_of(role)) for role in plans}
            notes = self._writer.part(f"{self._prefix}notes") if staged else ""
            if staged:
                self._notes = Notes(self._group, self._epoch, self._writer.step, notes)
            orders = [
                WriteFiles(
                    {role: plan.orders[index] for role, plan in plans.items()},
                    folders,
                    index,
                    notes,
                    {role: plan.nbytes(index) for role, plan in plans.items()},
                )
                for index in range(len(self._group.ranks))
            ]
            self._begun = _Begun(plans, folders)
            function = questions.stage if staged else questions.write
            self._call = send_each(
                self._group, f"{self.title}: {'stage' if staged else 'write'}", function, orders
            )
            if staged:
                outputs_of(self._group, self._call, f"{self.title}: staged", self._count)
        except BaseException as error:
            self.abandon(error)
            raise

    def _plans(self) -> dict[str, Spread]:
        alone = len(self._group.ranks) == 1
        title = f"{self.title}: plan"
        offers: list[dict[str, Offer]] = ask_same(
            self._group, title, questions.offer, self._group.role, alone
        )
        for rank, one in zip(self._group.ranks, offers, strict=True):
            if one.keys() != offers[0].keys():
                raise CheckpointError(
                    f"rank {rank} has a state of the roles {sorted(one)}, and rank {self._group.ranks[0]} of "
                    f"{sorted(offers[0])}; every rank must have the same roles"
                )
        return {role: spread([one[role] for one in offers]) for role in offers[0]}

    def finish(self) -> None:
        """Wait until all is written, and tell the step of it.

        Raises:
            CheckpointError: a rank could not write, or is gone.
            CallCancelled: somebody wanted it to end.
            As ``CallFuture.result``.
        """
        if self._begun is None or self._call is None:
            raise DeclarationError("a save is begun before it is finished: call begin() first")
        try:
            files: list[RankFiles]
            if self._notes is None:
                files = outputs_of(self._group, self._call, f"{self.title}: written", self._count)
            else:
                files = self._notes.wait(self._cancelled.is_set)
            for role, plan in self._begun.plans.items():
                self._list(role, plan, files)
        except BaseException as error:
            self.abandon(error)
            raise
        self._end()

    def _list(self, role: str, plan: Spread, files: Sequence[RankFiles]) -> None:
        part = self._prefix + title_of(role)
        names = [file_of(index) for index in range(len(files))]
        catalogue = catalogue_of(plan, names, [one.items[role] for one in files])
        self._writer.add({f"{part}/{name}": one.files[role] for name, one in zip(names, files, strict=True)})
        self._writer.write(f"{part}/{CATALOGUE}", catalogue.to_bytes())
        self._writer.write(f"{part}/{METADATA}", torch_metadata(catalogue))
        nbytes = sum(one.files[role].size for one in files)
        self.nbytes += nbytes
        self._writer.note(part, self._facts(role, catalogue, nbytes))

    def _facts(self, role: str, catalogue: Catalogue, nbytes: int) -> dict[str, Any]:
        ranks = f"{catalogue.world_size} rank{'s' if catalogue.world_size != 1 else ''}"
        return {
            "kind": "group",
            "text": f"{ranks}, {size(nbytes)}: {', '.join(catalogue.parts()) or 'nothing'}",
            "group": self._group.core.name,
            "role": role,
            "world_size": catalogue.world_size,
            "parts": list(catalogue.parts()),
            "tensors": len(catalogue.tensors),
            "values": len(catalogue.values),
        }

    def abandon(self, error: BaseException) -> None:
        """Let the next save of the group begin, once no rank writes this one any more. Idempotent.

        Its files may be removed then. After an interrupt or the like (``error`` is no ``Exception``) nothing is
        waited for.
        """
        if not self._has_turn:
            return
        try:
            if isinstance(error, Exception) and self._call is not None:
                with contextlib.suppress(Exception):  # it was raised, or is another group's to raise
                    self._call.result(None)
                if self._notes is not None:
                    self._notes.rest()
        finally:
            self._end()

    def _end(self) -> None:
        self._has_turn = False
        self._turn.give()
