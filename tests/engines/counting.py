"""An engine without a model, whose next token is the last token plus 1."""

from __future__ import annotations

from collections.abc import Sequence

import phalanx as px
from phalanx.engines import Answer, Capabilities, ModelRunner, SampledToken, Vocabulary

CONTEXT = 32


class CountingMachine(ModelRunner):
    """A runner that counts. Token 9 is an end token."""

    def __init__(self, room: int | None = None) -> None:
        self.capabilities = Capabilities(context=CONTEXT)
        self.vocabulary = Vocabulary(context=CONTEXT, end=frozenset({9}), size=100)
        self.answers: dict[int, Answer] = {}
        self.seeds: list[int] = []
        self.held = False
        self._room = room

    def room(self) -> int | None:
        return None if self._room is None else self._room - len(self.answers)

    def add(self, answers: Sequence[Answer]) -> None:
        self.answers.update((answer.key, answer) for answer in answers)
        self.seeds += [answer.seed for answer in answers]

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False

    def step(self) -> list[SampledToken]:
        if self.held:  # like a runner that samples outside its steps
            return []
        return [
            SampledToken(answer, answer.so_far[-1] + 1, None if answer.sampling.log_probs is None else -0.5)
            for answer in self.answers.values()
        ]

    def remove(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self.answers.pop(answer.key, None)

    def weights_changed(self) -> None:
        pass


class CountingEngine(px.engines.RolloutEngine):
    """An engine that generates by counting."""

    def __init__(self, room: int | None = None) -> None:
        self.machine = CountingMachine(room)
        self.serve(self.machine, seed=0)
