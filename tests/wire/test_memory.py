"""Blocks, copies and joins, with small thresholds so that tests reach every path quickly."""

from __future__ import annotations

import concurrent.futures.thread
import gc
import os
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.wire import memory
from phalanx.wire.memory import BufferPool, allocate, concat_arrays, concat_rows, private_copies, select_rows


@pytest.fixture(params=[False, True], ids=["one thread", "threads"])
def small_thresholds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(memory, "PARALLEL_FROM", 1)
        monkeypatch.setattr(memory, "HUGE_FROM", 1)
        monkeypatch.setattr(memory, "_TORCH_PARALLEL_FROM", 1)
        monkeypatch.setattr(memory, "_CHUNK", 5)


@pytest.mark.parametrize("nbytes", [0, 1, 100, 5 << 20])
def test_an_allocated_block_has_the_requested_size(nbytes: int) -> None:
    block = allocate(nbytes)
    assert (block.dtype, block.numel()) == (torch.uint8, nbytes)
    if nbytes <= 100:
        assert block.resize_(nbytes + 10).numel() == nbytes + 10


@pytest.mark.usefixtures("small_thresholds")
def test_private_copies_equal_their_sources_and_are_separate() -> None:
    expected = [list(range(n)) for n in (0, 1, 12, 30)]
    sources = list(map(bytearray, expected))
    copies = private_copies(list(map(memoryview, sources)))
    assert [copy.tolist() for copy in copies] == expected
    for value, copy in enumerate(copies, 100):
        copy.fill_(value)
    assert list(map(list, sources)) == expected
    assert [set(copy.tolist()) for copy in copies] == [set(), {101}, {102}, {103}]


DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e5m2]


@pytest.mark.usefixtures("small_thresholds")
@pytest.mark.parametrize(
    "whole",
    [
        *((torch.arange(24) % 3).reshape(8, 3).to(dtype) for dtype in DTYPES),
        torch.arange(24.0).reshape(3, 8).T,
        torch.tensor([[1 + 2j]] * 8).conj(),
        torch.eye(8).to_sparse(),
        torch._efficientzerotensor((8, 2)),
    ],
    ids=[*map(str, DTYPES), "with strides", "conjugate", "sparse", "without memory"],
)
def test_rows_of_any_tensor_are_joined_in_order(whole: torch.Tensor) -> None:
    pieces = [
        whole.narrow_copy(0, start, rows) if whole.is_sparse else whole[start : start + rows]
        for start, rows in ((0, 2), (2, 0), (2, 5), (7, 1))
    ]
    joined = concat_rows(pieces)
    assert joined.dtype == whole.dtype
    assert torch.equal(joined.to_dense(), whole.to_dense().resolve_conj())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_selected_as_torch_selects_them(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_TORCH_PARALLEL_FROM", 1)
    whole = (torch.arange(24) % 3).reshape(8, 3).to(dtype)
    for rows, indices in product((whole, whole[:, 1]), ([7, 0, 0], range(1, 8, 3), [])):
        selected = select_rows(rows, indices)
        expected = rows[torch.tensor(list(indices), dtype=torch.long)]
        assert selected.dtype == dtype
        assert torch.equal(selected.view(torch.uint8), expected.view(torch.uint8))
        assert selected.resize_(100).shape == (100,)
    for outside in (8, -1):
        with pytest.raises(IndexError):
            select_rows(whole, [outside])


@pytest.mark.usefixtures("small_thresholds")
@pytest.mark.parametrize("odd", [torch.eye(4).to_sparse(), torch._efficientzerotensor((4, 2))])
def test_rows_of_tensors_without_plain_memory_are_selected(odd: torch.Tensor) -> None:
    assert torch.equal(select_rows(odd, [3, 0]).to_dense(), odd.to_dense()[[3, 0]])


@pytest.mark.usefixtures("small_thresholds")
def test_joined_rows_have_own_memory_a_promoted_dtype_and_no_autograd_history() -> None:
    piece = torch.ones(3, 2, requires_grad=True)
    joined = concat_rows([piece])
    joined.fill_(0)
    assert (piece.sum().item(), joined.requires_grad, joined._base) == (6, False, None)
    assert concat_rows([torch.ones(1, dtype=torch.int32), torch.ones(1)]).dtype == torch.float32

    array = np.ones((2, 3))
    array.flags.writeable = False
    concat_arrays([array])[:] = 0
    assert array.sum() == 6


def test_a_joined_tensor_can_grow() -> None:
    assert concat_rows([torch.ones(3), torch.ones(2)]).resize_(1000).shape == (1000,)


@pytest.mark.usefixtures("small_thresholds")
def test_rows_of_different_shapes_cannot_be_joined() -> None:
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        concat_rows([torch.ones(2, 3), torch.ones(2, 4)])


@pytest.mark.usefixtures("small_thresholds")
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["f4", "?", "M8[s]", "U2", "O", "i4,u1"])
def test_arrays_are_joined_in_order(dtype: str, order: Any) -> None:
    whole = np.arange(24).astype(dtype).reshape(8, 3, order=order)
    joined = concat_arrays([whole[:2], whole[2:2], whole[2:]])
    assert (joined.dtype, joined.tolist()) == (whole.dtype, whole.tolist())


