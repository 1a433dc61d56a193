"""``px.engines.RolloutEngine``: base class of engines, and ``px.engines.endpoints``."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, TypeAlias

from phalanx.declare.dispatch_modes import Dispatch
from phalanx.declare.register import register
from phalanx.declare.weight_declarations import WeightsDeclared
from phalanx.declare.worker import Worker
from phalanx.engines.engine_loop import EngineCall, EngineLoop
from phalanx.engines.engine_requests import RequestFactory, Row
from phalanx.engines.engine_types import (
    Capabilities,
    Completion,
    Endpoint,
    EngineStatistics,
    PauseMode,
    Prefix,
    Prompt,
    SamplingParams,
    Tokens,
)
from phalanx.engines.model_runner import ModelRunner
from phalanx.errors import DeclarationError, WeightsTorn

TAGS: tuple[str, ...] = ("weights", "kv_cache")

_ENGINE = Dispatch.mesh("engine")
_DEFAULT = SamplingParams()

Prompts: TypeAlias = "Sequence[Prompt]"
Sampling: TypeAlias = "SamplingParams | Sequence[SamplingParams]"
Prefixes: TypeAlias = "Sequence[Prefix] | None"
Ids: TypeAlias = "Sequence[str] | None"


class RolloutEngine(Worker):
    """Base class of engines, roles that generate.

    Ranks are asynchronous: calls, and syncs of weights, run between two steps of the engine. Prompts are sharded over
    the axis ``dp`` of the mesh "engine", by default a coordinate per rank.

    A subclass creates its :class:`ModelRunner` in its constructor and calls :meth:`serve`.
    """

    __phalanx_options__ = {"max_concurrency": 10_000}
    #: Engines do not wait for each other, so groups of them are resized while they work.
    independent = True

    def serve(
        self,
        runner: ModelRunner,
        *,
        weights: str | None = None,
        seed: int | None = None,
        encode: Callable[[str], Sequence[int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Accept calls from now on.

        Args:
            runner: model runner that samples the tokens.
            weights: name under which this role accepts weights; each token is labeled with their version.
            seed: seed of the seeds of rows that have none; None for others in every run. Ranks get different seeds.
            encode: function that returns the tokens of a text.
            clock: function that returns seconds, for statistics.
        """
        self._runner = runner
        self._weights = weights
        self._seeds = random.Random(None if seed is None else f"{seed}/{self.rank}")
        self._requests = RequestFactory(
            runner.vocabulary, encode, runner.refuses, lambda: self._seeds.getrandbits(62)
        )
        self._loop = EngineLoop(
            runner, self._context, version=lambda: self.version, check=self._check_weights, clock=clock
        )
        self._has_warned = False
        if "engine" not in self._context.registered:
            self.register_mesh("engine", {"dp": self.rank})

    def __phalanx_made__(self) -> None:
        if "_loop" not in self.__dict__:
            raise DeclarationError(
                f"{type(self).__name__} has no model runner: call self.serve(runner) in its constructor"
            )

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token; 0 before the first sync."""
        if self._weights is None:
            return 0
        return WeightsDeclared.of(self._context).versions.get((self.role, self._weights), 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints: the generator of seeds. Weights come by a sync."""
        return {"seeds": self._seeds.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generator of seeds."""
        version, words, gauss = state["seeds"]
        self._seeds.setstate((version, tuple(words), gauss))

    @register(_ENGINE)
    async def generate(
        self, prompts: Prompts, sampling: Sampling = _DEFAULT, *, prefix: Prefixes = None, ids: Ids = None
    ) -> list[Completion]:
        """Answer each prompt.

        Args:
            prompts: rows: tokens of each, or texts if the engine has a tokenizer.
            sampling: sampling parameters: for all rows, or for each row.
            prefix: rows: answers to continue. Finished answers are returned as they are.
            ids: rows: names of the requests, for :meth:`abort`.

        Returns:
            An answer per row, in order. The error of a row is its ``error``.

        Raises:
            WeightsTorn: if a sync failed halfway, so that the weights have no version.
        """
        rows = self.generate_rows(prompts, sampling, prefix=prefix, ids=ids)
        return [completion for _, completion in sorted([row async for row in rows], key=lambda row: row[0])]

    @register(_ENGINE)
    async def generate_rows(
        self, prompts: Prompts, sampling: Sampling = _DEFAULT, *, prefix: Prefixes = None, ids: Ids = None
    ) -> AsyncGenerator[tuple[int, Completion]]:
        """Yield each answer of :meth:`generate` when it is finished, for ``group.generate_rows.stream(...,
        by="rows")``.
        """
        with self._begin(prompts, sampling, prefix, ids) as call:
            async for row in call.events():
                if isinstance(row, Row):
                    yield row.index, self._completion(row)

    @register(_ENGINE)
    async def generate_tokens(
        self, prompts: Prompts, sampling: Sampling = _DEFAULT, *, prefix: Prefixes = None, ids: Ids = None
    ) -> AsyncGenerator[Tokens]:
        """Yield tokens of :meth:`generate` as they are sampled, for ``group.any.generate_tokens.stream([prompt])``."""
        with self._begin(prompts, sampling, prefix, ids, streams=True) as call:
            async for tokens in call.events():
                if isinstance(tokens, Tokens):
                    yield tokens

    @register(_ENGINE)
    async def prompt_log_probs(self, prompts: Prompts) -> list[Completion]:
        """Compute the log-probability of every token of each prompt but the first, by the current weights.

        Returns:
            Per row a completion with the tokens of the prompt without the first; ``finish_reason`` is "length".
        """
        version = self.version
        rows = self._requests.rows(prompts, _DEFAULT, None, None, version, room=0)
        valid = [row for row in rows if row.error is None]
        completions = {row: self._completion(row) for row in rows if row.error is not None}
        log_probs = self._runner.prompt_log_probs([row.prompt for row in valid]) if valid else []
        for row, values in zip(valid, log_probs, strict=True):
            runs = ((version, len(row.prompt) - 1),)
            completions[row] = Completion(row.prompt[1:], tuple(values), "length", runs)
        return [completions[row] for row in rows]

    @register(needs_weights=False)
    async def pause(self, mode: PauseMode = "keep") -> None:
        """Take no further step until :meth:`resume`; new calls wait.

        Args:
            mode: "keep" keeps all answers, and they continue afterwards; "wait" returns once the running answers are
                finished; "abort" ends all with ``finish_reason="abort"``: callers can continue them by ``prefix=``.
        """
        if mode not in ("keep", "wait", "abort"):
            raise ValueError(f'pause({mode!r}): expected "keep", "wait" or "abort"')
        await self._loop.pause(mode)

    @register(needs_weights=False)
    async def resume(self) -> None:
        """Continue after :meth:`pause`."""
        self._loop.resume()

    @register(needs_weights=False)
    async def abort(self, ids: Iterable[str] | None = None) -> int:
        """End the answers of the requests ``ids``, or all, with ``finish_reason="abort"``.

        Returns:
            Number of aborted rows on this rank.
        """
        wanted = None if ids is None else {ids} if isinstance(ids, str) else set(ids)
        return self._loop.abort(lambda answer: wanted is None or answer.row.id in wanted)

    @register(needs_weights=False)
    async def reset_cache(self) -> None:
        """Drop the cache of prompts. A change of weights does so too."""
        self._runner.reset_cache()

    @register(needs_weights=False)
    async def sleep(self, tags: Sequence[str] = TAGS) -> None:
        """Release the memory of "weights" and "kv_cache" until :meth:`wake`; there are no steps meanwhile.

        An engine that cannot do that (``capabilities``) warns once, and continues.
        """
        _check_tags("sleep", tags)
        if self._runner.capabilities.sleep:
            self._loop.sleep(tags)
        elif not self._has_warned:
            self._has_warned = True
            reason = self._runner.why_not("sleep")
            warnings.warn(f"{type(self).__name__}.sleep() does nothing here: {reason}", stacklevel=2)

    @register(needs_weights=False)
    async def wake(self, tags: Sequence[str] = TAGS) -> None:
        """Allocate the memory of ``tags`` again."""
        _check_tags("wake", tags)
        if self._runner.capabilities.sleep:
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
        self._loop.abort(lambda _: True)
        self._runner.close()

    def _begin(
        self, prompts: Prompts, sampling: Sampling, prefix: Prefixes, ids: Ids, *, streams: bool = False
    ) -> EngineCall:
        """Queue the rows of a call."""
        if self._context.in_driver and not self._loop.is_open:
            raise RuntimeError(
                'the engine is paused, and with backend="inline" nobody could resume it while this call waits: '
                "resume() it first"
            )
        rows = self._requests.rows(prompts, sampling, prefix, ids, self.version)
        return self._loop.begin(rows, streams=streams)

    def _completion(self, row: Row) -> Completion:
        return row.completion(self.version, self._requests.vocabulary)

    def _check_weights(self) -> None:
        """Refuse to sample tokens from weights without a version.

        Raises:
            WeightsTorn: if a sync failed halfway.
        """
        reason = WeightsDeclared.of(self._context).torn.get(self.role)
        if reason is not None:
            raise WeightsTorn(f"running answers are given up: {reason}")


def _check_tags(method: str, tags: Sequence[str]) -> None:
    if isinstance(tags, str) or not set(tags) <= set(TAGS):
        raise ValueError(f"{method}({tags!r}): expected a list of {', '.join(map(repr, TAGS))}")


def endpoints(group: Any) -> list[Endpoint]:
    """Return the HTTP endpoint of each engine of a group, in the order of its ranks. Endpoints end with the group.

    Args:
        group: group, or role of a group, of a class whose engines serve, such as ``VllmRollout``.

    Raises:
        DeclarationError: if its engines have no server.
    """
    method = getattr(group, "endpoint", None)
    if method is None:
        raise DeclarationError(
            f"px.engines.endpoints({group!r}): these engines have no server; VllmRollout can have one for each"
        )
    served: list[Endpoint] = [endpoint for endpoint in method() if endpoint is not None]
    if not served:
        raise DeclarationError(f"px.engines.endpoints({group!r}): bind its class with serve=True")
    return served
