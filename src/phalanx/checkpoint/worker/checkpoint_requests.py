"""What a driver asks of ranks for a save or a load, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.checkpoint.storage.manifest import FileFacts
from phalanx.checkpoint.storage.safetensors_layout import Place
from phalanx.checkpoint.storage.write_plan import WriteOrder, Written

__all__ = [
    "LoadOrder",
    "Loaded",
    "RankFiles",
    "Restore",
    "Take",
    "Taken",
    "WriteFiles",
    "WriteModel",
    "file_of",
    "note_of",
    "title_of",
]


def title_of(role: str) -> str:
    """What the folder of a role is called; that of a group of a single class is "worker"."""
    return role or "worker"


def file_of(rank: int) -> str:
    """The file of a rank, named as torch's distributed checkpoint does."""
    return f"__{rank}_0.distcp"


def note_of(rank: int) -> str:
    """The file by which a rank tells that its thread has written all: it is gone once the driver has read it."""
    return f"done-{rank}.json"


@dataclass(frozen=True)
class WriteFiles:
    """Write what each role is to write.

    Attributes:
        orders: by role.
        folders: of each role: an absolute path, or a URL. They are there already.
        index: place of this rank among those that save.
        notes: the folder in which a thread tells that it has ended; "" where the call itself writes.
        nbytes: of the tensors that are written, by role; for traces.
    """

    orders: Mapping[str, tuple[WriteOrder, ...]]
    folders: Mapping[str, str]
    index: int
    notes: str = ""
    nbytes: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class WriteModel:
    """Write boxes of tensors of a role into safetensors files that are there already.

    Attributes:
        orders: what is to be written.
        places: where each tensor goes, by its key.
        folder: an absolute path.
        config: write the model's configuration beside them.
    """

    role: str
    orders: tuple[WriteOrder, ...]
    places: Mapping[str, Place]
    folder: str
    config: bool


class RankFiles(NamedTuple):
    """What a rank wrote: by role the items in the order of its orders, and size and digest of the file."""

    items: Mapping[str, tuple[Written, ...]]
    files: Mapping[str, FileFacts]
    seconds: float


@dataclass(frozen=True)
class LoadOrder:
    """Load roles.

    Attributes:
        folders: of each role: an absolute path, or a URL.
        catalogues: size and digest of each role's catalogue, as the step's manifest has them.
        parts: the outermost keys of the states that are loaded; None: all.
        index, world_size: place of this rank among those that load.
        models: headers of safetensors files by name, by role: a model alone is loaded from those.
    """

    folders: Mapping[str, str]
    catalogues: Mapping[str, FileFacts]
    parts: tuple[str, ...] | None
    index: int
    world_size: int
    models: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict[str, Mapping[str, bytes]])


class Loaded(NamedTuple):
    """What a rank read: bytes and seconds."""

    nbytes: int
    seconds: float


class Take(NamedTuple):
    """Copy the state as snapshot ``number``; ``last`` is the one before that is whole, 0 if there is none.

    ``again``: this rank's holder has that one, so that only what has changed since is to be sent.
    """

    number: int
    last: int
    again: bool


class Taken(NamedTuple):
    """What a rank copied: where its holder finds what it lacks, and the bytes of all and of that."""

    copy: Any
    nbytes: int
    sent_bytes: int


class Restore(NamedTuple):
    """Go back to snapshot ``number``; ``copy`` is where what another rank kept is, None for this rank's own.

    ``keep_rng``: draw on as before.
    """

    number: int
    copy: Any = None
    keep_rng: bool = False
