"""What one rank holds of a model: names, types, global shapes and boxes. Made by the readers, read by the planner.

A manifest says nothing of values. It pickles to a few kilobytes, because tensors that are held alike are listed
together and their names are templates.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from phalanx.weights.planning.boxes import Patch
from phalanx.weights.planning.tensor_names import Names

__all__ = ["DTYPE_BYTES", "FLOATS", "Held", "Manifest"]

FLOATS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of the types between which values may be cast."""

DTYPE_BYTES: Mapping[str, int] = {
    **FLOATS,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by the name of its type without ``torch.``."""


@dataclass(frozen=True)
class Held:
    """How a rank holds a tensor: its type, its global shape, and the boxes that are here (none: an empty rank)."""

    dtype: str
    shape: tuple[int, ...]
    patches: tuple[Patch, ...]


@dataclass(frozen=True)
class Manifest:
    """All that a rank holds. Ranks that hold equal boxes of a name are replicas: nobody has to say so."""

    groups: tuple[tuple[Held, Names], ...]
    ties: tuple[tuple[str, str], ...] = ()
    """Names that are another name's storage, as (name, the name that stands for both)."""

    @classmethod
    def of(cls, held: Mapping[str, Held], ties: Mapping[str, str] | None = None) -> Manifest:
        """The manifest of tensors by name; ``ties`` maps further names to those among them that they are."""
        by_form: dict[Held, list[str]] = defaultdict(list)
        for name, form in held.items():
            by_form[form].append(name)
        groups = ((form, Names.of(names)) for form, names in by_form.items())
        return cls(tuple(sorted(groups, key=repr)), tuple(sorted((ties or {}).items())))

    def items(self) -> Iterator[tuple[str, Held]]:
        """Every name with how it is held; ties left out."""
        for held, names in self.groups:
            for name in names:
                yield name, held

    @cached_property
    def digest(self) -> str:
        """The same for equal manifests, in every process."""
        return hashlib.blake2b(repr((self.groups, self.ties)).encode(), digest_size=16).hexdigest()


def digest_of(manifests: Iterable[Manifest]) -> str:
    """One digest of the manifests of a group, in rank order."""
    return hashlib.blake2b("".join(one.digest for one in manifests).encode(), digest_size=16).hexdigest()
