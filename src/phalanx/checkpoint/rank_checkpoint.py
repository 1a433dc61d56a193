"""A rank's part of saves and loads: handlers that the driver runs, and the state between them."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from phalanx.checkpoint.model_folder import ModelReader, Place, read_model, save_config, write_boxes
from phalanx.checkpoint.planners import LoadPlanner, SavePlanner
from phalanx.checkpoint.step_files import reader_of, write_items
from phalanx.checkpoint.storage import FileFacts, Storage, storage_errors
from phalanx.checkpoint.stored_keys import StoredState, read_stored
from phalanx.declare.state_declarations import StateDeclared
from phalanx.errors import CheckpointCorrupted, CheckpointError, CheckpointMismatch, PhalanxError
from phalanx.tracing.spans import span
from phalanx.worker.rank_state import LocalTensor, RankState, states_of
from phalanx.worker.worker_runtime import WorkerRuntime

T = TypeVar("T")

_END_S = 2.0
_PLANS = 4
"""Plans of saves and loads that a rank remembers; a failed plan is never used."""


def role_title(role: str) -> str:
    """Return the name of a role's folder: "worker" for a group of a single class."""
    return role or "worker"


def note_name(index: int) -> str:
    """Return the file by which a rank reports that its thread has ended."""
    return f"done-{index}.pickle"


@dataclass(frozen=True)
class WriteRequest:
    """Write the parts of the merged plans.

    Attributes:
        save: identifies the plan of this rank.
        plans: by role.
        folders: absolute path or URL, by role.
        notes: folder for the report of a thread.
    """

    save: str
    plans: Mapping[str, SavePlan]
    folders: Mapping[str, str]
    notes: str = ""


@dataclass(frozen=True)
class ModelRequest:
    """Write the boxes of a model into safetensors files that exist, and the model's configuration."""

    save: str
    role: str
    plan: SavePlan
    places: Mapping[str, Place]
    folder: str
    config: bool


class RankFiles(NamedTuple):
    """Places of the items, and facts of the files, by role."""

    results: Mapping[str, list[WriteResult]]
    files: Mapping[str, Mapping[str, FileFacts]]


@dataclass(frozen=True)
class LoadRequest:
    """Load roles.

    Attributes:
        load: identifies the load.
        folders: absolute path or URL, by role.
        files: facts of the files of each folder, by role; a role without files is loaded from a folder of safetensors.
        saved_ranks: ranks that saved, by role.
        parts: outermost keys to load; None: all.
        world_size: ranks that load.
    """

    load: str
    folders: Mapping[str, str]
    files: Mapping[str, Mapping[str, FileFacts]]
    saved_ranks: Mapping[str, int]
    parts: tuple[str, ...] | None
    world_size: int


class LoadReport(NamedTuple):
    """Names of the files that a rank reads, and keys in the files that it does not take."""

    files: list[str]
    left: list[str]


@dataclass
class _RoleLoad:
    """A planned load of a role."""

    state: RankState
    reader: FileSystemReader
    planner: LoadPlanner
    plan: LoadPlan
    nbytes: int


