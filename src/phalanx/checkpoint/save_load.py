"""``px.save`` and ``px.load``: groups as parts of a step, or a model as a folder in Hugging Face's format."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import os
import pickle
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, get_args

from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan

from phalanx.calls.call import Call
from phalanx.calls.future import CallFuture
from phalanx.calls.run_on import run_on
from phalanx.checkpoint import rank_checkpoint as handlers
from phalanx.checkpoint.model_folder import read_model, split_model, write_index
from phalanx.checkpoint.planners import merge_plans
from phalanx.checkpoint.rank_checkpoint import CONTINUE, NOTE, role_title
from phalanx.checkpoint.save_future import SaveFuture
from phalanx.checkpoint.step_files import METADATA, WrittenItems
from phalanx.checkpoint.steps import Step, StepWriter, read_step
from phalanx.checkpoint.storage import PathOrUrl, Storage, storage_errors
from phalanx.checkpoint.stored_state import StoredState, read_stored
from phalanx.display.progress import progress
from phalanx.display.text_format import first_of, size
from phalanx.errors import (
    CallCancelled,
    CheckpointCorrupted,
    CheckpointError,
    CheckpointMismatch,
    DeclarationError,
    GroupClosed,
    RemoteCallError,
)
from phalanx.members.recovery import ensure_ready
from phalanx.weights.sync_pairs import Ranks, checked_group
from phalanx.wire.value import checked_choice, checked_number
from phalanx.worker.rank_state import key_of

Format = Literal["steps", "hugging face"]

_POLL_S = (0.005, 0.1)
"""Seconds between polls for reports: minimum and maximum."""
_STOP_S = 60.0
"""Seconds to wait for threads to stop. The next save removes files that they still write."""


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A step that was saved or loaded.

    Attributes:
        step: number of the step.
        folder: folder of the files.
        nbytes: bytes of the ranks' files, or bytes of the tensors that the ranks loaded.
        seconds: time until the commit, or until all ranks had the state.
    """

    step: int
    folder: str
    nbytes: int
    seconds: float

    @classmethod
    def _of(cls, step: Step) -> CheckpointInfo:
        nbytes = sum(facts.size for name, facts in step.files.items() if not name.endswith(METADATA))
        return cls(step.number, step.folder, nbytes, step.seconds)

    def __str__(self) -> str:
        rate = f", {size(int(self.nbytes / self.seconds))}/s" if self.seconds > 0 else ""
        return f"step {self.step} in {self.folder}: {size(self.nbytes)} in {self.seconds:.3g} s{rate}"


class _Save:
    """The function ``px.save``; see :meth:`__call__`."""

    def __call__(
        self,
        group: Ranks,
        path: PathOrUrl,
        *,
        step: int = 0,
        keep: int | None = None,
        format: Format = "steps",
        shard_bytes: int = 5 << 30,
    ) -> CheckpointInfo:
        """Save the state of a group's workers as a step of ``path``: complete, or not at all.

        The state is declared by ``px.register_state``; by default it is the worker's ``state_dict()``. Each role of a
        colocated group is saved by its name; a role without a state is left out, with a warning. Sharded tensors
        (DTensor, Megatron's, declared boxes) are written once, each box by a rank that holds it. Other values are
        written once if they are equal on all ranks, and by rank if they differ.

        Args:
            group: a group, a role of it such as ``group.actor``, or some of its ranks.
            path: a path that the driver and all ranks share, or a URL that fsspec knows. Each step is a folder.
            step: number of the step. An earlier step of that number stays until this step is complete.
            keep: number of complete steps to keep in ``path``, this step included; None: all.
            format: "hugging face" writes the model alone, as a new folder of safetensors files; no URL.
            shard_bytes: maximum bytes of a safetensors file that has several tensors, in that format.

        Raises:
            CheckpointError: if the path cannot be written, the disk is full, the workers have no state, or ranks
                contradict each other. Nothing of this step is left, and the steps before stay complete.
            CheckpointLocked: if another driver writes there.
            WorkerDiedError, RemoteCallError: as ``CallFuture.result``. Nothing of this step is left either.
            GroupBroken: if the group is broken. Its policy does not recover it here, since its state would be lost.
        """
        ranks = checked_group(group, "px.save: the group")
        began = time.monotonic()
        if checked_choice("format", format, get_args(Format)) == "hugging face":
            if keep is not None:
                raise DeclarationError(
                    f"px.save(keep={keep!r}): a folder in this format is one model; leave it out"
                )
            folder = _model_folder(os.fspath(path))
            nbytes = _save_model(ranks, folder, checked_number("shard_bytes", shard_bytes, 1))
            return CheckpointInfo(step, folder, nbytes, time.monotonic() - began)
        return CheckpointInfo._of(begin_save({"": ranks}, path, step, keep)())

    def submit(
        self, group: Ranks, path: PathOrUrl, *, step: int = 0, keep: int | None = None
    ) -> SaveFuture[CheckpointInfo]:
        """Save as ``px.save`` does, while threads of the ranks write during the calls that follow.

        Return once each rank has copied its part, after its earlier calls. The memory of the copies is kept for the
        next save. A second save to the same path waits for the end of the first. The step is complete when the future
        is done.
        """
        ranks = checked_group(group, "px.save.submit: the group")
        cancelled = threading.Event()
        finish = begin_save({"": ranks}, path, step, keep, cancelled)
        title = f"save of {ranks.name!r} as step {step}"
        return SaveFuture(lambda: CheckpointInfo._of(finish()), title, cancelled)

    def __repr__(self) -> str:
        return "<function px.save>"


