"""The loop of an engine: queues answers, steps the model runner, and reports tokens and ends to the waiting calls."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence

from phalanx.declare.context import WorkerContext
from phalanx.engines.engine_requests import Answer, Row, SampledToken
from phalanx.engines.engine_types import EngineStatistics, PauseMode, Tokens
from phalanx.engines.model_runner import ModelRunner
from phalanx.tracing.spans import process

_RATE_S = 10.0
_REPORT_S = 0.5


class TokenRate:
    """Tokens per second over the last ten seconds of work; ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._steps: deque[tuple[float, float, int]] = deque()  # time of its end, seconds, tokens
        self._last = 0.0

    def start(self) -> None:
        """Begin to work; the time since the last step was idle."""
        self._last = self._clock()

    def add(self, tokens: int) -> None:
        """Count the tokens of a step that ends now."""
        now = self._clock()
        self._steps.append((now, now - self._last, tokens))
        self._last = now
        while self._steps[0][0] < now - _RATE_S:
            self._steps.popleft()

    def per_second(self) -> float:
        """Return the rate; 0 after ten seconds without a step."""
        if not self._steps or self._steps[-1][0] < self._clock() - _RATE_S:
            return 0.0
        seconds = sum(step[1] for step in self._steps)
        return sum(step[2] for step in self._steps) / seconds if seconds else 0.0


class EngineCall:
    """A running call: its rows, and a queue of their tokens and ends. On exit its unfinished rows are dropped."""

    def __init__(self, rows: Sequence[Row], *, streams: bool, leave: Callable[[Sequence[Row]], None]) -> None:
        self._rows, self._streams, self._leave = rows, streams, leave
        self._events: asyncio.Queue[Row | Tokens | BaseException] = asyncio.Queue()

    def report(self, answer: Answer, start: int, version: int) -> None:
        """Queue the tokens of an answer from number ``start``, if the call streams tokens."""
        if self._streams:
            row = answer.row
            self._events.put_nowait(
                Tokens(
                    row=row.index,
                    id=row.id,
                    tokens=tuple(answer.tokens[start:]),
                    log_probs=tuple(answer.log_probs[start:]),
                    version=version,
                    finish_reason=answer.finish_reason,
                    sample=answer.sample,
                    error=row.error,
                )
            )

    def finish(self, row: Row) -> None:
        """Queue the end of a row."""
        self._events.put_nowait(row)

    def fail(self, error: BaseException) -> None:
        """Let the caller raise an error of the engine."""
        self._events.put_nowait(error)

    async def events(self) -> AsyncGenerator[Row | Tokens]:
        """Yield tokens, if the call streams them, and rows as they finish."""
        unfinished = len(self._rows)
        while unfinished:
            event = await self._events.get()
            if isinstance(event, BaseException):
                raise event
            unfinished -= isinstance(event, Row)
            yield event

    def __enter__(self) -> EngineCall:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave(self._rows)


