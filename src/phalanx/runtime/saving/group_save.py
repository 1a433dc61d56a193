"""One group's part of a step: ranks are asked what they have, told who writes what, and what they wrote is listed."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.declare.spec import MethodSpec
from phalanx.dispatch.plan import CallPlan, Each, GatherPlan, Same
from phalanx.errors import DeclarationError, GroupClosed, PhalanxError, SaveError
from phalanx.execution.saving import questions
from phalanx.execution.saving.orders import RankFiles, WriteFiles, file_of, note_of, title_of
from phalanx.runtime.calls.call import Call
from phalanx.runtime.calls.future import CallFuture
from phalanx.runtime.calls.request import CallRequest
from phalanx.runtime.groups.ask import Asked, ask
from phalanx.runtime.groups.core import GroupCore
from phalanx.runtime.links.sides import Ranks
from phalanx.runtime.saving.torch_metadata import METADATA, torch_metadata
from phalanx.saving.catalogue import CATALOGUE, Catalogue
from phalanx.saving.places import place_at
from phalanx.saving.spread import Offer, Spread, catalogue_of, spread
from phalanx.saving.steps import StepWriter
from phalanx.show.progress import progress
from phalanx.show.sizes import size
from phalanx.transport.base import NotReady
from phalanx.wire.messages import HOST

__all__ = ["GroupSave", "checked_group", "send_each"]

_LOOK_S = (0.005, 0.1)
"""How often the driver looks for the notes of ranks' threads: at first, and at last."""
_ASK_S = 2.0
"""How often it asks the ranks themselves."""


def checked_group(given: Any, verb: str) -> Ranks:
    """A group, a role of it, or some of its ranks.

    Raises:
        DeclarationError: it is none of these.
    """
    if isinstance(getattr(given, "core", None), GroupCore) and given.ranks:
        return given
    raise DeclarationError(
        f"{verb}: {given!r} is no group; give a group, a role of it such as group.actor, or some of its ranks"
    )


def send_each(group: Ranks, title: str, function: Callable[..., Any], values: Sequence[Any]) -> Call:
    """Have a function of the library run on all ranks of ``group``, each with its own value.

    Raises:
        GroupClosed, GroupBroken: the group takes no calls.
    """
    plan = CallPlan(
        tuple(group.ranks), (Same(function), Each(values)), {}, GatherPlan("list", range(len(group.ranks)))
    )
    return group.core.send(CallRequest(plan, MethodSpec(HOST, title=title), ""))


def ask_same(group: Ranks, title: str, function: Callable[..., Any], *values: Any) -> list[Any]:
    """The same to all ranks; waits for their answers."""
    given = tuple(map(Same, (function, *values)))
    plan = CallPlan(tuple(group.ranks), given, {}, GatherPlan("list", range(len(group.ranks))))
    return group.core.send(CallRequest(plan, MethodSpec(HOST, title=title), "")).result(None)


def outputs_of(call: Call, description: str) -> list[Any]:
    """The outputs by rank, with a bar where somebody looks."""
    future: CallFuture[list[Any]] = CallFuture(call)
    for _ in progress(future.stream(), description=description):
        pass
    return future.result()


@dataclass(frozen=True)
class _Begun:
    """What was sent: plans and folders by role."""

    plans: Mapping[str, Spread]
    folders: Mapping[str, str]


_turns: weakref.WeakKeyDictionary[GroupCore, dict[str, threading.Lock]] = weakref.WeakKeyDictionary()
"""One save of a role at a time: the second waits until the first one's threads have ended."""


