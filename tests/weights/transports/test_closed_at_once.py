"""Whoever closes what another thread closes at the same moment closes nothing of somebody else's."""

from __future__ import annotations

import os
import threading

import pytest

from phalanx.weights.transports.segments import host_segments


def test_a_descriptor_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = host_segments.make(4096)
    closed: list[int] = []
    within, go_on = threading.Event(), threading.Event()
    close = os.close

    def slowly(fd: int) -> None:
        closed.append(fd)
        within.set()
        go_on.wait(10)
        close(fd)

    monkeypatch.setattr(os, "close", slowly)
    thread = threading.Thread(target=segment.close)
    thread.start()
    within.wait(10)
    go_on.set()
    segment.close()
    thread.join()
    assert len(closed) == 1