save = _Save()


def load(
    group: Ranks,
    path: PathOrUrl,
    *,
    step: int | None = None,
    parts: Sequence[str] | None = None,
    name: str | None = None,
    format: Format = "steps",
) -> CheckpointInfo:
    """Load a step of ``px.save`` or ``px.checkpoint.CheckpointManager``, bit for bit, into workers of any sharding.

    Before anything is changed, every rank checks that the state fits, and the files are compared with their digests.
    Tensors are written in place. On another number of ranks, each rank takes the saved random generators of its own
    number; a rank for which none were saved keeps its generators.

    Args:
        group: a group, a role of it, or some of its ranks; the number of ranks may differ.
        path: as for ``px.save``.
        step: number of the step; None: the step that was committed last.
        parts: outermost keys of the states to load, such as ``["model", "optimizer"]``; None: all.
        name: name of the group in a ``px.checkpoint.CheckpointManager``; None: the group's own name, or the only name.
        format: "hugging face": ``path``, no URL, is a folder of safetensors files for the model alone, without digests.

    Raises:
        CheckpointMismatch: if names, shapes or types do not fit, or values other than random generators differed by
            rank and the number of ranks is different. Nothing was changed.
        CheckpointCorrupted: if a file is missing or differs. Nothing was changed.
        CheckpointError: if there is no such step, or ranks do not see the path.
        WorkerDiedError, RemoteCallError: as ``CallFuture.result``.
    """
    ranks = checked_group(group, "px.load: the group")
    check_parts("px.load", parts)
    began = time.monotonic()
    if checked_choice("format", format, get_args(Format)) == "hugging face":
        if parts is not None or name is not None or step is not None:
            raise DeclarationError(
                f"px.load(parts={parts!r}, name={name!r}, step={step!r}): a folder in this format has a single model "
                "alone; leave them out"
            )
        folder = _model_folder(os.fspath(path))
        nbytes = load_groups([GroupLoad(ranks, {ranks.role: read_model(folder)})])
        return CheckpointInfo(0, folder, nbytes, time.monotonic() - began)
    saved = read_step(path, step)
    nbytes = load_groups([GroupLoad.of_step(ranks, saved, name, parts)])
    return CheckpointInfo(saved.number, saved.folder, nbytes, time.monotonic() - began)


