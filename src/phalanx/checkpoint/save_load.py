"""``px.save`` and ``px.load``: the state of one group."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.checkpoint.checkpoint_rpc import checked_group
from phalanx.checkpoint.group_load import check_names, load_group, prefix_of
from phalanx.checkpoint.group_save import GroupSave
from phalanx.checkpoint.hugging_face import load_model, save_model
from phalanx.checkpoint.save_future import SaveFuture
from phalanx.checkpoint.storage.steps import StepWriter, open_step, read_step
from phalanx.display.byte_format import size
from phalanx.errors import DeclarationError
from phalanx.weights.sync_sides import Ranks

__all__ = ["CheckpointInfo", "load", "save"]

Format = Literal["steps", "hugging face"]


@dataclass(frozen=True)
class CheckpointInfo:
    """A step that was saved, or loaded.

    Attributes:
        step: its number.
        folder: where its files are.
        nbytes: bytes of the ranks' files that were written, or bytes that the ranks read.
        seconds: from the first question to the commit, or until all ranks had it.
    """

    step: int
    folder: str
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        rate = f", {size(int(self.nbytes / self.seconds))}/s" if self.seconds > 0 else ""
        return f"step {self.step} in {self.folder}: {size(self.nbytes)} in {self.seconds:.3g} s{rate}"


class _Save:
    """``px.save``: see :meth:`__call__`."""

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
        """Save the state of a group's workers as one step of ``path``: whole, or not at all.

        What is saved is what ``px.register_state`` says, else the worker's ``state_dict()``; of a colocated group each
        role that has one, by name. Tensors that are sharded (DTensor, Megatron's, stated boxes) are written once,
        each part by a rank that holds it. Everything else is written once where it is equal on all ranks, and by rank
        where it is not.

        Args:
            group: a group, a role of it such as ``group.actor``, or some of its ranks.
            path: a path that the driver and all ranks see, or a URL that fsspec knows. Each step is a folder of it.
            step: number of the step. One that is there already stays until this one is whole.
            keep: how many whole steps stay in ``path``, this one included; None: all.
            format: "hugging face" makes ``path`` one folder of safetensors files instead, with the model alone; it
                must not be there yet, and all ranks write into its files at once.
            shard_bytes: of such a file at most, as long as it has more than one tensor.

        Raises:
            CheckpointError: the path cannot be written, the disk is full, the workers have no state, or ranks
            contradict
                each other; says which and why. Nothing is left of this step, and those before are whole.
            CheckpointLocked: another driver writes there.
            WorkerDiedError, RemoteCallError: as of calls; nothing is left of this step either.
        """
        ranks = checked_group(group, "px.save")
        began = time.monotonic()
        if _checked_format(format) == "hugging face":
            if keep is not None:
                raise DeclarationError(
                    f"px.save(keep={keep!r}): a folder in this format is one model; leave it out"
                )
            nbytes = save_model(ranks, os.fspath(path), shard_bytes)
            return CheckpointInfo(step, os.fspath(path), nbytes, time.monotonic() - began)
        with open_step(os.fspath(path), step, keep=keep) as writer:
            saving = GroupSave(ranks, writer)
            saving.begin()
            return _committed(saving, writer, began)

    def submit(
        self, group: Ranks, path: str | os.PathLike[str], *, step: int = 0, keep: int | None = None
    ) -> SaveFuture[CheckpointInfo]:
        """As a call, but threads of the ranks write beside the calls that follow.

        Returns once each rank has a copy of what it is to write, which waits for the calls that the ranks are at. The
        memory of the copies is kept for the next save. A second save of a group waits for the first one's end. The
        step is whole when the future is done.
        """
        ranks = checked_group(group, "px.save.submit")
        began = time.monotonic()
        writer = open_step(os.fspath(path), step, keep=keep)
        cancelled = threading.Event()
        saving = GroupSave(ranks, writer, cancelled=cancelled)
        try:
            saving.begin(staged=True)
        except BaseException:
            writer.abandon()
            raise

        def work() -> CheckpointInfo:
            with writer:
                return _committed(saving, writer, began)

        return SaveFuture(work, f"save of {ranks.name!r} as step {step}", cancelled)

    def __repr__(self) -> str:
        return "<function px.save>"


def _committed(saving: GroupSave, writer: StepWriter, began: float) -> CheckpointInfo:
    saving.finish()
    step = writer.commit()
    return CheckpointInfo(step.number, step.folder, saving.nbytes, time.monotonic() - began)


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
    """Load what ``px.save`` or ``px.checkpoint.CheckpointManager`` wrote, bit for bit, into workers that may be
    sharded otherwise.

    Every rank looks first whether all fits; nothing is changed before all have seen that. Tensors are written in
    place, and what they are compared with their digests is what they get.

    Args:
        group: a group, a role of it, or some of its ranks; of as many ranks as it likes.
        path: as for ``px.save``.
        step: number of the step; None: the one that was committed last.
        parts: the outermost keys of the states to load, such as ``["model", "optimizer"]``; None: all.
        name: under which a ``px.checkpoint.CheckpointManager`` has saved the group; None: the group's own name, or
        that of the only group.
        format: "hugging face": ``path`` is a folder of safetensors files, which the model alone is loaded from. Such
            files have no digests.

    Raises:
        CheckpointMismatch: what was saved does not fit: names, shapes, types, or values that differed by rank and
        the group
            has another number of ranks; names them. Nothing was changed.
        CheckpointCorrupted: a file is missing or is not what was written; names it. What the ranks have is mixed
        then, if the
            file is one of theirs: load another step.
        CheckpointError: there is no such step, or ranks do not see the path.
        WorkerDiedError, RemoteCallError: as of calls.
    """
    ranks = checked_group(group, "px.load")
    check_names("px.load", parts)
    began = time.monotonic()
    if _checked_format(format) == "hugging face":
        if parts is not None or name is not None:
            raise DeclarationError(
                f"px.load(parts={parts!r}, name={name!r}): a folder in this format has the model alone; leave them out"
            )
        found = load_model(ranks, os.fspath(path))
        nbytes = sum(one.nbytes for one in found)
        return CheckpointInfo(0 if step is None else step, os.fspath(path), nbytes, time.monotonic() - began)
    saved = read_step(os.fspath(path), step)
    read = load_group(ranks, saved, prefix_of(ranks, saved, name), parts=parts)
    return CheckpointInfo(
        saved.number, saved.folder, sum(one.nbytes for one in read), time.monotonic() - began
    )
