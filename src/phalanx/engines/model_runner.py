"""What an engine has to supply: steps. All else, requests, pauses, versions, errors of rows, is `RolloutEngine`'s."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Iterable, Sequence

from phalanx.engines.engine_requests import Answer, SampledToken, Vocabulary
from phalanx.engines.engine_types import Capabilities, SamplingParams

__all__ = ["ModelRunner"]


class ModelRunner(abc.ABC):
    """The inside of an engine. :class:`RolloutEngine` calls it from one thread, never two methods at once.

    Weights change only between two calls of it, or while a step is awaited. It does not end answers, except by
    ``SampledToken.finish`` where it knows an end that ``vocabulary`` does not tell.
    """

    #: What it can do.
    capabilities: Capabilities
    #: When answers end, and how tokens are told as text.
    vocabulary: Vocabulary

    @abc.abstractmethod
    def add(self, answers: Sequence[Answer]) -> None:
        """Draw tokens for these from the next step on, after ``answer.so_far``; each counts from the number of
        tokens that it has: token i is drawn with number i of ``answer.seed`` and ``answer.sample``."""

    @abc.abstractmethod
    def step(self) -> Iterable[SampledToken] | Awaitable[Iterable[SampledToken]]:
        """Draw a token, or some, for some or all of the answers that it has."""

    @abc.abstractmethod
    def remove(self, answers: Sequence[Answer]) -> None:
        """Forget these: they ended, or were aborted. Some may be unknown here."""

    @abc.abstractmethod
    def weights_changed(self) -> None:
        """The weights are others than in the last step: what was computed with the old ones is of no use."""

    @abc.abstractmethod
    def prompt_log_probs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Of each prompt the log-probability of every token but the first, after those before it."""

    def refuses(self, sampling: SamplingParams) -> str | None:
        """Why rows with this sampling cannot be served, in words; None where they can."""
        top = sampling.log_probs or 0
        if top > self.capabilities.top:
            most = self.capabilities.top
            return f"SamplingParams(log_probs={top}): this engine returns at most the {most} likeliest tokens"
        return None

    def room(self) -> int | None:
        """How many more answers it can take now; None for any number."""
        return None

    def cache_use(self) -> float:
        """The part of the memory for keys and values that is in use, 0 to 1."""
        return 0.0

    def reset_cache(self) -> None:
        """Forget what is kept of prompts from call to call."""
        return

    def hold(self) -> None:
        """Stand still until :meth:`release`, where tokens are drawn beside the steps that are asked for; a step that is
        waited for ends with what there is."""
        return

    def release(self) -> None:
        """Go on after :meth:`hold`."""
        return

    def why_not(self, what: str) -> str:
        """Why it cannot do what ``capabilities`` says that it cannot, in words."""
        return f"this engine has no {what}"

    def sleep(self, tags: Sequence[str]) -> None:
        """Give memory back; called where ``capabilities.sleep``."""
        return

    def wake(self, tags: Sequence[str]) -> None:
        """Take it again."""
        return

    def close(self) -> None:
        """Give everything back."""
        return
