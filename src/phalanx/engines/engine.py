"""``px.engines.RolloutEngine``, the base class of engines, with their step loop; and ``px.engines.endpoints``."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
import warnings
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterable, Sequence
from typing import Any, TypeAlias, get_args

from phalanx.declare.context import WorkerContext
from phalanx.declare.dispatch_modes import Dispatch
from phalanx.declare.register import register
from phalanx.declare.weight_declarations import WeightsDeclared
from phalanx.declare.worker import Worker
from phalanx.engines.engine_requests import Answer, ModelRunner, RequestFactory, Row, SampledToken
from phalanx.engines.engine_types import (
    Capabilities,
    Completion,
    Encode,
    Endpoint,
    EngineStatistics,
    PauseMode,
    Prefix,
    Prompt,
    SamplingParams,
    Tokens,
)
from phalanx.errors import DeclarationError, WeightsTorn
from phalanx.tracing.spans import process
from phalanx.wire.value import checked_choice

TAGS: tuple[str, ...] = ("weights", "kv_cache")
_RATE_S = 10.0
_REPORT_S = 0.5

_BY_ENGINE = Dispatch.mesh("engine")
_DEFAULT = SamplingParams()

Prompts: TypeAlias = "Sequence[Prompt]"
Sampling: TypeAlias = "SamplingParams | Sequence[SamplingParams]"
Prefixes: TypeAlias = "Sequence[Prefix] | None"
Ids: TypeAlias = "Sequence[str] | None"


class TokenRate:
    """Tokens per second, without idle time, of the steps in the last ten seconds; ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._steps: deque[tuple[float, float, int]] = deque()  # end time, seconds, tokens
        self._last = 0.0

    def start(self) -> None:
        """Begin a series of steps. The time since the last step was idle."""
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