class EngineLoop:
    """Steps of an engine, on the event loop of its rank.

    Answers wait in order until the runner has room. A pause with mode "keep" stops between two steps, "wait" finishes
    the running answers and starts no others, "abort" ends all. Sleeping parts stop the loop too.

    Args:
        runner: model runner of the engine.
        context: context of the rank, for reports.
        version: function that returns the current version of the weights.
        check: function that raises if no token may be sampled.
        clock: function that returns seconds, for statistics.
    """

    def __init__(
        self,
        runner: ModelRunner,
        context: WorkerContext,
        *,
        version: Callable[[], int],
        check: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner, self._context = runner, context
        self._version, self._check, self._clock = version, check, clock
        self._waiting: dict[int, Answer] = {}
        self._running: dict[int, Answer] = {}
        self._calls: dict[Row, EngineCall] = {}
        self._mode: PauseMode | None = None
        self._asleep = frozenset[str]()
        self._task: asyncio.Task[None] | None = None
        self._last_version = 0
        self._rate = TokenRate(clock)
        self._requests = self._aborted = self._tokens = 0
        self._next_report = 0.0
        self._idle_report: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """True if waiting answers may start: neither paused nor asleep."""
        return self._mode is None and not self._asleep

    def begin(self, rows: Sequence[Row], *, streams: bool) -> EngineCall:
        """Queue the rows of a call."""
        call = EngineCall(rows, streams=streams, leave=self._leave)
        for row in rows:
            self._calls[row] = call
            for answer in row.answers:
                if answer.finish_reason is None:
                    self._waiting[answer.key] = answer
                else:
                    call.report(answer, len(answer.tokens), self._version())
        self._finish_rows(rows)
        self._start_steps()
        return call

    def abort(self, wanted: Callable[[Answer], bool]) -> int:
        """End the wanted answers as they are; return the number of their rows."""
        answers = [answer for answer in (*self._running.values(), *self._waiting.values()) if wanted(answer)]
        self._drop(answers)
        for answer in answers:
            answer.finish_reason = "abort"
            version = answer.versions[-1][0] if answer.versions else self._version()
            self._calls[answer.row].report(answer, len(answer.tokens), version)
        rows = dict.fromkeys(answer.row for answer in answers)
        self._finish_rows(rows)
        return len(rows)

    async def pause(self, mode: PauseMode) -> None:
        """Stop; with "wait", return once no answer is running."""
        self._mode = mode
        if mode == "abort":
            self.abort(lambda _: True)
        elif mode == "wait" and not self._asleep:
            self._runner.release()  # an earlier pause may hold it
            self._start_steps()
            while self._running and self._task is not None:
                await asyncio.wait([self._task])
        if not self.is_open:
            self._runner.hold()

    def resume(self) -> None:
        """Continue after a pause."""
        self._mode = None
        self._continue()

    def sleep(self, tags: Sequence[str]) -> None:
        """Stop, and release the memory of ``tags``."""
        self._asleep = self._asleep.union(tags)
        self._runner.hold()
        self._runner.sleep(tags)

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate the memory of ``tags``, and continue if nothing else stops the loop."""
        self._runner.wake(tags)
        self._asleep = self._asleep.difference(tags)
        self._continue()

    def statistics(self) -> EngineStatistics:
        """Return the current statistics."""
        return EngineStatistics(
            running=len(self._running),
            waiting=len(self._waiting),
            requests=self._requests,
            aborted=self._aborted,
            tokens=self._tokens,
            tokens_per_second=self._rate.per_second(),
            cache_use=self._runner.cache_use(),
            version=self._version(),
            paused=self._mode,
        )

    def _continue(self) -> None:
        if self.is_open:
            self._runner.release()
            self._start_steps()

    def _has_step(self) -> bool:
        if self.is_open:
            return bool(self._waiting or self._running)
        return self._mode == "wait" and not self._asleep and bool(self._running)

    def _start_steps(self) -> None:
        if self._task is None and self._has_step():
            self._task = asyncio.get_running_loop().create_task(self._run_steps())

    async def _run_steps(self) -> None:
        """Step while there is work. Between two steps the rank handles calls and syncs of weights."""
        self._rate.start()
        try:
            while self._has_step():
                await self._step()
                await asyncio.sleep(0)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._task = None
            self._report()
            if self._idle_report is not None:
                self._idle_report.cancel()
            loop = asyncio.get_running_loop()  # once more when the rate has dropped to 0
            self._idle_report = loop.call_later(_RATE_S + _REPORT_S, self._report)

    async def _step(self) -> None:
        self._check()
        version = self._version()
        if version != self._last_version:
            self._runner.weights_changed()
            self._last_version = version
        if self.is_open and self._waiting:
            started = [self._waiting.pop(key) for key in list(self._waiting)[: self._runner.room()]]
            self._running.update((answer.key, answer) for answer in started)
            if started:
                self._runner.add(started)
        stepped = self._runner.step()
        sampled = list(await stepped if isinstance(stepped, Awaitable) else stepped)
        self._rate.add(len(sampled))
        self._tokens += len(sampled)
        if self._clock() >= self._next_report:
            self._next_report = self._clock() + _REPORT_S
            self._report()
        self._take(sampled, version)

    def _take(self, sampled: Iterable[SampledToken], version: int) -> None:
        """Append sampled tokens to their answers, and report them by version."""
        finished: list[Answer] = []
        key = lambda token: (token.answer, version if token.version is None else token.version)  # noqa: E731
        for (answer, token_version), tokens in itertools.groupby(sampled, key):
            start = len(answer.tokens)
            for token in tokens:
                if answer.key in self._running:  # else it ended, or was aborted during the step
                    answer.take(token, token_version, self._runner.vocabulary)
                    if answer.finish_reason is not None:
                        finished.append(self._running.pop(answer.key))
            if len(answer.tokens) > start:
                self._calls[answer.row].report(answer, start, token_version)
        if finished:
            self._runner.remove(finished)
            self._finish_rows(dict.fromkeys(answer.row for answer in finished))

    def _finish_rows(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if row.is_finished:
                self._requests += 1
                self._aborted += any(answer.finish_reason == "abort" for answer in row.answers)
                self._calls.pop(row).finish(row)

    def _leave(self, rows: Sequence[Row]) -> None:
        """Drop the unfinished rows of a call that ended."""
        unfinished = [row for row in rows if self._calls.pop(row, None) is not None]
        self._drop([answer for row in unfinished for answer in row.answers])

    def _drop(self, answers: Sequence[Answer]) -> None:
        dropped = [
            answer
            for answer in answers
            if self._running.pop(answer.key, None) or self._waiting.pop(answer.key, None)
        ]
        if dropped:
            self._runner.remove(dropped)

    def _fail(self, error: BaseException) -> None:
        """End all calls with ``error``; the engine is empty afterwards."""
        for call in set(self._calls.values()):
            call.fail(error)
        self._calls.clear()
        self._drop([*self._running.values(), *self._waiting.values()])

    def _report(self) -> None:
        """Report the statistics to `phalanx top`, traces and the cluster's metrics."""
        context, statistics = self._context, self.statistics()
        rank = f"{context.group} rank {context.rank}"
        if context.tell is not None:
            context.tell(statistics.line())
        if process.sink is not None:
            process.sink.count(f"engine of {rank}", statistics.numbers())
        if context.measure is not None:
            context.measure("engine", rank, statistics.numbers())
