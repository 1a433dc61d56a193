"""Random numbers by their place: number i of a seed, without those before it.

A row's tokens then depend on its own seed alone: not on what else is in the batch, nor on where an answer was
interrupted and gone on with. Numbers are those of splitmix64 (Steele, Lea and Flood 2014, "Fast splittable
pseudorandom number generators"), whose state after i numbers is seed + i * GOLDEN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["stream_of", "uniforms"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def stream_of(seed: int, sample: int) -> int:
    """The numbers that sample ``sample`` of a row with ``seed`` draws by, as a number below 2**64."""
    return _mixed_int((_mixed_int(seed & _MASK) + sample * _GOLDEN) & _MASK)


def uniforms(streams: Sequence[int], places: Sequence[int]) -> npt.NDArray[np.float64]:
    """Number ``places[i]`` of ``streams[i]``, each from 0 to below 1."""
    state = np.asarray(streams, np.uint64) + (np.asarray(places, np.uint64) + np.uint64(1)) * np.uint64(
        _GOLDEN
    )
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_FIRST)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_SECOND)
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed_int(state: int) -> int:
    state = ((state ^ (state >> 30)) * _FIRST) & _MASK
    state = ((state ^ (state >> 27)) * _SECOND) & _MASK
    return state ^ (state >> 31)
