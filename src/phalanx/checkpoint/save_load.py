"""``px.save`` and ``px.load``: the state of a group as a step, or its model as a folder in Hugging Face's format."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch.distributed.checkpoint import Metadata, SavePlan, TensorStorageMetadata

from phalanx.checkpoint import rank_checkpoint as handlers
from phalanx.checkpoint.group_checkpoint import (
    GroupLoad,
    begin_save,
    call_ranks,
    check_parts,
    checked_group,
    load_groups,
    plan_group,
)
from phalanx.checkpoint.model_folder import create_files, read_model
from phalanx.checkpoint.planners import merge_plans
from phalanx.checkpoint.save_future import SaveFuture
from phalanx.checkpoint.step_files import METADATA
from phalanx.checkpoint.steps import Step, read_step
from phalanx.checkpoint.storage import storage_errors
from phalanx.display.byte_format import size
from phalanx.errors import CheckpointError, DeclarationError
from phalanx.weights.sync_pairs import Ranks

Format = Literal["steps", "hugging face"]


@dataclass(frozen=True)
class CheckpointInfo:
    """A step that was saved or loaded.

    Attributes:
        step: its number.
        folder: of its files.
        nbytes: bytes of the ranks' files, or bytes of the tensors that the ranks loaded.
        seconds: until the commit, or until all ranks had the state.
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
        path: str | os.PathLike[str],
        *,
        step: int = 0,
        keep: int | None = None,
        format: Format = "steps",
        shard_bytes: int = 5 << 30,
    ) -> CheckpointInfo:
        """Save the state of a group's workers as a step of ``path``: complete, or not at all.

        The state is declared by ``px.register_state``; by default it is the worker's ``state_dict()``. Each role of a
        colocated group is saved by its name. Sharded tensors (DTensor, Megatron's, declared boxes) are written once,
        each box by a rank that holds it. Other values are written once if they are equal on all ranks, and by rank
        if they differ.

        Args:
            group: a group, a role of it such as ``group.actor``, or some of its ranks.
            path: a path that the driver and all ranks share, or a URL that fsspec knows. Each step is a folder.
            step: number of the step. A step of that number stays until this step is complete.
            keep: complete steps to keep in ``path``, this step included; None: all.
            format: "hugging face" writes the model alone, as a new folder of safetensors files.
            shard_bytes: of such a file at most, unless it has a single tensor.

        Raises:
            CheckpointError: if the path cannot be written, the disk is full, the workers have no state, or ranks
                contradict each other. Nothing of this step is left, and the steps before stay complete.
            CheckpointLocked: if another driver writes there.
            WorkerDiedError, RemoteCallError: as of calls. Nothing of this step is left either.
        """
        ranks = checked_group(group, "px.save")
        began = time.monotonic()
        if _checked_format(format) == "hugging face":
            if keep is not None:
                raise DeclarationError(
                    f"px.save(keep={keep!r}): a folder in this format is one model; leave it out"
                )
            nbytes = _save_model(ranks, os.fspath(path), shard_bytes)
            return CheckpointInfo(step, os.fspath(path), nbytes, time.monotonic() - began)
        return CheckpointInfo._of(begin_save({"": ranks}, os.fspath(path), step, keep)())

    def submit(
        self, group: Ranks, path: str | os.PathLike[str], *, step: int = 0, keep: int | None = None
    ) -> SaveFuture[CheckpointInfo]:
        """Save as a call does, while threads of the ranks write during the calls that follow.

        Return once each rank has a copy of its part, which waits for the calls before. The memory of the copies is
        kept for the next save. A second save to the same path waits for the end of the first. The step is complete
        when the future is done.
        """
        ranks = checked_group(group, "px.save.submit")
        cancelled = threading.Event()
        finish = begin_save({"": ranks}, os.fspath(path), step, keep, cancelled)
        title = f"save of {ranks.name!r} as step {step}"
        return SaveFuture(lambda: CheckpointInfo._of(finish()), title, cancelled)

    def __repr__(self) -> str:
        return "<function px.save>"


save = _Save()


def _checked_format(format: str) -> str:
    if format not in ("steps", "hugging face"):
        raise DeclarationError(f'format={format!r}: give "steps" or "hugging face"')
    return format


