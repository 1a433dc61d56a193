"""``px.checkpoint.CheckpointManager``: a run of several groups, saved as a single commit and resumed from it."""

from __future__ import annotations

import logging
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import cloudpickle
import torch

from phalanx.channels.channel import Channel
from phalanx.channels.channel_snapshots import check_owned, read, restore_values, snapshot
from phalanx.channels.staleness import StalenessManager
from phalanx.checkpoint.planners import pickling
from phalanx.checkpoint.save_future import SaveFuture
from phalanx.checkpoint.save_load import (
    GroupLoad,
    begin_save,
    check_parts,
    load_groups,
    saved_groups,
)
from phalanx.checkpoint.steps import PathLock, Step, StepWriter, checked_keep, listed, read_step
from phalanx.checkpoint.storage import PathOrUrl, Storage
from phalanx.declare.state_declarations import stateful, ways_of
from phalanx.errors import ChannelError, CheckpointError, CheckpointMismatch, DeclarationError
from phalanx.weights.sync_pairs import Ranks, checked_group
from phalanx.wire.value import Reduced
from phalanx.worker.rank_state import generators_of

_DRIVER = "driver"
"""Name of the driver's part of a step."""
_STATE = "driver/state.pickle"
_CHANNELS = "driver/channels.pickle"
_VERB = "px.checkpoint.CheckpointManager"

_log = logging.getLogger("phalanx")

_Versions = Mapping[tuple[str, str], int]
"""Versions of weights by role and name."""


