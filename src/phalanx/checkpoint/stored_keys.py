"""The keys of a saved state: which leaf each is, and which ranks had it."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.checkpoint import Metadata, TensorStorageMetadata

from phalanx.checkpoint.planners import rank_key
from phalanx.checkpoint.step_files import METADATA
from phalanx.checkpoint.storage import FileFacts, Storage
from phalanx.errors import CheckpointCorrupted, CheckpointError, CheckpointMismatch
from phalanx.worker.rank_state import Path, SavedLeaf, key_of

CATALOGUE = "catalogue.json"
"""File of format 1 with the paths of the leaves and the ranks that had them."""

_BY_RANK = re.compile(r"of rank (\d+)")


class StoredKey(NamedTuple):
    """The leaf of a key in the files; ``ranks`` had it, None: all."""

    leaf: str
    path: Path
    ranks: frozenset[int] | None = None


@dataclass(frozen=True)
class StoredState:
    """The state of a role in the files.

    Attributes:
        metadata: by which torch's distributed checkpoint reads the files.
        keys: by key in the files.
        world_size: ranks that saved.
        where: folder, for errors.
    """

    metadata: Metadata
    keys: Mapping[str, StoredKey]
    world_size: int
    where: str

    def names(self) -> list[str]:
        """Return the outermost keys of the state."""
        return sorted({str(one.path[0]) for one in self.keys.values() if one.path})

    def select(self, parts: Sequence[str] | None) -> StoredState:
        """Return the state with these outermost keys only; None: all.

        Raises:
            CheckpointMismatch: if there is no such key.
        """
        if parts is None:
            return self
        unknown = sorted(set(parts) - set(self.names()))
        if unknown:
            raise CheckpointMismatch(
                f"{self.where} has no part {unknown[0]!r}; it has {', '.join(self.names())}"
            )
        kept = {name: one for name, one in self.keys.items() if one.path and str(one.path[0]) in parts}
        return StoredState(self.metadata, kept, self.world_size, self.where)

    def keys_for(self, rank: int, world_size: int) -> dict[str, str]:
        """Return the key in the files of each leaf of a rank.

        Raises:
            CheckpointMismatch: if leaves differed by rank, and the world size differs.
        """
        other = world_size != self.world_size
        differing = sorted({one.leaf for one in self.keys.values() if one.ranks is not None}) if other else []
        if differing:
            parts = {str(one.path[0]) for one in self.keys.values() if one.path and one.leaf in differing}
            rest = [name for name in self.names() if name not in (*parts, "rng")]
            advice = f"load the parts without them (parts={rest!r}), or " if rest else ""
            raise CheckpointMismatch(
                f"{len(differing)} values differed by rank on the {self.world_size} ranks that saved, and nothing "
                f"says what they are on {world_size}: {', '.join(differing[:8])}; {advice}declare how tensors are "
                "sharded (DTensor, px.register_state(boxes=...)), or load on as many ranks"
            )
        return {one.leaf: name for name, one in self.keys.items() if one.ranks is None or rank in one.ranks}

    def leaf(self, name: str) -> SavedLeaf:
        """Return the leaf of a key in the files."""
        path, stored = self.keys[name].path, self.metadata.state_dict_metadata[name]
        if not isinstance(stored, TensorStorageMetadata):
            return SavedLeaf(path)
        sharded = any(chunk.sizes != stored.size for chunk in stored.chunks)
        return SavedLeaf(path, stored.properties.dtype, tuple(stored.size), sharded)


def read_stored(folder: str, files: Mapping[str, FileFacts], world_size: int) -> StoredState:
    """Read the keys of a folder, on a rank.

    Args:
        folder: absolute path or URL.
        files: facts of its files.
        world_size: ranks that saved.

    Raises:
        CheckpointError: if this rank does not see the folder.
        CheckpointCorrupted: if the metadata are damaged.
    """
    storage = Storage(folder)
    metadata: Metadata = pickle.loads(_verified(storage, METADATA, files))
    if CATALOGUE in files:
        keys = _keys_of_format_1(json.loads(_verified(storage, CATALOGUE, files)))
    else:
        stored = metadata.state_dict_metadata
        keys = {
            name: _stored_key(name, path) for name, path in metadata.planner_data.items() if name in stored
        }
    return StoredState(metadata, keys, world_size, folder)


def _verified(storage: Storage, name: str, files: Mapping[str, FileFacts]) -> bytes:
    data = storage.read(name)
    path = f"{storage.root}/{name}"
    if data is None:
        raise CheckpointError(
            f"{path} cannot be seen from this rank's node, though the driver sees it; choose a path that the driver "
            "and all ranks share"
        )
    if FileFacts.of(data) != files[name]:
        raise CheckpointCorrupted(f"{path} is damaged: load another step (step=)", files=(path,))
    return data


def _stored_key(name: str, path: Path) -> StoredKey:
    last = _BY_RANK.fullmatch(str(path[-1])) if path else None
    leaf = key_of(path[:-1])
    if last is None or name != rank_key(leaf, int(last[1])):
        return StoredKey(name, path)
    return StoredKey(leaf, path[:-1], frozenset([int(last[1])]))


def _keys_of_format_1(catalogue: Mapping[str, Any]) -> dict[str, StoredKey]:
    found: dict[str, StoredKey] = {}
    for leaf, steps in catalogue["paths"].items():
        path: Path = tuple((str(step[0]), int(step[1])) if isinstance(step, list) else step for step in steps)
        by_rank, ranks, _ = catalogue["values"].get(leaf, (False, None, None))
        if by_rank:
            for rank in range(catalogue["world_size"]) if ranks is None else ranks:
                found[rank_key(leaf, rank)] = StoredKey(leaf, path, frozenset([rank]))
        else:
            named = path[:1] in (("model",), ("optimizer",))  # found by the names of parameters, on any rank
            found[leaf] = StoredKey(leaf, path, None if ranks is None or named else frozenset(ranks))
    return found
