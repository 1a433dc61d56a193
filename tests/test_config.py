"""Settings that come from the environment."""

from __future__ import annotations

from typing import Any

import pytest

import phalanx as px
from phalanx.config import Settings, overlays_verl, own_variables, settings, shown_ranks


def test_settings_have_defaults_and_a_deadline_is_that_of_groups_without_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in own_variables():
        monkeypatch.delenv(name)
    assert settings() == Settings()
    monkeypatch.setenv("PHALANX_CALL_TIMEOUT", "7.5")

    with px.ResourcePool([1], backend="inline") as pool:
        own = px.WorkerGroup(pool, px.Worker, call_timeout=3.0)
        without = px.WorkerGroup(pool, px.Worker)

    assert (own.core.handle.call_timeout, without.core.handle.call_timeout) == (3.0, 7.5)


def test_settings_are_handed_on_without_the_marks_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_GRACE", "2")
    monkeypatch.setenv("PHALANX_PROCESS", "rank")

    given = own_variables()

    assert given["PHALANX_GRACE"] == "2"
    assert "PHALANX_PROCESS" not in given


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ("all", "all"),
        ("merged", "merged"),
        ("none", ()),
        (" 0, 2 ", (0, 2)),
        (2, (2,)),
        ([0, 1], (0, 1)),
        ([], ()),
    ],
)
def test_ranks_whose_output_is_shown(monkeypatch: pytest.MonkeyPatch, given: Any, ranks: object) -> None:
    assert shown_ranks(given) == ranks
    if isinstance(given, str):
        monkeypatch.setenv("PHALANX_SHOW_RANKS", given)
        assert settings().show_ranks == ranks


@pytest.mark.parametrize("given", ["inf", "nan", "-1", "²", "many"])
@pytest.mark.parametrize(
    "name", ["INLINE_BYTES", "GRACE", "START_TIMEOUT", "CALL_TIMEOUT", "MAX_IN_FLIGHT", "SHOW_RANKS"]
)
def test_a_number_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, given: str) -> None:
    monkeypatch.setenv(f"PHALANX_{name}", given)

    with pytest.raises(px.DeclarationError, match=given):
        settings()


@pytest.mark.parametrize(
    ("given", "on"), [("", None), ("1", True), ("0", False), ("False", False), ("off", False), ("NO", False)]
)
def test_a_variable_turns_something_on_or_off(
    monkeypatch: pytest.MonkeyPatch, given: str, on: bool | None
) -> None:
    for name in ("DEBUG", "PROGRESS", "METRICS", "VERL"):
        monkeypatch.setenv(f"PHALANX_{name}", given)
    found = settings()

    assert (found.debug, found.progress, found.metrics) == ((False, True, True) if on is None else (on,) * 3)
    assert overlays_verl() is bool(on)
