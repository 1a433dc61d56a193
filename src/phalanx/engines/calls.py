"""One call of an engine: its rows, and what its caller hears of them while they are made."""

from __future__ import annotations

import asyncio
import operator
import reprlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from phalanx.engines.engine_requests import Answer, Row
from phalanx.engines.engine_types import Completion, Prompt, SamplingParams, Tokens

__all__ = [
    "TAGS",
    "EngineCall",
    "check_tags",
    "each_row",
    "of_prompt",
    "prefixes_of",
    "rows_of",
    "samplings_of",
]

TAGS = ("weights", "kv_cache")


class EngineCall:
    """A call under way. Leaving its context gives up what is not at its end: ``leave`` hears of the rows."""

    def __init__(self, rows: Sequence[Row], *, tokens: bool, leave: Callable[[Iterable[Row]], None]) -> None:
        self._rows = rows
        self._wants_tokens = tokens
        self._leave = leave
        self._events: asyncio.Queue[Row | Tokens | BaseException] = asyncio.Queue()
        self._told = {id(answer): len(answer.tokens) for row in rows for answer in row.answers}
        self._told_end = set[int]()

    def drew(self, answer: Answer) -> None:
        """An answer got tokens."""
        if self._wants_tokens:
            self._tell(answer)

    def _tell(self, answer: Answer) -> None:
        told, now = self._told[id(answer)], len(answer.tokens)
        if told == now and (answer.finish_reason is None or id(answer) in self._told_end):
            return  # a step gave several tokens, which were told at the first of them
        self._told[id(answer)] = now
        if answer.finish_reason is not None:
            self._told_end.add(id(answer))
        for version, start, end in _runs_after(told, now, answer.versions):
            self._events.put_nowait(
                Tokens(
                    row=answer.row.index,
                    id=answer.row.id,
                    tokens=tuple(answer.tokens[start:end]),
                    log_probs=tuple(answer.log_probs[start:end]),
                    version=version,
                    finish_reason=answer.finish_reason if end == now else None,
                    sample=answer.sample,
                )
            )

    def ended(self, row: Row, version: int) -> None:
        """A row is at its end."""
        if self._wants_tokens:
            self._tell_end(row, version)
        self._events.put_nowait(row)

    def _tell_end(self, row: Row, version: int) -> None:
        """What no token said: that a row was aborted, cannot be served, or was at its end before."""
        for sample, done in enumerate(row.done.all if row.done is not None else ()):
            self._events.put_nowait(
                Tokens(row.index, row.id, (), (), version, done.finish_reason, sample, done.error)
            )
        for answer in row.answers:
            if id(answer) not in self._told_end:
                self._tell(answer)

    def failed(self, error: BaseException) -> None:
        """The engine gave up."""
        self._events.put_nowait(error)

    async def rows(self) -> AsyncGenerator[Row]:
        """The rows, as they come to their end."""
        left = len(self._rows)
        while left:
            event = await self._next()
            if isinstance(event, Row):
                left -= 1
                yield event

    async def tokens(self) -> AsyncGenerator[Tokens]:
        """Tokens, as they are drawn."""
        left = len(self._rows)
        while left:
            event = await self._next()
            if isinstance(event, Tokens):
                yield event
            else:
                left -= 1

    async def _next(self) -> Row | Tokens:
        event = await self._events.get()
        if isinstance(event, BaseException):
            raise event
        return event

    def __enter__(self) -> EngineCall:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(self._rows)


def _runs_after(told: int, now: int, versions: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Version, start and end of each run of tokens ``told`` to ``now``; one without tokens where there are none."""
    runs: list[tuple[int, int, int]] = []
    end = now
    for version, count in reversed(versions):
        start = max(end - count, told)
        if start < end:
            runs.append((version, start, end))
        end = start
    return runs[::-1] or [(versions[-1][0] if versions else 0, now, now)]


def rows_of(prompts: Sequence[Prompt], encode: Callable[[str], Sequence[int]] | None) -> list[list[int]]:
    """The tokens of each prompt.

    Raises:
        ValueError: these are no prompts.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts is a text; give a list of prompts")
    return [_tokens_of_prompt(prompt, encode) for prompt in prompts]


def _tokens_of_prompt(prompt: Any, encode: Callable[[str], Sequence[int]] | None) -> list[int]:
    if isinstance(prompt, str):
        if encode is None:
            raise ValueError(
                "a prompt is a text, and the engine has no tokenizer: give tokens, or tokenizer="
            )
        return list(encode(prompt))
    return _tokens_of("prompt", prompt, "a list of tokens, such as [1, 15, 3]")


def _tokens_of(what: str, given: Any, expected: str) -> list[int]:
    """Numbers of Python, from lists of numbers of whatever library, arrays and tensors."""
    listed = given.tolist() if hasattr(given, "tolist") else given
    try:
        if isinstance(listed, Sequence) and not isinstance(listed, str | bytes):
            return [operator.index(token) for token in listed]
    except TypeError:
        pass
    raise ValueError(f"a {what} is {reprlib.repr(given)}; expected {expected}")


def prefixes_of(prefixes: Any, count: int) -> list[Completion | list[int] | None]:
    """What there is of each answer already.

    Raises:
        ValueError: one is none of these, or there is not one for each row.
    """
    rows = each_row("prefix", [None] * count if prefixes is None else prefixes, count)
    expected = "the Completion that came back, its tokens, or None"
    return [
        one if one is None or isinstance(one, Completion) else _tokens_of("prefix", one, expected)
        for one in rows
    ]


def each_row(what: str, given: Any, count: int) -> list[Any]:
    """A list with one element per row.

    Raises:
        ValueError: it has another length.
    """
    rows = list(given)
    if len(rows) != count:
        raise ValueError(f"{what} has {len(rows)} elements for {count} prompts; give one for each")
    return rows


def of_prompt(prompt: Sequence[int], log_probs: Sequence[float], version: int) -> Completion:
    """The log-probabilities of a prompt, as what comes after its first token."""
    return Completion(tuple(prompt[1:]), tuple(log_probs), "length", ((version, len(prompt) - 1),))


def check_tags(method: str, tags: Sequence[str]) -> None:
    """See to it that these are parts of an engine that can sleep.

    Raises:
        ValueError: one is not.
    """
    unknown = sorted({tags} - set(TAGS) if isinstance(tags, str) else set(tags) - set(TAGS))
    if unknown or isinstance(tags, str):
        raise ValueError(f"{method}({tags!r}): expected a list of {', '.join(map(repr, TAGS))}")


def samplings_of(given: Any, count: int) -> list[SamplingParams]:
    """A sampling per row.

    Raises:
        ValueError: it is neither a ``SamplingParams`` nor one for each row.
    """
    rows = [given] * count if isinstance(given, SamplingParams) else list(given)
    for row in rows:
        if not isinstance(row, SamplingParams):
            raise ValueError(
                f"sampling={given!r}: expected px.engines.SamplingParams(max_tokens=..., ...), or a list "
                f"with one per prompt"
            )
    return each_row("sampling", rows, count)
