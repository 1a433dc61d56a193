"""Values that are like the one before are encoded to the very bytes that a pickler would give."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.dispatch.split import split_rows
from phalanx.wire.alike import Alike
from phalanx.wire.codec import encode


def many(values: list[Any]) -> list[bool]:
    """Whether each was known to be like one before; the bytes are compared."""
    alike, known = Alike(), list[bool]()
    for value in values:
        there, asked = alike.encoded(value), encode(value)
        known.append(there is not None)
        if there is None:
            alike.learn(value, asked)
        else:
            assert there.to_bytes() == asked.to_bytes()
            assert [bytes(buffer) for buffer in there.buffers] == [bytes(buffer) for buffer in asked.buffers]
    return known


def batch(rows: int) -> dict[str, Any]:
    return {
        "ids": torch.arange(rows * 6).reshape(rows, 6),
        "mask": np.ones((rows, 6), dtype=bool),
        "weights": (np.arange(rows, dtype=np.float32), torch.rand(rows, 300)),
        "scale": 0.5,
        "name": "policy",
    }


def test_pieces_of_one_size_are_like_the_first() -> None:
    arguments = [((piece,), {}) for piece in split_rows(batch(40), 10)]

    assert many(arguments) == [False] + [True] * 9


def test_pieces_of_two_sizes_are_encoded_in_full_twice() -> None:
    arguments = [((), {"batch": piece}) for piece in split_rows(batch(43), 10)]

    assert many(arguments).count(False) == 2


def test_empty_pieces_are_like_each_other() -> None:
    arguments = [((piece,), {}) for piece in split_rows(batch(2), 6)]

    assert many(arguments) == [False, True, False, True, True, True]


@dataclass
class Holds:
    array: Any


SHARED = np.arange(8)
UNLIKE: dict[str, Callable[[int], Any]] = {
    "another number": lambda n: {"x": np.ones(8), "n": 1000 + n},
    "another key": lambda n: {f"x{n}": np.ones(8)},
    "another dtype": lambda n: np.ones(8, dtype=[np.int32, np.float32, np.int64, np.int16][n]),
    "another layout": lambda n: (np.ones((4, 4), order="CF"[n % 2]), n),
    "one array twice": lambda n: (lambda one: [one, one])(np.full(8, n)),
    "two views of the same bytes": lambda n: (lambda one: [one, one[:]])(np.full(8, n)),
    "a container twice": lambda n: (lambda one: [one, one])({"x": np.full(8, n)}),
    "an array in an object": lambda n: (np.full(8, n), Holds(np.full(2, n))),
    "an object that is the same": lambda n: (np.full(8, n), HELD),
    "arrays of objects": lambda n: np.array([n, "x"], dtype=object),
    "a tensor that learns": lambda n: torch.full((8,), float(n), requires_grad=n % 2 == 0),
    "an attribute": lambda n: noted(n),
    "a subclass": lambda n: np.full(8, n).view(np.recarray),
    "shared by all": lambda n: {"x": np.full(4, n), "same": SHARED},
}
HELD = Holds(np.ones(2))


def noted(number: int) -> torch.Tensor:
    tensor: Any = torch.full((8,), float(number))
    tensor.note = number
    return tensor


@pytest.mark.parametrize("what", UNLIKE)
def test_whatever_is_not_alike_is_left_to_the_pickler(what: str) -> None:
    many([((UNLIKE[what](number),), {}) for number in range(4)])


def test_values_of_any_kind_in_any_order() -> None:
    choice = random.Random(3)
    kinds = [*UNLIKE.values(), lambda n: batch(4), lambda n: batch(2 + n % 2)]
    for _ in range(50):
        make = choice.sample(kinds, 2)
        many([((choice.choice(make)(n % 4),), {}) for n in range(6)])


def test_what_only_refers_to_the_same_address_is_not_taken_for_another_array() -> None:
    whole = np.arange(64, dtype=np.int64)
    first = ((whole[:8], whole[8:16]), {})
    same_bytes = ((whole[:8], whole[:8].view()), {})

    assert many([first, same_bytes]) == [False, False]