class CheckpointManager:
    """Checkpoints of a run: groups, the driver's own state, channels and staleness, saved as a single commit.

    A run that ends at any point, also during a save, continues from its last complete step::

        run = px.checkpoint.CheckpointManager("out/run", groups={"policy": policy}, state={"random": random}, keep=3)
        first = (run.resume() or 0) + 1
        for step in range(first, steps + 1):
            train(...)
            run.save(step)

    Only this process may write to the path until it calls :meth:`close` or ends.

    Args:
        path: a path that the driver and all ranks share, or a URL that fsspec knows ("s3://bucket/run").
        groups: groups, or roles of groups, by the names under which they are saved.
        state: state of the driver: an object with ``state_dict()`` and ``load_state_dict()``, a random generator, or a
            dict of such objects and of plain values. Objects are loaded in place; plain values are put back into the
            dict. The generators of ``random``, numpy and torch are always saved.
        channels: channels of this driver, saved with all items. A resume requeues items without an acknowledgement.
        staleness: manager of this driver. A resume drops running leases and accepted rows that are in none of the
            channels; their quota is released.
        keep: number of complete steps to keep; None: all.

    Raises:
        CheckpointLocked: if another driver has the path; the error names it.
        DeclarationError: if an argument is wrong.
        CheckpointError: if the path cannot be written.
    """

    def __init__(
        self,
        path: PathOrUrl,
        groups: Mapping[str, Ranks] | None = None,
        *,
        state: Any = None,
        channels: Sequence[Channel] = (),
        staleness: StalenessManager | None = None,
        keep: int | None = 3,
    ) -> None:
        if groups is not None and not isinstance(groups, Mapping):
            raise DeclarationError(
                f"{_VERB}(groups={groups!r}): give them by name: groups={{'policy': group}}"
            )
        storage = Storage(path)
        self.path = storage.root  # absolute: the program may change its directory
        self._groups = {
            name: checked_group(group, f"{_VERB}(groups=): {name!r}")
            for name, group in (groups or {}).items()
        }
        for name in self._groups:
            if not name or "/" in name or name in (".", ".."):
                raise DeclarationError(
                    f"{_VERB}(groups={{{name!r}: ...}}): a name must not be empty, '.', '..' or contain '/'"
                )
        self._state = _checked_state(state)
        self._state_owner: Any = stateful(self._state)
        try:
            check_owned(channels, staleness)
        except ChannelError as error:
            raise DeclarationError(
                f"{_VERB}: {error}; the driver that saves a run has to create its channels and its staleness"
            ) from None
        self._channels, self._staleness = tuple(channels), staleness
        if len({channel.name for channel in self._channels}) < len(self._channels):
            raise DeclarationError(f"{_VERB}(channels=): two channels have the same name; pass each once")
        self._keep = checked_keep(keep)
        self._pending: SaveFuture[Step] | None = None
        self._closed = False
        self.save = RunSave(self)
        """``run.save(step)`` saves and waits; ``run.save.submit(step)`` writes during the next steps."""
        self._lock = PathLock.acquire(storage)

    def resume(
        self, step: int | None = None, *, parts: Mapping[str, Sequence[str]] | None = None
    ) -> int | None:
        """Restore everything as it was at the last complete step, or at the given step.

        Call it after groups, channels and staleness were created, and before they are used. Everything is checked
        before anything is changed. Roles that generate with synced weights need a sync before they generate, unless
        their groups belong to the run. Versions of weights never decrease.

        Args:
            step: number of the step; None: the step that was committed last.
            parts: outermost keys of the state to load, by name of the group, such as ``{"policy": ["model",
                "optimizer"]}`` on another number of ranks, where values that differed by rank cannot be restored.

        Returns:
            The number of the step; None if nothing was saved yet.

        Raises:
            CheckpointMismatch: if the run has other groups, channels or names than the saved run.
            CheckpointCorrupted: if a file is missing or differs. Other steps may be complete: :meth:`steps`.
            CheckpointError: if the step does not exist, or a value of the state or of a channel cannot be read here.
            DeclarationError: if a channel or the staleness was used already, or the manager is closed.
            ChannelError: if the process of the channels dies meanwhile.
            DispatchError: if an item has no valid lengths for its channel, or the object store is full meanwhile.
        """
        self._check_open()
        parts = parts or {}
        if not isinstance(parts, Mapping):
            raise DeclarationError(
                f"run.resume(parts={parts!r}): give them by name: parts={{'policy': ['model']}}"
            )
        for name, names in parts.items():
            if name not in self._groups:
                raise DeclarationError(
                    f"run.resume(parts={{{name!r}: ...}}): the run has the groups {', '.join(self._groups) or 'none'}"
                )
            check_parts(f"run.resume, group {name!r}", names)
        if self._pending is not None and (error := self._pending.exception()) is not None:
            _log.warning("%s: %s; an earlier step is resumed", self.path, error)
        self._pending = None
        if step is None and not any(found.committed for found in listed(self.path)):
            return None
        saved = read_step(self.path, step)
        restore = self._read_driver(saved)
        groups = self._groups.items()
        load_groups([GroupLoad.of_step(group, saved, name, parts.get(name)) for name, group in groups])
        restore()
        return saved.number

    def steps(self) -> list[int]:
        """Return the complete steps, in the order in which they were saved."""
        return [found.number for found in listed(self.path) if found.whole]

    def _begin(self, step: int, cancelled: threading.Event | None = None) -> Callable[[], Step]:
        self._check_open()
        self._settle()
        return begin_save(self._groups, self.path, step, self._keep, cancelled, self._write_driver)

    def _write_driver(self, writer: StepWriter) -> None:
        """Add the driver's part to a step. Channels and staleness are of the same moment.

        Raises:
            CheckpointError: if a value of the state cannot be pickled.
            ChannelError: if the bytes of a channel's items cannot be read.
        """
        values: dict[str, bytes] = {}
        for name, value in self._state_owner.state_dict().items():
            with pickling(f"the driver's {name!r}", value):
                values[name] = cloudpickle.dumps(value, 5)
        names = [str(name) for name in self._state]
        writer.write(_STATE, pickle.dumps((names, values, _generators().state_dict()), 5))
        writer.parts[_DRIVER] = {"kind": "driver", "text": ", ".join([*names, "random numbers"])}
        has_staleness = self._staleness is not None
        flow = snapshot(self._channels, self._staleness) if self._channels or has_staleness else b""
        cores = {name: group.core for name, group in self._groups.items()}
        versions = {name: _newest(core.had_weights, core.published_weights) for name, core in cores.items()}
        content = tuple(channel.name for channel in self._channels), has_staleness, flow, versions
        writer.write(_CHANNELS, pickle.dumps(content, 5))

    def _read_driver(self, step: Step) -> Callable[[], None]:
        """Read the driver's part, check that it fits, and return a function that restores it. Versions never decrease.

        Raises:
            CheckpointMismatch: if the run has other names of groups, state or channels, or a staleness and the step
                has none, or vice versa.
            CheckpointError: if a value of the state or of a channel cannot be unpickled here.
            DeclarationError: if a channel or the staleness was used already.
        """
        if _DRIVER not in step.parts:
            raise CheckpointMismatch(
                f"{step.folder} was not saved by a {_VERB}: it has {_names(step.parts)}; load it with px.load"
            )
        _, saved, generators = pickle.loads(step.read(_STATE))
        _check_names("groups", saved_groups(step), self._groups)
        _check_names("state", saved, self._state)
        if _CHANNELS in step.files:
            channels, has_staleness, flow, versions = pickle.loads(step.read(_CHANNELS))
            _check_names("channels", channels, [channel.name for channel in self._channels])
            if has_staleness != (self._staleness is not None):
                had, has = ("a", "no") if has_staleness else ("no", "a")
                raise CheckpointMismatch(f"the run was saved with {had} staleness and has {has} staleness=")
        else:  # format 1
            flow, versions = b"", {}
            if self._channels or self._staleness is not None:
                _log.warning("%s is of format 1: its channels and staleness are not restored", step.folder)
        self._check_unused()
        try:
            content = read(flow, self._channels) if flow else None
        except ChannelError as error:
            raise CheckpointError(
                f"the channels of {step.folder} cannot be restored here: {error}"
            ) from error
        values: dict[str, Any] = {}
        for name, data in saved.items():
            try:
                values[name] = pickle.loads(data)
            except Exception as error:
                raise CheckpointError(
                    f"{name!r} of the driver's state cannot be read here: {error}"
                ) from error
        if isinstance(generators.get("torch"), bytes):  # format 1
            generators["torch"] = torch.frombuffer(bytearray(generators["torch"]), dtype=torch.uint8)

        def put() -> None:
            if content is not None:
                restore_values(content, self._channels, self._staleness)
            for name, group in self._groups.items():
                numbers = group.core.published_weights
                numbers.update(_newest(numbers, versions.get(name, {})))
            self._state_owner.load_state_dict(values)
            _generators().load_state_dict(generators)  # last: loading may draw random numbers

        return put

    def _check_unused(self) -> None:
        used = [f"channel {channel.name!r}" for channel in self._channels if channel.items.submitted]
        if self._staleness is not None and self._staleness.stats.rows.submitted:
            used.append("the staleness")
        if used:
            raise DeclarationError(
                f"run.resume: {used[0]} cannot be restored, because it was used already; resume before "
                "channels and staleness are used"
            )

    def _settle(self) -> None:
        """Wait for the pending save, and raise its error unless the caller has read it."""
        before, self._pending = self._pending, None
        if before is not None:
            wait = before.exception if before.was_read else before.result
            wait()

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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception:
            if error is None:  # else the block's own error is raised
                raise

    def __reduce__(self) -> Reduced:
        raise DeclarationError(
            "a px.checkpoint.CheckpointManager belongs to its driver, which alone writes the path"
        )

    def __repr__(self) -> str:
        return f"<run of {', '.join(self._groups) or 'no groups'} at {self.path}>"


