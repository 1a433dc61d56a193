"""What a command says where several clusters run on the machine."""

from __future__ import annotations

import pytest

import phalanx as px
from phalanx.backends.ray import cluster_reader


def test_each_cluster_is_listed_with_what_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster_reader.private, "cluster_addresses", lambda: {"127.0.0.1:1", "127.0.0.1:2"})
    monkeypatch.setattr(cluster_reader.private, "bootstrap_address", lambda: None)
    said = {"127.0.0.1:1": "train.py (pid 7): trainer"}
    monkeypatch.setattr(
        cluster_reader, "_drivers_of", lambda address: said.get(address, "no driver of phalanx")
    )
    with pytest.raises(px.PlacementError) as raised:
        cluster_reader.find_cluster()
    assert str(raised.value).splitlines() == [
        "several clusters run on this machine: say which one by --address or RAY_ADDRESS",
        "  127.0.0.1:1  train.py (pid 7): trainer",
        "  127.0.0.1:2  no driver of phalanx",
    ]


def test_a_cluster_that_is_gone_is_said_not_to_answer() -> None:
    assert cluster_reader._drivers_of("127.0.0.1:1") == "does not answer"