class _Questions:
    """Asks ranks whose notes do not come: on a full disk there may be no room for one.

    They answer between their calls, and so later than by a note.
    """

    def __init__(self, group: Ranks, notes: str) -> None:
        self._group = group
        self._notes = notes
        self._due = time.monotonic() + _ASK_S
        self._asked: Asked | None = None

    def answers(self, left: Sequence[int]) -> dict[int, RankFiles | str]:
        """What the ranks of these places have answered by now; does not wait."""
        if time.monotonic() < self._due:
            return {}
        ranks = [self._group.ranks[index] for index in left]
        found: dict[int, Any] = {}
        with contextlib.suppress(
            PhalanxError
        ):  # of a group that is closed, or has lost a rank: that is seen apart
            if self._asked is None:
                self._asked = ask(self._group.core, "px.save", ranks, questions.told, self._notes)
            found = self._asked.answers(0.0)
        if not any(isinstance(one, NotReady) for one in found.values()):
            self._asked, self._due = None, time.monotonic() + _ASK_S
        places = {self._group.ranks[index]: index for index in left}
        return {
            places[rank]: one
            for rank, one in found.items()
            if rank in places and isinstance(one, RankFiles | str)
        }


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
    """

    def __init__(self, group: Ranks, writer: StepWriter, prefix: str = "") -> None:
        self._group = group
        self._writer = writer
        self._prefix = prefix
        self._epoch = group.core.epoch
        self._begun: _Begun | None = None
        self._call: Call | None = None
        self._turn = _turns.setdefault(group.core, {}).setdefault(group.role, threading.Lock())
        self._has_turn = False
        self._notes = ""
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
            SaveError: the workers have no state, contradict each other, or changed it under way.
            As ``CallFuture.result``.
        """
        self._turn.acquire()
        self._has_turn = True
        try:
            self._epoch = self._group.core.epoch
            plans = self._plans()
            folders = {role: self._writer.part(self._prefix + title_of(role)) for role in plans}
            if staged:
                self._notes = self._writer.part(f"{self._prefix}notes")
            orders = [
                WriteFiles(
                    {role: plan.orders[index] for role, plan in plans.items()},
                    folders,
                    index,
                    self._notes,
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
                outputs_of(self._call, f"{self.title}: staged")
        except BaseException:
            self.end()
            raise

    def _plans(self) -> dict[str, Spread]:
        alone = len(self._group.ranks) == 1
        title = f"{self.title}: plan"
        offers: list[dict[str, Offer]] = ask_same(
            self._group, title, questions.offer, self._group.role, alone
        )
        for rank, one in zip(self._group.ranks, offers, strict=True):
            if one.keys() != offers[0].keys():
                raise SaveError(
                    f"rank {rank} has a state of the roles {sorted(one)}, and rank {self._group.ranks[0]} of "
                    f"{sorted(offers[0])}; every rank must have the same roles"
                )
        return {role: spread([one[role] for one in offers]) for role in offers[0]}

    def finish(self) -> None:
        """Wait until all is written, and tell the step of it.

        Raises:
            SaveError: a rank could not write, or is gone.
            As ``CallFuture.result``.
        """
        if self._begun is None or self._call is None:
            raise DeclarationError("a save is begun before it is finished: call begin() first")
        try:
            files: list[RankFiles]
            files = self._noted() if self._notes else outputs_of(self._call, f"{self.title}: written")
            for role, plan in self._begun.plans.items():
                self._list(role, plan, files)
        finally:
            self.end()

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

    def _noted(self) -> list[RankFiles]:
        """What the ranks' threads tell when they have written."""
        place = place_at(self._notes)
        found: dict[int, RankFiles] = {}
        questions_asked = _Questions(self._group, self._notes)
        pause, last = _LOOK_S
        while True:
            left = [index for index in range(len(self._group.ranks)) if index not in found]
            gone = {index: self._loss(index) for index in left}
            answers = questions_asked.answers(left)
            for index in left:
                data = place.read(note_of(index))
                told = answers.get(index) if data is None else pickle.loads(data)
                if told is not None:
                    found[index] = self._told(index, told)
                elif gone[index]:
                    raise SaveError(gone[index])
            if len(found) == len(self._group.ranks):
                break
            time.sleep(pause)
            pause = min(2 * pause, last)
        place.remove_folder("")
        return [found[index] for index in range(len(found))]

    def _told(self, index: int, told: RankFiles | str) -> RankFiles:
        if isinstance(told, RankFiles):
            return told
        raise SaveError(
            f"rank {self._group.ranks[index]} of {self._group.name!r} could not write step {self._writer.step}: {told}"
        )

    def _loss(self, index: int) -> str:
        """Why nothing is to be expected of a rank any more; asked before its note is looked for."""
        core, rank = self._group.core, self._group.ranks[index]
        if core.closed:
            raise GroupClosed(
                f"group {core.name!r} was closed before step {self._writer.step} was written", group=core.name
            )
        if core.transport.alive(self._epoch.endpoints[rank]):
            return ""
        return (
            f"rank {rank} of {self._group.name!r} died while it wrote step {self._writer.step}; that step is not "
            "saved, those before are whole"
        )

    def end(self) -> None:
        """Let the next save of the group begin. Idempotent; :meth:`finish` does so."""
        if self._has_turn:
            self._has_turn = False
            self._turn.release()
