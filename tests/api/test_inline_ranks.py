"""Ranks of the inline backend use that backend: for groups that they are given, for channels and for stored values."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping

import pytest

import phalanx as px
from phalanx.backends import inline
from phalanx.testing import faults


class Adder(px.Worker):
    @px.register(px.Dispatch.RANK_ZERO)
    def add(self, x: int) -> int:
        return x + 1


class Sleeper(px.Worker):
    def __init__(self) -> None:
        self.local = threading.local()  # like the current CUDA device
        self.local.ends = []

    @px.register(px.Dispatch.RANK_ZERO)
    async def sleep(self, seconds: float) -> list[str]:
        try:
            if seconds:
                asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.local.ends.append("CancelledError")
            raise
        return [*self.local.ends, "slept"]


class Caller(px.Worker):
    @px.register(px.Dispatch.RANK_ZERO)
    def call_other(self, group: px.WorkerGroup, x: int) -> int:
        return group.add(x)

    @px.register(px.Dispatch.RANK_ZERO)
    def take(self, name: str) -> int:
        return px.Channel.find(name).get()

    @px.register(px.Dispatch.RANK_ZERO)
    def store(self) -> str:
        return px.put(1).backend


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[px.ResourcePool]:
    """Slots of the inline backend in a process whose default backend is Ray, so that its use would start a cluster."""
    monkeypatch.setenv("PHALANX_BACKEND", "ray")
    with px.ResourcePool([1], use_gpu=False, backend="inline") as made:
        yield made


def test_ranks_use_their_own_backend_for_groups_channels_and_stored_values(pool: px.ResourcePool) -> None:
    adder, caller = px.WorkerGroup(pool, Adder), px.WorkerGroup(pool, Caller)

    assert caller.call_other(adder, 1) == 2
    assert caller.store() == "inline"
    with px.Channel(name="numbers", backend="inline") as channel:
        channel.put(7)
        assert caller.take("numbers") == 7


def test_ctrl_c_in_a_notebook_ends_the_call_of_an_async_method(pool: px.ResourcePool) -> None:
    """A notebook runs its event loop on the main thread, as this test does; ranks run their loop on it, too."""
    group = px.WorkerGroup(pool, Sleeper)

    async def cell() -> None:
        with pytest.raises(KeyboardInterrupt):
            group.sleep(60.0)
        assert group.sleep(0.0) == ["CancelledError", "slept"]

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(cell())


def test_an_error_is_marked_as_lost_if_a_worker_lost_a_rank_of_another_group(pool: px.ResourcePool) -> None:
    adder, caller = px.WorkerGroup(pool, Adder), px.WorkerGroup(pool, Caller)
    with pytest.raises(px.RemoteCallError) as raised:
        caller.call_other(adder, "no number")
    assert not raised.value.lost

    faults.kill(adder, 0)
    with pytest.raises(px.RemoteCallError) as raised:
        caller.call_other(adder, 1)
    assert raised.value.lost


def test_a_call_ends_if_its_rank_is_stopped_as_it_begins(
    pool: px.ResourcePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    adder = px.WorkerGroup(pool, Adder)

    def stop(environment: Mapping[str, str]) -> contextlib.nullcontext[None]:
        adder.core.backend.kill(adder.core.endpoints)
        return contextlib.nullcontext()

    monkeypatch.setattr(inline, "variables_set", stop)

    assert adder.add(1) == 2


def test_an_inline_group_is_refused_in_another_process(pool: px.ResourcePool) -> None:
    data = pickle.dumps(px.WorkerGroup(pool, Adder, name="adder"))
    code = f"import pickle; pickle.loads({data!r})"

    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert "DeclarationError: group 'adder' runs in the process of its driver" in ran.stderr
