"""Large blocks that are used again."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest
import torch

from phalanx.wire.memory import BufferPool, allocate

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no such memory here")

MB = 1 << 20


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(64 * MB)


def address(block: np.ndarray) -> int:
    return block.__array_interface__["data"][0]


def freed(pool: BufferPool, nbytes: int) -> int:
    """The address of a block that was used and is free again."""
    block = pool.block(nbytes)
    block[:] = 1
    return address(block)


def test_a_freed_block_serves_the_next_of_its_size(pool: BufferPool) -> None:
    place = freed(pool, 8 * MB)
    assert address(pool.block(8 * MB)) == place


def test_a_block_is_not_free_while_anything_uses_it(pool: BufferPool) -> None:
    block = torch.from_numpy(pool.block(8 * MB))
    view = block[MB:].view(torch.float32)[5:]
    place = block.data_ptr()
    del block
    gc.collect()
    assert address(pool.block(8 * MB)) != place
    view.fill_(2)


@pytest.mark.parametrize(("kept", "asked"), [(8, 32), (32, 8)], ids=["too small", "much too large"])
def test_a_block_of_another_size_stays_kept(pool: BufferPool, kept: int, asked: int) -> None:
    place = freed(pool, kept * MB)
    assert address(pool.block(asked * MB)) != place
    assert address(pool.block(kept * MB)) == place


def test_no_more_is_kept_than_the_bound(pool: BufferPool) -> None:
    blocks = [pool.block(16 * MB) for _ in range(6)]
    blocks.clear()
    assert pool.kept_bytes == 64 * MB


def test_a_block_larger_than_the_bound_is_not_kept(pool: BufferPool) -> None:
    freed(pool, 80 * MB)
    assert pool.kept_bytes == 0


def test_blocks_start_on_a_huge_page(pool: BufferPool) -> None:
    assert address(pool.block(5 * MB)) % (2 * MB) == 0


def test_large_received_memory_is_used_again() -> None:
    place = allocate(24 * MB).data_ptr()
    assert allocate(24 * MB).data_ptr() == place
