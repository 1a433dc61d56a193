"""Data types of engines: sampling parameters, completions, vocabularies, statistics.

Types that calls pass are registered as values without rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from phalanx.config import is_number, is_whole
from phalanx.dispatch.shardable import register_row_type
from phalanx.errors import DeclarationError
from phalanx.wire.value import checked_number

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
"""Ends of an answer: stop token or text; ``max_tokens`` or context reached; aborted; the row cannot be served, or the
engine failed while it generated."""

PauseMode: TypeAlias = Literal["keep", "wait", "abort"]

Prompt: TypeAlias = "Sequence[int] | str"
"""Tokens, or text if the engine has a tokenizer."""

Stop: TypeAlias = "int | str | tuple[int, ...]"
"""A token, a text (if the engine has a tokenizer), or a sequence of tokens."""

Encode: TypeAlias = Callable[[str], Sequence[int]]
Decode: TypeAlias = Callable[[Sequence[int]], str]

UNKNOWN_VERSION = -1
"""Weights version of tokens that were given as a prefix without their completion."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters: an object for all prompts of a call, or a list with an object per prompt.

    Attributes:
        max_tokens: maximum number of tokens of an answer, including the prefix.
        temperature: 0 takes the likeliest token; 1 samples from the model's own distribution.
        top_p: sample from the likeliest tokens that together have this probability.
        n: number of answers to each prompt; ``Completion.all`` has them.
        seed: seed of the row's own random numbers. Token i of an answer is sampled with number i of the seed,
            independent of the batch, and also after ``prefix=``. The same object for many rows gives equal
            prompts equal answers; :meth:`each` does not. None: the engine chooses one per answer.
        stop: tokens, sequences of tokens, or texts that end an answer. A stop token is the last token of the
            answer; ``text`` ends before a stop text.
        log_probs: None for no log-probabilities; 0 for the answer's tokens; k also for the k likeliest
            tokens at each position. Values are the model's own, before temperature and ``top_p``.
        ignore_eos: do not stop at the model's own end tokens.

    Raises:
        DeclarationError: if a value is out of range.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None
    stop: tuple[Stop, ...] = ()
    log_probs: int | None = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _checked_stops(self.stop))
        for name, least in (("max_tokens", 1), ("n", 1), ("seed", 0), ("log_probs", 0)):
            value = getattr(self, name)
            if value is not None or least:
                object.__setattr__(self, name, checked_number(f"SamplingParams: {name}", value, least))
        for name, valid, expected in (
            ("temperature", is_number(self.temperature) and self.temperature >= 0, "a number from 0"),
            ("top_p", is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0, up to 1"),
        ):
            if not valid:
                raise DeclarationError(f"SamplingParams({name}={getattr(self, name)!r}): expected {expected}")

    def each(self, count: int) -> list[SamplingParams]:
        """Return an object for each of ``count`` rows, with the seeds ``seed``, ``seed + 1``, and so on."""
        if self.seed is None:
            return [self] * count
        return [replace(self, seed=self.seed + row) for row in range(count)]


@dataclass(frozen=True)
class Completion:
    """Answer to a prompt.

    Attributes:
        tokens: tokens after the prompt, including the prefix.
        log_probs: log-probability of each token under the weights that sampled it; empty if none were requested; nan
            for tokens of a prefix without log-probabilities.
        finish_reason: "stop", "length", "abort", or "error".
        versions: runs of (version, number of tokens). Version 0 is before the first sync, -1 is a prefix of plain
            tokens. An answer without tokens has a run of 0 tokens.
        id: name of the request, for ``abort``.
        text: decoded tokens, if the engine has a tokenizer.
        error: reason why the row cannot be served, or None. Other rows are not affected.
        top: for each token the k likeliest tokens with their log-probabilities, if ``SamplingParams(log_probs=k)``.
        more: further answers to the same prompt, if ``SamplingParams(n=)`` requested several.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...]
    id: str = ""
    text: str | None = None
    error: str | None = None
    top: tuple[dict[int, float], ...] = ()
    more: tuple[Completion, ...] = ()

    @property
    def version(self) -> int:
        """Version of the weights that sampled the last token."""
        return self.versions[-1][0] if self.versions else 0

    @property
    def all(self) -> tuple[Completion, ...]:
        """All answers to the prompt, beginning with this answer."""
        return (replace(self, more=()), *self.more)

    @property
    def finished(self) -> bool:
        """True unless the answer was aborted; an aborted answer can be continued by ``prefix=``."""
        return self.finish_reason != "abort"


Prefix: TypeAlias = "Completion | Sequence[int] | None"
"""Answer to continue: an aborted completion, or its tokens. None for a new answer."""


@dataclass(frozen=True)
class Tokens:
    """New tokens of an answer in progress; :meth:`RolloutEngine.generate_tokens` yields them.

    Attributes:
        row: index of the prompt in the rank's shard.
        sample: index of the answer among the row's ``n`` answers.
        id: name of the request.
        tokens, log_probs, version: as in :class:`Completion`.
        finish_reason: end of the answer, with its last tokens; None before.
        error: as in :class:`Completion`.
    """

    row: int
    id: str
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    version: int
    finish_reason: FinishReason | None = None
    sample: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Capabilities:
    """Features of an engine. Use of a missing feature is ignored with a warning if that is harmless, else rejected.

    Attributes:
        context: maximum number of tokens of prompt and answer together.
        sleep: whether ``sleep`` releases memory.
        seeds: whether ``SamplingParams(seed=)`` gives a row the same tokens in every batch.
        top: largest k of ``SamplingParams(log_probs=k)``.
        text: whether the engine has a tokenizer.
    """

    context: int
    sleep: bool = False
    seeds: bool = True
    top: int = 0
    text: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """Limits and decoding of a model's tokens.

    Attributes:
        context: maximum number of tokens of prompt and answer together.
        end: the model's own end tokens.
        size: number of tokens, which are 0 to ``size - 1``; None if unknown.
        text: function that decodes tokens, if there is a tokenizer.
    """

    context: int
    end: frozenset[int] = frozenset()
    size: int | None = None
    text: Decode | None = None

    def __contains__(self, token: int) -> bool:
        return token >= 0 and (self.size is None or token < self.size)


@dataclass(frozen=True)
class EngineStatistics:
    """Activity of a rank's engine.

    Attributes:
        running, waiting: numbers of answers in progress and in the queue.
        requests, aborted: finished rows since the start, and aborted rows among them.
        tokens: tokens since the start.
        tokens_per_second: rate of the steps in the last ten seconds.
        cache_use: used fraction of the memory for keys and values, 0 to 1.
        version: version of the weights.
        paused: mode of the pause, or None.
    """

    running: int = 0
    waiting: int = 0
    requests: int = 0
    aborted: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0
    cache_use: float = 0.0
    version: int = 0
    paused: PauseMode | None = None

    def numbers(self) -> dict[str, float]:
        """Return the changing values by name, for metrics and traces."""
        names = ("tokens_per_second", "running", "waiting", "cache_use", "tokens")
        numbers = {name: float(getattr(self, name)) for name in names}
        return {**numbers, "weights_version": float(self.version)}

    def line(self) -> str:
        """Return the statistics as a line of text."""
        parts = [f"{self.tokens_per_second:.0f} tokens/s", f"{self.running} running"]
        parts += [f"{self.waiting} waiting", f"cache {self.cache_use:.0%}", f"{self.requests} rows done"]
        parts += [f"weights {self.version}"] if self.version else []
        return ", ".join([*parts, f"paused ({self.paused})"] if self.paused else parts)


@dataclass(frozen=True)
class Endpoint:
    """HTTP server of an engine, compatible with OpenAI's API.

    Attributes:
        url: address with "/v1", the ``base_url`` of OpenAI's client.
        token: key that every request needs, the ``api_key`` of OpenAI's client. The repr does not show it.
        model: model name in requests.
    """

    url: str
    token: str = field(repr=False)
    model: str


def end_tokens(eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
    """Return the end tokens in ``eos_token_id`` of a generation configuration."""
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or ())


def load_tokenizer(tokenizer: Any) -> tuple[Encode | None, Decode | None]:
    """Return functions that encode and decode, by a tokenizer or a folder with a tokenizer; (None, None) without."""
    if tokenizer is None:
        return None, None
    if isinstance(tokenizer, str | Path):
        check_folder("tokenizer", tokenizer)
        from transformers import AutoTokenizer  # only if texts are used

        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer))
    return tokenizer.encode, lambda tokens: tokenizer.decode(list(tokens))


def check_folder(argument: str, folder: str | Path) -> None:
    """Check that a folder exists, unless its name can be a name on the hub, with at most a single slash.

    Raises:
        ValueError: if the folder does not exist.
    """
    name = str(folder)
    if (name.startswith(("/", ".", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise ValueError(f"{argument}={name!r}: there is no such folder on this rank's host")


def _checked_stops(given: Any) -> tuple[Stop, ...]:
    stops: list[Stop] = []
    is_single = isinstance(given, str) or not isinstance(given, Iterable)
    for stop in () if given is None else [given] if is_single else given:
        if (isinstance(stop, str) and stop) or is_whole(stop):
            stops.append(stop if isinstance(stop, str) else checked_number("stop", stop))
        elif isinstance(stop, Sequence) and stop and all(is_whole(token, 0) for token in stop):
            stops.append(tuple(map(int, stop)))
        else:
            raise DeclarationError(
                f"SamplingParams(stop={given!r}): expected tokens, lists of tokens, or texts; an empty text would end "
                "every answer at once"
            )
    return tuple(stops)


def _reject_rows(*_: Any) -> Any:
    raise DeclarationError("values of px.engines have no rows; give a list with an object per row")


for _type in (SamplingParams, Completion, Tokens, Capabilities, EngineStatistics, Endpoint):
    register_row_type(_type, count=lambda _: None, slice=_reject_rows, concat=_reject_rows)
