"""What a call of the drop-in carries, in bytes: as traces and counts have it."""

from __future__ import annotations

import torch

from phalanx.compat.verl.single_controller.ray.calls import Parcels

MEGABYTE = 1 << 20


def test_large_arguments_are_counted_for_each_rank_and_for_the_store() -> None:
    parcels = Parcels()
    large, small, plain = torch.zeros(MEGABYTE, dtype=torch.uint8), torch.zeros(8), 3
    for value in (large, large, small, plain):
        parcels.of(value, shared=False)

    assert MEGABYTE <= parcels.nbytes([large, plain]) < MEGABYTE + 4096
    assert 32 <= parcels.nbytes([small]) < 4096
    assert MEGABYTE <= parcels.stored < MEGABYTE + 4096  # once, and not the small ones
