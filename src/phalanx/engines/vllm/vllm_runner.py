"""vLLM's engine in the process of a rank, step by step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from phalanx.engines.engine_requests import Answer, SampledToken, Vocabulary
from phalanx.engines.engine_types import Capabilities, SamplingParams
from phalanx.engines.model_runner import ModelRunner
from phalanx.engines.vllm.sampling_params import Asking, drawn, of_prompt, prompt_of
from phalanx.engines.vllm.seeds import NAME
from phalanx.engines.vllm.sleeping import SLEEP, orders
from phalanx.engines.vllm.tp_group import Leader
from phalanx.engines.vllm.vllm_imports import arguments_of, find, on_cpu
from phalanx.engines.vllm.vllm_weights import reload
from phalanx.engines.vllm.weight_segment import KeptWeights
from phalanx.errors import InternalError, PhalanxError, WeightsError

__all__ = ["VllmRunner", "engine_arguments", "make_engine"]

_CPU_CACHE_BYTES = 512 << 20


def engine_arguments(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs``: what this needs, and the user's ``options``."""
    wanted: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "logprobs_mode": "raw_logprobs",
    }
    if on_cpu():
        # vLLM would take nine tenths of the machine's memory, and compile kernels for the better part of a minute.
        if not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & options.keys():
            wanted["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
        wanted["enforce_eager"] = True
        if options.get("enforce_eager", True):
            _compile_nothing()
    # A step draws with the weights that it began with, and its tokens are told before the next one.
    needed = {"model": model, "async_scheduling": False, "logits_processors": [NAME]}
    return {**wanted, **options, **needed}


def make_engine(arguments: dict[str, Any]) -> Any:
    """vLLM's ``LLMEngine``, in this process."""
    config = arguments_of("EngineArgs", arguments)
    return find("vllm.v1.engine.llm_engine.LLMEngine").from_engine_args(config)


def _compile_nothing() -> None:
    """vLLM compiles the kernel of log-probabilities even where nothing else is compiled: half a minute on two cores."""
    if os.environ.setdefault("TORCHDYNAMO_DISABLE", "1") == "1":
        find("torch._dynamo.config").disable = True


class VllmRunner(ModelRunner):
    """An ``LLMEngine``.

    Args:
        engine: vLLM's, or what leads those of several ranks.
        vocabulary, capabilities: of it.
        seeds: see :class:`Asking`.
        kept: where weights lie, if other ranks of the engine load them too.
    """

    def __init__(
        self,
        engine: Any,
        vocabulary: Vocabulary,
        capabilities: Capabilities,
        *,
        seeds: bool,
        kept: KeptWeights | None = None,
    ) -> None:
        self._engine: Any = engine
        self._kept = kept
        self._answers: dict[str, Answer] = {}
        self._ahead: list[SampledToken] = []
        self._broken: str | None = None
        self._asleep = frozenset[str]()
        self._asked = 0
        self._slots: int = engine.vllm_config.scheduler_config.max_num_seqs
        self.vocabulary, self.capabilities = vocabulary, capabilities
        self._asking = Asking(vocabulary, seeds=seeds)

    def room(self) -> int | None:
        """See :class:`ModelRunner`: vLLM's ``max_num_seqs``."""
        return max(0, self._slots - len(self._answers))

    def refuses(self, sampling: SamplingParams) -> str | None:
        """See :class:`ModelRunner`."""
        return super().refuses(sampling) or self._asking.refuses(sampling)

    def add(self, answers: Sequence[Answer]) -> None:
        """See :class:`ModelRunner`."""
        for answer in answers:
            self._answers[str(answer.key)] = answer
            self._ask(str(answer.key), answer.so_far, self._asking.of(answer))

    def _ask(self, key: str, tokens: Sequence[int], params: Any) -> None:
        self._engine.add_request(key, prompt_of(tokens), params)

    def step(self) -> Iterable[SampledToken]:
        """See :class:`ModelRunner`."""
        self._check()
        if self._ahead:
            ahead, self._ahead = self._ahead, []
            return ahead
        return self._stepped()

    def _stepped(self) -> list[SampledToken]:
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._broken = f"vLLM's engine failed: {type(error).__name__}: {error}"
            raise
        told: list[SampledToken] = []
        for output in outputs:
            answer = self._answers.get(output.request_id)
            if answer is not None:
                told += drawn(answer, output.outputs[0])
        return told

    def remove(self, answers: Sequence[Answer]) -> None:
        """See :class:`ModelRunner`."""
        keys = [key for key in (str(one.key) for one in answers) if self._answers.pop(key, None) is not None]
        self._ahead = [one for one in self._ahead if str(one.answer.key) in self._answers]
        if keys and self._broken is None:
            self._engine.abort_request(keys)

    def weights_changed(self) -> None:
        """See :class:`ModelRunner`; :meth:`load` has seen to it."""

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take other weights, all of them; what is under way goes on with them, and what is kept of prompts is dropped.

        Raises:
            WeightsError: vLLM failed at it, and cannot be used any more.
        """
        self._check()
        self._take_back()
        try:
            if self._kept is None:
                self._engine.collective_rpc(reload, args=(pairs,))
            else:
                tensors = dict(pairs)
                self._engine.load(self._kept.take(tensors), tensors.items())
        except BaseException as error:
            self._broken = f"a load of weights failed in vLLM: {type(error).__name__}: {error}"
            raise WeightsError(f"{self._broken}; the group has to be restarted: group.restart()") from error
        self.reset_cache()

    def _take_back(self) -> None:
        """Forget tokens that nobody has heard of; they are drawn again, with the weights of then."""
        again = list({id(one.answer): one.answer for one in self._ahead}.values())
        self._ahead = []
        self.remove(again)
        self.add(again)

    def reset_cache(self) -> None:
        """See :class:`ModelRunner`; what the answers under way have in it is computed again."""
        self._check()
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            self._broken = "vLLM did not drop what it keeps of prompts"
            raise InternalError(
                f"{self._broken}, so that answers could be of two versions; restart the group"
            )

    def prompt_log_probs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """See :class:`ModelRunner`. Tokens that others get meanwhile are told in the next step."""
        self._check()
        found: dict[str, list[float]] = {}
        asked: dict[str, Sequence[int]] = {}
        for prompt in prompts:
            self._asked += 1
            asked[f"prompt-{self._asked}"] = prompt
            self._ask(f"prompt-{self._asked}", *self._asking.of_prompt(prompt))
        while len(found) < len(asked):
            for output in self._engine.step():
                if output.request_id in asked:
                    found[output.request_id] = of_prompt(asked[output.request_id], output)
                elif output.request_id in self._answers:
                    self._ahead += drawn(self._answers[output.request_id], output.outputs[0])
        return [found[key] for key in asked]

    def cache_use(self) -> float:
        """See :class:`ModelRunner`."""
        return float(self._engine.engine_core.engine_core.scheduler.kv_cache_manager.usage)

    def why_not(self, what: str) -> str:
        """See :class:`ModelRunner`."""
        if what == "sleep":
            return "vLLM gives no memory back on CPUs" if on_cpu() else "bind it with enable_sleep_mode=True"
        return super().why_not(what)

    def sleep(self, tags: Sequence[str]) -> None:
        """See :class:`ModelRunner`."""
        self.reset_cache()
        self._let_sleep(self._asleep.union(tags))

    def wake(self, tags: Sequence[str]) -> None:
        """See :class:`ModelRunner`."""
        self._let_sleep(self._asleep.difference(tags))

    def _let_sleep(self, wanted: frozenset[str]) -> None:
        for told in orders(self._asleep, wanted):
            if told == SLEEP:
                self._engine.sleep(level=1, mode="keep")
            else:
                self._engine.wake_up(tags=list(told))
        self._asleep = wanted

    def close(self) -> None:
        """See :class:`ModelRunner`."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._broken = "it was closed"
            if isinstance(engine, Leader):
                engine.dismiss()
            engine.engine_core.shutdown()
        if self._kept is not None:
            self._kept.close()

    def _check(self) -> None:
        if self._broken is not None:
            raise PhalanxError(f"this engine cannot be used any more, since {self._broken}: group.restart()")
