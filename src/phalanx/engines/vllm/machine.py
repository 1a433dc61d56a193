"""vLLM's engine in the process of a rank, step by step."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from phalanx.engines.leaves import Capabilities, FinishReason
from phalanx.engines.machine import Machine
from phalanx.engines.requests import Answer, Drawn, Vocabulary
from phalanx.engines.vllm.library import find, on_cpu
from phalanx.engines.vllm.seeds import EXTRA, seeded_draws
from phalanx.engines.vllm.team import Leader
from phalanx.engines.vllm.weights import reload
from phalanx.errors import InternalError, PhalanxError, WeightsError

__all__ = ["VllmMachine", "capabilities_of", "engine_arguments", "make_engine", "vocabulary_of"]

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
    needed = {"model": model, "async_scheduling": False, "logits_processors": [seeded_draws()]}
    return {**wanted, **options, **needed}


def make_engine(arguments: dict[str, Any]) -> Any:
    """vLLM's ``LLMEngine``, in this process."""
    config = find("vllm.engine.arg_utils.EngineArgs")(**arguments)
    return find("vllm.v1.engine.llm_engine.LLMEngine").from_engine_args(config)


def vocabulary_of(engine: Any) -> Vocabulary:
    """When answers of its model end."""
    model = engine.vllm_config.model_config
    return Vocabulary(
        context=model.max_model_len,
        end=_end_tokens(model, model.hf_text_config),
        size=model.get_vocab_size(),
    )


def capabilities_of(engine: Any) -> Capabilities:
    """What it can do."""
    model = engine.vllm_config.model_config
    return Capabilities(
        context=model.max_model_len,
        sleep=bool(model.enable_sleep_mode) and not on_cpu(),
        prefix_cache=bool(engine.vllm_config.cache_config.enable_prefix_caching),
        top=max(model.max_logprobs, 0),
    )


def _compile_nothing() -> None:
    """vLLM compiles the kernel of log-probabilities even where nothing else is compiled: half a minute on two cores."""
    if os.environ.setdefault("TORCHDYNAMO_DISABLE", "1") == "1":
        find("torch._dynamo.config").disable = True


