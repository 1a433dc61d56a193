"""Steps of a path: :class:`StepWriter` writes a step, and :func:`read_step` finds it.

A step is a folder. It is complete from the moment its manifest exists. The manifest is written last, once every file
is on the disk. A folder without a manifest is left over from a writer that died, and the next writer removes it.

A single driver writes to a path at a time, by :class:`PathLock`. On a file system the kernel releases the lock with
the process. Stores have no locks: there the newest driver claims the path, and a driver that lost its claim commits
and removes nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePath
from typing import Any

from phalanx.checkpoint.storage import FileInfo, PathOrUrl, Storage, storage_errors
from phalanx.display.text_format import first_of, size
from phalanx.errors import CheckpointCorrupted, CheckpointError, CheckpointLocked
from phalanx.wire.value import checked_number

MANIFEST = "manifest.json"
FORMAT = 2
READABLE = (1, 2)
"""Steps of format 1 have a ``catalogue.json`` next to each ``.metadata``; see `phalanx.checkpoint.stored_state`."""

_FACTS = ("serial", "at", "seconds", "parts")
"""Fields of a step that its manifest has under the same names."""

_MARK = ".phalanx"
"""Name of an empty file in each step: the leftovers of saves are removed, and folders of others never."""

LOCK = ".lock"
CLAIM = "claim.txt"

_locks: dict[str, PathLock] = {}
_guard = threading.Lock()
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


@dataclass(frozen=True)
class Step:
    """A step of a path, as described by its folder and its manifest.

    Attributes:
        storage: folder of the step.
        number: number that the caller gave.
        serial: number of the commit among all commits of the path, from 1. The last commit is resumed by default. 0 if
            there is no manifest, or it cannot be read.
        at: time of the commit, in seconds since 1970.
        seconds: seconds from the begin of the step to its commit.
        files: facts of the files, by name relative to the step's folder.
        parts: descriptions of its parts, as JSON data by name.
        faults: names of files that are missing or have another size.
        why: error of a manifest that cannot be read.
    """

    storage: Storage
    number: int
    serial: int = 0
    at: float = 0.0
    seconds: float = 0.0
    files: Mapping[str, FileInfo] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    why: str = ""

    def __repr__(self) -> str:
        written = size(sum(facts.size for facts in self.files.values()))
        return f"<Step {self.number} in {self.folder}: {written} in {len(self.files)} files, {self.seconds:.3g} s>"

    @property
    def folder(self) -> str:
        """Absolute path or URL."""
        return self.storage.root

    @property
    def committed(self) -> bool:
        """True if the step was complete at some time."""
        return bool(self.serial or self.faults)

    @property
    def whole(self) -> bool:
        """True if the step was committed and no fault is known. Contents are verified by a load."""
        return self.committed and not self.faults

    def path(self, name: str) -> str:
        """Return the absolute path or URL of a file or a part."""
        return f"{self.storage.root}/{name}"

    def read(self, name: str) -> bytes:
        """Return the content of a file, verified by its digest.

        Raises:
            CheckpointCorrupted: if it is missing or differs.
        """
        data = self.storage.read(name)
        if data is None or FileInfo.of(data) != self.files[name]:
            raise self.corrupted([name])
        return data

    def corrupted(self, files: Sequence[str], more: str = "") -> CheckpointError:
        """Return the error for files that are missing or differ, or for a step that its writer has removed."""
        if self.storage.read(MANIFEST) is None:
            return CheckpointError(
                f"{self.folder} was removed while it was read: its writer keeps fewer steps (keep=). Load again, which "
                "takes the last step"
            )
        return CheckpointCorrupted(
            f"{self.folder} is damaged: {first_of(files, 5)}: missing or changed since the save; load another step "
            f"(step=){more}",
            files=tuple(files),
        )

    def remove(self) -> None:
        """Remove the step, its manifest first: an interrupted removal leaves no step that looks complete.

        Its mark goes last, so that the next save removes the rest.
        """
        others = set(self.storage.names()) - {MANIFEST, _MARK}
        for name in (MANIFEST, *others, ""):
            self.storage.remove(name)


class StepWriter:
    """The writer of a step, until :meth:`commit` or :meth:`abandon`. No reader sees the step before its commit.

    The writer waits for the end of the previous step. Leftovers of writers that died are removed.

    Args:
        path: path of the run, which the driver and all ranks share, or a URL that fsspec knows.
        step: number of the step, from 0. An earlier step of that number stays until this step is committed.
        keep: number of complete steps to keep, this step included; None: all.

    Attributes:
        folder: absolute path or URL of its files.
        files: files that were written, by name relative to the step. The commit checks that they exist.
        parts: descriptions of its parts, as JSON data. ``phalanx runs`` shows ``text`` of a dict.

    Raises:
        DeclarationError: if a number is too small.
        CheckpointLocked: if another driver writes there.
        CheckpointError: if the path cannot be written.
    """

    def __init__(self, path: PathOrUrl, step: int, keep: int | None = None) -> None:
        self.step = checked_number("step", step, 0, "give a number from 0")
        self._keep = checked_keep(keep)
        self._run = Storage(path)
        self._lock = PathLock.acquire(self._run)
        with contextlib.ExitStack() as stack:
            stack.callback(self._lock.release)
            stack.enter_context(self._lock.turn)
            self._lock.renew()  # else the leftovers may be the step of another driver
            for found in find_steps(self._run):
                if not found.committed:
                    names = found.storage.names()
                    if not names or _MARK in names:
                        found.remove()
            name = f"step-{self.step:08d}"
            if not self._run.is_local or name in self._run.names():
                name += f".{secrets.randbelow(1 << 32)}"  # drivers of a store do not exclude each other
            self._storage = Storage(f"{self._run.root}/{name}")
            self._storage.make("")
            self._storage.mark(_MARK)
            self._end = stack.pop_all()
        self.folder = self._storage.root
        self.files: dict[str, FileInfo] = {}
        self.parts: dict[str, Any] = {}
        self._began = time.monotonic()
        self._ended = False

    def part(self, name: str) -> str:
        """Create the folder of a part, and return its absolute path or URL."""
        self._storage.make(name)
        return f"{self.folder}/{name}"

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, by its name relative to the step."""
        if "/" in name:
            self.part(name.rpartition("/")[0])
        self._storage.write(name, data)
        self.files[name] = FileInfo.of(data)

    def commit(self) -> Step:
        """Make the step complete, and remove the steps beyond ``keep``.

        Raises:
            CheckpointError: if a file is missing. The step can only be abandoned.
            CheckpointLocked: if another driver has claimed the path.
        """
        self._lock.check()  # first: a driver that has claimed the path removes the files
        missing = self._storage.missing(self.files)
        if missing:
            raise CheckpointError(
                f"step {self.step} is not saved: {first_of(missing, 3)} of it cannot be seen by the driver in "
                f"{self.folder}; is that a path that only one node sees? Choose one that the driver and all ranks share"
            )
        self._run.sync("")
        for folder in {parent for name in self.files for parent in PurePath(name).parents}:
            self._storage.sync(str(folder))
        self._lock.check()
        serial = 1 + max([0, *(found.serial for found in find_steps(self._run, strict=True))])
        at, seconds = time.time(), time.monotonic() - self._began
        step = Step(self._storage, self.step, serial, at, seconds, self.files, self.parts)
        self._storage.write(MANIFEST, _manifest(step))
        self._lock.check()  # a store compares and writes in two steps: a claim in between withdraws the step
        # The step is complete. What cannot be removed is left to the next save.
        self._finish("old steps", lambda: expired(find_steps(self._run, strict=True), self._keep))
        return step

    def abandon(self) -> None:
        """Remove the files that were written. Does nothing after a commit."""
        if not self._ended:
            self._finish(f"files of step {self.step}", lambda: [Step(self._storage, self.step)])

    def _finish(self, title: str, steps: Callable[[], Sequence[Step]]) -> None:
        """Remove steps, and let the next step of the path begin."""
        self._ended = True  # first: an interrupt of the removal of older steps must not remove the only one
        try:
            with self._end:
                for step in steps():
                    step.remove()
        except CheckpointError as error:
            warnings.warn(f"{title} were not removed, or the path not released: {error}", stacklevel=3)


