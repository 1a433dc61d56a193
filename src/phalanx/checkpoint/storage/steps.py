"""Steps of a path, written and read: :func:`open_step` -> files -> ``commit()``, and :func:`read_step`.

A step is a folder. It is whole from the moment at which its manifest appears, which is written last, after every
file is on the disk; what has no manifest is left over from a writer that died, and the next one removes it. So
whatever happens at whatever point, the last whole step is found.
"""

from __future__ import annotations

import operator
import threading
import time
import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from phalanx.checkpoint.storage.manifest import MANIFEST, FileFacts, Manifest, digest
from phalanx.checkpoint.storage.path_lock import Hold, hold, let_go
from phalanx.checkpoint.storage.retention import (
    Found,
    expired,
    faults_of,
    folder_of,
    in_order,
    leftovers,
    step_of,
)
from phalanx.checkpoint.storage.storage import Place, place_at
from phalanx.errors import CheckpointCorrupted, CheckpointError, DeclarationError

_writing: set[tuple[str, str]] = set()
"""Folders that this process writes, by root and name: an asynchronous save may be under way while another begins."""
_one_at_a_time = threading.RLock()
"""Around looking at a place and changing it by what was seen."""


class StepWriter:
    """A step that is being written; not there for anybody else until :meth:`commit`.

    Files are put under :attr:`folder` by whoever can reach it, in folders that :meth:`part` gave. A file that nobody
    told of (:meth:`add`) is digested here, by reading it; large ones are better digested where they were written
    (``phalanx.checkpoint.storage.storage.file_facts``). As a context manager it is abandoned unless it was
    committed. Its methods may be called on any thread, by one at a time.

    Attributes:
        step: its number.
        folder: where its files go: an absolute path, or a URL.
    """

    def __init__(self, place: Place, step: int, name: str, keep: int | None, held: Hold) -> None:
        self.step = step
        self.folder = f"{place.root}/{name}"
        self._place, self._name, self._keep, self._hold = place, name, keep, held
        self._files: dict[str, FileFacts] = {}
        self._parts: dict[str, Any] = {}
        self._began = time.monotonic()
        self._over = False

    def part(self, name: str) -> str:
        """Make the folder of a part, and give its absolute path or URL.

        Args:
            name: of the part, such as "policy" or "groups/policy".

        Raises:
            CheckpointError: it cannot be made.
        """
        _check_name(name)
        self._place.make(f"{self._name}/{name}")
        return f"{self.folder}/{name}"

    def write(self, name: str, data: bytes) -> None:
        """Write a small file of the driver's own.

        Args:
            name: relative to the step, such as "driver/state.pickle"; its folder is made.
        """
        _check_name(name)
        if "/" in name:
            self._place.make(f"{self._name}/{name.rpartition('/')[0]}")
        self._place.write(f"{self._name}/{name}", data)
        self._files[name] = FileFacts(len(data), digest(data))

    def add(self, files: Mapping[str, FileFacts]) -> None:
        """Tell of files that others wrote, by name relative to the step; they are looked for at the commit."""
        for name, facts in files.items():
            _check_name(name)
            self._files[name] = FileFacts(*facts)

    def note(self, part: str, facts: Any) -> None:
        """What a part says of itself: plain data (JSON), which the manifest has and ``phalanx runs`` shows.

        Of a dict, ``kind`` ("group", "channel", ...) and ``text`` (a few words) are shown.
        """
        self._parts[part] = facts

    def commit(self) -> SavedStep:
        """Make the step whole, and remove those that ``keep`` does not keep.

        Raises:
            CheckpointError: a file that was told of is not there; it is abandoned then, and the steps before are whole.
            CheckpointLocked: another driver has taken the path over.
        """
        if self._over:
            raise DeclarationError(f"step {self.step} was committed or abandoned before")
        try:
            self._find_files()
            self._place.keep_folders(["", *sorted(self._folders())])
            with _one_at_a_time:
                self._hold.check()
                serial = 1 + max([0, *(one.serial for one in look(self._place))])
                manifest = Manifest(
                    self.step, serial, time.time(), time.monotonic() - self._began, self._files, self._parts
                )
                self._place.write(f"{self._name}/{MANIFEST}", manifest.to_bytes())
        except BaseException:
            self.abandon()
            raise
        self._tidy()
        self._end()
        return SavedStep(self._place, Found(self._name, self.step, manifest))

    def abandon(self) -> None:
        """Remove what was written. Idempotent, and nothing after a commit."""
        if self._over:
            return
        try:
            _remove(self._place, self._name)
        except CheckpointError as error:
            warnings.warn(f"what was written of step {self.step} is left: {error}", stacklevel=2)
        finally:
            self._end()

    def _find_files(self) -> None:
        there = set(self._place.files(self._name))
        missing = [name for name in sorted(self._files) if name not in there]
        if not missing:
            missing = [name for name in sorted(self._files) if self._size(name) != self._files[name].size]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise CheckpointError(
                f"step {self.step} is not saved: {', '.join(missing[:3])}{more} of it cannot be seen by the driver in "
                f"{self.folder}; is that a path that only one node sees? Choose one that the driver and all ranks share"
            )
        for name in sorted(there - self._files.keys()):
            self._place.keep(f"{self._name}/{name}")
            facts = self._place.facts(f"{self._name}/{name}")
            if facts is not None:
                self._files[name] = facts

    def _folders(self) -> set[str]:
        """Those of the step that have folders alone: where a file is written, its folder is kept with it."""
        found, direct = set[str](), {name.rpartition("/")[0] for name in self._files}
        for name in direct:
            steps = name.split("/")
            found |= {"/".join(steps[:depth]) for depth in range(1, len(steps))}
        return {f"{self._name}/{folder}" for folder in found - direct}

    def _size(self, name: str) -> int | None:
        return self._place.size(f"{self._name}/{name}")

    def _tidy(self) -> None:
        try:
            with _one_at_a_time:
                for folder in expired(look(self._place), self._keep):
                    _remove(self._place, folder)
        except CheckpointError as error:  # the step is whole, and the next save tries again
            warnings.warn(f"old steps are left: {error}", stacklevel=3)

    def _end(self) -> None:
        self._over = True
        _writing.discard((self._place.root, self._name))
        let_go(self._hold, self._place)

    def __enter__(self) -> StepWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()