@dataclass
class RankCheckpoint:
    """The state of a rank between handlers."""

    host: WorkerRuntime
    saves: dict[str, dict[str, SavePlanner]] = field(default_factory=dict[str, dict[str, SavePlanner]])
    loads: dict[str, dict[str, _RoleLoad]] = field(default_factory=dict[str, dict[str, _RoleLoad]])
    buffers: dict[str, dict[MetadataIndex, torch.Tensor]] = field(
        default_factory=dict[str, dict[MetadataIndex, torch.Tensor]]
    )
    thread: threading.Thread | None = None
    ended: bool = False
    stopped: str = ""
    report: tuple[str, RankFiles | str] = ("", "")

    @classmethod
    def of(cls, host: WorkerRuntime) -> RankCheckpoint:
        """Return the state of the rank of ``host``."""
        found = host.context.shared.get("checkpoint")
        if not isinstance(found, cls):
            found = host.context.shared["checkpoint"] = cls(host)
            host.closers.add(found.end)
        return found

    def states(self, role: str) -> dict[str, RankState]:
        """Return the state of a role, or of each role with a state."""
        return states_of(self.host.context, self.host.instances, self.host.device, role)

    def wait(self) -> None:
        """Wait for the thread of the save before."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def stop(self, notes: str) -> None:
        """Stop the thread that writes for ``notes``, and wait for its end."""
        self.stopped = notes
        self.wait()

    def end(self) -> None:
        """Stop the thread: the rank ends."""
        self.ended = True
        if self.thread is not None:
            self.thread.join(_END_S)

    def write(self, request: WriteRequest, planners: Mapping[str, SavePlanner]) -> RankFiles:
        """Write the files of each role."""
        results: dict[str, list[WriteResult]] = {}
        files: dict[str, Mapping[str, FileFacts]] = {}
        for role, folder in request.folders.items():
            nbytes = sum(item.tensor_storage_size() or 0 for item in request.plans[role].items)
            with span("write", role=role_title(role), nbytes=nbytes):
                results[role], files[role] = write_items(
                    folder, request.plans[role], planners[role], self._check(request.notes)
                )
        return RankFiles(results, files)

    def write_staged(self, request: WriteRequest, planners: Mapping[str, SavePlanner], index: int) -> None:
        """Write the copies, and report to the driver."""
        try:
            report: RankFiles | str = self.write(request, planners)
        except BaseException as error:
            report = str(error) if isinstance(error, PhalanxError) else f"{type(error).__name__}: {error}"
        self.report = (request.notes, report)
        with suppress(PhalanxError):  # on a full disk the driver asks for the report
            Storage(request.notes).write(note_name(index), pickle.dumps(report))

    def _check(self, notes: str) -> Callable[[], None]:
        def check() -> None:
            if self.ended:
                raise CheckpointError("the group was closed before its state was written")
            if notes and notes == self.stopped:
                raise CheckpointError("the driver gave it up")

        return check


def plan_save(host: WorkerRuntime, index: int, save: str, role: str, alone: bool) -> dict[str, SavePlan]:
    """Plan a save of this rank, by role. ``index`` is the rank's place in the group that saves."""
    rank = RankCheckpoint.of(host)
    planners = {
        name: SavePlanner(state.leaves(), index, alone=alone) for name, state in rank.states(role).items()
    }
    _remember(rank.saves, save, planners)
    return {name: planner.create_local_plan() for name, planner in planners.items()}


def write(host: WorkerRuntime, request: WriteRequest) -> RankFiles:
    """Write this rank's part."""
    rank = RankCheckpoint.of(host)
    rank.wait()
    return rank.write(request, _recalled(rank.saves, request.save))


def stage(host: WorkerRuntime, request: WriteRequest) -> None:
    """Copy this rank's part. A thread writes the copy."""
    rank = RankCheckpoint.of(host)
    rank.wait()
    planners = _recalled(rank.saves, request.save)
    for role, planner in planners.items():
        planner.stage(request.plans[role], rank.buffers.setdefault(role, {}))
    index = next(iter(planners.values())).rank
    rank.thread = threading.Thread(
        target=rank.write_staged, args=(request, planners, index), name="phalanx-save", daemon=True
    )
    rank.thread.start()


def report(host: WorkerRuntime, notes: str) -> RankFiles | str | None:
    """Return the report of the thread that writes for ``notes``; None before it has ended."""
    found = RankCheckpoint.of(host).report
    return found[1] if found[0] == notes else None


def stop(host: WorkerRuntime, notes: str) -> None:
    """Stop the thread that writes for ``notes``, and wait for its end."""
    RankCheckpoint.of(host).stop(notes)


def write_model(host: WorkerRuntime, request: ModelRequest) -> int:
    """Write this rank's boxes of a model. Return their bytes."""
    planner = _recalled(RankCheckpoint.of(host).saves, request.save)[request.role]
    if request.config:
        worker = host.instances[request.role]
        declared = StateDeclared.of(host.context).roles.get(request.role)
        save_config(getattr(worker, "model", None) if declared is None else declared.model, request.folder)
    with span("write", role=role_title(request.role), nbytes=0):
        return write_boxes(request.folder, request.plan, planner, request.places)


