"""A causal language model of transformers as an engine, by transformers' own continuous batching and paged attention.

Its manager has a thread of its own. That thread is held by ``manager.pause()`` at all times but those of a step,
so that weights, which come between two steps, never change under it. What the manager draws by is said once for
all its requests, so there is one for the likeliest tokens and one for the model's own distribution, each with a
cache, made when first needed.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from phalanx.engines.engine_requests import Answer, SampledToken, Vocabulary
from phalanx.engines.engine_types import Capabilities, SamplingParams
from phalanx.engines.model_runner import ModelRunner
from phalanx.engines.padded import PaddedRunner

__all__ = ["ContinuousMachine"]

_PAGE = 256
_LOOK_S = 1.0
"""Between two looks at whether the manager's thread still runs, where it gives nothing."""


@dataclass
class _Request:
    """An answer in a manager, under a name that is used once; ``seen`` of its tokens were told."""

    answer: Answer
    name: str
    seen: int = 0


@dataclass(eq=False)
class _Held:
    """A manager whose thread is held; ``requests`` are those that it has, by name."""

    manager: Any
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    requests: dict[str, _Request] = field(default_factory=dict[str, _Request])

    def hold(self) -> None:
        """Return once its thread stands still."""
        self.held.enter_context(self.manager.pause())

    def step(self) -> list[Any]:
        """Let it go until it gives something; all that it gave.

        Raises:
            RuntimeError: its thread ended.
        """
        self.held.close()
        try:
            first = self.manager.get_result(timeout=_LOOK_S)
            while first is None:
                if not self.manager.is_running():
                    raise RuntimeError("continuous batching of transformers ended; its log says why")
                first = self.manager.get_result(timeout=_LOOK_S)
        finally:
            if self.manager.is_running():
                self.hold()
        outputs = [first]
        while (more := self.manager.get_result(timeout=0)) is not None:
            outputs.append(more)
        return outputs

    def stop(self) -> None:
        """End its thread."""
        self.held.close()
        self.manager.stop(block=True, hard_stop=True)


