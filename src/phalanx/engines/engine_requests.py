"""The requests of one engine: what runs, what waits, and when an answer is at its end. No engine is known here.

A row becomes a :class:`Row` of ``n`` :class:`Answer`. Answers wait until the engine takes them, then get tokens step by
step, each with the version of the weights that drew it, until one of their ends comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from phalanx.engines.engine_types import (
    UNKNOWN_VERSION,
    Completion,
    FinishReason,
    PauseMode,
    Prefix,
    SamplingParams,
    joined_runs,
)

__all__ = ["Answer", "Gate", "Requests", "Row", "SampledToken", "Vocabulary"]


class SampledToken(NamedTuple):
    """One token of an answer, from a step of an engine.

    ``log_prob`` is None where the sampling wants none. ``finish`` is what the engine itself found to be the end there.
    ``version`` is of the weights that drew it, where the engine knows that better than who asked for the step.
    """

    answer: Answer
    token: int
    log_prob: float | None = None
    top: dict[int, float] | None = None
    finish: FinishReason | None = None
    version: int | None = None


@dataclass(frozen=True)
class Vocabulary:
    """What is needed to know when an answer ends, and to say it in words.

    Attributes:
        context: tokens that prompt and answer may have together.
        end: the model's own end tokens.
        size: tokens are numbers below it.
        text: gives the text of tokens, where there is a tokenizer.
    """

    context: int
    end: frozenset[int] = frozenset()
    size: int | None = None
    text: Callable[[Sequence[int]], str] | None = None


@dataclass(eq=False)
class Answer:
    """One answer while it is made.

    ``key`` is its number in the engine; ``sample`` which of the ``n`` it is. ``tokens`` begins with those of the
    prefix.
    """

    row: Row
    key: int
    sample: int
    seed: int
    tokens: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    top: list[dict[int, float]] = field(default_factory=list[dict[int, float]])
    versions: tuple[tuple[int, int], ...] = ()
    finish_reason: FinishReason | None = None
    text: str | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens that it answers."""
        return self.row.prompt

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are drawn."""
        return self.row.sampling

    @property
    def so_far(self) -> list[int]:
        """Prompt and tokens: what the next token is drawn after."""
        return [*self.row.prompt, *self.tokens]

    def take(self, drawn: SampledToken, version: int, vocabulary: Vocabulary) -> None:
        """One more token."""
        self.tokens.append(drawn.token)
        if drawn.log_prob is not None:
            self.log_probs.append(drawn.log_prob)
        if drawn.top is not None:
            self.top.append(drawn.top)
        self.versions = joined_runs(self.versions, version, 1)
        self.finish_reason = drawn.finish or self._end(vocabulary)

    def _end(self, vocabulary: Vocabulary) -> FinishReason | None:
        sampling, token = self.sampling, self.tokens[-1]
        if token in vocabulary.end and not sampling.ignore_eos:
            return "stop"
        if any(self._stopped_by(stop, vocabulary) for stop in sampling.stop):
            return "stop"
        full = len(self.prompt) + len(self.tokens) >= vocabulary.context
        return "length" if full or len(self.tokens) >= sampling.max_tokens else None

    def _stopped_by(self, stop: int | str | tuple[int, ...], vocabulary: Vocabulary) -> bool:
        if isinstance(stop, int):
            return self.tokens[-1] == stop
        if isinstance(stop, tuple):
            return tuple(self.tokens[-len(stop) :]) == stop
        if vocabulary.text is None:
            return False
        # Tokens before were looked at already. A character has four tokens at most; those before are told otherwise
        # where they are the first ones.
        if stop not in vocabulary.text(self.tokens[-4 * len(stop) - 8 :]):
            return False
        text = vocabulary.text(self.tokens)
        if stop not in text:
            return False
        self.text = text[: text.index(stop)]
        return True

    def completion(self, version: int, vocabulary: Vocabulary) -> Completion:
        """What its caller gets; ``version`` is of the weights now, for an answer without tokens."""
        text = self.text
        if text is None and vocabulary.text is not None:
            shown = [token for token in self.tokens if token not in vocabulary.end]
            text = vocabulary.text(shown)
        return Completion(
            tokens=tuple(self.tokens),
            log_probs=tuple(self.log_probs),
            finish_reason=self.finish_reason or "abort",
            versions=self.versions or ((version, 0),),
            id=self.row.id,
            text=text,
            top=tuple(self.top),
        )


@dataclass(eq=False)
class Row:
    """One prompt of a call, with the answers to it. ``index`` is its place in the rank's piece."""

    index: int
    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    answers: list[Answer] = field(default_factory=list[Answer])
    done: Completion | None = None
    """Its end, where no engine was needed to know it."""

    @property
    def over(self) -> bool:
        """Whether all its answers are at their end."""
        return self.done is not None or all(answer.finish_reason is not None for answer in self.answers)

    def completion(self, version: int, vocabulary: Vocabulary) -> Completion:
        """What its caller gets."""
        if self.done is not None:
            return self.done
        first, *more = (answer.completion(version, vocabulary) for answer in self.answers)
        if not more:
            return first
        return replace(first, more=tuple(more))


