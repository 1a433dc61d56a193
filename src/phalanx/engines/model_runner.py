"""Interface of the part of an engine that runs the model; ``RolloutEngine`` supplies requests, pauses, versions."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Iterable, Sequence

from phalanx.engines.engine_requests import Answer, SampledToken
from phalanx.engines.engine_types import Capabilities, SamplingParams
from phalanx.engines.vocabulary import Vocabulary


class ModelRunner(abc.ABC):
    """Runs the model of an engine. :class:`RolloutEngine` calls its methods from a single thread, in sequence.

    Weights change only between two calls, or while a step is awaited. A runner does not end answers, except by
    ``SampledToken.finish`` at an end that ``vocabulary`` does not tell; its token is None at an end without a token.
    """

    #: Features of the engine.
    capabilities: Capabilities
    #: Limits and decoding of tokens.
    vocabulary: Vocabulary

    @abc.abstractmethod
    def add(self, answers: Sequence[Answer]) -> None:
        """Sample tokens for ``answers`` from the next step on, after ``answer.so_far``.

        Token i of an answer is sampled with number i of ``answer.seed`` and ``answer.sample``, including
        tokens of a prefix.
        """

    @abc.abstractmethod
    def step(self) -> Iterable[SampledToken] | Awaitable[Iterable[SampledToken]]:
        """Sample tokens for some or all of the added answers."""

    @abc.abstractmethod
    def remove(self, answers: Sequence[Answer]) -> None:
        """Forget ``answers``: they ended or were aborted. Some may be unknown."""

    @abc.abstractmethod
    def weights_changed(self) -> None:
        """Drop results of the old weights: they have changed since the last step."""

    @abc.abstractmethod
    def prompt_log_probs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability of every token of each prompt but the first."""

    def refuses(self, sampling: SamplingParams) -> str | None:
        """Return why rows with this sampling cannot be served, or None."""
        top, most = sampling.log_probs or 0, self.capabilities.top
        if top > most:
            return f"SamplingParams(log_probs={top}): this engine returns at most the {most} likeliest tokens"
        return None

    def room(self) -> int | None:
        """Return how many more answers can be added now, or None without a limit."""
        return None

    def cache_use(self) -> float:
        """Return the used fraction of the memory for keys and values, 0 to 1."""
        return 0.0

    def reset_cache(self) -> None:
        """Drop the cache of prompts."""
        return

    def hold(self) -> None:
        """Stop until :meth:`release`, if tokens are sampled concurrently to steps. A pending step ends.

        Both methods may be called several times in a row.
        """
        return

    def release(self) -> None:
        """Continue after :meth:`hold`."""
        return

    def sleep(self, tags: Sequence[str]) -> None:
        """Release memory; called if ``capabilities.sleep``."""
        return

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate the memory again."""
        return

    def close(self) -> None:
        """Release everything."""
        return
