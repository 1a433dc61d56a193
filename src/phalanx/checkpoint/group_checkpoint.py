"""A group's part of a step: saved by :class:`GroupSave`, loaded by :func:`load_groups`."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, TensorStorageMetadata

from phalanx.backends.backend_types import NotReady
from phalanx.calls.call import Call
from phalanx.calls.run_on import run_on
from phalanx.checkpoint import rank_checkpoint as handlers
from phalanx.checkpoint.planners import merge_plans
from phalanx.checkpoint.rank_calls import Count, results, send
from phalanx.checkpoint.rank_checkpoint import (
    LoadReport,
    LoadRequest,
    RankFiles,
    WriteRequest,
    note_name,
    role_title,
)
from phalanx.checkpoint.step_files import METADATA
from phalanx.checkpoint.steps import SavedStep, StepWriter
from phalanx.checkpoint.storage import FileFacts, Storage
from phalanx.display.byte_format import size
from phalanx.errors import (
    CallCancelled,
    CheckpointError,
    CheckpointMismatch,
    DeclarationError,
    GroupClosed,
    PhalanxError,
)
from phalanx.weights.sync_pairs import Ranks

_POLL_S = (0.005, 0.1)
"""Seconds between looks for reports: at first, and at last."""
_ASK_S = 2.0
"""Seconds between calls that ask for a report, which a full disk may not have taken."""
_STOP_S = 60.0
"""Seconds to wait for threads that stop. The next save removes what they still write."""


def plan_group(group: Ranks, title: str, save: str) -> dict[str, list[SavePlan]]:
    """Have the ranks plan a save. Return their plans by role."""
    ranks = range(len(group.ranks))
    call = send(group, title, handlers.plan_save, ranks, save, group.role, len(ranks) == 1)
    plans: list[dict[str, SavePlan]] = results(group, call, title)
    for rank, one in zip(group.ranks, plans, strict=True):
        if one.keys() != plans[0].keys():
            raise CheckpointError(
                f"rank {rank} has a state of the roles {sorted(one)}, and rank {group.ranks[0]} of "
                f"{sorted(plans[0])}; every rank must have the same roles"
            )
    return {role: [one[role] for one in plans] for role in plans[0]}


@contextlib.contextmanager
def abandoning(writer: StepWriter, saves: Sequence[GroupSave]) -> Generator[None]:
    """Abandon the step if the block raises, once no rank writes any more."""
    try:
        yield
    except BaseException as error:
        for save in saves:
            save.abandon(error)
        writer.abandon()
        raise


class GroupSave:
    """A group's part of a step.

    Args:
        group: a group, a role of it, or some of its ranks.
        writer: of the step; its owner commits it after :meth:`finish`.
        prefix: of the folders in the step, such as "groups/policy/"; each role has one.
        cancelled: set to end a staged save.
        count: called for each rank that has staged or written; None: a progress bar of its own.
    """

    def __init__(
        self,
        group: Ranks,
        writer: StepWriter,
        prefix: str = "",
        cancelled: threading.Event | None = None,
        count: Count | None = None,
    ) -> None:
        self._group, self._writer, self._prefix, self._count = group, writer, prefix, count
        self._cancelled = threading.Event() if cancelled is None else cancelled
        self._title = f"save {group.name!r} step {writer.step}"
        self._metadata: dict[str, Metadata] = {}
        self._call: Call | None = None
        self._notes = ""
        self._epoch = group.core.epoch
        self.nbytes = 0

    def begin(self, *, staged: bool = False) -> None:
        """Plan, and have the ranks begin to write.

        Args:
            staged: return when each rank has copied its part, which a thread writes. Else :meth:`finish` waits.

        Raises:
            CheckpointError: if the workers have no state, or contradict each other. As ``CallFuture.result``.
        """
        save = f"{self._writer.folder}/{self._prefix}"
        plans: dict[str, list[SavePlan]] = {}
        for role, offered in plan_group(self._group, f"{self._title}: plan", save).items():
            merged, self._metadata[role] = merge_plans(offered)
            plans[role] = FileSystemWriter(".").prepare_global_plan(merged)  # names the file of each rank
        folders = {role: self._writer.part(self._prefix + role_title(role)) for role in plans}
        self._notes = self._writer.part(f"{self._prefix}.notes") if staged else ""
        self._epoch = self._group.core.epoch
        requests = [
            WriteRequest(save, {role: one[index] for role, one in plans.items()}, folders, self._notes)
            for index in range(len(self._group.ranks))
        ]
        verb, handler = ("staged", handlers.stage) if staged else ("written", handlers.write)
        self._call = send(self._group, f"{self._title}: {verb}", handler, requests)
        if staged:
            results(self._group, self._call, f"{self._title}: {verb}", self._count)

    def finish(self) -> None:
        """Wait until the ranks have written, and add the files to the step.

        Raises:
            CheckpointError: if a rank could not write, or died.
            CallCancelled: if the save was cancelled. As ``CallFuture.result``.
        """
        if self._call is None:
            raise DeclarationError("a save is begun before it is finished: call begin() first")
        if self._notes:
            files = self._reports()
        else:
            files = results(self._group, self._call, f"{self._title}: written", self._count)
        for role, metadata in self._metadata.items():
            self._add(role, metadata, files)

    def _add(self, role: str, metadata: Metadata, files: Sequence[RankFiles]) -> None:
        part = self._prefix + role_title(role)
        places = {result.index: result.storage_data for one in files for result in one.results[role]}
        self._writer.write(
            f"{part}/{METADATA}", pickle.dumps(dataclasses.replace(metadata, storage_data=places))
        )
        facts = {f"{part}/{name}": found for one in files for name, found in one.files[role].items()}
        self._writer.add(facts)
        nbytes = sum(found.size for found in facts.values())
        self.nbytes += nbytes
        parts = sorted({str(path[0]) for path in metadata.planner_data.values() if path})
        tensors = sum(isinstance(one, TensorStorageMetadata) for one in metadata.state_dict_metadata.values())
        ranks = f"{len(files)} rank{'s' if len(files) != 1 else ''}"
        self._writer.note(
            part,
            {
                "kind": "group",
                "text": f"{ranks}, {size(nbytes)}: {', '.join(parts) or 'nothing'}",
                "group": self._group.core.name,
                "role": role,
                "world_size": len(files),
                "parts": parts,
                "tensors": tensors,
                "values": len(metadata.state_dict_metadata) - tensors,
            },
        )

    def abandon(self, error: BaseException) -> None:
        """Return once no rank writes any more, so that the files may be removed.

        After an interrupt (``error`` is no ``Exception``) it does not wait.
        """
        if isinstance(error, Exception) and self._call is not None:
            with contextlib.suppress(Exception):  # it was raised before
                self._call.result(None)
            if self._notes:
                self._stop()

    def _reports(self) -> list[RankFiles]:
        """Wait for the threads of the ranks."""
        found: dict[int, RankFiles] = {}
        storage, pause, due = Storage(self._notes), _POLL_S[0], time.monotonic() + _ASK_S
        asked: Call | None = None
        while True:
            if self._cancelled.is_set():
                raise CallCancelled(
                    f"the save of step {self._writer.step} was cancelled; the steps before are complete",
                    group=self._group.core.name,
                )
            if asked is None and time.monotonic() > due:
                asked = self._unchecked(handlers.report)
            answers = self._answers(asked)
            if asked is not None and len(answers) == len(self._group.ranks):
                asked, due = None, time.monotonic() + _ASK_S
            for index in range(len(self._group.ranks)):
                if index not in found:
                    self._look(index, storage, answers.get(self._group.ranks[index]), found)
            if len(found) == len(self._group.ranks):
                storage.remove("")
                return [found[index] for index in range(len(found))]
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])

    def _look(self, index: int, storage: Storage, answer: Any, found: dict[int, RankFiles]) -> None:
        """Take the report of a rank, if there is one."""
        group, rank = self._group, self._group.ranks[index]
        if group.core.closed:
            raise GroupClosed(
                f"group {group.core.name!r} was closed before step {self._writer.step} was written",
                group=group.core.name,
            )
        is_alive = self._is_alive(index)  # before the look: a rank may report and end
        note = storage.read(note_name(index))
        report = answer if note is None else pickle.loads(note)
        if isinstance(report, RankFiles):
            found[index] = report
        elif isinstance(report, str):
            raise CheckpointError(
                f"rank {rank} of {group.name!r} could not write step {self._writer.step}: {report}"
            )
        elif not is_alive:
            raise CheckpointError(
                f"rank {rank} of {group.name!r} died while it wrote step {self._writer.step}; that step is not saved, "
                "the steps before are complete"
            )

    def _stop(self) -> None:
        """Stop the threads, and wait until none of them writes."""
        until, storage = time.monotonic() + _STOP_S, Storage(self._notes)
        call = self._unchecked(handlers.stop)
        while time.monotonic() < until:
            answers = self._answers(call, _POLL_S[1])
            if all(
                rank in answers or not self._is_alive(index) or storage.exists(note_name(index))
                for index, rank in enumerate(self._group.ranks)
            ):
                return

    def _unchecked(self, handler: Callable[..., Any]) -> Call | None:
        """Call a handler with the folder of the reports; None if the group takes no calls."""
        with contextlib.suppress(PhalanxError):
            return run_on(
                self._group.core,
                handler,
                self._notes,
                ranks=self._group.ranks,
                title="px.save",
                checked=False,
                epoch=self._epoch,
            )
        return None

    @staticmethod
    def _answers(call: Call | None, seconds: float = 0.0) -> dict[int, Any]:
        """Return the answers that are there, errors of lost ranks included."""
        if call is None:
            time.sleep(seconds)
            return {}
        return {rank: one for rank, one in call.answers(seconds).items() if not isinstance(one, NotReady)}

    def _is_alive(self, index: int) -> bool:
        return self._group.core.backend.alive(self._epoch.endpoints[self._group.ranks[index]])


@dataclasses.dataclass
class GroupLoad:
    """A group and the part of a step to load into it.

    Attributes:
        group: a group, a role of it, or some of its ranks.
        folders: absolute path or URL by role.
        files: facts of the files of each folder, by role; a role without files is loaded from safetensors.
        saved_ranks: ranks that saved, by role.
        parts: outermost keys to load; None: all.
        title: for traces and progress.
    """

    group: Ranks
    folders: Mapping[str, str]
    files: Mapping[str, Mapping[str, FileFacts]]
    saved_ranks: Mapping[str, int]
    parts: Sequence[str] | None
    title: str

    @classmethod
    def of(cls, group: Ranks, step: SavedStep, prefix: str, parts: Sequence[str] | None) -> GroupLoad:
        """Return the load of what ``GroupSave(..., prefix)`` wrote.

        Raises:
            CheckpointMismatch: if the step has other roles.
        """
        roles = _roles(group, step, prefix)
        files: dict[str, dict[str, FileFacts]] = {}
        for role, part in roles.items():
            start = f"{part}/"
            found = {name: facts for name, facts in step.manifest.files.items() if name.startswith(start)}
            files[role] = {name.removeprefix(start): facts for name, facts in found.items()}
        return cls(
            group,
            {role: step.path(part) for role, part in roles.items()},
            files,
            {role: int(step.parts[part]["world_size"]) for role, part in roles.items()},
            parts,
            f"load {group.name!r} step {step.number}",
        )


def load_groups(loads: Sequence[GroupLoad]) -> int:
    """Load groups: check that all fits in all of them, verify the files, and read. Return the bytes.

    Raises:
        CheckpointMismatch: if something does not fit. No rank of any group was changed.
        CheckpointCorrupted: if a file is missing or differs. No rank was changed. As ``CallFuture.result``.
    """
    name = secrets.token_hex(8)
    files = [_planned(one, name) for one in loads]
    for one, names in zip(loads, files, strict=True):
        ranks = len(one.group.ranks)
        facts = [
            (f"{one.folders[role]}/{file}", one.files[role][file])
            for role in one.files
            for file in sorted(names[role])
        ]
        if facts:
            title = f"{one.title}: verify"
            call = send(
                one.group, title, handlers.check_files, [dict(facts[rank::ranks]) for rank in range(ranks)]
            )
            results(one.group, call, title)
    nbytes = 0
    for one in loads:
        title = f"{one.title}: read"
        call = send(one.group, title, handlers.load, [name] * len(one.group.ranks))
        nbytes += sum(results(one.group, call, title))
    return nbytes


def _planned(load: GroupLoad, name: str) -> dict[str, set[str]]:
    """Have the ranks of a group check that all fits. Return the names of the files to read, by role."""
    ranks = range(len(load.group.ranks))
    parts = None if load.parts is None else tuple(load.parts)
    request = LoadRequest(name, load.folders, load.files, load.saved_ranks, parts, len(ranks))
    title = f"{load.title}: plan"
    reports: list[dict[str, LoadReport]] = results(
        load.group, send(load.group, title, handlers.plan_load, ranks, request), title
    )
    for role, folder in load.folders.items():
        left = sorted(set.intersection(*(set(one[role].left) for one in reports)))
        if left:
            shown = ", ".join(left[:8]) + (", ..." if len(left) > 8 else "")
            raise CheckpointMismatch(
                f"{len(left)} values of {folder} are taken by no rank: {shown}; the workers here have no such names. "
                "Load what is wanted with parts=[...]"
            )
    return {role: {file for one in reports for file in one[role].files} for role in load.folders}


def check_parts(verb: str, parts: Any) -> None:
    """Check that parts are a list of names: a text would be taken for its letters."""
    if isinstance(parts, str):
        raise DeclarationError(f"{verb}(parts={parts!r}): give a list of names, such as [{parts!r}]")


def prefix_of(group: Ranks, step: SavedStep, name: str | None) -> str:
    """Return the prefix of a group's folders in a step of ``px.checkpoint.CheckpointManager``; "" for ``px.save``.

    Raises:
        CheckpointMismatch: if the step has no group of that name, or several and ``name`` is None.
    """
    parts = [part for part, facts in step.parts.items() if facts.get("kind") == "group" and "/" in part]
    names = sorted({part.split("/")[1] for part in parts})
    if not names and name is None:
        return ""
    if name is None:
        name = names[0] if len(names) == 1 else group.core.name
    if name not in names:
        raise CheckpointMismatch(
            f"{step.folder} has the groups {', '.join(names)}, and none is named {name!r}; say which: px.load(name=)"
            if names
            else f"{step.folder} was saved by px.save, without names of groups; leave out name={name!r}"
        )
    return f"groups/{name}/"


def _roles(group: Ranks, step: SavedStep, prefix: str) -> dict[str, str]:
    """Return the parts of a step by the role that each is loaded into."""
    saved = {
        str(facts["role"]): part
        for part, facts in step.parts.items()
        if facts.get("kind") == "group" and part.startswith(prefix) and "/" not in part.removeprefix(prefix)
    }
    if not saved:
        raise CheckpointMismatch(
            f"{step.folder} has no state of a group; it has {', '.join(step.parts) or 'nothing'}"
        )
    role, mine = group.role, set(group.core.card.callables)
    if role in saved:
        return {role: saved[role]}
    if role or mine <= {""}:
        if len(saved) == 1:
            return {role: next(iter(saved.values()))}
        raise CheckpointMismatch(
            f"{step.folder} has the roles {', '.join(map(role_title, sorted(saved)))}, and none is named "
            f"{role_title(role)!r}; load into a role of that name"
        )
    missing = sorted(saved.keys() - mine)
    if missing:
        raise CheckpointMismatch(
            f"{step.folder} has the role {role_title(missing[0])!r}, which group {group.name!r} does not have; its "
            f"roles are {', '.join(sorted(mine))}. Load the roles one by one: px.load(group.{sorted(mine)[0]}, path)"
        )
    return saved