def _results(calls: Sequence[Call], title: str) -> list[list[Any]]:
    """Return the results by call and rank, with a progress bar of all ranks.

    Errors that ranks raise about the save or load are raised without the library's traceback. Errors of user code
    keep theirs.
    """
    futures = [CallFuture[list[Any]](call) for call in calls]
    streams = [future.stream() for future in futures]
    total = sum(map(operator.length_hint, streams))
    try:
        for _ in progress(itertools.chain.from_iterable(streams), total=total, description=title):
            pass
        return [future.result() for future in futures]
    except RemoteCallError as error:
        causes: list[Any] = [report.exception for report in error.causes]
        if not causes or not all(isinstance(cause, CheckpointError) for cause in causes):
            raise
        first = causes[0]
        ranks = sorted(report.rank for report in error.causes if str(report.exception) == str(first))
        text = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {error.group!r}: {first}"
        if isinstance(first, CheckpointCorrupted):
            raise CheckpointCorrupted(text, files=first.files) from None
        raise type(first)(text) from None


def _call_ranks(
    group: Ranks, title: str, handler: Callable[..., Any], each: Sequence[Any], *args: Any
) -> list[Any]:
    """Return the results of ``handler(runtime, value, *args)`` by rank, each with its own value."""
    call = run_on(group.core, handler, *args, ranks=group.ranks, each=each, title=title)
    return _results([call], title)[0]


def begin_save(
    groups: Mapping[str, Ranks],
    path: PathOrUrl,
    step: int,
    keep: int | None,
    cancelled: threading.Event | None = None,
    add: Callable[[StepWriter], None] | None = None,
    *,
    model: bool = False,
) -> Callable[[], Step]:
    """Begin a step with groups, roles or ranks. The returned function waits for the ranks, and commits.

    Args:
        groups: groups, roles or ranks by name; "" for a single group without a name.
        path, step, keep: as for :class:`StepWriter`.
        cancelled: if given, ranks copy their state before this function returns, and threads write the copies until
            it is set, which ends the save. None: the ranks write before they take other calls.
        add: function that adds further files to the step.
        model: True to save the models alone.
    """
    writer = StepWriter(path, step, keep)
    saves: list[_GroupSave] = []
    title = f"save step {step} of {path}: {'written' if cancelled is None else 'staged'}"

    def wait() -> list[list[Any]]:
        return _results([save.call for save in saves], title)

    def finish() -> Step:
        with _abandoning(writer, saves):
            written = wait() if cancelled is None else [save.collect(cancelled) for save in saves]
            for save, items in zip(saves, written, strict=True):
                save.add(items)
            return writer.commit()

    with _abandoning(writer, saves):
        for name, group in groups.items():
            prefix = f"groups/{name}/" if name else ""
            saves.append(_GroupSave(group, writer, prefix, staged=cancelled is not None, model=model))
        if cancelled is not None:
            wait()
        if add is not None:
            add(writer)
    return finish


@contextlib.contextmanager
def _abandoning(writer: StepWriter, saves: Sequence[_GroupSave]) -> Generator[None]:
    """Abandon the step if the block raises, once no rank writes any more; after an interrupt, at once."""
    try:
        yield
    except BaseException as error:
        for save in saves if isinstance(error, Exception) else ():
            save.abandon()
        writer.abandon()
        raise


