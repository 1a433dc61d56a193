"""Several encoded values in one stored object.

Storing an object, and finding it, takes Ray as long as copying some megabytes. So small pieces for ranks of one node
lie in one object together; each rank decodes its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from phalanx.wire.arrival import Policy
from phalanx.wire.codec import Encoded
from phalanx.wire.value import Value


@dataclass(frozen=True, slots=True)
class Bundle:
    """Encoded values. Pickling it hands the bytes of all out of band; unpickled, its values are views of those."""

    values: Sequence[Encoded]

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(value.nbytes for value in self.values)

    def __reduce__(self) -> tuple[Any, ...]:
        facts = [
            (len(value.buffers), value.own, value.policy and value.policy.value, value.tokens)
            for value in self.values
        ]
        parts = [part for value in self.values for part in (value.head, *value.buffers)]
        return _bundle, (facts, *map(pickle.PickleBuffer, parts))


def _bundle(facts: Sequence[tuple[int, int, str | None, Sequence[Any]]], *parts: Value) -> Bundle:
    # Stands in stored objects by name.
    views = [memoryview(part) for part in parts]
    bounds = accumulate((1 + count for count, *_ in facts), initial=0)
    values = [
        Encoded(head, buffers, own, tokens, None if policy is None else Policy(policy))  # type: ignore[arg-type]
        for (_, own, policy, tokens), (head, *buffers) in zip(
            facts, (views[begin:end] for begin, end in pairwise(bounds)), strict=True
        )
    ]
    return Bundle(values)
