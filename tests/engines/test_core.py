"""The client of an engine in processes of its own, as far as it needs none."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from phalanx.engines.vllm import async_llm_core as core


def test_a_start_that_takes_long_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow(core.AsyncCore):
        async def _made(self, arguments: dict[str, Any]) -> Any:
            while "not up" not in caplog.text:
                await asyncio.sleep(0.001)
            return None

    monkeypatch.setattr(core, "_TELL_S", 0.01)

    Slow({}).close()

    assert "vLLM's engine is not up after 0 s: waiting for vLLM to start its processes" in caplog.text


def test_a_start_that_fails_ends_the_clients_thread() -> None:
    class Failing(core.AsyncCore):
        async def _made(self, arguments: dict[str, Any]) -> Any:
            raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        Failing({})
    assert "phalanx-vllm" not in [thread.name for thread in threading.enumerate()]