def checked_keep(keep: int | None) -> int | None:
    """Return the number of complete steps to keep; None: all."""
    advice = "give the number of steps to keep, at least 1, or None for all"
    return None if keep is None else checked_number("keep", keep, 1, advice)


def read_step(path: PathOrUrl, step: int | None = None) -> Step:
    """Return the step that was committed last, or the step of that number.

    Raises:
        CheckpointError: if there is no such step.
        CheckpointCorrupted: if files are missing or have another size; the error names the complete steps.
    """
    if step is not None:
        step = checked_number(
            "step", step, 0, "give the number of a step, or None for the one that was committed last"
        )
    storage = Storage(path)
    found = find_steps(storage)
    steps = in_order(found)
    chosen = next((one for one in reversed(steps) if step in (None, one.number)), None)
    complete = f"complete steps: {', '.join(str(one.number) for one in steps if one.whole) or 'none'}"
    unreadable = max(
        (one for one in found if one.why and step in (None, one.number)),
        key=lambda one: one.number,
        default=None,
    )
    # A later step may be the last commit, but its manifest cannot be read.
    if unreadable and (chosen is None or (step is None and unreadable.number > chosen.number)):
        raise CheckpointCorrupted(
            f"{unreadable.why}; or load another step (step=); {complete}", files=unreadable.faults
        )
    if chosen is None and storage.read(MANIFEST) is not None:
        raise CheckpointError(f"{storage.root} is a single step: give the folder above it, and step=")
    if chosen is None:
        raise CheckpointError(
            f"step {step} is not in {storage.root}; {complete}"
            if steps
            else f"nothing was saved in {storage.root} yet; give the path that px.save was given"
        )
    if chosen.faults:
        raise chosen.corrupted(chosen.faults, f"; {complete}")
    return chosen


