"""Which steps are whole, which folders go, and whether a lock is a dead driver's: values in, values out."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from phalanx.checkpoint.storage.manifest import Manifest

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def folder_of(step: int, taken: Collection[str]) -> str:
    """A new name for the folder of ``step``; the same step may be there already, saved by a run that went on from
    before it."""
    first = f"step-{step:08d}"
    names = [first, *(f"{first}.{again}" for again in range(2, len(taken) + 3))]
    return next(name for name in names if name not in taken)


def step_of(folder: str) -> int | None:
    """The step that a folder is of; None for what is no step's."""
    match = _NAME.fullmatch(folder)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Found:
    """A folder of a step, as it was found.

    Attributes:
        folder: its name.
        step: by its name.
        manifest: None where it has none: then it is half-written, or was being removed.
        faults: names of files that are missing or of another size than was written, or of a manifest that cannot be
            read.
        why: a manifest cannot be read: it is damaged, or of another version of the library.
    """

    folder: str
    step: int
    manifest: Manifest | None
    faults: tuple[str, ...] = ()
    why: str = ""

    @property
    def whole(self) -> bool:
        """It was committed, and no fault is seen; contents are compared when they are loaded."""
        return self.manifest is not None and not self.faults

    @property
    def committed(self) -> bool:
        """It was whole once."""
        return self.manifest is not None or bool(self.faults)

    @property
    def serial(self) -> int:
        return self.manifest.serial if self.manifest is not None else 0


def faults_of(manifest: Manifest, sizes: Mapping[str, int | None]) -> tuple[str, ...]:
    """Files that are missing or of another size, in order of their names; ``sizes`` has None for those missing."""
    return tuple(name for name in sorted(manifest.files) if sizes.get(name) != manifest.files[name].size)


def in_order(found: Sequence[Found]) -> list[Found]:
    """Committed steps, the last commit last; of a step that was committed again only the last commit."""
    committed = sorted((one for one in found if one.manifest is not None), key=lambda one: one.serial)
    last = {one.step: one for one in committed}
    return [one for one in committed if last[one.step] is one]


def leftovers(found: Sequence[Found], writing: Collection[str]) -> list[str]:
    """Folders that were never committed, or half removed, and that nobody writes (``writing``: who may write at all
    holds the lock, so others' are dead)."""
    return [one.folder for one in found if not one.committed and one.folder not in writing]


def expired(found: Sequence[Found], keep: int | None) -> list[str]:
    """Folders of steps to remove after a commit, the oldest first: those beyond the last ``keep`` whole ones, and
    steps that were committed again."""
    kept = in_order(found)
    again = [one for one in found if one.manifest is not None and one not in kept]
    whole = [one for one in kept if one.whole]
    oldest = whole[-keep].serial if keep is not None and len(whole) > keep else 0
    gone = [*again, *(one for one in kept if one.serial < oldest)]
    return [one.folder for one in sorted(gone, key=lambda one: one.serial)]


@dataclass(frozen=True)
class Holder:
    """The process that may write a path.

    Attributes:
        host, pid: where it is.
        machine: equal for processes that can see each other's pids: boot and namespace of the host.
        started: of the process, in clock ticks since boot, for a pid may be used again.
        since: when it took the lock, in seconds since 1970.
        token: no other taking of a lock has it.
        beat: counted up while the process lives.
    """

    host: str
    pid: int
    machine: str
    started: int
    since: float
    token: str
    beat: int = 0

    def beats(self) -> Holder:
        """The same, alive a while later."""
        return replace(self, beat=self.beat + 1)

    def to_bytes(self) -> bytes:
        """As a file."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes | None) -> Holder | None:
        """What :meth:`to_bytes` gave; None where it is nothing of the kind."""
        try:
            return cls(**json.loads(data or b""))
        except (ValueError, TypeError):
            return None

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host}"


Verdict = Literal["free", "held", "watch"]


def verdict(holder: Holder | None, me: Holder, started: int | None) -> Verdict:
    """Whether a lock may be taken.

    Args:
        holder: who has it; None: nobody, or its file cannot be read.
        me: who asks.
        started: when the process of the holder's pid was started, here; None where there is none.

    Returns:
        "watch": its process cannot be seen from here; it is dead if its beat stays the same.
    """
    if holder is None:
        return "free"
    if (holder.host, holder.machine) != (me.host, me.machine):
        return "watch"
    return "held" if started == holder.started else "free"
