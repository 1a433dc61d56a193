"""Processes that die at any point of what they do to files."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest

from phalanx.checkpoint.storage import path_lock as holding
from phalanx.checkpoint.storage import steps
from phalanx.checkpoint.storage.storage import Place

_CHANGES = ("make", "write", "keep", "remove", "remove_folder")


class Killed(BaseException):
    """What a process does not live to see."""


class Mortal:
    """A place whose process dies in the middle of its change number ``last`` (from 0); None: never."""

    def __init__(self, place: Place, last: float | None = None) -> None:
        self.place, self.last = place, last
        self.changes = 0
        self.dead = False

    @property
    def root(self) -> str:
        return self.place.root

    def __getattr__(self, name: str) -> Any:  # whatever a place has
        if self.dead:
            raise Killed
        if name not in _CHANGES:
            return getattr(self.place, name)

        def change(*args: Any) -> Any:
            number = self.changes
            self.changes += 1
            if self.last is not None and number + 0.5 >= self.last:
                self.dead = True
                if number == self.last:
                    half(self.place, name, *args)
                raise Killed
            return getattr(self.place, name)(*args)

        return change


def half(place: Place, name: str, *args: Any) -> None:
    """What a change leaves that is cut off."""
    if name == "write":
        place.write(f"{args[0]}.abcd.part", args[1][: len(args[1]) // 2])
    if name == "remove_folder":
        for file in place.files(args[0])[::2]:
            place.remove(f"{args[0]}/{file}")


@contextlib.contextmanager
def process(number: int) -> Generator[None]:
    """The block is another process of this machine, the only one that lives."""
    real = holding.this_process
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holding, "_holds", holding._Holds())
        patch.setattr(holding, "this_process", lambda: replace(real(), pid=number, started=number))
        patch.setattr(holding.os, "getpid", lambda: number)
        patch.setattr(holding, "started_at", lambda pid: number if pid == number else None)
        patch.setattr(steps, "_writing", set())
        try:
            yield
        finally:
            for one in holding._holds._by_root.values():
                one._over.set()