def listed(path: str) -> list[Step]:
    """Return all steps of a path: committed steps in the order of their commits, then incomplete ones."""
    return find_steps(Storage(path))


def find_steps(storage: Storage, *, strict: bool = False) -> list[Step]:
    """Return all steps of a path, by the names of their folders, in the order of :func:`listed`.

    With ``strict``, an error of reading a manifest is raised; else it is the fault of that step.
    """
    matches = [match for name in storage.names() if (match := _NAME.fullmatch(name))]
    found = [_found(Storage(f"{storage.root}/{match[0]}"), int(match[1]), strict) for match in matches]
    return sorted(found, key=lambda one: one.serial or math.inf)


def in_order(found: Sequence[Step]) -> list[Step]:
    """Return the committed steps among all steps; of a step committed again only the last commit."""
    last = {one.number: one for one in found if one.serial}
    return [one for one in found if last.get(one.number) is one]


def expired(found: Sequence[Step], keep: int | None) -> list[Step]:
    """Return the steps to remove after a commit: steps committed again, and steps older than the last ``keep``."""
    kept = in_order(found)
    whole = [one for one in kept if one.whole]
    oldest = whole[-keep].serial if keep is not None and len(whole) > keep else 0
    return [one for one in found if one.serial and (one not in kept or one.serial < oldest)]


def _found(storage: Storage, number: int, strict: bool) -> Step:
    try:
        data = storage.read(MANIFEST)
    except CheckpointError as error:
        if strict:
            raise
        return Step(storage, number, faults=(MANIFEST,), why=str(error))
    if data is None:
        return Step(storage, number)
    body, why = _read_manifest(data)
    if why:
        return Step(storage, number, faults=(MANIFEST,), why=f"{storage.root}/{MANIFEST} {why}")
    files = {name: FileInfo(*facts) for name, facts in body["files"].items()}
    faults = storage.missing(files)
    if faults and storage.read(MANIFEST) is None:  # its writer is removing it
        return Step(storage, number)
    return Step(storage, number, files=files, faults=tuple(faults), **{name: body[name] for name in _FACTS})


def _manifest(step: Step) -> bytes:
    """Return the manifest of a step, with its own digest."""
    facts = {name: getattr(step, name) for name in _FACTS}
    body = {"step": step.number, **facts, "files": dict(sorted(step.files.items())), "format": FORMAT}
    return json.dumps({"digest": _digest(body), "manifest": body}, indent=1).encode()