class SavedStep:
    """A step that was committed.

    Attributes:
        number: its step.
        folder: an absolute path, or a URL.
        manifest: its files, and what its parts say of themselves.
    """

    def __init__(self, place: Place, found: Found) -> None:
        if found.manifest is None:
            raise DeclarationError(f"{found.folder} was never committed")
        self._place, self._name = place, found.folder
        self.number = found.step
        self.folder = f"{place.root}/{found.folder}"
        self.manifest = found.manifest

    @property
    def parts(self) -> Mapping[str, Any]:
        """What its parts say of themselves, by name."""
        return self.manifest.parts

    def files(self, part: str = "") -> list[str]:
        """Names of its files, or of those of one part, relative to the step."""
        return [name for name in sorted(self.manifest.files) if not part or name.startswith(f"{part}/")]

    def path(self, name: str) -> str:
        """Absolute path or URL of a file or a part."""
        return f"{self.folder}/{name}"

    def read(self, name: str) -> bytes:
        """A whole file, compared with its digest.

        Raises:
            CheckpointCorrupted: it is missing or not what was written.
            CheckpointError: the step has no such file.
        """
        facts = self.manifest.files.get(name)
        if facts is None:
            raise CheckpointError(
                f"{self.folder} has no file {name!r}; it has {', '.join(self.files()) or 'none'}"
            )
        data = self._place.read(f"{self._name}/{name}")
        if data is None or FileFacts(len(data), digest(data)) != facts:
            with self.reading():
                raise _damaged(self.folder, [name])
        return data

    def check(self, names: Iterable[str] | None = None) -> None:
        """Compare files with their digests, by reading them; None: all.

        Raises:
            CheckpointCorrupted: with the names of all that are missing or not what was written.
        """
        wrong = [
            name
            for name in (self.files() if names is None else names)
            if self._place.facts(f"{self._name}/{name}") != self.manifest.files.get(name)
        ]
        if wrong:
            with self.reading():
                raise _damaged(self.folder, wrong)

    @contextmanager
    def reading(self) -> Generator[None]:
        """Around reading its files: what is missing since the step was removed meanwhile is not damaged.

        Raises:
            CheckpointError: whoever saves there keeps fewer steps.
        """
        try:
            yield
        except CheckpointCorrupted as error:
            if self._place.size(f"{self._name}/{MANIFEST}") is not None:
                raise
            raise CheckpointError(
                f"{self.folder} was removed while it was read: whoever saves there keeps so many steps only (keep=). "
                "Load again, which takes the last step; what was being loaded has parts of both until then"
            ) from error

    def __repr__(self) -> str:
        return f"<step {self.number} of {self._place.root}>"


def open_step(path: str, step: int, *, keep: int | None = None) -> StepWriter:
    """Begin to write a step, and remove what writers that died left half-written.

    Args:
        path: of the run: a path that the driver and all ranks see, or a URL that fsspec knows.
        step: its number, from 0. One that is there already stays until this one is committed.
        keep: how many whole steps stay after the commit, this one included; None: all.

    Raises:
        DeclarationError: a number is too small.
        CheckpointLocked: another driver writes there; it says who.
        CheckpointError: the path cannot be written.
    """
    step = numbered("step", step, 0, "give a number from 0")
    if keep is not None:
        keep = numbered("keep", keep, 1, "give how many steps shall stay, from 1, or None for all")
    return open_at(place_at(path), step, keep)


