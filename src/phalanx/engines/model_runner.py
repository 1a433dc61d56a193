"""Interface of the part of an engine that runs the model; ``RolloutEngine`` handles requests, pauses, versions."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Iterable, Sequence

from phalanx.engines.engine_requests import Answer, SampledToken
from phalanx.engines.engine_types import Capabilities, SamplingParams
from phalanx.engines.vocabulary import Vocabulary


class ModelRunner(abc.ABC):
    """Base class of model runners. :class:`RolloutEngine` calls the methods from a single thread, in sequence.

    Weights change only between two calls, or while a step is awaited. The engine ends answers by ``vocabulary`` and
    their sampling parameters. A runner reports other ends by ``SampledToken.finish``.
    """

    #: Features of the engine.
    capabilities: Capabilities
    #: Limits and decoding of tokens.
    vocabulary: Vocabulary

    @abc.abstractmethod
    def add(self, answers: Sequence[Answer]) -> None:
        """Add ``answers``: the next steps sample their tokens, after ``answer.so_far``.

        Token i of an answer is sampled with random number i of ``answer.seed`` and ``answer.sample``; i counts
        the tokens of a prefix, too.
        """

    @abc.abstractmethod
    def step(self) -> Iterable[SampledToken] | Awaitable[Iterable[SampledToken]]:
        """Sample tokens for some or all of the added answers, and return them."""

    @abc.abstractmethod
    def remove(self, answers: Sequence[Answer]) -> None:
        """Remove ``answers``, which ended or were aborted. Some may be unknown."""

    @abc.abstractmethod
    def weights_changed(self) -> None:
        """Drop cached results of the old weights: the weights have changed since the last step."""

    def refuses(self, sampling: SamplingParams) -> str | None:
        """Return the reason why rows with these parameters cannot be served, or None."""
        top, most = sampling.log_probs or 0, self.capabilities.top
        if top > most:
            return f"SamplingParams(log_probs={top}): this engine returns at most the {most} likeliest tokens"
        return None

    def room(self) -> int | None:
        """Return the number of answers that can be added now, or None without a limit."""
        return None

    def cache_use(self) -> float:
        """Return the used fraction of the memory for keys and values, 0 to 1."""
        return 0.0

    def reset_cache(self) -> None:
        """Drop the cache of prompts."""
        return

    def hold(self) -> None:
        """Stop until :meth:`release`, if the runner samples tokens between steps, too. A pending step ends.

        ``hold`` and ``release`` are idempotent.
        """
        return

    def release(self) -> None:
        """Continue after :meth:`hold`."""
        return

    def sleep(self, tags: Sequence[str]) -> None:
        """Release the memory of ``tags``; called only if ``capabilities.sleep``."""
        return

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate the memory of ``tags`` again."""
        return

    def close(self) -> None:
        """Release all resources."""
        return