class VllmMachine(Machine):
    """An ``LLMEngine``.

    Args:
        engine: vLLM's, or what leads those of several ranks.
        seeds: draw all rows by their seeds; else those that name none share vLLM's own random numbers, which is faster.
    """

    def __init__(self, engine: Any, *, seeds: bool) -> None:
        self._seeds = seeds
        self._engine: Any = engine
        self._params = find("vllm.sampling_params.SamplingParams")
        self._delta = find("vllm.sampling_params.RequestOutputKind").DELTA
        self._answers: dict[str, Answer] = {}
        self._ahead: list[Drawn] = []
        self._broken: str | None = None
        self._asked = 0
        self._slots: int = engine.vllm_config.scheduler_config.max_num_seqs
        self.vocabulary, self.capabilities = vocabulary_of(engine), capabilities_of(engine)

    def room(self) -> int | None:
        """See :class:`Machine`: vLLM's ``max_num_seqs``."""
        return max(0, self._slots - len(self._answers))

    def add(self, answers: Sequence[Answer]) -> None:
        """See :class:`Machine`."""
        for answer in answers:
            self._answers[str(answer.key)] = answer
            self._ask(str(answer.key), answer.so_far, self._params_of(answer))

    def _ask(self, key: str, tokens: Sequence[int], params: Any) -> None:
        prompt = {"type": "token", "prompt_token_ids": list(tokens), "arrival_time": time.time()}
        self._engine.add_request(key, prompt, params)

    def _params_of(self, answer: Answer) -> Any:
        sampling, had = answer.sampling, len(answer.tokens)
        stops = {stop for stop in sampling.stop if isinstance(stop, int)}
        end = frozenset[int]() if sampling.ignore_eos else self.vocabulary.end
        seeded = (self._seeds or sampling.seed is not None) and sampling.temperature > 0
        return self._params(
            max_tokens=sampling.max_tokens - had,
            temperature=sampling.temperature,
            # What draws by seed does it by top_p itself, and leaves one token.
            top_p=sampling.top_p,
            logprobs=sampling.logprobs,
            stop_token_ids=sorted(stops | end) or None,
            ignore_eos=True,  # vLLM has no tokenizer here; the end tokens are among the stops
            extra_args={EXTRA: (answer.seed, answer.sample, had)} if seeded else None,
            detokenize=False,
            output_kind=self._delta,
        )

    def step(self) -> Iterable[Drawn]:
        """See :class:`Machine`."""
        self._check()
        if self._ahead:
            ahead, self._ahead = self._ahead, []
            return ahead
        return self._stepped()

    def _stepped(self) -> list[Drawn]:
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._broken = f"vLLM's engine failed: {type(error).__name__}: {error}"
            raise
        drawn: list[Drawn] = []
        for output in outputs:
            answer = self._answers.get(output.request_id)
            if answer is not None:
                drawn += _drawn(answer, output.outputs[0])
        return drawn

    def remove(self, answers: Sequence[Answer]) -> None:
        """See :class:`Machine`."""
        keys = [key for key in (str(one.key) for one in answers) if self._answers.pop(key, None) is not None]
        if keys and self._broken is None:
            self._engine.abort_request(keys)

    def weights_changed(self) -> None:
        """See :class:`Machine`; :meth:`load` has seen to it."""

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take other weights, all of them; what is under way goes on with them, and what is kept of prompts is dropped.

        Raises:
            WeightsError: vLLM failed at it, and cannot be used any more.
        """
        self._check()
        self._take_back()
        try:
            self._engine.collective_rpc(reload, args=(pairs,))
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
        """See :class:`Machine`; what the answers under way have in it is computed again."""
        self._check()
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            self._broken = "vLLM did not drop what it keeps of prompts"
            raise InternalError(
                f"{self._broken}, so that answers could be of two versions; restart the group"
            )

    def prompt_log_probs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """See :class:`Machine`. Tokens that others get meanwhile are told in the next step."""
        self._check()
        found: dict[str, list[float]] = {}
        keys: list[str] = []
        for prompt in prompts:
            self._asked += 1
            keys.append(f"prompt-{self._asked}")
            params = self._params(max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False)
            self._ask(keys[-1], prompt, params)
        while len(found) < len(keys):
            for output in self._engine.step():
                if output.request_id in keys:
                    found[output.request_id] = _of_prompt(output)
                elif output.request_id in self._answers:
                    self._ahead += _drawn(self._answers[output.request_id], output.outputs[0])
        return [found[key] for key in keys]

    def cache_use(self) -> float:
        """See :class:`Machine`."""
        return float(self._engine.engine_core.engine_core.scheduler.kv_cache_manager.usage)

    def why_not(self, what: str) -> str:
        """See :class:`Machine`."""
        if what == "sleep":
            return "vLLM gives no memory back on CPUs" if on_cpu() else "bind it with enable_sleep_mode=True"
        return super().why_not(what)

    def sleep(self, tags: Sequence[str]) -> None:
        """See :class:`Machine`."""
        self.reset_cache()
        self._engine.sleep(level=1, mode="keep")

    def wake(self, tags: Sequence[str]) -> None:
        """See :class:`Machine`."""
        self._engine.wake_up(tags=list(tags))

    def close(self) -> None:
        """See :class:`Machine`."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._broken = "it was closed"
            if isinstance(engine, Leader):
                engine.dismiss()
            engine.engine_core.shutdown()

    def _check(self) -> None:
        if self._broken is not None:
            raise PhalanxError(f"this engine cannot be used any more, since {self._broken}: group.restart()")


def _drawn(answer: Answer, output: Any) -> Iterable[Drawn]:
    tokens = list(output.token_ids)
    for at, token in enumerate(tokens):
        told = None if output.logprobs is None else output.logprobs[at]
        finish = _finish(output.finish_reason) if at == len(tokens) - 1 else None
        if told is None:
            yield Drawn(answer, token, finish=finish)
            continue
        yield Drawn(answer, token, told[token].logprob, _top(told, answer.sampling.logprobs or 0), finish)


def _finish(reason: str | None) -> FinishReason | None:
    return "stop" if reason == "stop" else "length" if reason == "length" else None


def _top(told: dict[int, Any], count: int) -> dict[int, float] | None:
    if not count:
        return None
    likeliest = sorted(told.items(), key=lambda pair: pair[1].rank)[:count]
    return {token: one.logprob for token, one in likeliest}


def _of_prompt(output: Any) -> list[float]:
    tokens = output.prompt_token_ids[1:]
    return [
        one[token].logprob if one else math.nan
        for token, one in zip(tokens, output.prompt_logprobs[1:], strict=True)
    ]


def _end_tokens(model_config: Any, hf: Any) -> frozenset[int]:
    """The model's end tokens, as its generation settings have them, else its configuration."""
    settings = model_config.try_get_generation_config() or {}
    told = settings.get("eos_token_id", getattr(hf, "eos_token_id", None))
    if told is None:
        return frozenset()
    return frozenset([told] if isinstance(told, int) else told)
