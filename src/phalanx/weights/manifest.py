"""Manifests: names, types, global shapes and boxes of the tensors that a rank holds.

A manifest has no values. Tensors of equal layout are listed together and their names are templates, so that it
pickles to a few kilobytes.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from phalanx.weights.boxes import LocalBox

FLOATS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of the types between which values may be cast."""

DTYPE_BYTES: Mapping[str, int] = {
    **FLOATS,
    **dict.fromkeys(("complex64", "int64"), 8),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"), 1),
    "int32": 4,
    "int16": 2,
}
"""Bytes per element, by the name of the type without ``torch.``."""

# A complete component of a name. "007" is no number, since the template would print it as 7.
_NUMBER = re.compile(r"(?<![^.])(0|[1-9][0-9]*)(?![^.])")


@dataclass(frozen=True)
class Template:
    """All names that have ``texts`` between their numbers.

    If ``combined`` is True, ``numbers`` has the values of each position, and every combination is a name. Otherwise
    it has a tuple of numbers per name.
    """

    texts: tuple[str, ...]
    numbers: tuple[tuple[int, ...], ...]
    combined: bool

    @classmethod
    def of(cls, texts: tuple[str, ...], numbers: set[tuple[int, ...]]) -> Template:
        """Return the template of the names that ``texts`` and ``numbers`` make up."""
        values = tuple(tuple(sorted(set(position))) for position in zip(*numbers, strict=True))
        combinations = 1
        for position in values:
            combinations *= len(position)
        if combinations == len(numbers):
            return cls(texts, values, True)
        return cls(texts, tuple(sorted(numbers)), False)

    def __iter__(self) -> Iterator[str]:
        form = "{}".join(text.replace("{", "{{").replace("}", "}}") for text in self.texts).format
        for numbers in product(*self.numbers) if self.combined else self.numbers:
            yield form(*numbers)


@dataclass(frozen=True)
class Names:
    """A set of names in a fixed order. Equal sets are equal values."""

    templates: tuple[Template, ...]

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        """Return the set of ``names``."""
        by_texts: dict[tuple[str, ...], set[tuple[int, ...]]] = defaultdict(set)
        for name in names:
            parts = _NUMBER.split(name)
            by_texts[tuple(parts[::2])].add(tuple(int(number) for number in parts[1::2]))
        return cls(tuple(Template.of(texts, by_texts[texts]) for texts in sorted(by_texts)))

    def __iter__(self) -> Iterator[str]:
        for template in self.templates:
            yield from template


@dataclass(frozen=True)
class HeldTensor:
    """The layout of a tensor on a rank: type, global shape and local boxes (none on an empty rank)."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[LocalBox, ...]


@dataclass(frozen=True)
class Manifest:
    """All tensors of a rank. Ranks that hold equal boxes of a name are replicas.

    Attributes:
        groups: layouts, each with the names that have it.
        ties: (name, name that stands for both) of names that share a storage.
    """

    groups: tuple[tuple[HeldTensor, Names], ...]
    ties: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, tensors: Mapping[str, HeldTensor], ties: Mapping[str, str] | None = None) -> Manifest:
        """Return the manifest of tensors by name; ``ties`` maps further names to names among them."""
        by_layout: dict[HeldTensor, list[str]] = defaultdict(list)
        for name, tensor in tensors.items():
            by_layout[tensor].append(name)
        groups = ((tensor, Names.of(names)) for tensor, names in by_layout.items())
        return cls(tuple(sorted(groups, key=repr)), tuple(sorted((ties or {}).items())))

    def items(self) -> Iterator[tuple[str, HeldTensor]]:
        """Yield every name with its layout, without ties."""
        for tensor, names in self.groups:
            for name in names:
                yield name, tensor

    @cached_property
    def digest(self) -> str:
        """A digest that is the same for equal manifests in every process."""
        return hashlib.blake2b(repr((self.groups, self.ties)).encode(), digest_size=16).hexdigest()