class Requests:
    """All answers that an engine has to make, in the order in which they came.

    ``draw_seed`` gives the seed of a row that names none; ``refuses`` says why a sampling cannot be served.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        draw_seed: Callable[[], int],
        refuses: Callable[[SamplingParams], str | None] = lambda _: None,
    ) -> None:
        self.vocabulary = vocabulary
        self._refuses = refuses
        self._draw_seed = draw_seed
        self._keys = 0
        self._rows = 0
        self.waiting: dict[int, Answer] = {}
        self.running: dict[int, Answer] = {}

    @property
    def any(self) -> bool:
        """Whether there is something to do."""
        return bool(self.waiting or self.running)

    def row(
        self,
        index: int,
        id: str | None,
        prompt: Sequence[int],
        sampling: SamplingParams,
        prefix: Prefix,
        version: int,
        *,
        whole: bool = False,
    ) -> Row:
        """A row with its answers, none of which waits yet. One that cannot be served, or needs nothing, is done.

        ``whole``: the context need not have room for an answer.
        """
        self._rows += 1
        name = f"request-{self._rows}" if id is None else id
        made = Row(index, name, tuple(prompt), sampling)
        fault = self._fault(made, prefix, self.vocabulary.context - (not whole))
        if fault is not None:
            made.done = Completion((), (), "error", ((version, 0),), made.id, error=fault)
        elif isinstance(prefix, Completion) and all(one.finished for one in prefix.all):
            made.done = prefix
        else:
            self._add_answers(made, prefix)
        return made

    def rows(
        self,
        names: Sequence[str | None],
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingParams],
        prefixes: Sequence[Prefix],
        version: int,
    ) -> list[Row]:
        """A row for each prompt; see :meth:`row`."""
        given = zip(names, prompts, samplings, prefixes, strict=True)
        return [self.row(index, *one, version) for index, one in enumerate(given)]

    def _add_answers(self, row: Row, prefix: Prefix) -> None:
        seed = row.sampling.seed
        for sample in range(row.sampling.n):
            self._keys += 1
            drawn = self._draw_seed() if seed is None else seed
            answer = Answer(row, self._keys, sample, drawn)
            _go_on_with(answer, prefix)
            row.answers.append(answer)
            if answer.tokens and answer.finish_reason is None:
                full = len(answer.so_far) >= self.vocabulary.context
                if full or len(answer.tokens) >= row.sampling.max_tokens:
                    answer.finish_reason = "length"

    def _fault(self, row: Row, prefix: Prefix, longest: int) -> str | None:
        if not row.prompt:
            return "its prompt is empty; give at least one token"
        if len(row.prompt) > longest:
            return (
                f"its prompt has {len(row.prompt)} tokens, where the context of {self.vocabulary.context} has room for "
                f"{longest}; shorten the prompt, or give the engine a longer context"
            )
        for what, tokens in (("prompt", row.prompt), *(("prefix", one) for one in _tokens_of(prefix))):
            fault = self._fault_of_tokens(what, tokens)
            if fault is not None:
                return fault
        texts = [stop for stop in row.sampling.stop if isinstance(stop, str)]
        if texts and self.vocabulary.text is None:
            return f"it is to stop at the text {texts[0]!r}, and the engine has no tokenizer; give tokenizer="
        if isinstance(prefix, Completion) and len(prefix.all) != row.sampling.n:
            return (
                f"prefix has {len(prefix.all)} answers, and SamplingParams(n={row.sampling.n}) wants others"
            )
        return self._refuses(row.sampling)

    def _fault_of_tokens(self, what: str, tokens: Sequence[int]) -> str | None:
        size = self.vocabulary.size
        if not tokens or (min(tokens) >= 0 and (size is None or max(tokens) < size)):
            return None
        wrong = next(token for token in tokens if token < 0 or (size is not None and token >= size))
        return f"its {what} has the token {wrong}; tokens are from 0, and below {size or 'their number'}"

    def put(self, row: Row) -> None:
        """Let the answers of a row wait for the engine."""
        self.waiting.update((answer.key, answer) for answer in row.answers if answer.finish_reason is None)

    def admit(self, room: int | None) -> list[Answer]:
        """The next answers for the engine, ``room`` at most; they run from now on."""
        keys = list(self.waiting)[:room]
        taken = [self.waiting.pop(key) for key in keys]
        self.running.update((answer.key, answer) for answer in taken)
        return taken

    def take(self, drawn: Iterable[SampledToken], version: int) -> Iterator[Answer]:
        """Give answers what a step drew; those that got something. What is at its end runs no more."""
        for one in drawn:
            if one.answer.key not in self.running:
                continue  # it was aborted while the engine was at it
            one.answer.take(one, version if one.version is None else one.version, self.vocabulary)
            if one.answer.finish_reason is not None:
                del self.running[one.answer.key]
            yield one.answer

    def abort(self, wanted: Callable[[Answer], bool]) -> list[Answer]:
        """End answers where they are; those that were ended, which the engine has to drop."""
        ended = [one for one in (*self.running.values(), *self.waiting.values()) if wanted(one)]
        for answer in ended:
            answer.finish_reason = "abort"
            self.running.pop(answer.key, None)
            self.waiting.pop(answer.key, None)
        return ended

    def drop(self, answers: Iterable[Answer]) -> list[Answer]:
        """Forget answers that nobody waits for any more; those of them that the engine has to drop."""
        return [one for one in answers if self.running.pop(one.key, None) or self.waiting.pop(one.key, None)]


def _tokens_of(prefix: Prefix) -> list[Sequence[int]]:
    if isinstance(prefix, Completion):
        return [one.tokens for one in prefix.all]
    return [] if prefix is None else [prefix]


def _go_on_with(answer: Answer, prefix: Prefix) -> None:
    if prefix is None:
        return
    if not isinstance(prefix, Completion):
        answer.tokens = list(prefix)
        answer.log_probs = [math.nan] * len(answer.tokens) if answer.sampling.log_probs is not None else []
        answer.versions = joined_runs((), UNKNOWN_VERSION, len(answer.tokens))
        return
    one = prefix.all[answer.sample]
    answer.tokens, answer.log_probs, answer.top = list(one.tokens), list(one.log_probs), list(one.top)
    if not one.finished:
        _align(answer)
    answer.versions = one.versions if one.tokens else ()
    if one.finished:
        answer.finish_reason, answer.text = one.finish_reason, one.text


def _align(answer: Answer) -> None:
    """What is told of each token is told of each: what the prefix does not know is nan, or no tokens."""
    sampling, count = answer.sampling, len(answer.tokens)
    missing = count - len(answer.log_probs)
    answer.log_probs = (
        [] if sampling.log_probs is None else [*answer.log_probs, *[math.nan] * missing][:count]
    )
    top = [*answer.top, *({} for _ in range(count - len(answer.top)))]
    answer.top = top[:count] if sampling.log_probs else []


@dataclass
class Gate:
    """Whether an engine may go on: a state machine of pause and resume, sleep and wake.

    ``keep`` stops between two steps, with all answers where they are. ``wait`` lets the running ones come to their
    end and begins no others. ``abort`` ends all. A second pause replaces the mode of the first; one ``resume``
    ends any. While something of the engine sleeps there is no step either.
    """

    mode: PauseMode | None = None
    asleep: frozenset[str] = frozenset()

    def pause(self, mode: PauseMode) -> None:
        """Close it."""
        self.mode = mode

    def resume(self) -> None:
        """Open it."""
        self.mode = None

    def sleep(self, tags: Iterable[str]) -> None:
        """These parts sleep from now on."""
        self.asleep |= frozenset(tags)

    def wake(self, tags: Iterable[str]) -> None:
        """These parts are awake."""
        self.asleep -= frozenset(tags)

    @property
    def open(self) -> bool:
        """Whether answers that wait may begin."""
        return self.mode is None and not self.asleep

    def steps(self, requests: Requests) -> bool:
        """Whether there is a step to take."""
        if self.open:
            return requests.any
        return self.mode == "wait" and not self.asleep and bool(requests.running)
