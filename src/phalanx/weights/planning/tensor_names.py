"""Names of tensors, kept small: 36,000 names of a model of layers and experts are a few templates with numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

__all__ = ["Names"]

_NUMBER = re.compile(
    r"(?<![^.])(0|[1-9][0-9]*)(?![^.])"
)  # a whole component of the name; "007" would not come back

Slots = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Template:
    """All names with ``texts`` between their numbers.

    ``combined`` tells how the numbers are meant: one tuple of values per place, of which every combination
    is a name; or else one tuple of numbers per name.
    """

    texts: tuple[str, ...]
    numbers: Slots
    combined: bool

    def __iter__(self) -> Iterator[str]:
        form = "{}".join(text.replace("{", "{{").replace("}", "}}") for text in self.texts).format
        for numbers in product(*self.numbers) if self.combined else self.numbers:
            yield form(*numbers)


@dataclass(frozen=True)
class Names:
    """A set of names, in one order for one set; equal sets are equal values."""

    templates: tuple[Template, ...]

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        """The set of ``names``."""
        found: dict[tuple[str, ...], set[tuple[int, ...]]] = defaultdict(set)
        for name in names:
            parts = _NUMBER.split(name)
            found[tuple(parts[::2])].add(tuple(int(number) for number in parts[1::2]))
        return cls(tuple(_template(texts, found[texts]) for texts in sorted(found)))

    def __iter__(self) -> Iterator[str]:
        for template in self.templates:
            yield from template


def _template(texts: tuple[str, ...], numbers: set[tuple[int, ...]]) -> Template:
    slots = tuple(tuple(sorted(set(values))) for values in zip(*numbers, strict=True))
    combinations = 1
    for values in slots:
        combinations *= len(values)
    if combinations == len(numbers):
        return Template(texts, slots, True)
    return Template(texts, tuple(sorted(numbers)), False)
