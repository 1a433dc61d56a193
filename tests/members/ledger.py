"""A worker whose state is the list of its calls."""

from __future__ import annotations

from typing import Any

import phalanx as px


class Ledger(px.Worker):
    def __init__(self) -> None:
        self.made: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"made": list(self.made)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.made = list(state["made"])

    @px.register
    def add(self, number: int) -> list[int]:
        self.made.append(number)
        return list(self.made)
