"""Requests of any engine: input checks, rows, their answers while tokens arrive, and the interface of model runners.

A row has ``n`` answers. An answer gets tokens step by step, with the version of the weights that sampled them, until
it ends.
"""

from __future__ import annotations

import abc
import itertools
import math
import operator
import reprlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

from phalanx.engines.engine_types import (
    UNKNOWN_VERSION,
    Capabilities,
    Completion,
    Encode,
    FinishReason,
    Prefix,
    Prompt,
    SamplingParams,
    Stop,
    Vocabulary,
)


class SampledToken(NamedTuple):
    """A token of an answer, from a step of a model runner.

    ``log_prob`` is None if the sampling requests none. ``finish`` is an end that only the runner knows; with the token
    None, the answer ends without another token. ``version`` is the version of the weights that sampled the token; None
    stands for the version at the start of the step. ``error`` is the reason of the end "error".
    """

    answer: Answer
    token: int | None
    log_prob: float | None = None
    top: dict[int, float] | None = None
    finish: FinishReason | None = None
    version: int | None = None
    error: str | None = None


@dataclass(eq=False)
class Answer:
    """An answer in progress.

    ``key`` is its number in the engine, ``sample`` its index among the row's answers, ``seed`` a number of 64 bits.
    ``tokens`` begins with the tokens of the prefix; ``versions`` has the version of the weights for each token.
    ``error`` is the reason why the answer cannot be served, ``given`` the completion of an answer that needs no tokens.
    """

    row: Row
    key: int
    sample: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    text: str | None = None
    error: str | None = None
    given: Completion | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        """Tokens of the prompt."""
        return self.row.prompt

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of the row."""
        return self.row.sampling

    @property
    def so_far(self) -> list[int]:
        """Prompt and tokens: the context of the next token."""
        return [*self.row.prompt, *self.tokens]

    def take(self, sampled: SampledToken, version: int) -> None:
        """Append a token that was sampled by weights of ``version``, or end without another token."""
        if sampled.token is None:
            self.finish_reason, self.error = sampled.finish or "abort", sampled.error
            return
        self.tokens.append(sampled.token)
        self.versions.append(version)
        if sampled.log_prob is not None:
            self.log_probs.append(sampled.log_prob)
        if sampled.top is not None:
            self.top.append(sampled.top)
        self.finish_reason = sampled.finish or self._end()

    def resume(self, given: Completion) -> None:
        """Begin with a prefix. Log-probabilities that the prefix lacks are nan."""
        if given.finished:
            self.given, self.finish_reason, self.error = given, given.finish_reason, given.error
            return
        count, wanted = len(given.tokens), self.sampling.log_probs
        self.tokens = list(given.tokens)
        self.versions = [version for version, tokens in given.versions for _ in range(tokens)]
        if wanted is not None:
            self.log_probs = [*given.log_probs, *[math.nan] * (count - len(given.log_probs))]
        if wanted:
            self.top = [*given.top, *({} for _ in range(count - len(given.top)))]
        if count and self._is_full():
            self.finish_reason = "length"

    def _is_full(self) -> bool:
        """Return whether ``max_tokens`` or the context is reached."""
        room = self.row.vocabulary.context - len(self.prompt)
        return len(self.tokens) >= min(self.sampling.max_tokens, room)

    def _end(self) -> FinishReason | None:
        is_end = self.tokens[-1] in self.row.vocabulary.end and not self.sampling.ignore_eos
        if is_end or any(self._is_stopped_by(stop) for stop in self.sampling.stop):
            return "stop"
        return "length" if self._is_full() else None

    def _is_stopped_by(self, stop: Stop) -> bool:
        if not isinstance(stop, str):
            sequence = (stop,) if isinstance(stop, int) else stop
            return tuple(self.tokens[-len(sequence) :]) == sequence
        # Earlier tokens were searched before, and a character has at most four tokens. The first tokens of a text can
        # be decoded differently, hence the second search in the complete text.
        decode = self.row.vocabulary.text
        if decode is None or stop not in (tail := decode(self.tokens[-4 * len(stop) - 8 :])):
            return False
        text = decode(self.tokens)
        found = (one for one in self.sampling.stop if isinstance(one, str) and one in tail)
        starts = [text.index(one) for one in found if one in text]
        if starts:
            self.text = text[: min(starts)]
        return bool(starts)

    def completion(self, version: int) -> Completion:
        """Return the completion. ``version``, the current version, is used for an answer without tokens."""
        if self.given is not None:
            return self.given
        text, vocabulary = self.text, self.row.vocabulary
        if text is None and vocabulary.text is not None:
            text = vocabulary.text([token for token in self.tokens if token not in vocabulary.end])
        runs = itertools.groupby(self.versions)
        return Completion(
            tokens=tuple(self.tokens),
            log_probs=tuple(self.log_probs),
            finish_reason=self.finish_reason or "abort",
            versions=tuple((number, len(list(run))) for number, run in runs) or ((version, 0),),
            id=self.row.id,
            text=text,
            error=self.error,
            top=tuple(self.top),
        )


@dataclass(eq=False)
class Row:
    """A prompt of a call, with its answers. ``index`` is its index in the rank's shard.

    ``report`` gets the tokens of its answers if ``streams``, else its index and completion.
    """

    index: int
    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    vocabulary: Vocabulary
    answers: list[Answer] = field(default_factory=list)
    report: Callable[[Any], None] = lambda _: None
    streams: bool = False

    def completion(self, version: int) -> Completion:
        """Return the completion of the row; see :meth:`Answer.completion`."""
        first, *more = (answer.completion(version) for answer in self.answers)
        return replace(first, more=tuple(more))


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


class RequestFactory:
    """Factory of rows from the arguments of calls, which are checked.

    Args:
        runner: model runner of the engine.
        encode: function that encodes a text; None without a tokenizer.
        seeds: generator of seeds for answers whose sampling has none.
    """

    def __init__(self, runner: ModelRunner, encode: Encode | None, seeds: Random) -> None:
        self._runner, self._encode, self._seeds = runner, encode, seeds
        self._keys = itertools.count(1)
        self._name = f"request-{secrets.token_hex(4)}"  # unique among the ranks

    def rows(self, prompts: Sequence[Prompt], sampling: Any, prefix: Any, ids: Any) -> list[Row]:
        """Return a row for each prompt. A row that cannot be served, or needs no tokens, is already finished.

        Args:
            sampling: a ``SamplingParams``, or a list with an element per prompt.
            prefix, ids: None, or a list with an element per prompt.

        Raises:
            ValueError: if an argument is of the wrong type or length.
        """
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
            kind = type(prompts).__name__
            raise ValueError(f"prompts is a {kind}; give a list of prompts, such as prompts['input_ids']")
        tokens = [self._prompt_tokens(prompt) for prompt in prompts]
        count = len(tokens)
        samplings = list(sampling) if isinstance(sampling, Iterable) else [sampling] * count
        if not all(isinstance(row, SamplingParams) for row in samplings):
            expected = "px.engines.SamplingParams(max_tokens=..., ...), or a list with one per prompt"
            raise ValueError(f"sampling={sampling!r}: expected {expected}")
        samplings, prefixes = _column("sampling", samplings, count), _column("prefix", prefix, count)
        rows = zip(tokens, samplings, prefixes, _column("ids", ids, count), strict=True)
        return [self._row(index, *row) for index, row in enumerate(rows)]

    def _prompt_tokens(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            return _tokens("prompt", prompt, "a list of tokens, such as [1, 15, 3]")
        if self._encode is None:
            raise ValueError("a prompt is a text, but the engine has no tokenizer: give tokens or tokenizer=")
        return list(self._encode(prompt))

    def _row(self, index: int, prompt: list[int], sampling: Any, prefix: Any, id: Any) -> Row:
        name = f"{self._name}-{next(self._keys)}" if id is None else id
        row = Row(index, name, tuple(prompt), sampling, self._runner.vocabulary)
        prefixes = _prefixes(prefix, sampling.n)
        error = next(self._errors(row, prefixes), None)
        for sample, given in enumerate(prefixes):
            seed = self._seeds.getrandbits(62) if sampling.seed is None else sampling.seed % 2**64
            answer = Answer(row, next(self._keys), sample, seed)
            if error is None:
                answer.resume(given)
            else:
                answer.finish_reason, answer.error = "error", error
            row.answers.append(answer)
        return row

    def _errors(self, row: Row, prefixes: Sequence[Completion]) -> Iterator[str]:
        vocabulary, sampling = row.vocabulary, row.sampling
        longest = vocabulary.context - 1  # room for a token
        if not row.prompt:
            yield "its prompt is empty; give at least one token"
        if len(row.prompt) > longest:
            yield (
                f"its prompt has {len(row.prompt)} tokens, but the context of {vocabulary.context} tokens has room "
                f"for only {longest}; shorten the prompt, or give the engine a longer context"
            )
        for name, tokens in (("prompt", row.prompt), *(("prefix", given.tokens) for given in prefixes)):
            wrong = next((token for token in tokens if token not in vocabulary), None)
            if wrong is not None:
                expected = "at least 0" if vocabulary.size is None else f"0 to {vocabulary.size - 1}"
                yield f"its {name} has the token {wrong}; expected {expected}"
        texts = [stop for stop in sampling.stop if isinstance(stop, str)]
        if texts and vocabulary.text is None:
            yield f"it stops at the text {texts[0]!r}, but the engine has no tokenizer; give tokenizer="
        if len(prefixes) != sampling.n:
            yield f"prefix has {len(prefixes)} answers; expected {sampling.n}, as SamplingParams(n={sampling.n})"
        if any(len(given.tokens) > sampling.max_tokens for given in prefixes if not given.finished):
            yield f"its prefix is longer than max_tokens={sampling.max_tokens}, which includes the prefix"
        refusal = self._runner.refuses(sampling)
        if refusal is not None:
            yield refusal


def _column(name: str, values: Any, count: int) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable | None):
        raise ValueError(f"{name} is {reprlib.repr(values)}; expected a list with an element per prompt")
    column = [None] * count if values is None else list(values)
    if len(column) != count:
        raise ValueError(f"{name} has {len(column)} elements for {count} prompts; give one for each")
    return column


def _tokens(name: str, given: Any, expected: str) -> list[int]:
    """Return Python integers from a list, array or tensor of numbers."""
    listed = given.tolist() if hasattr(given, "tolist") else given
    try:
        if isinstance(listed, Sequence) and not isinstance(listed, str | bytes):
            return [operator.index(token) for token in listed]
    except TypeError:
        pass
    raise ValueError(f"a {name} is {reprlib.repr(given)}; expected {expected}")


def _prefixes(prefix: Prefix, count: int) -> Sequence[Completion]:
    """Return a prefix for each of the ``count`` answers of a row; it has no tokens if ``prefix`` is None."""
    if isinstance(prefix, Completion):
        return prefix.all
    tokens = _tokens("prefix", () if prefix is None else prefix, "a Completion, its tokens, or None")
    return [Completion(tuple(tokens), (), "abort", ((UNKNOWN_VERSION, len(tokens)),))] * count