class EngineLoop:
    """Steps of an engine, on the event loop of its rank.

    Answers wait in order until the runner has room. A pause with mode "keep" stops between two steps, "wait" finishes
    the running answers and starts no others, "abort" ends all. The loop also stops while parts of the engine sleep.

    Args:
        runner: model runner of the engine.
        context: context of the rank, for the state of its weights and for reports.
        weights: name under which the role accepts weights, or None.
    """

    def __init__(self, runner: ModelRunner, context: WorkerContext, weights: str | None) -> None:
        self._runner, self._context, self._weights = runner, context, weights
        self._waiting: dict[int, Answer] = {}
        self._running: dict[int, Answer] = {}
        self._calls: set[asyncio.Queue[Any]] = set()  # events of the calls that have not returned
        self._mode: PauseMode | None = None
        self._asleep = frozenset[str]()
        self._task: asyncio.Task[None] | None = None
        self._last_version = 0
        self._rate = TokenRate(time.monotonic)
        self._requests = self._aborted = self._tokens = 0
        self._next_report: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """True if waiting answers may start: the engine is neither paused nor asleep."""
        return self._mode is None and not self._asleep

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token; 0 before the first sync."""
        return WeightsDeclared.of(self._context).versions.get((self._context.role, self._weights or ""), 0)

    async def run(self, rows: Sequence[Row], *, streams: bool = False) -> AsyncGenerator[Any]:
        """Yield index and completion of each finished row, or all tokens if ``streams``. Drop the others on exit."""
        events: asyncio.Queue[Any] = asyncio.Queue()
        unfinished = sum(len(row.answers) for row in rows) if streams else len(rows)
        self._calls.add(events)
        try:
            for row in rows:
                row.report, row.streams = events.put_nowait, streams
                for answer in row.answers:
                    if answer.finish_reason is None:
                        self._waiting[answer.key] = answer
                    else:
                        self._stream(answer, len(answer.tokens))
            self._finish(rows)
            self._start_steps()
            while unfinished:
                if self._context.in_driver and events.empty() and not self._has_step():
                    raise RuntimeError("the engine is paused or asleep: resume() or wake() it first")
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                unfinished -= not isinstance(event, Tokens) or event.finish_reason is not None
                yield event
        finally:
            self._calls.discard(events)
            self._drop([answer for row in rows for answer in row.answers])

    def abort(self, ids: Container[str] | None = None) -> int:
        """End the answers of the requests ``ids``, or all, with their tokens so far; return the number of rows."""
        unfinished = (*self._running.values(), *self._waiting.values())
        answers = [answer for answer in unfinished if ids is None or answer.row.id in ids]
        self._drop(answers)
        for answer in answers:
            answer.finish_reason = "abort"
            self._stream(answer, len(answer.tokens))
        return self._finish(answer.row for answer in answers)

    async def pause(self, mode: PauseMode) -> None:
        """Stop the loop. Mode "wait" returns when no answer is running; "abort" ends all answers."""
        self._mode = mode
        if mode == "abort":
            self.abort()
        elif mode == "wait":
            self._start_steps()
            while self._mode == "wait" and self._running and self._task is not None:
                await asyncio.wait([self._task])
        if not self.is_open:
            self._runner.hold()

    def resume(self) -> None:
        """Continue after a pause."""
        self._mode = None
        self._start_steps()

    def sleep(self, tags: Sequence[str]) -> None:
        """Stop, and release the memory of ``tags``."""
        self._asleep = self._asleep.union(tags)
        self._runner.hold()
        self._runner.sleep(tags)

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate the memory of ``tags``, and continue unless the loop is stopped for another reason."""
        self._runner.wake(tags)
        self._asleep = self._asleep.difference(tags)
        self._start_steps()

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
            version=self.version,
            paused=self._mode,
        )

    def _has_step(self) -> bool:
        if self.is_open:
            return bool(self._waiting or self._running)
        return self._mode == "wait" and not self._asleep and bool(self._running)

    def _start_steps(self) -> None:
        has_step = self._has_step()
        if self.is_open or has_step:
            self._runner.release()  # an earlier pause may have held the runner
        if self._task is None and has_step:
            self._task = asyncio.get_running_loop().create_task(self._run_steps())

    async def _run_steps(self) -> None:
        """Step while there is work. Between two steps the rank handles calls and syncs of weights."""
        self._rate.start()
        try:
            self._report()
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

    async def _step(self) -> None:
        torn = WeightsDeclared.of(self._context).torn.get(self._context.role)
        if torn is not None:
            raise WeightsTorn(f"running answers are given up: {torn}")
        version = self.version
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
        count = sum(one.token is not None for one in sampled)
        self._rate.add(count)
        self._tokens += count
        self._take(sampled, version)

    def _take(self, sampled: Iterable[SampledToken], version: int) -> None:
        """Append sampled tokens to their answers, and stream them by version."""
        finished: list[Answer] = []
        for (answer, own), tokens in itertools.groupby(sampled, lambda one: (one.answer, one.version)):
            start, ended = len(answer.tokens), len(finished)
            for token in tokens:
                if answer.key in self._running:  # else the answer ended, or was aborted during the step
                    answer.take(token, version if own is None else own)
                    if answer.finish_reason is not None:
                        finished.append(self._running.pop(answer.key))
            if len(answer.tokens) > start or len(finished) > ended:
                self._stream(answer, start)
        if finished:
            self._runner.remove(finished)
            self._finish(answer.row for answer in finished)

    def _stream(self, answer: Answer, start: int) -> None:
        """Queue the tokens of an answer from index ``start`` on, if its call streams tokens."""
        row = answer.row
        if row.streams:
            tokens, log_probs = tuple(answer.tokens[start:]), tuple(answer.log_probs[start:])
            version = answer.versions[-1] if answer.versions else self.version
            end, sample = answer.finish_reason, answer.sample
            row.report(Tokens(row.index, row.id, tokens, log_probs, version, end, sample, answer.error))

    def _finish(self, rows: Iterable[Row]) -> int:
        """Count the finished rows among ``rows``, queue them, and return the number of all ``rows``."""
        rows = dict.fromkeys(rows)
        for row in rows:
            ends = [answer.finish_reason for answer in row.answers]
            if all(ends):
                self._requests += 1
                self._aborted += "abort" in ends
                if not row.streams:
                    row.report((row.index, row.completion(self.version)))
        return len(rows)

    def _drop(self, answers: Sequence[Answer]) -> None:
        tables = (self._running, self._waiting)
        dropped = [answer for answer in answers if any(table.pop(answer.key, None) for table in tables)]
        if dropped:
            self._runner.remove(dropped)

    def _fail(self, error: BaseException) -> None:
        """End all calls with ``error``; the engine is empty afterwards."""
        for events in self._calls:
            events.put_nowait(error)
        self._drop([*self._running.values(), *self._waiting.values()])

    def _report(self) -> None:
        """Report the statistics to ``phalanx top``, traces and the cluster's metrics, until the engine is idle."""
        context, statistics = self._context, self.statistics()
        rank = f"{context.group} rank {context.rank}"
        if context.tell is not None:
            context.tell(statistics.line())
        if process.sink is not None:
            process.sink.count(f"engine of {rank}", statistics.numbers())
        if context.measure is not None:
            context.measure("engine", rank, statistics.numbers())
        if self._next_report is not None:
            self._next_report.cancel()
        if self._task is not None or statistics.tokens_per_second:
            self._next_report = asyncio.get_running_loop().call_later(_REPORT_S, self._report)


