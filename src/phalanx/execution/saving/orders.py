"""What a driver asks of ranks for a save or a load, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.saving.manifest import FileFacts
from phalanx.saving.spread import WriteOrder, Written

__all__ = ["LoadOrder", "Loaded", "Offered", "RankFiles", "WriteFiles", "file_of", "note_of", "title_of"]


def title_of(role: str) -> str:
    """What the folder of a role is called; that of a group of a single class is "worker"."""
    return role or "worker"


def file_of(rank: int) -> str:
    """The file of a rank, named as torch's distributed checkpoint does."""
    return f"__{rank}_0.distcp"


def note_of(rank: int) -> str:
    """The file by which a rank tells that its thread has written all: it is gone once the driver has read it."""
    return f"done-{rank}.json"


class Offered(NamedTuple):
    """What a role of a rank has to save, as bytes: an :class:`~phalanx.saving.spread.Offer` pickled once."""

    role: str
    offer: bytes


@dataclass(frozen=True)
class WriteFiles:
    """Write what each role is to write.

    Attributes:
        orders: by role.
        folders: of each role: an absolute path, or a URL. They are there already.
        index: place of this rank among those that save.
        notes: the folder in which a thread tells that it has ended; "" where the call itself writes.
    """

    orders: Mapping[str, tuple[WriteOrder, ...]]
    folders: Mapping[str, str]
    index: int
    notes: str = ""


class RankFiles(NamedTuple):
    """What a rank wrote: by role the items in the order of its orders, and size and digest of the file."""

    items: Mapping[str, tuple[Written, ...]]
    files: Mapping[str, FileFacts]
    seconds: float

    def plain(self) -> list[object]:
        """As JSON can have it."""
        items = {role: [list(one) for one in found] for role, found in self.items.items()}
        return [items, {role: list(facts) for role, facts in self.files.items()}, self.seconds]

    @classmethod
    def from_plain(cls, given: list[object]) -> RankFiles:
        """What :meth:`plain` gave."""
        items: Mapping[str, list[list[object]]]
        files: Mapping[str, list[object]]
        items, files, seconds = given  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
        written = {role: tuple(Written(*one) for one in found) for role, found in items.items()}  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        facts = {role: FileFacts(*one) for role, one in files.items()}  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        return cls(written, facts, float(seconds))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class LoadOrder:
    """Load roles.

    Attributes:
        folders: of each role: an absolute path, or a URL.
        catalogues: size and digest of each role's catalogue, as the step's manifest has them.
        parts: the outermost keys of the states that are loaded; None: all.
        index, world_size: place of this rank among those that load.
    """

    folders: Mapping[str, str]
    catalogues: Mapping[str, FileFacts]
    parts: tuple[str, ...] | None
    index: int
    world_size: int


class Loaded(NamedTuple):
    """What a rank read: bytes and seconds."""

    nbytes: int
    seconds: float
