"""Bytes of the arguments of a drop-in call, as traces and statistics report them."""

from __future__ import annotations

import torch

from phalanx.compat.verl.single_controller.ray.group import PayloadEncoder

MEGABYTE = 1 << 20


def test_large_arguments_count_for_each_rank_and_once_for_the_store() -> None:
    payloads = PayloadEncoder()
    large, small, plain = torch.zeros(MEGABYTE, dtype=torch.uint8), torch.zeros(8), 3
    for value in (large, large, small, plain):
        payloads.of(value, shared=False)

    assert MEGABYTE <= payloads.nbytes([large, plain]) < MEGABYTE + 4096
    assert 32 <= payloads.nbytes([small]) < 4096
    assert MEGABYTE <= payloads.stored < MEGABYTE + 4096  # once, without the small values
