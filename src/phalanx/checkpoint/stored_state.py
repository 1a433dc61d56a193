"""The state of a role as it was saved: which leaf each key of the files is, and which ranks had it."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.distributed.checkpoint import Metadata, TensorStorageMetadata

from phalanx.checkpoint.planners import rank_key
from phalanx.checkpoint.step_files import METADATA, read_items
from phalanx.checkpoint.steps import Step
from phalanx.errors import CheckpointMismatch
from phalanx.worker.rank_state import GENERATORS, Path, SavedLeaf, key_of

_CATALOGUE = "catalogue.json"
"""File of format 1 with the paths of the leaves and the ranks that had them."""

_BY_RANK = re.compile(r"of rank (\d+)")


class StoredKey(NamedTuple):
    """The leaf of a key in the files; ``ranks`` had it, None: all."""

    leaf: str
    path: Path
    ranks: frozenset[int] | None = None

    @property
    def part(self) -> str:
        """Outermost key of the state; "" for a value that is the complete state."""
        return str(self.path[0]) if self.path else ""


@dataclass(frozen=True)
class StoredState:
    """The state of a role in the files.

    Attributes:
        metadata: by which torch's distributed checkpoint reads the files.
        keys: by key in the files.
        world_size: ranks that saved.
        where: folder.
        read: function of folder, metadata, plan and planner that reads the items of a rank's plan.
        resized: another number of ranks loads it.
    """

    metadata: Metadata
    keys: Mapping[str, StoredKey]
    world_size: int
    where: str
    read: Callable[..., None] = read_items
    resized: bool = False

    def names(self) -> list[str]:
        """Return the outermost keys of the state."""
        return sorted({one.part for one in self.keys.values()} - {""})

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
        return replace(self, keys={name: one for name, one in self.keys.items() if one.part in parts})

    def for_ranks(self, world_size: int) -> StoredState:
        """Return the state for a number of ranks.

        On another number, each rank takes the generators of its own number, and keys of ranks that do not exist are
        left out.

        Raises:
            CheckpointMismatch: if other leaves differed by rank, and the world size differs.
        """
        if world_size == self.world_size:
            return self
        by_rank = [one for one in self.keys.values() if one.ranks is not None and one.part != GENERATORS]
        differing = {one.leaf: one.part for one in by_rank}
        if differing:
            rest = [name for name in self.names() if name not in (*differing.values(), GENERATORS)]
            advice = f"load the parts without them (parts={rest!r}), or " if rest else ""
            raise CheckpointMismatch(
                f"{len(differing)} values differed by rank on the {self.world_size} ranks that saved, and nothing "
                f"says what they are on {world_size}: {', '.join(sorted(differing)[:8])}; {advice}declare how tensors "
                "are sharded (DTensor, px.register_state(boxes=...)), or load on as many ranks"
            )
        here = frozenset(range(world_size))
        keys = {name: one for name, one in self.keys.items() if one.ranks is None or one.ranks & here}
        return replace(self, keys=keys, resized=True)

    def lacks_generators(self, rank: int) -> bool:
        """Return whether a random generator of a rank is missing because it is not among the ranks that saved."""
        generators = {one.leaf for one in self.keys.values() if one.part == GENERATORS}
        return self.resized and not generators <= self.keys_for(rank).keys()

    def keys_for(self, rank: int) -> dict[str, str]:
        """Return the key in the files of each leaf of a rank."""
        return {one.leaf: name for name, one in self.keys.items() if one.ranks is None or rank in one.ranks}

    def below(self, part: str) -> StoredState:
        """Return the state as a part of a larger state."""
        keys = {name: StoredKey(f"{part}.{one.leaf}", (part, *one.path)) for name, one in self.keys.items()}
        return replace(self, keys=keys)

    def leaf(self, name: str) -> SavedLeaf:
        """Return the leaf of a key in the files."""
        path, stored = self.keys[name].path, self.metadata.state_dict_metadata[name]
        if not isinstance(stored, TensorStorageMetadata):
            return SavedLeaf(path)
        sharded = any(chunk.sizes != stored.size for chunk in stored.chunks)
        return SavedLeaf(path, stored.properties.dtype, tuple(stored.size), sharded)


def read_stored(step: Step, part: str) -> StoredState:
    """Read the state of a role, a part of a step.

    Raises:
        CheckpointCorrupted: if the metadata are missing or differ.
    """
    metadata: Metadata = pickle.loads(step.read(f"{part}/{METADATA}"))
    catalogue = f"{part}/{_CATALOGUE}"
    if catalogue in step.files:
        keys = _keys_of_format_1(json.loads(step.read(catalogue)))
    else:
        stored = metadata.state_dict_metadata
        keys = {
            name: _stored_key(name, path) for name, path in metadata.planner_data.items() if name in stored
        }
    return StoredState(metadata, keys, int(step.parts[part]["world_size"]), step.path(part))


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