class _GroupSave:
    """A group's part of a step: the ranks have planned it, and write or copy it.

    Args:
        writer: writer of the step.
        prefix: prefix of the folders of roles in the step, such as "groups/policy/".
        staged: True if ranks copy their part, and a thread writes the copy.
        model: True to save the model alone, by the names of its tensors.

    Raises:
        CheckpointError: if the workers have no state, or contradict each other.
        PhalanxError: as ``CallFuture.result``.
    """

    def __init__(self, group: Ranks, writer: StepWriter, prefix: str, *, staged: bool, model: bool) -> None:
        self.group, self._writer, self._prefix, self._staged = group, writer, prefix, staged
        with group.core.as_it_is():
            ensure_ready(group.core)  # without a recovery, which would replace the state
        title = f"save {group.name!r} step {writer.step}"
        save, ranks = f"{writer.folder}/{prefix}", range(len(group.ranks))
        offered: list[dict[str, SavePlan]] = _call_ranks(
            group, f"{title}: plan", handlers.plan_save, ranks, save, group.role, len(ranks) == 1, model
        )
        for rank, one in zip(group.ranks, offered, strict=True):
            if one.keys() != offered[0].keys():
                raise CheckpointError(
                    f"rank {rank} has a state of the roles {sorted(one)}, and rank {group.ranks[0]} of "
                    f"{sorted(offered[0])}; every rank must have the same roles"
                )
        plans: dict[str, list[SavePlan]] = {}
        self._metadata: dict[str, Metadata] = {}
        for role in offered[0]:
            merged, self._metadata[role] = merge_plans([one[role] for one in offered], model=model)
            plans[role] = FileSystemWriter(".").prepare_global_plan(merged)  # names the file of each rank
        folders = {role: writer.part(prefix + role_title(role)) for role in plans}
        self._notes = Storage(f"{writer.folder}/{prefix}.notes")
        if staged:
            self._notes.make("")
            self._notes.mark(CONTINUE)
        self._ranks = group.ranks  # a resize may change those of the group
        self._processes = [group.core.epoch.endpoints[rank] for rank in self._ranks]
        each = [{role: one[index] for role, one in plans.items()} for index in ranks]
        title, notes = (f"{title}: staged", self._notes.root) if staged else (f"{title}: written", "")
        self.call = run_on(
            group.core, handlers.write, save, folders, notes, ranks=self._ranks, each=each, title=title
        )

    def collect(self, cancelled: threading.Event) -> list[dict[str, WrittenItems]]:
        """Wait for the threads of the ranks. Return the written items by rank and role.

        Raises:
            CheckpointError: if a rank could not write, or died.
            CallCancelled: if the save was cancelled.
        """
        name, step, kept = self.group.core.name, self._writer.step, "the steps before are complete"
        reports: list[Any] = []
        for reports in self._reports():
            if cancelled.is_set():
                raise CallCancelled(f"the save of step {step} was cancelled; {kept}", group=name)
            if self.group.core.closed:
                raise GroupClosed(f"group {name!r} was closed before step {step} was written", group=name)
            for rank, report in zip(self._ranks, reports, strict=True):
                if isinstance(report, str):
                    raise CheckpointError(
                        f"rank {rank} of {self.group.name!r} could not write step {step}: {report}; {kept}"
                    )
        self._notes.remove("")
        return reports

    def _reports(self) -> Generator[list[Any]]:
        """Yield the reports of the ranks' threads until all have arrived: items by role, or the text of an error.

        Threads report by a file, since a call would wait for the rank's earlier calls.
        """
        reports: list[Any] = [None] * len(self._ranks)
        pause = _POLL_S[0]
        while True:
            reports = [report or self._report(index) for index, report in enumerate(reports)]
            yield reports
            if all(reports):
                return
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])

    def _report(self, index: int) -> Any:
        died = self.group.core.backend.dead_of([self._processes[index]])  # first: a rank may report and end
        note = self._notes.read(NOTE.format(index))
        if note:
            return pickle.loads(note)
        if note is None:
            where = f"its report in {self._notes.root} cannot be seen by the driver"
            return f"{where}: the disk is full, only one node sees the path, or it was removed"
        return "it died" if died else None

    def abandon(self) -> None:
        """Wait until no rank writes any more (threads of a submitted save: for 60 s), so that files may be removed."""
        with contextlib.suppress(Exception):  # the caller has the first error already
            self.call.result(None)
        until = time.monotonic() + _STOP_S
        with contextlib.suppress(CheckpointError):
            self._notes.remove(CONTINUE)
            for _ in self._reports() if self._staged else ():
                if time.monotonic() > until:
                    return

    def add(self, written: Sequence[Mapping[str, WrittenItems]]) -> None:
        """Add the files of the ranks to the step."""
        for role, metadata in self._metadata.items():
            part = self._prefix + role_title(role)
            places = {result.index: result.storage_data for one in written for result in one[role][0]}
            content = pickle.dumps(dataclasses.replace(metadata, storage_data=places))
            self._writer.write(f"{part}/{METADATA}", content)
            facts = {f"{part}/{name}": found for one in written for name, found in one[role][1].items()}
            self._writer.files |= facts
            names = sorted({str(path[0]) for path in metadata.planner_data.values() if path})
            ranks = f"{len(written)} rank{'s' if len(written) != 1 else ''}"
            nbytes = size(sum(found.size for found in facts.values()))
            self._writer.parts[part] = {
                "kind": "group",
                "text": f"{ranks}, {nbytes}: {', '.join(names) or 'nothing'}",
                "role": role,
                "world_size": len(written),
            }