class ContinuousMachine(ModelRunner):
    """Draws tokens as transformers' scheduler has them.

    Args:
        model: a causal language model of transformers.
        vocabulary: when answers end.
        max_running: answers at once at most.
        num_blocks: of the cache, of 256 tokens each. max_batch_tokens: read in one step at most.
        seed: of the manager that draws; it has none for single rows.
    """

    def __init__(
        self,
        model: nn.Module,
        vocabulary: Vocabulary,
        *,
        max_running: int = 256,
        num_blocks: int = 64,
        max_batch_tokens: int = 1024,
        seed: int | None = None,
    ) -> None:
        # An answer for which the cache is too small would end the manager, and with it all others.
        vocabulary = replace(vocabulary, context=min(vocabulary.context, num_blocks * _PAGE))
        self.vocabulary = vocabulary
        self.capabilities = Capabilities(
            context=vocabulary.context, seeds=False, top=0, text=vocabulary.text is not None
        )
        self._model: Any = model
        self._max_running = max_running
        self._num_blocks = num_blocks
        self._max_batch_tokens = max_batch_tokens
        self._seed = seed
        self._managers: dict[bool, _Held] = {}
        self._names = 0
        self._warned = False
        self._reader = PaddedRunner(model, vocabulary, max_running=max_running)

    def refuses(self, sampling: SamplingParams) -> str | None:
        """See :class:`ModelRunner`."""
        if sampling.temperature not in (0, 1) or sampling.top_p < 1:
            return (
                f"scheduler='continuous' draws at temperature 0 or 1 and with top_p=1, not at temperature "
                f"{sampling.temperature} and top_p={sampling.top_p}; scheduler='padded' does"
            )
        return super().refuses(sampling)

    def room(self) -> int | None:
        """See :class:`ModelRunner`."""
        return max(0, self._max_running - sum(len(one.requests) for one in self._managers.values()))

    def add(self, answers: Sequence[Answer]) -> None:
        """See :class:`ModelRunner`."""
        if not self._warned and any(answer.sampling.seed is not None for answer in answers):
            self._warned = True
            warnings.warn(
                "SamplingParams(seed=) has no effect with scheduler='continuous', which has one seed for all rows: "
                "TransformersRollout(seed=)",
                stacklevel=2,
            )
        for answer in answers:
            self._add(answer)

    def _add(self, answer: Answer) -> None:
        held = self._manager(draws=answer.sampling.temperature > 0)
        self._names += 1
        name, so_far = str(self._names), answer.so_far
        held.requests[name] = _Request(answer, name)
        left = min(answer.sampling.max_tokens - len(answer.tokens), self.vocabulary.context - len(so_far))
        held.manager.add_request(
            so_far, request_id=name, max_new_tokens=left, streaming=True, eos_token_id=-1
        )

    def _manager(self, draws: bool) -> _Held:
        held = self._managers.get(draws)
        if held is not None and not held.manager.is_running():  # it failed; its calls have heard of it
            held.stop()
            held = None
        if held is None:
            held = self._managers[draws] = self._started(draws)
        return held

    def _started(self, draws: bool) -> _Held:
        from transformers import (  # transformers: only where this scheduler is asked for
            ContinuousBatchingConfig,
            GenerationConfig,
        )

        on_cpu = next(self._model.parameters()).device.type == "cpu"
        manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=draws, temperature=1.0, top_p=1.0, top_k=0, eos_token_id=-1, max_new_tokens=16
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=_PAGE,
                num_blocks=self._num_blocks,
                max_batch_tokens=self._max_batch_tokens,
                allow_block_sharing=False,  # what it knows of prompts would outlive the weights
                use_async_batching=False,  # a step is over when its tokens are here
                use_cuda_graph=False if on_cpu else None,
                return_logprobs=True,
                seed=self._seed,
            ),
        )
        manager.start()
        held = _Held(manager)
        held.hold()
        _end_with_program(held)
        return held

    def step(self) -> list[SampledToken]:
        """See :class:`ModelRunner`."""
        drawn: list[SampledToken] = []
        for held in self._managers.values():
            if held.requests:
                for output in held.step():
                    drawn += _drawn(held.requests.get(output.request_id), output)
        return drawn

    def remove(self, answers: Sequence[Answer]) -> None:
        """See :class:`ModelRunner`."""
        gone = {id(answer) for answer in answers}
        for held in self._managers.values():
            for request in [one for one in held.requests.values() if id(one.answer) in gone]:
                held.manager.cancel_request(request.name)
                del held.requests[request.name]

    def weights_changed(self) -> None:
        """See :class:`ModelRunner`: what runs is read again, under another name."""
        running = [one.answer for held in self._managers.values() for one in held.requests.values()]
        self.remove(running)
        for answer in running:
            self._add(answer)

    @torch.no_grad()
    def prompt_log_probs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """See :class:`ModelRunner`."""
        return self._reader.prompt_log_probs(prompts)

    def cache_use(self) -> float:
        """See :class:`ModelRunner`: answers at work of those that there may be."""
        return sum(len(one.requests) for one in self._managers.values()) / self._max_running

    def why_not(self, what: str) -> str:
        """See :class:`ModelRunner`."""
        return "the model and its cache stay where they are"

    def close(self) -> None:
        """See :class:`ModelRunner`."""
        while self._managers:
            _, held = self._managers.popitem()
            held.stop()


_open: weakref.WeakSet[_Held] = weakref.WeakSet()
_ending: list[threading.Thread] = []


def _end_with_program(held: _Held) -> None:
    """Stop it where nobody closes the machine. A program does not end before the threads of its managers have."""
    _open.add(held)

    def wait() -> None:
        threading.main_thread().join()
        for still in list(_open):
            if still.manager.is_running():
                still.stop()

    if not _ending:
        _ending.append(threading.Thread(target=wait, name="phalanx-continuous-batching-end"))
        _ending[0].start()


def _drawn(request: _Request | None, output: Any) -> list[SampledToken]:
    """The tokens of an output that were not told before.

    Raises:
        RuntimeError: the request failed.
    """
    if request is None:  # it was given up before this output came
        return []
    if output.error is not None:
        raise RuntimeError(
            f"continuous batching of transformers gave request {request.answer.row.id!r} up: {output.error}"
        )
    wanted = request.answer.sampling.log_probs is not None
    new = range(request.seen, len(output.generated_tokens))
    request.seen = len(output.generated_tokens)
    return [
        SampledToken(
            request.answer, output.generated_tokens[place], output.logprobs[place] if wanted else None
        )
        for place in new
    ]
