"""A lost rank for which there is no room any more: the whole group is started anew, where that can be had."""

from __future__ import annotations

import logging

import pytest

import phalanx as px
from phalanx.calls.health_check import look_after
from phalanx.testing import faults
from phalanx.testing.scripted import Event, scripted
from tests.members.ledger import Ledger


@pytest.mark.parametrize("refused", ["reserve", "spawn"])
def test_it_is_restarted_instead_and_that_is_said(refused: str, caplog: pytest.LogCaptureFixture) -> None:
    full: list[str] = []

    def script(what: str, number: int) -> Event:
        if what in full:
            full.remove(what)
            return "refuse"
        return "fine"

    with scripted(script), px.ResourcePool([3], use_gpu=False, backend="inline") as pool:
        group = px.WorkerGroup(pool, Ledger, on_failure=px.ReplacePolicy())
        group.add(1)
        px.snapshot(group)
        before = group.core.endpoints
        faults.kill(group, 1)
        look_after(group.core)
        full.append(refused)

        with caplog.at_level(logging.WARNING, "phalanx"):
            assert group.add(2) == [[2]] * 3  # what the constructor made, and nothing of the snapshot

        assert group.state == "ready"
        assert not {id(one) for one in before} & {id(one) for one in group.core.endpoints}
    assert any("is restarted instead" in one.getMessage() for one in caplog.records)
