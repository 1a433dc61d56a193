"""A writer dies at any change of its files: the last complete step is found, and its leftovers are removed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint import steps
from phalanx.checkpoint.steps import find_steps, in_order, read_step
from phalanx.checkpoint.storage import Storage
from tests.checkpoint.save_workers import saved

KEEP = 2


class Killed(BaseException):
    """The end of the process."""


class Killer:
    """Ends the process in the middle of its change number ``last``: half of that change is done, and none after."""

    def __init__(self, patch: pytest.MonkeyPatch, last: float) -> None:
        self.changes, self.last = 0, last
        for name in ("make", "write", "remove"):
            patch.setattr(Storage, name, self._changed(getattr(Storage, name)))

    def _changed(self, real: Any) -> Any:
        def change(storage: Storage, name: str, *args: bytes) -> None:
            number = self.changes
            self.changes += 1
            if number > self.last:
                raise Killed
            if number == self.last and real.__name__ == "write":
                real(storage, f"{name}.abcd.part", args[0][: len(args[0]) // 2])
                raise Killed
            real(storage, name, *args)
            if number == self.last:
                raise Killed

        return change


@pytest.fixture(params=["folder", "store"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(os, "fsync", lambda number: None)  # power stays on here
    return f"memory://{secrets.token_hex(4)}/run" if request.param == "store" else str(tmp_path / "run")


@pytest.fixture(autouse=True)
def _other_process() -> Iterator[None]:
    yield
    steps._locks.clear()


def content(step: int) -> bytes:
    return f"weights of step {step}".encode() * 3


def saved_until_killed(path: str, last: float) -> tuple[int, int]:
    """Return the last step whose commit returned, or -1, and the number of changes."""
    step = -1
    with pytest.MonkeyPatch.context() as patch:
        killer = Killer(patch, last)
        try:
            for number in range(4):
                saved(path, number, keep=KEEP, data=content(number))
                step = number
        except Killed:
            for lock in steps._locks.values():
                if lock._file >= 0:
                    os.close(lock._file)
        steps._locks.clear()
    return step, killer.changes


def test_the_last_complete_step_is_found_and_leftovers_are_removed(path: str) -> None:
    _, changes = saved_until_killed(f"{path}-counted", float("inf"))
    assert changes > 20

    for number in range(changes):
        here = f"{path}-{number}"
        last, _ = saved_until_killed(here, number)
        found = [one.number for one in in_order(find_steps(Storage(here))) if one.whole]
        # A kill right after a commit leaves a step more than its writer knows of.
        assert found[-1:] in ([last] if last >= 0 else [], [last + 1]), number
        assert len(found) >= min(last + 1, KEEP), number
        for step in found:
            assert read_step(here, step).read("policy/rank-0") == content(step)

        saved(here, last + 1, keep=KEEP, data=content(last + 1))
        after = find_steps(Storage(here))
        assert all(one.whole for one in after), number
        assert [one.number for one in in_order(after)] == [*range(last + 2)][-KEEP:], number