def _read_manifest(data: bytes) -> tuple[dict[str, Any], str]:
    """Return the content of a manifest, and its fault, if any."""
    try:
        outer = json.loads(data)
        body, written, version = outer["manifest"], outer["digest"], outer["manifest"]["format"]
    except (ValueError, KeyError, TypeError):
        return {}, "is damaged: it is not a manifest"
    if version not in READABLE:
        return {}, (
            f"has format {version!r}; this version of phalanx reads formats {READABLE[0]} to {FORMAT}: load it with "
            "the version that wrote it"
        )
    return body, "" if _digest(body) == written else "is damaged: its digest is not that of its text"


def _digest(body: Mapping[str, Any]) -> str:
    return FileInfo.of(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).digest


class PathLock:
    """The right of this process to write to a path. It must be released as often as it was acquired.

    Attributes:
        turn: held by the step that is written; the next step of the path waits for it.
    """

    def __init__(self, storage: Storage, key: str) -> None:
        self.turn = threading.Lock()
        self._storage, self._key, self._users, self._pid = storage, key, 0, os.getpid()
        since = datetime.now().isoformat(sep=" ")
        self._claim = f"pid {self._pid} on host {socket.gethostname()} since {since}".encode()
        if storage.is_local:
            self._file = _locked_file(storage, self._claim)
        else:
            storage.write(CLAIM, self._claim)

    @classmethod
    def acquire(cls, storage: Storage) -> PathLock:
        """Acquire the lock of a path, or acquire it again.

        Raises:
            CheckpointLocked: if another process has it.
            CheckpointError: if the path cannot be written.
        """
        storage.make("")
        key = os.path.realpath(storage.root) if storage.is_local else storage.root
        with _guard:
            lock = _locks.get(key)
            if lock is None or lock._pid != os.getpid():  # a forked process has to lock for itself
                lock = _locks[key] = cls(storage, key)
            lock._users += 1
            return lock

    def renew(self) -> None:
        """Claim the path again, for the next step, if the driver that claimed it since has released it.

        Raises:
            CheckpointLocked: if another driver has claimed it.
        """
        if not self._storage.is_local and self._storage.read(CLAIM) is None:
            self._storage.write(CLAIM, self._claim)
        self.check()

    def check(self) -> None:
        """Check that no other driver has claimed the path since.

        Raises:
            CheckpointLocked: if another driver has claimed it, even if that driver has released it.
        """
        found = self._claim if self._storage.is_local else self._storage.read(CLAIM)
        if found != self._claim:
            other = "a process that has released it" if found is None else _holder(found)
            raise CheckpointLocked(
                f"{self._storage.root} was claimed by {other} while this process wrote to it, so this process "
                "commits nothing there any more; end one of the drivers",
                holder=other,
            )

    def release(self) -> None:
        """Release the lock."""
        with _guard:
            self._users -= 1
            if self._users or self._pid != os.getpid():  # a forked process has only a copy
                return
            _locks.pop(self._key, None)
            if self._storage.is_local:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, 0)
                    fcntl.flock(self._file, fcntl.LOCK_UN)  # a forked process may keep the file open
                os.close(self._file)
            elif self._storage.read(CLAIM) == self._claim:
                self._storage.remove(CLAIM)


def _locked_file(storage: Storage, claim: bytes) -> int:
    path = f"{storage.root}/{LOCK}"
    with storage_errors(path, "locked"), contextlib.ExitStack() as undo:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        undo.callback(os.close, file)  # an open file keeps the lock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = _holder(os.pread(file, 1 << 10, 0))
            raise CheckpointLocked(
                f"{storage.root} is held by {other}: one driver saves to a path at a time; end that driver, or choose "
                "another path",
                holder=other,
            ) from None
        except OSError:
            pass  # on a file system without locks, drivers do not exclude each other
        os.ftruncate(file, 0)
        os.pwrite(file, claim, 0)
        undo.pop_all()
    return file


def _holder(claim: bytes) -> str:
    return claim.decode(errors="replace") or "an unknown process"
