"""Steps of a path: :func:`open_step`, files, ``commit()``; and :func:`read_step`.

A step is a folder. It is complete from the moment its manifest exists. The manifest is written last, once every file
is on the disk. A folder without a manifest is left over from a writer that died, and the next writer removes it.
"""

from __future__ import annotations

import json
import operator
import re
import secrets
import time
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from phalanx.checkpoint.path_lock import PathLock
from phalanx.checkpoint.storage import FileFacts, Storage, digest
from phalanx.errors import CheckpointCorrupted, CheckpointError, DeclarationError

MANIFEST = "manifest.json"
FORMAT = 2
READABLE = (1, 2)
"""Steps of format 1 have a ``catalogue.json`` beside each ``.metadata``; see `phalanx.checkpoint.stored_keys`."""

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


@dataclass(frozen=True)
class Manifest:
    """The files of a step, and a description of its parts.

    Attributes:
        step: number that the caller gave.
        serial: number of the commit among all of the path, from 1. The last commit is resumed by default.
        at: time of the commit, in seconds since 1970.
        seconds: from the opening of the step to its commit.
        files: by name relative to the step's folder.
        parts: JSON data by name of the part.
        format: version of the layout.
    """

    step: int
    serial: int
    at: float
    seconds: float
    files: Mapping[str, FileFacts] = field(default_factory=dict[str, FileFacts])
    parts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """Return the content of the file, with its own digest."""
        body = {
            **self.__dict__,
            "files": {name: list(self.files[name]) for name in sorted(self.files)},
            "parts": dict(self.parts),
        }
        return json.dumps({"digest": digest(_body(body)), "manifest": body}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str = MANIFEST) -> Manifest:
        """Return the manifest of a file.

        Raises:
            CheckpointCorrupted: if it is damaged, or of a later version of the library.
        """
        try:
            outer = json.loads(data)
            body = outer["manifest"]
            written, version = outer["digest"], body["format"]
        except (ValueError, KeyError, TypeError):
            raise CheckpointCorrupted(f"{where} is damaged: it is not a manifest", files=(where,)) from None
        if version not in READABLE:
            raise CheckpointCorrupted(
                f"{where} has format {version!r}; this version of phalanx reads formats {READABLE[0]} to {FORMAT}: "
                "load it with the version that wrote it",
                files=(where,),
            )
        if digest(_body(body)) != written:
            raise CheckpointCorrupted(
                f"{where} is damaged: its digest is not that of its text", files=(where,)
            )
        body["files"] = {name: FileFacts(*facts) for name, facts in body["files"].items()}
        return cls(**body)


def _body(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True)
class FoundStep:
    """A folder of a step.

    Attributes:
        folder: its name.
        step: number in its name.
        manifest: None if there is none, or none that can be read.
        faults: names of files that are missing or have another size.
        why: error of a manifest that cannot be read.
    """

    folder: str
    step: int
    manifest: Manifest | None
    faults: tuple[str, ...] = ()
    why: str = ""

    @property
    def whole(self) -> bool:
        """True if the step was committed and no fault is known. Contents are verified by a load."""
        return self.manifest is not None and not self.faults

    @property
    def committed(self) -> bool:
        """True if the step was complete at some time."""
        return self.manifest is not None or bool(self.faults)

    @property
    def serial(self) -> int:
        """Number of the commit; 0 if it is not known."""
        return self.manifest.serial if self.manifest is not None else 0


