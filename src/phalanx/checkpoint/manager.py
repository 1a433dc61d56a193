"""``px.checkpoint.CheckpointManager``: a whole run of several groups saved as one commit, and gone on from there."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from phalanx.channels.channel import Channel
from phalanx.channels.staleness import StalenessManager
from phalanx.checkpoint.checkpoint_rpc import Count, checked_group, counting
from phalanx.checkpoint.driver_state import Driver
from phalanx.checkpoint.flow_state import Links, SavedLinks
from phalanx.checkpoint.group_load import check_names, load_group
from phalanx.checkpoint.group_save import GroupSave
from phalanx.checkpoint.save_future import SaveFuture
from phalanx.checkpoint.storage.path_lock import hold, let_go
from phalanx.checkpoint.storage.steps import SavedStep, StepWriter, listed, numbered, open_step, read_step
from phalanx.checkpoint.storage.storage import place_at
from phalanx.errors import CheckpointError, CheckpointMismatch, DeclarationError
from phalanx.weights.sync_sides import Ranks
from phalanx.wire.value import Reduced

__all__ = ["CheckpointManager", "RunSave"]

_DRIVER = "driver/state.pickle"
_LINKS = "driver/links.pickle"
_LAYOUT = "run"


class CheckpointManager:
    """All that a run needs to go on: groups, the driver's own state, channels, staleness; saved as one commit.

    A run that ends at any point, in the middle of a save too, is gone on with from its last whole step::

        run = px.checkpoint.CheckpointManager("out/run", groups={"policy": policy}, state={"random": random}, keep=3)
        first = (run.resume() or 0) + 1
        for step in range(first, steps + 1):
            train(...)
            run.save(step)

    This process may write the path alone until :meth:`close`, or its end. (The run of ``phalanx top`` is something
    else: what the processes of one driver are shown under.)

    Args:
        path: a path that the driver and all ranks share, or a URL that fsspec knows ("s3://bucket/run").
        groups: those whose workers have a state, by the names under which it is saved. A role of a group will do.
        state: of the driver: something with ``state_dict()`` and ``load_state_dict()``, a random generator, or a dict
            of such things and of plain values. They are loaded in place; plain values are put back into the dict. The
            random numbers of ``random``, and of numpy and torch where they are loaded, are saved in any case.
        channels: made by this driver, with all that waits in them. What was taken and not acknowledged waits again.
        staleness: made by this driver. Leases that ran are dropped, and rows that were accepted and lie in none of
            the channels; their credit is back.
        keep: how many whole steps stay; None: all.

    Raises:
        CheckpointLocked: another driver has the path; it says who. The lock of one that is dead is taken over.
        DeclarationError: an argument is wrong.
        CheckpointError: the path cannot be written.
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
        if keep is not None:
            keep = numbered(
                "keep",
                keep,
                1,
                "give px.checkpoint.CheckpointManager how many steps shall stay, from 1, or None for all",
            )
        if groups is not None and not isinstance(groups, Mapping):
            raise DeclarationError(
                f"px.checkpoint.CheckpointManager(groups={groups!r}): give them by name: groups={{'policy': group}}"
            )
        self.path = os.fspath(path)
        self._groups = {
            name: checked_group(group, "px.checkpoint.CheckpointManager(groups=)")
            for name, group in (groups or {}).items()
        }
        for name in self._groups:
            if not name or "/" in name or name in (".", ".."):
                raise DeclarationError(
                    f"px.checkpoint.CheckpointManager(groups={{{name!r}: ...}}): a name is a word without slashes"
                )
        self._driver = Driver(state)
        self._links = Links(self._groups, channels, staleness)
        self._keep = keep
        self._under_way: SaveFuture[SavedStep] | None = None
        self._closed = False
        self.save = RunSave(self._save, self._submit)
        """``run.save(step)`` saves and waits; ``run.save.submit(step)`` goes on beside the next steps."""
        self._place = place_at(self.path)
        self._hold = hold(self._place)

    def resume(
        self, step: int | None = None, *, parts: Mapping[str, Sequence[str]] | None = None
    ) -> int | None:
        """Have everything as it was at the last whole step, or at the one given.

        Call it before anything moves: after groups, channels and staleness were made. Weights that roles generate
        with are not part of it unless their groups are: sync once before anything is generated. Versions of weights
        go on from the last one, and never back.

        Args:
            step: its number; None: the one that was committed last.
            parts: of groups by name, the outermost keys of their states to load, such as ``{"policy": ["model",
                "optimizer"]}`` on another number of ranks, where the random numbers of ranks have no place. All of a
                group that is not named.

        Returns:
            The step; None where nothing was saved yet.

        Raises:
            CheckpointMismatch: the run has other groups, channels or names than the one that was saved.
            CheckpointCorrupted: a file is missing or not what was written; other steps may be whole: :meth:`steps`.
            CheckpointError: that step is not there.
            DeclarationError: something went through a channel already.
        """
        self._check_open()
        chosen = self._chosen(parts or {})
        self._settle()
        if step is None and not any(one.committed for one in listed(self.path)):
            return None
        saved = read_step(self.path, step)
        self._check_layout(saved)
        restore = self._driver.load(saved.read(_DRIVER))
        links = _links_of(saved)
        self._links.check(links)
        for name, group in self._groups.items():
            load_group(group, saved, f"groups/{name}/", parts=chosen.get(name))
        self._links.load(links)
        restore()
        return saved.number

    def steps(self) -> list[int]:
        """The steps that are whole, in the order in which they were saved."""
        return [one.step for one in listed(self.path) if one.whole]

    def _counting(self, step: int, what: str) -> AbstractContextManager[Count]:
        """A bar that counts the ranks of all groups."""
        total = sum(len(group.ranks) for group in self._groups.values())
        return counting(total, f"save step {step} of {self.path}: {what}")

    def _save(self, step: int) -> SavedStep:
        with self._counting(step, "written") as count:
            return self._begin(step, False, threading.Event(), count)()

    def _submit(self, step: int) -> SaveFuture[SavedStep]:
        cancelled = threading.Event()
        with self._counting(
            step, "staged"
        ) as count:  # none beside the next steps, which may have one of their own
            finish = self._begin(step, True, cancelled, count)
        self._under_way = SaveFuture(finish, f"save of step {step}", cancelled)
        return self._under_way

    def _begin(
        self, step: int, staged: bool, cancelled: threading.Event, count: Count
    ) -> Callable[[], SavedStep]:
        """Take down all that changes; what is given waits for the ranks, and commits."""
        self._check_open()
        self._settle()
        writer = open_step(self.path, step, keep=self._keep)
        saves: list[GroupSave] = []
        try:
            for name, group in self._groups.items():
                saves.append(GroupSave(group, writer, f"groups/{name}/", cancelled, count))
                saves[-1].begin(staged=staged)
            writer.write(_DRIVER, self._driver.save())
            writer.note("driver", self._driver.described())
            links = self._links.save()
            writer.write(_LINKS, links.to_bytes())
            for part, facts in links.described().items():
                writer.note(part, facts)
            writer.note(_LAYOUT, {"groups": sorted(self._groups)})
        except BaseException as error:
            _abandon(saves, writer, error)
            raise
        return lambda: _finished(saves, writer)

    def _settle(self) -> None:
        """Wait for the save under way. Its error belongs to whoever asks its future, and else is raised here."""
        before, self._under_way = self._under_way, None
        if before is not None and not before.asked:
            before.result()
        elif before is not None:
            before.exception()

    def _check_layout(self, saved: SavedStep) -> None:
        layout = saved.parts.get(_LAYOUT)
        if layout is None:
            raise CheckpointMismatch(
                f"{saved.folder} was not saved by a px.checkpoint.CheckpointManager: it has "
                f"{', '.join(saved.parts) or 'nothing'}; load it with "
                "px.load"
            )
        if layout["groups"] != sorted(self._groups):
            raise CheckpointMismatch(
                f"the run was saved with groups {', '.join(layout['groups']) or 'none'} and has "
                f"{', '.join(sorted(self._groups)) or 'none'}; give "
                f"px.checkpoint.CheckpointManager(groups=) the same names"
            )

    def _chosen(self, parts: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
        for name, names in parts.items():
            if name not in self._groups:
                raise DeclarationError(
                    f"run.resume(parts={{{name!r}: ...}}): the run has the groups {', '.join(self._groups) or 'none'}"
                )
            check_names(f"run.resume, group {name!r}", names)
        return parts

    def _check_open(self) -> None:
        if self._closed:
            raise DeclarationError(
                f"the run of {self.path} was closed; make another px.checkpoint.CheckpointManager"
            )

    def close(self) -> None:
        """Wait for the save under way, and let others write the path. Idempotent.

        Raises:
            CheckpointError: the save under way failed, and nobody asked.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._settle()
        finally:
            let_go(self._hold, self._place)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError:
            if error is None:  # else the block's own error is the one to see
                raise

    def __reduce__(self) -> Reduced:
        raise DeclarationError(
            "a px.checkpoint.CheckpointManager belongs to its driver, which alone writes the path"
        )

    def __repr__(self) -> str:
        return f"<run of {', '.join(self._groups) or 'no groups'} at {self.path}>"


class RunSave:
    """What ``run.save`` is."""

    def __init__(
        self,
        save: Callable[[int], SavedStep],
        submit: Callable[[int], SaveFuture[SavedStep]],
    ) -> None:
        self._save, self._submit = save, submit

    def __call__(self, step: int) -> SavedStep:
        """Save everything as ``step``, and wait until it is committed.

        Calls that were made before are in it. Steps beyond ``keep`` are removed, the oldest first.

        Raises:
            CheckpointError: no room, no right, a path that not all see; the steps before stay whole.
            WorkerDiedError: a rank died under way; likewise.
        """
        return self._save(step)

    def submit(self, step: int) -> SaveFuture[SavedStep]:
        """Take down everything as it is now, and write it beside what comes next.

        Returns when each rank has copied what it is to write. The save before this one is waited for.

        Raises:
            CheckpointError: as for a call, or the save before this one failed.
        """
        return self._submit(step)


def _finished(saves: Sequence[GroupSave], writer: StepWriter) -> SavedStep:
    try:
        for save in saves:
            save.finish()
        return writer.commit()
    except BaseException as error:
        _abandon(saves, writer, error)
        raise


def _abandon(saves: Sequence[GroupSave], writer: StepWriter, error: BaseException) -> None:
    for save in saves:
        save.abandon(error)
    writer.abandon()


def _links_of(saved: SavedStep) -> SavedLinks:
    try:
        links = pickle.loads(saved.read(_LINKS))
    except (AttributeError, ImportError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{saved.path(_LINKS)} cannot be read by this version of phalanx: {error}"
        ) from error
    if not isinstance(links, SavedLinks):
        raise CheckpointError(f"{saved.path(_LINKS)} has {type(links).__name__}, which no run has saved")
    return links
