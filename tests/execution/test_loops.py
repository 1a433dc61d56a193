"""The event loop of a rank's ``async`` methods."""

from __future__ import annotations

import asyncio
import gc

from phalanx.execution.loops import Loop


async def running() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_all_methods_share_one_loop_which_is_closed_with_its_rank() -> None:
    rank = Loop()
    first, second = rank.to_end(running()), rank.to_end(running())
    before = first.is_closed()
    del rank
    gc.collect()

    assert first is second
    assert (before, first.is_closed()) == (False, True)
