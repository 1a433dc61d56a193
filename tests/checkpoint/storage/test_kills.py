"""A writer dies at any point of what it does to files: the last whole step is found, and what is left is removed."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import cast

import pytest

from phalanx.checkpoint.storage.retention import in_order
from phalanx.checkpoint.storage.steps import look, open_at, read_step
from phalanx.checkpoint.storage.storage import Place, place_at
from tests.checkpoint.storage.support import Killed, Mortal, process

KEEP = 2


@pytest.fixture(params=["folder", "store"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a new run, on a file system and in a store."""
    monkeypatch.setattr(os, "fsync", lambda number: None)  # power stays on here
    return f"memory://{secrets.token_hex(4)}/run" if request.param == "store" else str(tmp_path / "run")


def content(step: int) -> bytes:
    return f"weights of step {step}".encode() * 3


def save(place: Place | Mortal, step: int) -> None:
    with open_at(cast("Place", place), step, KEEP) as writer:
        part = writer.part("policy")
        name = f"{part.removeprefix(place.root + '/')}/rank-0"
        place.write(name, content(step))
        writer.write("driver/state", content(step)[::-1])
        writer.commit()


def saved_until_killed(place: Mortal, steps: range) -> int:
    """The last step whose commit returned, or -1."""
    last = -1
    with contextlib.suppress(Killed):
        for step in steps:
            save(place, step)
            last = step
    return last


def changes_of(path: str) -> int:
    with process(1):
        place = Mortal(place_at(path))
        saved_until_killed(place, range(4))
        return place.changes


def test_the_last_whole_step_is_found_wherever_the_writer_died(path: str) -> None:
    number = changes_of(f"{path}-counted")
    assert number > 30

    for twice in range(2 * number):
        here = f"{path}-{twice}"
        with process(1):
            last = saved_until_killed(Mortal(place_at(here), twice / 2), range(4))
        found = [one.step for one in in_order(look(place_at(here))) if one.whole]
        # A kill between a commit and what follows it leaves a step more than the writer knew of.
        assert found[-1:] in ([last] if last >= 0 else [], [last + 1]), twice
        assert len(found) >= min(last + 1, KEEP), twice
        for step in found:
            one = read_step(here, step)
            one.check()
            assert one.read("policy/rank-0") == content(step)
            assert one.read("driver/state") == content(step)[::-1]


def test_the_next_writer_takes_over_and_leaves_nothing_half_written(path: str) -> None:
    number = changes_of(f"{path}-counted")

    for twice in range(2 * number):
        here = f"{path}-{twice}"
        with process(1):
            last = saved_until_killed(Mortal(place_at(here), twice / 2), range(4))
        with process(2):
            save(place_at(here), last + 1)
        found = look(place_at(here))
        assert all(one.whole for one in found), twice
        assert [one.step for one in in_order(found)] == [*range(last + 2)][-KEEP:], twice
