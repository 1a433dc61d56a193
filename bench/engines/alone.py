"""vLLM in a process of its own, without anything of ours."""

from __future__ import annotations

import os
import time
from typing import Any

from bench.engines.setup import OPTIONS, TOKENS, model_of, prompts
from bench.protocol import serve


class Alone:
    """An ``LLMEngine`` in this process, driven as vLLM's own ``LLM`` does it."""

    def handle(self, op: str, given: dict[str, Any]) -> float:
        """Do one thing; its seconds."""
        began = time.perf_counter()
        if op == "open":
            self._open(given["folder"])
        elif op == "generate":
            self._generate(prompts(), TOKENS)
        elif op == "prepare":
            self._state = dict(model_of(self._folder).state_dict())
        elif op == "load":
            self._engine.collective_rpc(_reload, args=(iter(self._state.items()),))
        return time.perf_counter() - began

    def _open(self, folder: str) -> None:
        """Up to the first token."""
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="ERROR",
            TORCHDYNAMO_DISABLE="1",
        )
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._folder = folder
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(model=folder, skip_tokenizer_init=True, **OPTIONS)
        )
        self._generate([[1, 2, 3]], 1)

    def _generate(self, some: list[list[int]], count: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=count, ignore_eos=True, logprobs=0, detokenize=False)
        for number, prompt in enumerate(some):
            self._engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        tokens = 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens += len(output.outputs[0].token_ids) if output.finished else 0
        if tokens != count * len(some):
            raise RuntimeError(f"vLLM gave {tokens} tokens for {len(some)} requests of {count}")


def _reload(worker: Any, pairs: Any) -> None:
    """What vLLM itself does for new weights."""
    worker.reload_weights(weights_iterator=pairs, is_checkpoint_format=True)


if __name__ == "__main__":
    serve(Alone().handle)