def plan_load(host: WorkerRuntime, index: int, request: LoadRequest) -> dict[str, LoadReport]:
    """Check that the saved state fits, and change nothing.

    Raises:
        CheckpointMismatch: if it does not fit.
    """
    rank = RankCheckpoint.of(host)
    loads: dict[str, _RoleLoad] = {}
    reports: dict[str, LoadReport] = {}
    for role, folder in request.folders.items():
        if role not in host.instances:
            raise CheckpointMismatch(f"{folder} is of a role {role!r}, which this group does not have")
        state = rank.states(role)[role]
        stored, parts = _stored(state, role, request)
        keys = stored.keys_for(index, request.world_size)
        targets = state.targets({key: stored.leaf(name) for key, name in keys.items()}, folder, parts)
        planner = LoadPlanner(stored.metadata, targets, keys)
        plan = planner.create_local_plan()
        reader = reader_of(folder, stored.metadata) if request.files else ModelReader(folder, stored.metadata)
        loads[role] = _RoleLoad(state, reader, planner, plan, _nbytes(targets))
        taken = {keys[key] for key in targets}
        files = {stored.metadata.storage_data[item.storage_index].relative_path for item in plan.items}
        reports[role] = LoadReport(sorted(files), sorted(stored.keys.keys() - taken))
    _remember(rank.loads, request.load, loads)
    return reports


def check_files(host: WorkerRuntime, files: Mapping[str, FileFacts]) -> None:
    """Compare files with their digests, by reading them.

    Raises:
        CheckpointCorrupted: if files are missing or differ.
    """
    wrong: list[str] = []
    for path, facts in files.items():
        folder, _, name = path.rpartition("/")
        if Storage(folder).facts(name) != facts:
            wrong.append(path)
    if wrong:
        raise CheckpointCorrupted(
            f"{', '.join(wrong[:5])}: damaged, missing, or this rank's node does not see the path; load another step "
            "(step=)",
            files=tuple(wrong),
        )


def load(host: WorkerRuntime, load: str) -> int:
    """Read the planned load, and give it to the workers. Return the bytes of its tensors."""
    loads = _recalled(RankCheckpoint.of(host).loads, load)
    for role, one in loads.items():
        folder = str(one.reader.path)
        with span("read", role=role_title(role), nbytes=one.nbytes), torch.no_grad():
            try:
                with storage_errors(folder, "read"):
                    one.reader.read_data(one.plan, one.planner).wait()
            except FileNotFoundError as error:
                raise CheckpointCorrupted(
                    f"{error.filename} is missing; load another step (step=)", files=(str(error.filename),)
                ) from error
        one.state.apply(one.planner.values)
    return sum(one.nbytes for one in loads.values())


def _stored(state: RankState, role: str, request: LoadRequest) -> tuple[StoredState, tuple[str, ...] | None]:
    folder = request.folders[role]
    if role in request.files:
        stored = read_stored(folder, request.files[role], request.saved_ranks[role])
        return stored.select(request.parts), request.parts
    has_model = any(path[:1] == ("model",) for path, _ in state.leaves().values())
    return read_model(folder, ("model",) if has_model else ()), ("model",) if has_model else None


def _nbytes(targets: Mapping[str, LocalTensor | None]) -> int:
    return sum(one.local.numel() * one.local.element_size() for one in targets.values() if one is not None)


def _remember(plans: dict[str, Any], name: str, plan: Any) -> None:
    plans[name] = plan
    for old in list(plans)[:-_PLANS]:
        del plans[old]


def _recalled(plans: dict[str, dict[str, T]], name: str) -> dict[str, T]:
    if name not in plans:
        raise CheckpointError("this rank was restarted after the save or load was planned; call it again")
    return plans.pop(name)
