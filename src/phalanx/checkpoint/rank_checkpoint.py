"""A rank's part of saves and loads: handlers that the driver runs, and the state that they share."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex

from phalanx.checkpoint.model_folder import read_boxes, write_file
from phalanx.checkpoint.planners import LoadPlanner, SavePlanner
from phalanx.checkpoint.step_files import WrittenItems, write_items
from phalanx.checkpoint.storage import FileInfo, Storage, storage_errors
from phalanx.checkpoint.stored_state import StoredState
from phalanx.declare.state_declarations import declared_states
from phalanx.errors import CheckpointCorrupted, CheckpointError, CheckpointMismatch, PhalanxError
from phalanx.tracing.spans import span
from phalanx.worker.rank_state import GENERATORS, key_of, states_of
from phalanx.worker.worker_runtime import WorkerRuntime

CONTINUE = "continue"
"""Name of a file that the driver removes to end a submitted save."""
_LOOK_S = 0.25
_PLANS = 16
"""Maximum number of plans that a rank remembers. Plans of failed saves and loads are never recalled."""
NOTE = "rank-{}.pickle"
"""Name of the file by which a rank's thread reports its end: empty before, missing if the disk is full."""


def role_title(role: str) -> str:
    """Return the name of a role's folder: "worker" for a group of a single class."""
    return role or "worker"


class RankCheckpoint:
    """The state of a rank between handlers.

    Attributes:
        buffers: host memory for copies, by role, which saves reuse.
        thread: writes the copies of the last submitted save.
    """

    def __init__(self) -> None:
        self._plans: dict[str, Any] = {}
        self.buffers: dict[str, dict[MetadataIndex, torch.Tensor]] = {}
        self.thread: threading.Thread | None = None

    @classmethod
    def of(cls, runtime: WorkerRuntime) -> RankCheckpoint:
        """Return the state of the rank of ``runtime``."""
        return runtime.context.shared.setdefault("checkpoint", cls())

    def remember(self, name: str, plan: Any) -> None:
        """Keep a plan for the handler that follows."""
        self._plans[name] = plan
        for old in list(self._plans)[:-_PLANS]:
            del self._plans[old]

    def recall(self, name: str) -> Any:
        """Return a plan and forget it."""
        if name not in self._plans:
            raise CheckpointError("this rank was restarted after the save or load was planned; call it again")
        return self._plans.pop(name)


def plan_save(
    runtime: WorkerRuntime, index: int, save: str, role: str, alone: bool, model: bool
) -> dict[str, SavePlan]:
    """Plan a save of this rank, by role.

    Args:
        index: index of the rank among the ranks that save.
        save: unique name of the save.
        role: the role to save; "": each role with a state.
        alone: True if no other rank saves.
        model: True to save the model alone, with keys relative to it. A state without a model is the model.
    """
    planners: dict[str, SavePlanner] = {}
    for name, state in states_of(runtime, role).items():
        leaves = state.leaves()
        parts = [(path[1:], value) for path, value in leaves.values() if path[:1] == ("model",)]
        if model and parts:
            leaves = {key_of(path): (path, value) for path, value in parts}
        planners[name] = SavePlanner(leaves, index, alone=alone)
    RankCheckpoint.of(runtime).remember(save, planners)
    return {name: planner.create_local_plan() for name, planner in planners.items()}


def write(
    runtime: WorkerRuntime, plans: Mapping[str, SavePlan], save: str, folders: Mapping[str, str], notes: str
) -> dict[str, WrittenItems] | None:
    """Write this rank's part of a planned save, and return the items by role.

    With ``notes``, a folder for reports, a thread writes a copy of the part.
    """
    rank = RankCheckpoint.of(runtime)
    if rank.thread is not None:
        rank.thread.join()
    planners: dict[str, SavePlanner] = rank.recall(save)

    def write_files(check: Callable[[], None]) -> dict[str, WrittenItems]:
        written: dict[str, WrittenItems] = {}
        for role, planner in planners.items():
            nbytes = sum(item.tensor_storage_size() or 0 for item in plans[role].items)
            with span("write", role=role_title(role), nbytes=nbytes):
                written[role] = write_items(folders[role], plans[role], planner, check)
        return written

    if not notes:
        return write_files(lambda: None)
    for role, planner in planners.items():
        planner.stage(plans[role], rank.buffers.setdefault(role, {}))
    note = NOTE.format(next(iter(planners.values())).rank)
    work = (write_files, Storage(notes), note)
    Storage(notes).mark(note)
    rank.thread = threading.Thread(target=_write_and_report, args=work, name="phalanx-save", daemon=True)
    rank.thread.start()
    return None