class GroupLoad:
    """The load of a saved state into a group: it is planned, then verified, then read.

    Args:
        sources: saved states by role.
        step: the step with the states; None for a folder, whose files have no digests.
    """

    def __init__(self, group: Ranks, sources: Mapping[str, StoredState], step: Step | None = None) -> None:
        self._group, self._sources, self._step = group, sources, step
        self._title = f"load {group.name!r} {'model' if step is None else f'step {step.number}'}"
        self._token = secrets.token_hex(8)

    @classmethod
    def of_step(cls, group: Ranks, step: Step, name: str | None, parts: Sequence[str] | None) -> GroupLoad:
        """Return the load of a group that was saved under ``name``; None: the group's own name, or the only name.

        Raises:
            CheckpointMismatch: if the step has other groups, roles or parts, or values differed by rank and the number
                of ranks is different.
        """
        found = _saved_parts(group, step, name)
        states = {role: read_stored(step, part).select(parts) for role, part in found.items()}
        return cls(group, {role: state.for_ranks(len(group.ranks)) for role, state in states.items()}, step)

    def plan(self) -> None:
        """Have the ranks check that all fits, and that some rank takes each value."""
        ensure_ready(self._group.core)
        ranks = range(len(self._group.ranks))
        not_taken: list[set[tuple[str, str]]] = _call_ranks(
            self._group, f"{self._title}: plan", handlers.plan_load, ranks, self._token, self._sources
        )
        left = sorted(set.intersection(*not_taken))
        if left:
            names = [name for folder, name in left if folder == left[0][0]]
            advice = "" if self._step is None else ". Load what is wanted with parts=[...]"
            raise CheckpointMismatch(
                f"no rank loads {len(names)} values of {left[0][0]}: {first_of(names, 8)}; the workers here have "
                f"no such names{advice}"
            )

    def verify(self) -> None:
        """Have the ranks compare the files with their digests, each file once."""
        group, step = self._group, self._step
        if step is None:
            return
        folders = tuple(f"{stored.where}/" for stored in self._sources.values())
        facts = [one for one in step.files.items() if step.path(one[0]).startswith(folders)]
        each = [dict(facts[rank :: len(group.ranks)]) for rank in range(len(group.ranks))]
        wrong = _call_ranks(group, f"{self._title}: verify", handlers.damaged_files, each, step.folder)
        if any(wrong):
            ranks = ", ".join(str(rank) for rank, names in zip(group.ranks, wrong, strict=True) if names)
            raise step.corrupted(
                [name for names in wrong for name in names],
                f"; read by ranks {ranks} of {group.name!r}, whose nodes have to see the path",
            )

    def read(self) -> int:
        """Have the ranks read the files. Return the bytes."""
        tokens = [self._token] * len(self._group.ranks)
        try:
            return sum(_call_ranks(self._group, f"{self._title}: read", handlers.load, tokens))
        except CheckpointCorrupted as error:  # a file was removed after it was verified
            raise error if self._step is None else self._step.corrupted(error.files) from None


def load_groups(loads: Sequence[GroupLoad]) -> int:
    """Load groups: check that all fits in all of them, verify the files, and read. Return the bytes.

    Raises:
        CheckpointMismatch: if something does not fit. No rank of any group was changed.
        CheckpointCorrupted: if a file is missing or differs. No rank was changed.
        PhalanxError: as ``CallFuture.result``.
    """
    for load in loads:
        load.plan()
    for load in loads:
        load.verify()
    return sum([load.read() for load in loads])


def check_parts(verb: str, parts: Any) -> None:
    """Raise ``DeclarationError`` if ``parts`` is a string, which would be taken as a list of its letters."""
    if isinstance(parts, str):
        raise DeclarationError(f"{verb}(parts={parts!r}): give a list of names, such as [{parts!r}]")


def saved_groups(step: Step) -> dict[str, dict[str, str]]:
    """Return the parts of a step by group and role; the group of ``px.save`` has the name ""."""
    found: dict[str, dict[str, str]] = {}
    for part, facts in step.parts.items():
        if facts.get("kind") == "group":
            found.setdefault(part.split("/")[1] if "/" in part else "", {})[str(facts["role"])] = part
    return found


