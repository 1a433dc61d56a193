"""What goes into an engine and what comes out of it: values without rows. A list of them has one row for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from phalanx.dispatch.shardable import register_row_type
from phalanx.errors import DeclarationError

__all__ = [
    "UNKNOWN_VERSION",
    "Capabilities",
    "Completion",
    "Endpoint",
    "EngineStatistics",
    "FinishReason",
    "PauseMode",
    "Prefix",
    "Prompt",
    "SamplingParams",
    "Stop",
    "Tokens",
    "joined_runs",
]

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
"""A stop token or text came; ``max_tokens`` or the context was full; it was aborted; the row could not be served."""

PauseMode: TypeAlias = Literal["keep", "wait", "abort"]

Prompt: TypeAlias = "Sequence[int] | str"
"""Tokens, or text where the engine has a tokenizer."""

Stop: TypeAlias = "int | str | tuple[int, ...]"
"""One token, a text (where the engine has a tokenizer), or several tokens in a row."""

UNKNOWN_VERSION = -1
"""Of tokens that were given as a plain prefix: who drew them is not known here."""

Runs: TypeAlias = "tuple[tuple[int, int], ...]"
"""Pairs of a version of the weights, and of how many tokens in a row were made with it."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    One for all prompts of a call, or a list with one for each.

    Attributes:
        max_tokens: of an answer at most, those of ``prefix=`` included.
        temperature: 0 takes the likeliest token; 1 draws from the model's own distribution.
        top_p: draws from the likeliest tokens that together have this probability.
        n: answers to each prompt; ``Completion.all`` has them.
        seed: of the row's own random numbers: token i of an answer is drawn with number i of its seed, whatever else
            is in the batch, and also where ``prefix=`` goes on. One ``SamplingParams`` for many rows gives equal
            prompts equal answers; :meth:`each` does not. None: the engine draws one.
        stop: what ends an answer: tokens, several tokens in a row, or texts. A stop token is the last of the
            answer; what ``text`` has of an answer ends before a stop text.
        log_probs: None for no log-probabilities; 0 for those of the answer's tokens; k for those of the k likeliest
            tokens at each place too. They are the model's own, before temperature and ``top_p``.
        ignore_eos: do not stop at the model's own end tokens.

    Raises:
        DeclarationError: a value that none of these can be.
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
        object.__setattr__(self, "stop", _stops(self.stop))
        wrong = (
            ("max_tokens", _whole(self.max_tokens, 1), "a whole number from 1"),
            ("temperature", _number(self.temperature) and self.temperature >= 0, "a number from 0"),
            ("top_p", _number(self.top_p) and 0 < self.top_p <= 1, "a number above 0, up to 1"),
            ("n", _whole(self.n, 1), "a whole number from 1"),
            ("seed", self.seed is None or _whole(self.seed, 0), "a whole number from 0, or None"),
            (
                "log_probs",
                self.log_probs is None or _whole(self.log_probs, 0),
                "a whole number from 0, or None",
            ),
        )
        for name, right, expected in wrong:
            if not right:
                raise DeclarationError(f"SamplingParams({name}={getattr(self, name)!r}): expected {expected}")

    def each(self, count: int) -> list[SamplingParams]:
        """One for each of ``count`` rows, with the seeds ``seed``, ``seed + 1``, and so on."""
        if self.seed is None:
            return [self] * count
        return [replace(self, seed=self.seed + row) for row in range(count)]


@dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        tokens: drawn after the prompt, those of ``prefix=`` included.
        log_probs: of each token, by the weights that drew it; empty where none were asked for; nan of tokens that
            were given as a prefix without them.
        finish_reason: "stop", "length", "abort", or "error".
        versions: runs of (version, tokens): with which weights how many tokens in a row were drawn. 0 are those
            from before the first sync, -1 those that were given as a prefix of plain tokens. An answer without
            tokens has one run, of no tokens.
        id: of the request, for ``abort``.
        text: where the engine has a tokenizer.
        error: what was wrong with this row; the other rows have their answers.
        top: for each token the likeliest ones with their log-probabilities, where ``SamplingParams(log_probs=k)``
        asked for k. more: the other answers to the same prompt, of ``SamplingParams(n=)``.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    versions: Runs
    id: str = ""
    text: str | None = None
    error: str | None = None
    top: tuple[dict[int, float], ...] = ()
    more: tuple[Completion, ...] = ()

    @property
    def version(self) -> int:
        """Of the weights that drew the last token."""
        return self.versions[-1][0] if self.versions else 0

    @property
    def all(self) -> tuple[Completion, ...]:
        """The answers to the prompt, this one first."""
        return (replace(self, more=()), *self.more)

    @property
    def __phalanx_nbytes__(self) -> int:
        texts = len(self.text or "") + len(self.id)
        top = 16 * sum(map(len, self.top))
        return 64 + texts + 8 * (len(self.tokens) + len(self.log_probs)) + top + 64 * len(self.more)

    @property
    def finished(self) -> bool:
        """Whether it came to its end; one that was aborted can be gone on with, by ``prefix=``."""
        return self.finish_reason != "abort"


