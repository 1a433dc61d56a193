"""vLLM's ``AsyncLLM`` as the inside of an engine: it draws tokens beside what the rank does, and steps collect them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from phalanx.engines.engine_requests import Answer, SampledToken, Vocabulary
from phalanx.engines.engine_types import Capabilities, SamplingParams
from phalanx.engines.model_runner import ModelRunner
from phalanx.engines.vllm.async_llm_core import AsyncCore
from phalanx.engines.vllm.sampling_params import Asking, drawn, of_prompt, prompt_of
from phalanx.engines.vllm.sleeping import SLEEP, orders
from phalanx.engines.vllm.weight_segment import KeptWeights
from phalanx.errors import InternalError, PhalanxError, WeightsError

__all__ = ["AsyncVllmRunner"]


class AsyncVllmRunner(ModelRunner):
    """Answers are followed on the loop of ``core``; a step gives what was drawn since the last one.

    Args:
        core: vLLM's.
        vocabulary, capabilities: of it.
        seeds: see :class:`Asking`.
        kept: where weights lie.
        coming: gives the number of the version that is being loaded.
    """

    def __init__(
        self,
        core: AsyncCore,
        vocabulary: Vocabulary,
        capabilities: Capabilities,
        *,
        seeds: bool,
        kept: KeptWeights,
        coming: Callable[[], int],
    ) -> None:
        self.vocabulary, self.capabilities = vocabulary, capabilities
        self._core, self._kept, self._coming = core, kept, coming
        self._asking = Asking(vocabulary, seeds=seeds)
        self._slots: int = core.llm.vllm_config.scheduler_config.max_num_seqs
        self._answers: set[int] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._lock = threading.Lock()
        self._drawn: list[SampledToken] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._held = set[str]()  # why it stands still
        self._broken: str | None = None
        self._asleep = frozenset[str]()
        self._version = 0
        self._asked = 0

    def room(self) -> int | None:
        """See :class:`ModelRunner`: twice vLLM's ``max_num_seqs``, so that it never waits for what comes next."""
        return max(0, 2 * self._slots - len(self._answers))

    def refuses(self, sampling: SamplingParams) -> str | None:
        """See :class:`ModelRunner`."""
        return super().refuses(sampling) or self._asking.refuses(sampling)

    def add(self, answers: Sequence[Answer]) -> None:
        """See :class:`ModelRunner`."""
        self._answers.update(answer.key for answer in answers)
        self._core.soon(self._begin([(one, prompt_of(one.so_far), self._asking.of(one)) for one in answers]))

    async def _begin(self, asked: Sequence[tuple[Answer, Any, Any]]) -> None:
        for answer, prompt, params in asked:
            self._tasks[answer.key] = asyncio.create_task(self._follow(answer, prompt, params))

    async def _follow(self, answer: Answer, prompt: Any, params: Any) -> None:
        try:
            async for output in self._core.llm.generate(prompt, params, str(answer.key)):
                self._tell(drawn(answer, output.outputs[0], self._version))
        except Exception as error:
            self._tell((), error)
        finally:
            self._tasks.pop(answer.key, None)

    def _tell(self, some: Iterable[SampledToken], error: BaseException | None = None) -> None:
        """Let a step that is waited for end with these."""
        with self._lock:
            self._drawn += some
            self._error = self._error or error
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.get_loop().call_soon_threadsafe(_end, waiter)

    async def step(self) -> Iterable[SampledToken]:
        """See :class:`ModelRunner`."""
        self._check()
        with self._lock:
            waiter = None
            if not self._drawn and self._error is None and self._answers and not self._held:
                waiter = self._waiter = asyncio.get_running_loop().create_future()
        if waiter is not None:
            await waiter
        with self._lock:
            some, self._drawn = self._drawn, []
            error, self._error = self._error, None
        if error is not None:
            if self._core.llm.errored:  # else vLLM did not take a request
                self._broken = f"vLLM's engine failed: {type(error).__name__}: {error}"
            raise error
        return some

    def remove(self, answers: Sequence[Answer]) -> None:
        """See :class:`ModelRunner`."""
        # One that was just added has no task yet: it is begun before this is done.
        going = [answer.key for answer in answers if answer.key in self._answers]
        self._answers.difference_update(going)
        if going and self._broken is None:
            self._core.soon(self._drop(going))
        if not self._answers:
            self._tell(())

    async def _drop(self, keys: Sequence[int]) -> None:
        for key in keys:
            task = self._tasks.pop(key, None)  # by itself it does not go, if it has not begun
            if task is not None:
                task.cancel()

    def weights_changed(self) -> None:
        """See :class:`ModelRunner`; :meth:`load` has seen to it."""

    def hold(self) -> None:
        """See :class:`ModelRunner`."""
        self._stand("pause")

    def release(self) -> None:
        """See :class:`ModelRunner`."""
        self._go_on("pause")

    def _stand(self, *why: str) -> None:
        """Stand still for these reasons, too."""
        if not self._held and self._broken is None:
            self._core.wait(self._core.llm.pause_generation(mode="keep", clear_cache=False))
        self._held.update(why)
        self._tell(())

    def _go_on(self, *why: str) -> None:
        """Go on, unless there are other reasons to stand still."""
        held = bool(self._held)
        self._held.difference_update(why)
        if held and not self._held and self._broken is None:
            self._core.wait(self._core.llm.resume_generation())

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take other weights, all of them; what is under way goes on with them.

        Raises:
            WeightsError: vLLM failed at it, and cannot be used any more.
        """
        self._check()
        told, number = self._kept.take(dict(pairs)), self._coming()
        try:
            self._core.wait(self._load(told, number))
        except BaseException as error:
            self._broken = f"a load of weights failed in vLLM: {type(error).__name__}: {error}"
            raise WeightsError(f"{self._broken}; the group has to be restarted: group.restart()") from error

    async def _load(self, told: str, number: int) -> None:
        llm = self._core.llm
        await llm.pause_generation(mode="keep", clear_cache=False)
        await llm.collective_rpc("phalanx_load", args=(told,))
        await self._reset()
        await llm.update_weight_version(str(number))
        self._version = number
        if not self._held:
            await llm.resume_generation()

    async def _reset(self) -> None:
        if not await self._core.llm.reset_prefix_cache(reset_running_requests=True):
            raise InternalError("vLLM did not drop what it keeps of prompts")

    def reset_cache(self) -> None:
        """See :class:`ModelRunner`; what the answers under way have in it is computed again."""
        self._check()
        self._core.wait(self._reset())

    def prompt_log_probs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """See :class:`ModelRunner`."""
        self._check()
        held = tuple(self._held)
        self._go_on(*held)
        try:
            return self._core.wait(self._read(prompts))
        finally:
            if held:
                self._stand(*held)

    async def _read(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        return list(await asyncio.gather(*map(self._read_one, prompts)))

    async def _read_one(self, prompt: Sequence[int]) -> list[float]:
        self._asked += 1
        found: list[float] = []
        tokens, params = self._asking.of_prompt(prompt)
        async for output in self._core.llm.generate(prompt_of(tokens), params, f"prompt-{self._asked}"):
            found = of_prompt(prompt, output)
        return found

    def cache_use(self) -> float:
        """See :class:`ModelRunner`."""
        return self._core.cache_use

    def why_not(self, what: str) -> str:
        """See :class:`ModelRunner`."""
        if what == "sleep":
            return "vLLM gives memory back on GPUs, and where it is bound with enable_sleep_mode=True"
        return super().why_not(what)

    def sleep(self, tags: Sequence[str]) -> None:
        """See :class:`ModelRunner`."""
        self._stand(*tags)
        self.reset_cache()
        self._core.wait(self._let_sleep(self._asleep.union(tags)))

    def wake(self, tags: Sequence[str]) -> None:
        """See :class:`ModelRunner`."""
        self._core.wait(self._let_sleep(self._asleep.difference(tags)))
        self._go_on(*tags)

    async def _let_sleep(self, wanted: frozenset[str]) -> None:
        for told in orders(self._asleep, wanted):
            if told == SLEEP:
                await self._core.llm.sleep(level=1, mode="keep")
            else:
                await self._core.llm.wake_up(tags=list(told))
        self._asleep = wanted

    def close(self) -> None:
        """See :class:`ModelRunner`."""
        if self._broken != "it was closed":
            self._broken = "it was closed"
            self._core.close()
            self._kept.close()

    def _check(self) -> None:
        if self._broken is not None:
            raise PhalanxError(f"this engine cannot be used any more, since {self._broken}: group.restart()")


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