def numbered(name: str, given: Any, least: int, advice: str) -> int:
    """A whole number, of numpy or torch too.

    Raises:
        DeclarationError: it is none, or less than ``least``.
    """
    try:
        number = -1 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        number = -1
    if number < least:
        raise DeclarationError(f"{name}={given!r}: {advice}")
    return number


def open_at(place: Place, step: int, keep: int | None = None) -> StepWriter:
    """The same as :func:`open_step`, of a place."""
    held = hold(place)
    try:
        with _one_at_a_time:
            writing = {name for root, name in _writing if root == place.root}
            for folder in leftovers(look(place), writing):
                _remove(place, folder)
            name = folder_of(step, place.names())
            _writing.add((place.root, name))
        try:
            place.make(name)
        except BaseException:
            _writing.discard((place.root, name))
            raise
    except BaseException:
        let_go(held, place)
        raise
    return StepWriter(place, step, name, keep, held)


def read_step(path: str, step: int | None = None) -> SavedStep:
    """The last step that was committed, or the one of that number. Contents are compared when they are read.

    Raises:
        CheckpointError: there is none.
        CheckpointCorrupted: files of it are missing or of another size; it names them, and the steps that are whole.
    """
    if step is not None:
        step = numbered(
            "step", step, 0, "give the number of a step, or None for the one that was committed last"
        )
    place = place_at(path)
    found = look(place)
    steps = in_order(found)
    chosen = next((one for one in reversed(steps) if step is None or one.step == step), None)
    whole = ", ".join(str(one.step) for one in steps if one.whole) or "none"
    if chosen is None:
        broken = [one for one in found if one.faults and (step is None or one.step == step)]
        if broken:
            raise _not_whole(place, broken[-1], whole)
        if not steps:
            raise CheckpointError(
                f"nothing was saved in {place.root} yet; give the path that px.save was given"
            )
        raise CheckpointError(f"step {step} is not in {place.root}; whole steps there: {whole}")
    if step is None:  # a later one may be the last, which its manifest cannot say any more
        later = [one for one in found if one.manifest is None and one.faults and one.step > chosen.step]
        chosen = max([chosen, *later], key=lambda one: one.step)
    if chosen.faults:
        raise _not_whole(place, chosen, whole)
    return SavedStep(place, chosen)


def listed(path: str) -> list[Found]:
    """All steps of a path: committed ones in the order of their commits, then half-written ones."""
    found = look(place_at(path))
    committed = in_order(found)
    return [*committed, *(one for one in found if one not in committed)]


def look(place: Place) -> list[Found]:
    """All folders of steps, by name."""
    return [_found(place, name, step) for name in place.names() if (step := step_of(name)) is not None]


def _found(place: Place, folder: str, step: int) -> Found:
    where = f"{folder}/{MANIFEST}"
    data = place.read(where)
    if data is None:
        return Found(folder, step, None)
    try:
        manifest = Manifest.from_bytes(data, f"{place.root}/{where}")
    except CheckpointCorrupted as error:
        return Found(folder, step, None, (MANIFEST,), str(error))
    faults = faults_of(manifest, {name: place.size(f"{folder}/{name}") for name in manifest.files})
    if faults and place.size(where) is None:  # it is being removed by whoever keeps fewer steps
        return Found(folder, step, None)
    return Found(folder, step, manifest, faults)


def _remove(place: Place, folder: str) -> None:
    """Without its manifest it is no step any more: a removal that ends early leaves nothing that looks whole."""
    place.remove(f"{folder}/{MANIFEST}")
    place.remove_folder(folder)


def _check_name(name: str) -> None:
    parts = name.split("/")
    if name == MANIFEST or any(part in ("", ".", "..") for part in parts):
        raise DeclarationError(
            f"{name!r} is no name for a part of a saved step; give words between single slashes"
        )


def _not_whole(place: Place, found: Found, whole: str) -> CheckpointCorrupted:
    more = f"; whole steps: {whole}"
    if not found.why:
        return _damaged(f"{place.root}/{found.folder}", found.faults, more)
    return CheckpointCorrupted(f"{found.why}; or load another step (step=){more}", files=found.faults)


def _damaged(folder: str, names: Iterable[str], more: str = "") -> CheckpointCorrupted:
    wrong = tuple(names)
    shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    return CheckpointCorrupted(
        f"{folder} is damaged: {shown}: missing, or not what was written; load another step (step=){more}",
        files=wrong,
    )
