"""The event loop of a rank's ``async`` methods."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading

import pytest

from phalanx.worker.worker_runtime import Loop


async def running() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_all_methods_share_one_loop_which_is_closed_with_its_rank() -> None:
    rank = Loop()
    first, second = rank.run(running()), rank.run(running())
    before = first.is_closed()
    del rank
    gc.collect()

    assert first is second
    assert (before, first.is_closed()) == (False, True)


class Interrupt(BaseException):
    """As a cancelled call is interrupted by."""


def test_an_interrupted_call_does_not_go_on_while_the_next_one_runs() -> None:
    loop, seen = Loop(), list[str]()

    async def first() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("first ended")

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    try:
        sender.start()
        with pytest.raises(Interrupt):
            loop.run(first())
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)

    assert seen == ["first ended"]
