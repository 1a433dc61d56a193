"""``px.engines.RolloutEngine``: what every engine is to a group."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

from phalanx.declare.dispatch_modes import Dispatch
from phalanx.declare.register import register
from phalanx.declare.weight_declarations import WeightsDeclared
from phalanx.declare.worker import Worker
from phalanx.engines.calls import (
    TAGS,
    EngineCall,
    check_tags,
    each_row,
    of_prompt,
    prefixes_of,
    rows_of,
    samplings_of,
)
from phalanx.engines.engine_loop import EngineLoop
from phalanx.engines.engine_requests import Requests, Row
from phalanx.engines.engine_status import StatusReporter
from phalanx.engines.engine_types import (
    Capabilities,
    Completion,
    EngineStatistics,
    PauseMode,
    Prefix,
    Prompt,
    SamplingParams,
    Tokens,
)
from phalanx.engines.meter import Meter
from phalanx.engines.model_runner import ModelRunner
from phalanx.errors import DeclarationError, WeightsTorn

__all__ = ["RolloutEngine"]

_ENGINE = Dispatch.mesh("engine")
_DEFAULT = SamplingParams()


class RolloutEngine(Worker):
    """Base class of engines: a role that generates.

    Ranks are asynchronous by themselves: calls interleave between two steps of the engine, and so do syncs of weights.
    Prompts are split over the axis ``dp`` of the mesh "engine", by default one coordinate per rank.

    A subclass makes its :class:`ModelRunner` in its constructor and calls :meth:`serve`.
    """

    __phalanx_options__ = {"max_concurrency": 10_000}
    #: No engine waits for another one: groups of them are resized while they work.
    independent = True

    def serve(
        self,
        machine: ModelRunner,
        *,
        weights: str | None = None,
        seed: int | None = None,
        encode: Callable[[str], Sequence[int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take calls from now on.

        Args:
            machine: draws the tokens.
            weights: the name under which this role accepts weights, whose versions are told with each token.
            seed: of the seeds of rows that name none; None for others in every run. Ranks get different ones.
            encode: gives the tokens of a text.
            clock: seconds, for statistics.
        """
        self._machine = machine
        self._weights = weights
        self._encode = encode
        source = random.Random(None if seed is None else f"{seed}/{self.rank}")
        self._source = source
        self._requests = Requests(machine.vocabulary, lambda: source.getrandbits(62), machine.refuses)
        self._teller = StatusReporter(self._context, lambda: self._work.statistics())
        self._work = EngineLoop(
            machine,
            self._requests,
            version=lambda: self.version,
            check=self._check_weights,
            meter=Meter(clock),
            tell=self._teller.tell,
            rests=self._teller.rests,
        )
        if "engine" not in self._context.registered:
            self.register_mesh("engine", {"dp": self.rank})

    def __phalanx_made__(self) -> None:
        if "_work" not in self.__dict__:
            raise DeclarationError(
                f"{type(self).__name__} has nothing that draws tokens: call self.serve(machine) in its constructor"
            )

    @property
    def version(self) -> int:
        """Of the weights that the next token is drawn with; 0 before the first sync."""
        if self._weights is None:
            return 0
        return WeightsDeclared.of(self._context).versions.get((self.role, self._weights), 0)

    def state_dict(self) -> dict[str, Any]:
        """What a saved run needs of it: where it is in the seeds that it gives rows. Weights come by a sync."""
        return {"seeds": self._source.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the seeds from there."""
        version, words, gauss = state["seeds"]
        self._source.setstate((version, tuple(words), gauss))

    @register(_ENGINE)
    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = _DEFAULT,
        *,
        prefix: Sequence[Prefix] | None = None,
        ids: Sequence[str] | None = None,
    ) -> list[Completion]:
        """Answer each prompt.

        Args:
            prompts: rows: tokens of each, or texts where the engine has a tokenizer.
            sampling: how tokens are drawn: for all rows, or one for each.
            prefix: rows: what there is of the answers already. Those that are finished come back as they are.
            ids: rows: names of the requests, for :meth:`abort`.

        Returns:
            One answer per row, in order. What is wrong with one row is its ``error``.

        Raises:
            WeightsTorn: a sync failed in the middle, so that the weights are of no version.
        """
        done: dict[int, Completion] = {}
        with self._call(prompts, sampling, prefix, ids) as call:
            async for row in call.rows():
                done[row.index] = self._completion(row)
        return [done[index] for index in range(len(done))]

    @register(_ENGINE)
    async def generate_rows(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = _DEFAULT,
        *,
        prefix: Sequence[Prefix] | None = None,
        ids: Sequence[str] | None = None,
    ) -> AsyncGenerator[tuple[int, Completion]]:
        """As :meth:`generate`, each answer as soon as it is there: for ``group.generate_rows.stream(...,
        by="rows")``.
        """
        with self._call(prompts, sampling, prefix, ids) as call:
            async for row in call.rows():
                yield row.index, self._completion(row)

    @register(_ENGINE)
    async def generate_tokens(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = _DEFAULT,
        *,
        prefix: Sequence[Prefix] | None = None,
        ids: Sequence[str] | None = None,
    ) -> AsyncGenerator[Tokens]:
        """As :meth:`generate`, tokens as they are drawn: for ``group.any.generate_tokens.stream([prompt])``."""
        with self._call(prompts, sampling, prefix, ids, tokens=True) as call:
            async for tokens in call.tokens():
                yield tokens

    @register(_ENGINE)
    async def prompt_log_probs(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """The log-probability of every token of each prompt but the first, by the weights of now.

        Returns:
            Per row a completion whose tokens are those of the prompt without the first; ``finish_reason`` is "length".
        """
        requests = self._requests
        found: list[Completion | None] = []
        asked: list[Sequence[int]] = []
        for index, prompt in enumerate(rows_of(prompts, self._encode)):
            row = requests.row(index, None, prompt, SamplingParams(), None, self.version, whole=True)
            found.append(row.done)
            if row.done is None:
                asked.append(row.prompt)
        version = self.version
        told = iter(zip(asked, self._machine.prompt_log_probs(asked) if asked else [], strict=True))
        return [one if one is not None else of_prompt(*next(told), version) for one in found]

    @register(needs_weights=False)
    async def pause(self, mode: PauseMode = "keep") -> None:
        """Take no further step until :meth:`resume`; calls that come meanwhile wait.

        Args:
            mode: "keep" leaves all answers where they are, and they go on afterwards; "wait" returns once the running
                ones are at their end; "abort" ends all as they are, with ``finish_reason="abort"``: their callers may
                go on with them by ``prefix=``.
        """
        if mode not in ("keep", "wait", "abort"):
            raise ValueError(f'pause({mode!r}): expected "keep", "wait" or "abort"')
        work = self._work
        work.gate.pause(mode)
        if mode == "abort":
            work.abort(lambda _: True)
        elif mode == "wait":
            self._machine.release()  # where a pause before this one holds it
            await work.until_idle()
        if work.gate.mode is not None:
            self._machine.hold()

    @register(needs_weights=False)
    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._work.gate.resume()
        self._machine.release()
        self._work.go_on()

    @register(needs_weights=False)
    async def abort(self, ids: Iterable[str] | None = None) -> int:
        """End answers where they are, with ``finish_reason="abort"``: those of the requests ``ids``, or all.

        Returns:
            How many rows that were on this rank.
        """
        wanted = None if ids is None else {ids} if isinstance(ids, str) else set(ids)
        return self._work.abort(lambda answer: wanted is None or answer.row.id in wanted)

    @register(needs_weights=False)
    async def reset_cache(self) -> None:
        """Forget what is kept of prompts from call to call. A change of weights does so by itself."""
        self._machine.reset_cache()

    @register(needs_weights=False)
    async def sleep(self, tags: Sequence[str] = TAGS) -> None:
        """Give the memory of "weights" and "kv_cache" back until :meth:`wake`; there are no steps meanwhile.

        An engine that cannot do that (``capabilities``) warns once, and goes on.
        """
        check_tags("sleep", tags)
        if not self._machine.capabilities.sleep:
            self._teller.warn_of("sleep", f"{type(self).__name__}.sleep()", self._machine.why_not("sleep"))
            return
        self._work.gate.sleep(tags)
        self._machine.sleep(tags)

    @register(needs_weights=False)
    async def wake(self, tags: Sequence[str] = TAGS) -> None:
        """Take the memory of ``tags`` again."""
        check_tags("wake", tags)
        if not self._machine.capabilities.sleep:
            return
        self._machine.wake(tags)
        self._work.gate.wake(tags)
        self._work.go_on()

    @register(needs_weights=False, collect="first")
    async def capabilities(self) -> Capabilities:
        """What this engine can do."""
        return self._machine.capabilities

    @register(needs_weights=False)
    async def engine_statistics(self) -> EngineStatistics:
        """What each rank's engine does, and did."""
        return self._work.statistics()

    def close(self) -> None:
        """End all answers, and give back what the engine holds."""
        self._work.abort(lambda _: True)
        self._machine.close()

    def _call(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        prefix: Sequence[Prefix] | None,
        ids: Sequence[str] | None,
        *,
        tokens: bool = False,
    ) -> EngineCall:
        """The rows of a call, of which those that need steps wait for them from now on."""
        self._check_open()
        texts = rows_of(prompts, self._encode)
        count = len(texts)
        samplings = samplings_of(sampling, count)
        prefixes = prefixes_of(prefix, count)
        names = each_row("ids", [None] * count if ids is None else ids, count)
        rows = self._requests.rows(names, texts, samplings, prefixes, self.version)
        return self._work.begin(rows, tokens=tokens)

    def _check_open(self) -> None:
        if self._context.in_driver and not self._work.gate.open:
            raise RuntimeError(
                'the engine is paused, and with backend="inline" nobody could resume it while this call waits: '
                "resume() it first"
            )

    def _completion(self, row: Row) -> Completion:
        return row.completion(self.version, self._requests.vocabulary)

    def _check_weights(self) -> None:
        """Refuse to draw tokens with weights of no version.

        Raises:
            WeightsTorn: they are.
        """
        why = WeightsDeclared.of(self._context).torn.get(self.role)
        if why is not None:
            raise WeightsTorn(f"answers that were under way are given up: {why}")