class RolloutEngine(Worker):
    """Base class of rollout engines.

    Ranks are asynchronous: calls, and syncs of weights, run between two steps of the engine. Prompts are sharded over
    the axis ``dp`` of the mesh "engine"; by default, each rank has its own coordinate.

    A subclass creates its :class:`ModelRunner` in its constructor and calls :meth:`serve`.
    """

    __phalanx_options__ = {"max_concurrency": 10_000}
    #: Engines do not wait for each other, so their groups can be resized while they work.
    independent = True

    def serve(
        self,
        runner: ModelRunner,
        *,
        weights: str | None = None,
        seed: int | None = None,
        encode: Encode | None = None,
    ) -> None:
        """Start to accept calls. The constructor of an engine calls it.

        Args:
            runner: model runner that samples the tokens.
            weights: name under which this role accepts weights; each token is labeled with their version.
            seed: seed of the generator of seeds for rows that have none; ranks get different seeds. None: random.
            encode: function that returns the tokens of a text.
        """
        self._runner = runner
        self._seeds = random.Random(None if seed is None else f"{seed}/{self.rank}")
        self._requests = RequestFactory(runner, encode, self._seeds)
        self._loop = EngineLoop(runner, self._context, weights)
        self._has_warned = False
        if "engine" not in self._context.registered:
            self.register_mesh("engine", {"dp": self.rank})

    def __phalanx_made__(self) -> None:
        if "_loop" not in self.__dict__:
            raise DeclarationError(
                f"{type(self).__name__} has no model runner: call self.serve(runner) in its constructor"
            )

    def __phalanx_leaves__(self) -> None:
        """Finish the calls of this rank, which leaves its group: ``resume`` and ``wake`` do not reach it any more."""
        self._loop.resume()
        if not self._loop.is_open:  # it sleeps
            self._loop.abort()

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token; 0 before the first sync."""
        return self._loop.version

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints: the generator of seeds. Weights are left to syncs."""
        return {"rng": (self.rank, self._seeds.getstate())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generator of seeds, if it was saved for this rank. Older steps have it as "seeds"."""
        rank, seeds = state.get("rng", (self.rank, state.get("seeds")))
        if seeds and rank == self.rank:
            self._seeds.setstate(seeds)

    @register(_BY_ENGINE)
    async def generate(
        self, prompts: Prompts, sampling: Sampling = _DEFAULT, *, prefix: Prefixes = None, ids: Ids = None
    ) -> list[Completion]:
        """Answer each prompt.

        Args:
            prompts: tokens of each row, or texts if the engine has a tokenizer.
            sampling: parameters for all rows, or a list with an object per row.
            prefix: answer of each row to continue, or None. Finished answers are returned unchanged.
            ids: request name of each row, for :meth:`abort`.

        Returns:
            A completion per row, in order. A row that cannot be served has the reason as its ``error``.

        Raises:
            ValueError: if an argument has a wrong type or length.
            WeightsTorn: if a sync failed halfway and left partly updated weights.
        """
        rows = self.generate_rows(prompts, sampling, prefix=prefix, ids=ids)
        return [completion for _, completion in sorted([row async for row in rows])]  # no row occurs twice

    @register(_BY_ENGINE)
    async def generate_rows(
        self, prompts: Prompts, sampling: Sampling = _DEFAULT, *, prefix: Prefixes = None, ids: Ids = None
    ) -> AsyncGenerator[tuple[int, Completion]]:
        """Yield (row, completion) of :meth:`generate` when a row is finished.

        For ``group.generate_rows.stream(..., by="rows")``.
        """
        rows = self._requests.rows(prompts, sampling, prefix, ids)
        async with contextlib.aclosing(self._loop.run(rows)) as events:
            async for row in events:
                yield row

    @register(_BY_ENGINE)
    async def generate_tokens(
        self, prompts: Prompts, sampling: Sampling = _DEFAULT, *, prefix: Prefixes = None, ids: Ids = None
    ) -> AsyncGenerator[Tokens]:
        """Yield tokens of :meth:`generate` as they are sampled, for ``group.any.generate_tokens.stream([prompt])``."""
        rows = self._requests.rows(prompts, sampling, prefix, ids)
        async with contextlib.aclosing(self._loop.run(rows, streams=True)) as events:
            async for tokens in events:
                yield tokens

    @register(needs_weights=False, rerun_on_restart=True)
    async def pause(self, mode: PauseMode = "keep") -> None:
        """Pause the engine until :meth:`resume`; new calls wait. Ranks that start later are paused, too.

        Args:
            mode: With "keep", all answers continue afterwards. "wait" returns when the running answers are finished.
                "abort" ends all with ``finish_reason="abort"``: callers can continue them by ``prefix=``.

        Raises:
            ValueError: if the mode is unknown.
        """
        await self._loop.pause(checked_choice("pause: mode", mode, get_args(PauseMode), ValueError))

    @register(needs_weights=False, rerun_on_restart=True)
    async def resume(self) -> None:
        """Continue after :meth:`pause`."""
        self._loop.resume()

    @register(needs_weights=False)
    async def abort(self, ids: Iterable[str] | None = None) -> int:
        """End the answers of the requests ``ids``, or all answers, with ``finish_reason="abort"``.

        Returns:
            Number of aborted rows on this rank.
        """
        return self._loop.abort(None if ids is None else {ids} if isinstance(ids, str) else set(ids))

    @register(needs_weights=False)
    async def reset_cache(self) -> None:
        """Drop the cache of prompts. A change of weights drops it too."""
        self._runner.reset_cache()

    @register(needs_weights=False)
    async def sleep(self, tags: Sequence[str] = TAGS) -> None:
        """Release the memory of ``tags`` ("weights", "kv_cache") until :meth:`wake`; no steps run until then.

        An engine that cannot sleep (see :meth:`capabilities`) warns once, and continues.
        """
        _check_tags("sleep", tags)
        if self._runner.capabilities.sleep:
            self._loop.sleep(tags)
        elif not self._has_warned:
            self._has_warned = True
            advice = "only VllmRollout releases memory, on GPUs and with enable_sleep_mode=True"
            warnings.warn(f"{type(self).__name__}.sleep() does nothing here: {advice}", stacklevel=2)

    @register(needs_weights=False)
    async def wake(self, tags: Sequence[str] = TAGS) -> None:
        """Allocate the memory of ``tags`` again. Steps continue once all parts are allocated."""
        _check_tags("wake", tags)
        self._loop.wake(tags)

    @register(needs_weights=False, collect="first")
    async def capabilities(self) -> Capabilities:
        """Return the features of this engine."""
        return self._runner.capabilities

    @register(needs_weights=False)
    async def engine_statistics(self) -> EngineStatistics:
        """Return the statistics of each rank's engine."""
        return self._loop.statistics()

    def close(self) -> None:
        """End all answers, and release all resources."""
        self._loop.abort()
        self._runner.close()


def _check_tags(method: str, tags: Sequence[str]) -> None:
    if isinstance(tags, str) or not tags or not set(tags) <= set(TAGS):
        raise ValueError(f"{method}({tags!r}): expected some of {', '.join(map(repr, TAGS))} in a list")


def endpoints(group: Any) -> list[Endpoint]:
    """Return the HTTP endpoint of each engine of a group, in rank order. Endpoints end with the group.

    Args:
        group: group, or role of a group, whose engines have an HTTP server, such as ``VllmRollout``.

    Raises:
        DeclarationError: if the engines have no server.
    """
    method = getattr(group, "endpoint", None)
    served = [] if method is None else [endpoint for endpoint in method() if endpoint is not None]
    if not served:
        raise DeclarationError(
            f"px.engines.endpoints({group!r}): these engines have no server; bind VllmRollout with serve=True "
            "to give each engine a server"
        )
    return served