Prefix: TypeAlias = "Completion | Sequence[int] | None"
"""An answer to go on with, as it came back or as tokens."""


@dataclass(frozen=True)
class Tokens:
    """Some tokens of an answer, as they are drawn; what :meth:`RolloutEngine.generate_tokens` yields.

    Attributes:
        row: of the prompt in the rank's own piece. sample: which of the ``n`` answers.
        id: of the request.
        tokens, log_probs, version: as in :class:`Completion`.
        finish_reason: with the last ones; None before.
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
    """What an engine can do. What it cannot is accepted where that does no harm, with one warning, else refused.

    Attributes:
        context: tokens that prompt and answer may have together.
        sleep: whether ``sleep`` gives memory back.
        prefix_cache: whether it keeps what it knows of prompts from call to call.
        seeds: whether ``SamplingParams(seed=)`` gives a row the same tokens whatever else is in the batch.
        top: the largest k of ``SamplingParams(log_probs=k)``.
        prompt_log_probs: whether it tells log-probabilities of prompts.
        text: whether it has a tokenizer.
    """

    context: int
    sleep: bool = False
    prefix_cache: bool = False
    seeds: bool = True
    top: int = 0
    prompt_log_probs: bool = True
    text: bool = False


@dataclass(frozen=True)
class EngineStatistics:
    """What a rank's engine does, and did.

    Attributes:
        running, waiting: answers that are drawn now, and that have to wait.
        requests: rows that came to their end since the start; aborted: of them, those that were aborted.
        tokens: drawn since the start. tokens_per_second: of the last ten seconds at work.
        cache_use: part of the memory for keys and values that is in use, 0 to 1.
        version: of the weights. paused: how, or None.
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
        """What changes while it works, by name: for metrics and traces."""
        return {
            "tokens_per_second": self.tokens_per_second,
            "running": float(self.running),
            "waiting": float(self.waiting),
            "cache_use": self.cache_use,
            "tokens": float(self.tokens),
            "weights_version": float(self.version),
        }

    def line(self) -> str:
        """The same for people."""
        parts = [
            f"{self.tokens_per_second:.0f} tokens/s",
            f"{self.running} running",
            f"{self.waiting} waiting",
        ]
        parts += [f"cache {self.cache_use:.0%}", f"{self.requests} rows done"]
        parts += [f"weights {self.version}"] if self.version else []
        return ", ".join([*parts, f"paused ({self.paused})"] if self.paused else parts)


@dataclass(frozen=True)
class Endpoint:
    """An engine that is served by HTTP, as OpenAI's API is.

    Attributes:
        url: with "/v1", as OpenAI's client takes it for ``base_url``.
        token: the key that every request needs; OpenAI's client takes it for ``api_key``. The repr does not show it.
        model: its name in requests.
    """

    url: str
    token: str = field(repr=False)
    model: str


def joined_runs(runs: Sequence[tuple[int, int]], version: int, count: int) -> Runs:
    """``runs`` with ``count`` more tokens of ``version``."""
    if count and runs and runs[-1][0] == version:
        return (*runs[:-1], (version, runs[-1][1] + count))
    return (*runs, (version, count)) if count else tuple(runs)


def _stops(given: Any) -> tuple[Stop, ...]:
    stops: list[Stop] = []
    for one in () if given is None else [given] if isinstance(given, int | str) else given:
        if isinstance(one, str) or (isinstance(one, int) and not isinstance(one, bool)):
            stops.append(one)
        elif isinstance(one, Sequence) and one and all(_whole(token, 0) for token in one):
            stops.append(tuple(one))
        else:
            raise DeclarationError(
                f"SamplingParams(stop={given!r}): expected tokens, lists of tokens, or texts"
            )
    if "" in stops:
        raise DeclarationError(
            f"SamplingParams(stop={given!r}): an empty text would end every answer at once"
        )
    return tuple(stops)


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _without_rows(cls: type) -> None:
    """Let dispatch take values of ``cls`` whole, although dataclasses are taken apart."""

    def none(*_: Any) -> Any:
        raise DeclarationError(f"a {cls.__name__} has no rows; give a list with one for each row")

    register_row_type(cls, count=lambda _: None, slice=none, concat=none)


for _leaf in (SamplingParams, Completion, Tokens, Capabilities, EngineStatistics, Endpoint):
    _without_rows(_leaf)
