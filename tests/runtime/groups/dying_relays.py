"""Relays that end themselves at a step of a call that a test names, and ranks that say where they are."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

import phalanx as px
from phalanx.transport.ray.relay import Relay
from phalanx.transport.ray.relays import RayRelays
from phalanx.wire.relayed import Envelope, part_of
from tests.runtime.fault_workers import within

Step = Literal["before it sends", "after it sent to some"]
_ENDS = "ends"
_PATIENCE_S = 60.0


def order(folder: Path, relay: str, step: Step) -> None:
    """Have the relay of that name end itself at that step of the next call that comes to it."""
    (folder / _ENDS).write_text(f"{relay}/{step}")


def dying(folder: Path) -> Callable[..., RayRelays]:
    """What makes relays of a group that obey :func:`order`."""
    where = str(folder)

    class Dying(Relay):  # travels by value, with the folder
        def _send(self, envelope: Envelope, refs: Sequence[Any]) -> Any:
            relay, _, step = _read(where).partition("/")
            if relay == self._below.name:
                if step == "after it sent to some":
                    self._send_to_some(envelope, refs)
                os.kill(os.getpid(), signal.SIGKILL)
            return super()._send(envelope, refs)

        def _send_to_some(self, envelope: Envelope, refs: Sequence[Any]) -> None:
            ranks = list(self._below.ranks if envelope.ranks is None else envelope.ranks)
            half = len(ranks) // 2
            part, used = part_of(envelope, range(half), ranks[:half])
            super()._send(part, [refs[place] for place in used])
            there = [Path(where, f"began-{rank}") for rank in ranks[:half]]
            within(_PATIENCE_S, lambda: all(path.exists() for path in there))

    return functools.partial(RayRelays, actor=Dying)


def _read(folder: str) -> str:
    path = Path(folder, _ENDS)
    return path.read_text() if path.exists() else ""


class Held(px.Worker):
    """Ranks that are at a call until they may go on."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @px.register
    def hold(self, folder: str) -> int:
        """Until the file for this rank, or for all, is there."""
        Path(folder, f"began-{self.rank}").touch()
        gates = [Path(folder, f"go-{self.rank}"), Path(folder, "go")]
        within(_PATIENCE_S, lambda: any(gate.exists() for gate in gates))
        Path(folder, f"ended-{self.rank}").touch()
        return self.rank

    @px.register
    def hold_large(self, folder: str) -> np.ndarray:
        """The same; its output is too large to pass through a relay."""
        return np.full(100_000, self.hold(folder))

    @px.register
    def total(self, value: Any) -> float:
        """Of what another group gave, piece by piece."""
        return float(sum(np.sum(piece) for piece in value))

    @px.register
    def note(self, number: int) -> None:
        """Keep a number."""
        self.seen.append(number)

    @px.register
    def noted(self) -> list[int]:
        """The numbers, in the order in which they came."""
        return self.seen

    def state_dict(self) -> dict[str, Any]:
        """What a new process gets."""
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of a rank that is gone."""
        self.seen = state["seen"]


def began(folder: Path, ranks: Sequence[int]) -> bool:
    """Whether these ranks come to be at the call."""
    return within(_PATIENCE_S, lambda: all((folder / f"began-{rank}").exists() for rank in ranks))


def ended(folder: Path, ranks: Sequence[int]) -> bool:
    """Whether these ranks come to have left it."""
    return within(_PATIENCE_S, lambda: all((folder / f"ended-{rank}").exists() for rank in ranks))