class RunSave:
    """The callable ``run.save``."""

    def __init__(self, run: CheckpointManager) -> None:
        self._run = run

    def __call__(self, step: int) -> Step:
        """Save everything as ``step``, and wait until it is committed.

        Calls that were made before are included. Steps beyond ``keep`` are removed, the oldest first.

        Returns:
            The step: its ``number``, ``folder``, ``files``, and ``seconds`` until the commit.

        Raises:
            CheckpointError: if the path cannot be written, or not all ranks see it. The steps before stay complete.
            WorkerDiedError, GroupBroken: if a rank died. No policy recovers the group here, since its state would be
                lost. The steps before stay complete.
        """
        return self._run._begin(step)()

    def submit(self, step: int) -> SaveFuture[Step]:
        """Save everything as it is now, and write it during the calls that follow.

        Return when each rank has copied its part. Wait for the previous save before.

        Raises:
            CheckpointError: as ``run.save(step)``, or if the previous save failed.
        """
        cancelled = threading.Event()
        work = self._run._begin(step, cancelled)
        self._run._pending = SaveFuture(work, f"save of step {step}", cancelled)
        return self._run._pending


def _checked_state(state: Any) -> Mapping[str, Any]:
    if state is None:
        return {}
    if ways_of(state) is not None:
        return {"state": state}
    if isinstance(state, MutableMapping):
        return state
    raise DeclarationError(
        f"{_VERB}(state={type(state).__name__}): pass an object with state_dict() and load_state_dict(), a random "
        "generator, or a dict of these and of plain values"
    )


def _check_names(kind: str, saved: Iterable[str], current: Iterable[str]) -> None:
    if set(saved) != set(current):
        raise CheckpointMismatch(
            f"the run was saved with {kind} {_names(saved)} and has {_names(current)}; give {_VERB}({kind}=) the same"
        )


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, names))) or "none"


def _newest(versions: _Versions, others: _Versions) -> dict[tuple[str, str], int]:
    """Return the later of the two versions of each name; versions count from 1."""
    return dict(Counter(versions) | Counter(others))


def _generators() -> Any:
    return generators_of("cuda" if torch.cuda.is_initialized() else "cpu")