def load(
    group: Ranks,
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    parts: Sequence[str] | None = None,
    name: str | None = None,
    format: Format = "steps",
) -> CheckpointInfo:
    """Load a step of ``px.save`` or ``px.checkpoint.CheckpointManager``, bit for bit, into workers of any sharding.

    First every rank checks that all fits, and the files are compared with their digests. Nothing is changed before.
    Tensors are written in place. On another number of ranks, each rank takes the random generators of its number, and
    a rank without any keeps its own.

    Args:
        group: a group, a role of it, or some of its ranks; the number of ranks may differ.
        path: as for ``px.save``.
        step: number of the step; None: the step that was committed last.
        parts: outermost keys of the states to load, such as ``["model", "optimizer"]``; None: all.
        name: of the group in a ``px.checkpoint.CheckpointManager``; None: the group's own name, or the only name.
        format: "hugging face": ``path`` is a folder of safetensors files for the model alone, without digests.

    Raises:
        CheckpointMismatch: if the step does not fit: names, shapes, types, or other values that differed by rank and
            the number of ranks is different. Nothing was changed.
        CheckpointCorrupted: if a file is missing or differs. Nothing was changed.
        CheckpointError: if there is no such step, or ranks do not see the path.
        WorkerDiedError, RemoteCallError: as of calls.
    """
    ranks = checked_group(group, "px.load")
    check_parts("px.load", parts)
    began = time.monotonic()
    if _checked_format(format) == "hugging face":
        if parts is not None or name is not None:
            raise DeclarationError(
                f"px.load(parts={parts!r}, name={name!r}): a folder in this format has the model alone; leave them out"
            )
        model = read_model(os.path.abspath(os.path.expanduser(path)))
        nbytes = load_groups([GroupLoad(ranks, {ranks.role: model})])
        return CheckpointInfo(0 if step is None else step, os.fspath(path), nbytes, time.monotonic() - began)
    saved = read_step(os.fspath(path), step)
    nbytes = load_groups([GroupLoad.of_step(ranks, saved, name, parts)])
    return CheckpointInfo(saved.number, saved.folder, nbytes, time.monotonic() - began)


def _save_model(group: Ranks, path: str, shard_bytes: int) -> int:
    """Write the model of a role into a new folder. Each rank writes its boxes. Return the bytes.

    Raises:
        CheckpointError: if the folder exists, cannot be written, or the state is no model.
    """
    if "://" in path:
        raise CheckpointError(
            f"{path!r}: a model is written into files by all ranks at once, so give a path, not a URL"
        )
    path = os.path.abspath(os.path.expanduser(path))
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise CheckpointError(f"{path} is there already; give the path of a folder that is not")
    folder = f"{path}.{secrets.token_hex(4)}.part"
    title = f"save model of {group.name!r}"
    roles = plan_group(group, f"{title}: plan", folder, model=True)
    if len(roles) != 1:
        names = sorted(roles)
        raise CheckpointError(
            f"{group.name!r} has the roles {', '.join(names)}; give one of them, such as group.{names[0]}"
        )
    (role, offered), *_ = roles.items()
    plans, metadata = merge_plans(offered)
    tensors = _tensors(group, offered, metadata)
    try:
        with storage_errors(path, "written"):
            places = create_files(Path(folder), tensors, shard_bytes)
        written = call_ranks(group, f"{title}: write", handlers.write_model, plans, folder, role, places)
        with storage_errors(path, "written"):
            if os.path.isdir(path):
                os.rmdir(path)
            os.rename(folder, path)
        return sum(written)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tensors(
    group: Ranks, offered: Sequence[SavePlan], metadata: Metadata
) -> dict[str, TensorStorageMetadata]:
    """Return the tensors of a model, if it has only tensors, and no tensor that differs by rank."""
    stored = metadata.state_dict_metadata
    tensors = {name: one for name, one in stored.items() if isinstance(one, TensorStorageMetadata)}
    values = sorted(stored.keys() - tensors.keys())
    if values or not tensors:
        raise CheckpointError(
            f"the state of {group.name!r} is no model: {', '.join(values[:5]) or 'it has no tensors'}; "
            "register the model alone: px.register_state(self, model=...)"
        )
    differing = sorted(tensors.keys() - {key for plan in offered for key in plan.planner_data})
    if differing:
        raise CheckpointError(
            f"{', '.join(differing[:5])} differ by rank, and nothing says how they are sharded; declare it (DTensor, "
            "px.register_state(boxes=..., megatron=...))"
        )
    return tensors
