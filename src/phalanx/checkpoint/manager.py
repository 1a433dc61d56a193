"""``px.checkpoint.CheckpointManager``: a run of several groups, saved as a single commit and resumed from there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from phalanx.channels.channel import Channel
from phalanx.channels.staleness import StalenessManager
from phalanx.checkpoint.driver_part import DRIVER, DriverPart
from phalanx.checkpoint.group_checkpoint import (
    GroupLoad,
    begin_save,
    check_parts,
    checked_group,
    load_groups,
    saved_groups,
)
from phalanx.checkpoint.path_lock import PathLock
from phalanx.checkpoint.save_future import SaveFuture
from phalanx.checkpoint.steps import Step, checked_number, listed, read_step
from phalanx.checkpoint.storage import Storage
from phalanx.errors import CheckpointError, CheckpointMismatch, DeclarationError
from phalanx.weights.sync_pairs import Ranks
from phalanx.wire.value import Reduced


class CheckpointManager:
    """All that a run needs to continue: groups, the driver's own state, channels, staleness; saved as a single commit.

    A run that ends at any point, also during a save, continues from its last complete step::

        run = px.checkpoint.CheckpointManager("out/run", groups={"policy": policy}, state={"random": random}, keep=3)
        first = (run.resume() or 0) + 1
        for step in range(first, steps + 1):
            train(...)
            run.save(step)

    Only this process may write to the path until :meth:`close`, or its end.

    Args:
        path: a path that the driver and all ranks share, or a URL that fsspec knows ("s3://bucket/run").
        groups: groups, or roles of groups, by the names under which they are saved.
        state: of the driver: an object with ``state_dict()`` and ``load_state_dict()``, a random generator, or a dict
            of such objects and of plain values. Objects are loaded in place; plain values are put back into the dict.
            The random numbers of ``random``, numpy and torch are always saved.
        channels: channels of this driver, with all items. Items without an acknowledgement are requeued.
        staleness: of this driver. Running leases are dropped, and accepted rows that are in none of the channels;
            their quota is released.
        keep: complete steps to keep; None: all.

    Raises:
        CheckpointLocked: if another driver has the path; the error names it.
        DeclarationError: if an argument is wrong.
        CheckpointError: if the path cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        groups: Mapping[str, Ranks] | None = None,
        *,
        state: Any = None,
        channels: Sequence[Channel] = (),
        staleness: StalenessManager | None = None,
        keep: int | None = 3,
    ) -> None:
        verb = "px.checkpoint.CheckpointManager"
        if keep is not None:
            keep = checked_number(
                "keep", keep, 1, f"give {verb} how many steps shall stay, from 1, or None for all"
            )
        if groups is not None and not isinstance(groups, Mapping):
            raise DeclarationError(
                f"{verb}(groups={groups!r}): give them by name: groups={{'policy': group}}"
            )
        self.path = os.fspath(path)
        self._groups = {
            name: checked_group(group, f"{verb}(groups=)") for name, group in (groups or {}).items()
        }
        for name in self._groups:
            if not name or "/" in name or name in (".", ".."):
                raise DeclarationError(f"{verb}(groups={{{name!r}: ...}}): a name is a word without slashes")
        self._driver = DriverPart(state, self._groups, channels, staleness)
        self._keep = keep
        self._pending: SaveFuture[Step] | None = None
        self._closed = False
        self.save = RunSave(self)
        """``run.save(step)`` saves and waits; ``run.save.submit(step)`` continues during the next steps."""
        self._lock = PathLock.acquire(Storage(self.path))

    def resume(
        self, step: int | None = None, *, parts: Mapping[str, Sequence[str]] | None = None
    ) -> int | None:
        """Restore everything as it was at the last complete step, or at the given step.

        Call it after groups, channels and staleness were created, and before anything moves. Everything is checked
        before anything is changed. Roles that generate with synced weights need a sync before they generate, unless
        their groups belong to the run. Versions of weights never go back.

        Args:
            step: its number; None: the step that was committed last.
            parts: by name of a group, the outermost keys of its state to load, such as ``{"policy": ["model",
                "optimizer"]}`` on another number of ranks, where values that differed by rank cannot be restored.

        Returns:
            The step; None if nothing was saved yet.

        Raises:
            CheckpointMismatch: if the run has other groups, channels or names than the saved run.
            CheckpointCorrupted: if a file is missing or differs. Other steps may be complete: :meth:`steps`.
            CheckpointError: if the step does not exist.
            DeclarationError: if items passed through a channel already.
        """
        self._check_open()
        for name, names in (parts or {}).items():
            if name not in self._groups:
                raise DeclarationError(
                    f"run.resume(parts={{{name!r}: ...}}): the run has the groups {', '.join(self._groups) or 'none'}"
                )
            check_parts(f"run.resume, group {name!r}", names)
        self._settle()
        if step is None and not any(found.committed for found in listed(self.path)):
            return None
        saved = read_step(self.path, step)
        self._check_layout(saved)
        restore = self._driver.load(saved)
        chosen = parts or {}
        with saved.reading():
            load_groups(
                [GroupLoad.of(group, saved, name, chosen.get(name)) for name, group in self._groups.items()]
            )
        restore()
        return saved.number

    def steps(self) -> list[int]:
        """Return the complete steps, in the order in which they were saved."""
        return [found.number for found in listed(self.path) if found.whole]

    def _begin(self, step: int, cancelled: threading.Event | None = None) -> Callable[[], Step]:
        self._check_open()
        self._settle()
        return begin_save(self._groups, self.path, step, self._keep, cancelled, self._driver.save)

    def _settle(self) -> None:
        """Wait for the pending save, and raise its error unless the caller has read it."""
        before, self._pending = self._pending, None
        if before is not None and not before.was_read:
            before.result()
        elif before is not None:
            before.exception()

    def _check_layout(self, saved: Step) -> None:
        if DRIVER not in saved.parts:
            raise CheckpointMismatch(
                f"{saved.folder} was not saved by a px.checkpoint.CheckpointManager: it has "
                f"{', '.join(saved.parts) or 'nothing'}; load it with px.load"
            )
        names = saved_groups(saved).keys()
        if names != self._groups.keys():
            raise CheckpointMismatch(
                f"the run was saved with groups {', '.join(sorted(names)) or 'none'} and has "
                f"{', '.join(sorted(self._groups)) or 'none'}; give px.checkpoint.CheckpointManager(groups=) the same "
                "names"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise DeclarationError(
                f"the run of {self.path} was closed; create another px.checkpoint.CheckpointManager"
            )

    def close(self) -> None:
        """Wait for the pending save, and release the path. Calling it again does nothing.

        Raises:
            CheckpointError: if the pending save failed, and the caller has not read the error.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._settle()
        finally:
            self._lock.release()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError:
            if error is None:  # else the block's own error is raised
                raise

    def __reduce__(self) -> Reduced:
        raise DeclarationError(
            "a px.checkpoint.CheckpointManager belongs to its driver, which alone writes the path"
        )

    def __repr__(self) -> str:
        return f"<run of {', '.join(self._groups) or 'no groups'} at {self.path}>"


class RunSave:
    """The function ``run.save``."""

    def __init__(self, run: CheckpointManager) -> None:
        self._run = run

    def __call__(self, step: int) -> Step:
        """Save everything as ``step``, and wait until it is committed.

        Calls that were made before are included. Steps beyond ``keep`` are removed, the oldest first.

        Raises:
            CheckpointError: if the path cannot be written, or not all see it. The steps before stay complete.
            WorkerDiedError: if a rank died. The steps before stay complete.
        """
        return self._run._begin(step)()

    def submit(self, step: int) -> SaveFuture[Step]:
        """Save everything as it is now, and write it during the calls that follow.

        Return when each rank has copied its part. The save before is waited for.

        Raises:
            CheckpointError: as of a call, or if the save before failed.
        """
        cancelled = threading.Event()
        work = self._run._begin(step, cancelled)
        self._run._pending = SaveFuture(work, f"save of step {step}", cancelled)
        return self._run._pending