def _saved_parts(group: Ranks, step: Step, name: str | None) -> dict[str, str]:
    """Return the parts of a step by the role that each is loaded into."""
    by_group = saved_groups(step)
    if not by_group:
        raise CheckpointMismatch(
            f"{step.folder} has no state of a group; it has {', '.join(step.parts) or 'nothing'}"
        )
    if name is None:
        name = next(iter(by_group)) if len(by_group) == 1 else group.core.name
    if name not in by_group:
        raise CheckpointMismatch(
            f"{step.folder} was saved by px.save, without names of groups; leave out name={name!r}"
            if "" in by_group
            else f"{step.folder} has the groups {', '.join(sorted(by_group))}, and none is named {name!r}; say which: "
            "px.load(name=)"
        )
    saved, role, mine = by_group[name], group.role, set(group.core.handle.callables)
    if role in saved:
        return {role: saved[role]}
    is_single = bool(role) or mine <= {""}
    if is_single and len(saved) == 1:
        return {role: next(iter(saved.values()))}
    if is_single or saved.keys() - mine:
        raise CheckpointMismatch(
            f"{step.folder} has the roles {', '.join(map(role_title, sorted(saved)))}, and {group.name!r} has "
            f"{', '.join(map(role_title, [role] if role else sorted(mine)))}; load into roles of these names, or role "
            "by role: px.load(group.actor, path)"
        )
    return saved


def _model_folder(path: str) -> str:
    """Return the absolute path of the folder of a model in Hugging Face's format; raise an error for a URL."""
    if "://" in path:
        raise CheckpointError(
            f"{path!r}: all ranks write or read the files of a model at once, so give a path, not a URL"
        )
    return Storage(path).root


def _save_model(group: Ranks, path: str, shard_bytes: int) -> int:
    """Write the model of a role into a new folder. Return the bytes written.

    The ranks save their boxes as a step, from which each rank then makes some of the files, one after the other. A file
    has complete tensors, and no rank holds more than a file in memory.

    Raises:
        CheckpointError: if the folder exists, cannot be written, or the state is no model.
    """
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path) or os.listdir(path)):
        raise CheckpointError(f"{path} exists already; give the path of a new folder")
    work = f"{path}.{secrets.token_hex(4)}.part"
    folder = f"{work}/model"
    try:
        step = begin_save({"": group}, work, 0, None, model=True)()
        roles = saved_groups(step)[""]
        if len(roles) != 1:
            names = sorted(roles)
            raise CheckpointError(
                f"{group.name!r} has the roles {', '.join(names)}; give one of them, such as group.{names[0]}"
            )
        (role, part), *_ = roles.items()
        stored = read_stored(step, part)
        _check_model(group, stored)
        files = split_model(stored.leaves, shard_bytes)
        Storage(work).make("model")
        ranks = range(len(group.ranks))
        title = f"save model of {group.name!r}: write"
        nbytes = sum(_call_ranks(group, title, handlers.write_model, ranks, folder, role, stored, files))
        if len(files) > 1:
            write_index(folder, files, nbytes)
        with storage_errors(path, "written"):
            if os.path.isdir(path):
                os.rmdir(path)
            os.rename(folder, path)
        return nbytes
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_model(group: Ranks, stored: StoredState) -> None:
    """Check that a saved state has only tensors, and none that differs by rank."""
    leaves = stored.leaves
    values = sorted(name for name, leaf in leaves.items() if leaf.dtype is None)
    if values or not leaves:
        raise CheckpointError(
            f"the state of {group.name!r} is no model: {', '.join(values[:5]) or 'it has no tensors'}; "
            "register the model alone: px.register_state(self, model=...)"
        )
    differing = sorted({key_of(leaf.path) for leaf in leaves.values() if leaf.ranks is not None})
    if differing:
        raise CheckpointError(
            f"{', '.join(differing[:5])} differ by rank, and nothing says how they are sharded; declare it (DTensor, "
            "px.register_state(boxes=..., megatron=...))"
        )