def _write_and_report(write_files: Callable[[Callable[[], None]], Any], notes: Storage, note: str) -> None:
    """Write files, checking before each block that the driver still wants them, and report to the driver by a note."""
    with suppress(OSError):  # sandboxes may refuse it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # this thread; a training step goes first
    next_look = 0.0

    def check() -> None:
        nonlocal next_look
        if time.monotonic() >= next_look:  # not for each block: reading may be a request to a store
            next_look = time.monotonic() + _LOOK_S
            if notes.read(CONTINUE) is None:
                raise CheckpointError("the save was abandoned before it was written")

    try:
        report: Any = write_files(check)
    except BaseException as error:
        report = str(error) if isinstance(error, PhalanxError) else f"{type(error).__name__}: {error}"
    try:
        notes.write(note, pickle.dumps(report))
    except PhalanxError:
        notes.remove(note)  # reports a full disk, and needs no space on it


def write_model(
    runtime: WorkerRuntime,
    index: int,
    folder: str,
    role: str,
    stored: StoredState,
    files: Mapping[str, Sequence[str]],
) -> int:
    """Write this rank's files of a saved model, rank 0 also the configuration. Return the bytes.

    Args:
        index: index of the rank among the ranks that saved.
        folder: folder of the files.
        role: role of the model.
        stored: the saved model.
        files: names of tensors by file, of all ranks.
    """
    if index == 0:
        declared = declared_states(runtime.context).get(role)
        model = getattr(runtime.instances[role], "model", None) if declared is None else declared.model
        save: Any = getattr(getattr(model, "config", None), "save_pretrained", None)
        if callable(save):  # a model of transformers
            save(folder)
    own = list(files.items())[index :: stored.world_size]
    with span("write", role=role_title(role), nbytes=0):
        return sum([write_file(f"{folder}/{file}", names, stored) for file, names in own])


def plan_load(
    runtime: WorkerRuntime, index: int, load: str, sources: Mapping[str, StoredState]
) -> set[tuple[str, str]]:
    """Plan a load: check that the saved states fit, and change nothing.

    Return (folder, key) of the values that the rank does not take.

    Args:
        index: index of the rank among the ranks that load.
        load: unique name of the load.
        sources: saved states by role.

    Raises:
        CheckpointMismatch: if a state does not fit.
    """
    reads: list[Callable[[], int]] = []
    left = set[tuple[str, str]]()
    for role, source in sources.items():
        if role not in runtime.instances:
            raise CheckpointMismatch(
                f"{source.where} is of the role {role_title(role)}, and this group has the roles "
                f"{', '.join(runtime.instances)}; give one of them, such as group.{next(iter(runtime.instances))}"
            )
        reads.append(_planned(runtime, role, source, index, left))
    RankCheckpoint.of(runtime).remember(load, reads)
    return left


def _planned(
    runtime: WorkerRuntime, role: str, stored: StoredState, index: int, left: set[tuple[str, str]]
) -> Callable[[], int]:
    """Return a function that reads the state of a role and returns the bytes of its tensors. Add to ``left``."""
    state = states_of(runtime, role)[role]
    declared = declared_states(runtime.context).get(role)
    if stored.read is read_boxes and any(path[:1] == ("model",) for path, _ in state.leaves().values()):
        stored = stored.as_model()
    folder, parts, keys = stored.where, stored.parts, stored.keys_for(index)
    if GENERATORS in state.names and stored.lacks_generators(index):  # the rank keeps its own
        parts = [name for name in parts or state.names if name != GENERATORS]
        keys = {leaf: name for leaf, name in keys.items() if stored.leaves[name].part != GENERATORS}
    targets = state.targets({leaf: stored.leaves[name] for leaf, name in keys.items()}, folder, parts)
    planner = LoadPlanner(stored.metadata, {keys[leaf]: target for leaf, target in targets.items()})
    nbytes = sum(target.local.nbytes for target in targets.values() if target is not None)

    def read() -> int:
        with span("read", role=role_title(role), nbytes=nbytes), torch.no_grad():
            try:
                with storage_errors(folder, "read"):
                    stored.read(folder, planner)
            except FileNotFoundError as error:
                raise CheckpointCorrupted(
                    f"{error.filename} is missing; load another step (step=)", files=(str(error.filename),)
                ) from error
        values = planner.values
        state.apply({leaf: values[name] for leaf, name in keys.items() if name in values})
        if any(stored.leaves[keys[leaf]].part == "model" for leaf in targets):
            runtime.weights.loaded(role, None if declared is None else declared.model)
        return nbytes

    left.update((folder, name) for name in stored.leaves.keys() - {keys[leaf] for leaf in targets})
    return read


def damaged_files(runtime: WorkerRuntime, files: Mapping[str, FileInfo], folder: str) -> list[str]:
    """Return the files of a folder that are missing or differ from their digests, by reading them."""
    return Storage(folder).differing(files)


def load(runtime: WorkerRuntime, load: str) -> int:
    """Load the planned states into the workers. Return the bytes of their tensors."""
    reads: list[Callable[[], int]] = RankCheckpoint.of(runtime).recall(load)
    return sum(read() for read in reads)