class StepWriter:
    """A step that is written. No reader sees it before :meth:`commit`.

    As a context manager it is abandoned unless it was committed.

    Attributes:
        step: its number.
        folder: absolute path or URL of its files.
    """

    def __init__(self, storage: Storage, step: int, name: str, keep: int | None, lock: PathLock) -> None:
        self.step = step
        self.folder = f"{storage.root}/{name}"
        self._storage, self._name, self._keep, self._lock = storage, name, keep, lock
        self._files: dict[str, FileFacts] = {}
        self._parts: dict[str, Any] = {}
        self._began = time.monotonic()
        self._ended = False

    def part(self, name: str) -> str:
        """Create the folder of a part, and return its absolute path or URL."""
        self._storage.make(f"{self._name}/{name}")
        return f"{self.folder}/{name}"

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, by its name relative to the step."""
        if "/" in name:
            self._storage.make(f"{self._name}/{name.rpartition('/')[0]}")
        self._storage.write(f"{self._name}/{name}", data)
        self._files[name] = FileFacts.of(data)

    def add(self, files: Mapping[str, FileFacts]) -> None:
        """Add files that ranks wrote, by name relative to the step. The commit checks that they exist."""
        self._files |= files

    def note(self, part: str, facts: Any) -> None:
        """Describe a part by JSON data. ``phalanx runs`` shows ``kind`` and ``text`` of a dict."""
        self._parts[part] = facts

    def commit(self) -> SavedStep:
        """Make the step complete, and remove the steps beyond ``keep``.

        Raises:
            CheckpointError: if a file is missing. The step is abandoned, and the steps before stay complete.
            CheckpointLocked: if another driver has claimed the path.
        """
        if self._ended:
            raise DeclarationError(f"step {self.step} was committed or abandoned before")
        try:
            self._check_files()
            parents = {parent for name in self._files for parent in _parents(f"{self._name}/{name}")}
            self._storage.sync_folders(["", *sorted(parents)])
            self._lock.check()
            serial = 1 + max([0, *(found.serial for found in find_steps(self._storage))])
            manifest = Manifest(
                self.step, serial, time.time(), time.monotonic() - self._began, self._files, self._parts
            )
            self._storage.write(f"{self._name}/{MANIFEST}", manifest.to_bytes())
            self._lock.check()  # a store compares and writes in two steps: a claim in between withdraws the step
        except BaseException:
            self.abandon()
            raise
        try:
            for folder in expired(find_steps(self._storage), self._keep):
                _remove(self._storage, folder)
        except CheckpointError as error:  # the step is complete, and the next save tries again
            warnings.warn(f"old steps were not removed: {error}", stacklevel=2)
        self._end()
        return SavedStep(self._storage, FoundStep(self._name, self.step, manifest))

    def abandon(self) -> None:
        """Remove the files that were written. Does nothing after a commit."""
        if self._ended:
            return
        try:
            _remove(self._storage, self._name)
        except CheckpointError as error:
            warnings.warn(f"files of step {self.step} were not removed: {error}", stacklevel=2)
        finally:
            self._end()

    def _check_files(self) -> None:
        sizes = self._storage.sizes(self._name)
        missing = [name for name, facts in sorted(self._files.items()) if sizes.get(name) != facts.size]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise CheckpointError(
                f"step {self.step} is not saved: {', '.join(missing[:3])}{more} of it cannot be seen by the driver in "
                f"{self.folder}; is that a path that only one node sees? Choose one that the driver and all ranks share"
            )

    def _end(self) -> None:
        self._ended = True
        self._lock.turn.release()
        self._lock.release()

    def __enter__(self) -> StepWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()


class SavedStep:
    """A committed step.

    Attributes:
        number: its number.
        folder: absolute path or URL.
        manifest: its files and parts.
    """

    def __init__(self, storage: Storage, found: FoundStep) -> None:
        if found.manifest is None:
            raise DeclarationError(f"{found.folder} was never committed")
        self._storage, self._name = storage, found.folder
        self.number = found.step
        self.folder = f"{storage.root}/{found.folder}"
        self.manifest = found.manifest

    @property
    def parts(self) -> Mapping[str, Any]:
        """Descriptions of its parts, by name."""
        return self.manifest.parts

    def path(self, name: str) -> str:
        """Return the absolute path or URL of a file or a part."""
        return f"{self.folder}/{name}"

    def read(self, name: str) -> bytes:
        """Return the content of a file, verified by its digest.

        Raises:
            CheckpointCorrupted: if it is missing or differs.
            CheckpointError: if the step has no such file.
        """
        facts = self.manifest.files.get(name)
        if facts is None:
            names = ", ".join(self.manifest.files) or "none"
            raise CheckpointError(f"{self.folder} has no file {name!r}; it has {names}")
        data = self._storage.read(f"{self._name}/{name}")
        if data is None or FileFacts.of(data) != facts:
            with self.reading():
                raise corrupted(self.folder, [name])
        return data

    def check(self) -> None:
        """Compare all files with their digests, by reading them.

        Raises:
            CheckpointCorrupted: if files are missing or differ; the error names them.
        """
        files = self.manifest.files.items()
        wrong = [name for name, facts in files if self._storage.facts(f"{self._name}/{name}") != facts]
        if wrong:
            with self.reading():
                raise corrupted(self.folder, wrong)

    @contextmanager
    def reading(self) -> Generator[None]:
        """Raise corruption as ``CheckpointError`` if the step was removed during the block."""
        try:
            yield
        except CheckpointCorrupted as error:
            if self._storage.exists(f"{self._name}/{MANIFEST}"):
                raise
            raise CheckpointError(
                f"{self.folder} was removed while it was read: its writer keeps fewer steps (keep=). Load again, which "
                "takes the last step; ranks may have parts of both until then"
            ) from error


def open_step(path: str, step: int, *, keep: int | None = None) -> StepWriter:
    """Begin to write a step, once the step before it has ended. Remove leftovers of writers that died.

    Args:
        path: of the run: a path that the driver and all ranks share, or a URL that fsspec knows.
        step: its number, from 0. A step of that number stays until this step is committed.
        keep: complete steps to keep, this step included; None: all.

    Raises:
        DeclarationError: if a number is too small.
        CheckpointLocked: if another driver writes there.
        CheckpointError: if the path cannot be written.
    """
    step = checked_number("step", step, 0, "give a number from 0")
    if keep is not None:
        keep = checked_number("keep", keep, 1, "give how many steps shall stay, from 1, or None for all")
    storage = Storage(path)
    lock = PathLock.acquire(storage)
    try:
        lock.turn.acquire()
        try:
            for found in find_steps(storage):
                if not found.committed:
                    _remove(storage, found.folder)
            name = folder_name(step, storage.names(), is_unique=not storage.is_local)
            storage.make(name)
        except BaseException:
            lock.turn.release()
            raise
    except BaseException:
        lock.release()
        raise
    return StepWriter(storage, step, name, keep, lock)


def checked_number(name: str, value: Any, least: int, advice: str) -> int:
    """Return a whole number, also of numpy or torch.

    Raises:
        DeclarationError: if it is none, or less than ``least``.
    """
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < least:
        raise DeclarationError(f"{name}={value!r}: {advice}")
    return number


def read_step(path: str, step: int | None = None) -> SavedStep:
    """Return the step that was committed last, or the step of that number.

    Raises:
        CheckpointError: if there is none.
        CheckpointCorrupted: if files are missing or have another size; the error names the complete steps.
    """
    if step is not None:
        step = checked_number(
            "step", step, 0, "give the number of a step, or None for the one that was committed last"
        )
    storage = Storage(path)
    found = find_steps(storage)
    steps = in_order(found)
    chosen = next((one for one in reversed(steps) if step is None or one.step == step), None)
    whole = ", ".join(str(one.step) for one in steps if one.whole) or "none"
    unreadable = [one for one in found if one.why and step in (None, one.step)]
    if step is None and chosen is not None:  # a later step may be the last one, but its manifest cannot tell
        unreadable = [one for one in unreadable if one.step > chosen.step]
    if unreadable and (chosen is None or step is None):
        last = max(unreadable, key=lambda one: one.step)
        raise CheckpointCorrupted(
            f"{last.why}; or load another step (step=); whole steps: {whole}", files=last.faults
        )
    if chosen is None:
        raise CheckpointError(
            f"step {step} is not in {storage.root}; whole steps there: {whole}"
            if steps
            else f"nothing was saved in {storage.root} yet; give the path that px.save was given"
        )
    if chosen.faults:
        raise corrupted(f"{storage.root}/{chosen.folder}", chosen.faults, f"; whole steps: {whole}")
    return SavedStep(storage, chosen)


def listed(path: str) -> list[FoundStep]:
    """Return all steps of a path: committed steps in the order of their commits, then incomplete ones."""
    found = find_steps(Storage(path))
    committed = in_order(found)
    return [*committed, *(one for one in found if one not in committed)]


def find_steps(storage: Storage) -> list[FoundStep]:
    """Return all folders of steps, by name."""
    matches = [match for name in storage.names() if (match := _NAME.fullmatch(name))]
    return [_found(storage, match[0], int(match[1])) for match in matches]


def in_order(found: Sequence[FoundStep]) -> list[FoundStep]:
    """Return the committed steps in the order of their commits; of a step committed again only the last commit."""
    committed = sorted((one for one in found if one.manifest is not None), key=lambda one: one.serial)
    last = {one.step: one for one in committed}
    return [one for one in committed if last[one.step] is one]


def expired(found: Sequence[FoundStep], keep: int | None) -> list[str]:
    """Return the folders to remove after a commit: steps committed again, and steps older than the last ``keep``."""
    kept = in_order(found)
    again = [one for one in found if one.manifest is not None and one not in kept]
    whole = [one for one in kept if one.whole]
    oldest = whole[-keep].serial if keep is not None and len(whole) > keep else 0
    gone = [*again, *(one for one in kept if one.serial < oldest)]
    return [one.folder for one in sorted(gone, key=lambda one: one.serial)]


def folder_name(step: int, taken: Sequence[str], *, is_unique: bool) -> str:
    """Return a new name for the folder of a step. The same step may exist, from a run that was resumed before it.

    Args:
        is_unique: no other driver may choose the same name at the same time.
    """
    first = f"step-{step:08d}"
    numbers = (
        str(secrets.randbelow(1 << 32)) if is_unique else str(again) for again in range(2, len(taken) + 3)
    )
    names = (*([] if is_unique else [first]), *(f"{first}.{number}" for number in numbers))
    return next(name for name in names if name not in taken)


def _found(storage: Storage, folder: str, step: int) -> FoundStep:
    where = f"{folder}/{MANIFEST}"
    data = storage.read(where)
    if data is None:
        return FoundStep(folder, step, None)
    try:
        manifest = Manifest.from_bytes(data, f"{storage.root}/{where}")
    except CheckpointCorrupted as error:
        return FoundStep(folder, step, None, (MANIFEST,), str(error))
    sizes = storage.sizes(folder)
    faults = tuple(name for name in sorted(manifest.files) if sizes.get(name) != manifest.files[name].size)
    if faults and not storage.exists(where):  # its writer is removing it
        return FoundStep(folder, step, None)
    return FoundStep(folder, step, manifest, faults)


def _remove(storage: Storage, folder: str) -> None:
    """Remove the manifest first: a removal that ends early leaves no step that looks complete."""
    storage.remove(f"{folder}/{MANIFEST}")
    storage.remove(folder)


def _parents(name: str) -> list[str]:
    steps = name.split("/")
    return ["/".join(steps[:depth]) for depth in range(1, len(steps))]


def corrupted(folder: str, names: Iterable[str], more: str = "") -> CheckpointCorrupted:
    """Return the error for files of a step that are missing or differ."""
    wrong = tuple(names)
    shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    return CheckpointCorrupted(
        f"{folder} is damaged: {shown}: missing, or not what was written; load another step (step=){more}",
        files=wrong,
    )
