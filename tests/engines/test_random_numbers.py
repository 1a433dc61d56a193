"""Random numbers by their position."""

from __future__ import annotations

import numpy as np

from phalanx.engines.token_sampling import random_streams, uniform_numbers


def test_uniform_numbers_are_those_of_splitmix64() -> None:
    # The first outputs of splitmix64 for the seed 1234567, as Vigna's reference code prints them.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]

    found = uniform_numbers(np.asarray([1234567] * 3, np.uint64), [0, 1, 2])

    assert found.tolist() == [(number >> 11) * 2.0**-53 for number in known]


def test_each_seed_and_sample_has_its_own_random_stream() -> None:
    seeds, samples = zip(*((seed, sample) for seed in range(20) for sample in range(20)), strict=True)

    assert len(set(random_streams(seeds, samples).tolist())) == 400