def test_the_first_error_of_a_threaded_copy_is_raised_after_all_copies_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "PARALLEL_FROM", 1)
    copied = np.zeros(4, np.uint8)
    with pytest.raises(ValueError, match="broadcast"):
        memory._copy_all([np.zeros(3, np.uint8), copied], [np.ones(2, np.uint8), np.ones(4, np.uint8)])
    assert copied.all()


def test_large_values_are_copied_while_the_interpreter_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)
    (copied,) = private_copies([memoryview(bytes([1]) * memory.PARALLEL_FROM)])
    assert copied.numpy().all()


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_copies_with_threads_of_its_own() -> None:
    source = [memoryview(bytes([1]) * memory.PARALLEL_FROM)]
    private_copies(source)  # starts the parent's threads
    child = os.fork()
    if child == 0:
        os._exit(0 if private_copies(source)[0].numpy().all() else 1)  # torch's threads do not survive a fork
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


MB = 1 << 20


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(64 * MB)


def address(block: np.ndarray) -> int:
    return block.__array_interface__["data"][0]


def freed(pool: BufferPool, nbytes: int) -> int:
    """Return the address of a block that was used and is free again."""
    block = pool.block(nbytes)
    block[:] = 1
    return address(block)


def test_a_block_is_not_reused_while_a_view_of_it_exists(pool: BufferPool) -> None:
    block = torch.from_numpy(pool.block(8 * MB))
    view = block[MB:].view(torch.float32)[5:]
    place = block.data_ptr()
    del block
    gc.collect()
    assert address(pool.block(8 * MB)) != place
    view.fill_(2)


@pytest.mark.parametrize(("kept", "asked"), [(8, 32), (32, 8)], ids=["too small", "much too large"])
def test_a_freed_block_is_reused_only_for_a_block_of_its_size(
    pool: BufferPool, kept: int, asked: int
) -> None:
    place = freed(pool, kept * MB)
    assert address(pool.block(asked * MB)) != place
    assert address(pool.block(kept * MB)) == place


def test_the_pool_keeps_at_most_its_limit_and_uses_huge_pages(
    pool: BufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    monkeypatch.setattr(memory._Region, "advise", lambda _, advice: asked.append(advice))
    freed(pool, 80 * MB)
    assert asked == ["MADV_HUGEPAGE"]
    assert pool.kept_bytes == 0
    blocks = [pool.block(16 * MB) for _ in range(6)]
    assert address(blocks[0]) % (2 * MB) == 0
    blocks.clear()
    assert pool.kept_bytes == 64 * MB


def test_large_allocated_memory_is_reused() -> None:
    place = allocate(24 * MB).data_ptr()
    assert allocate(24 * MB).data_ptr() == place
