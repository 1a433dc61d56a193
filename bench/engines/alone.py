"""vLLM alone, without Phalanx."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from bench.engines.setup import OPTIONS, TOKENS, model_of, prompts
from bench.protocol import serve


class Alone:
    """An ``AsyncLLM``, as in `vllm serve`, and for updates an ``LLMEngine`` in this process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def handle(self, op: str, given: dict[str, Any]) -> float:
        """Run an operation and return its seconds."""
        began = time.perf_counter()
        if op == "open":
            self._folder = given["folder"]
            self._loop.run_until_complete(self._open())
        elif op == "generate":
            self._loop.run_until_complete(self._generate(prompts(), TOKENS))
        elif op == "prepare":
            self._prepare()
        elif op == "load":
            self._engine.collective_rpc(_reload, args=(iter(self._state.items()),))
        elif op == "close":
            self._llm.shutdown()
        return time.perf_counter() - began

    async def _open(self) -> None:
        """Start the engine and generate the first token."""
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="ERROR",
            TORCHDYNAMO_DISABLE="1",
        )
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(model=self._folder, skip_tokenizer_init=True, **OPTIONS)
        self._llm = AsyncLLM.from_engine_args(arguments)
        await self._generate([[1, 2, 3]], 1)

    def _prepare(self) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._llm.shutdown()
        arguments = EngineArgs(model=self._folder, skip_tokenizer_init=True, **OPTIONS)
        self._engine = LLMEngine.from_engine_args(arguments)
        self._state = dict(model_of(self._folder).state_dict())

    async def _generate(self, some: list[list[int]], count: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA
        options = {"max_tokens": count, "ignore_eos": True, "logprobs": 0, "detokenize": False}
        params = SamplingParams(**options, output_kind=kind)

        async def one(number: int, prompt: list[int]) -> int:
            given = {"prompt_token_ids": prompt}
            outputs = self._llm.generate(given, params, str(number))
            return sum([len(output.outputs[0].token_ids) async for output in outputs])

        tokens = sum(await asyncio.gather(*(one(*pair) for pair in enumerate(some))))
        if tokens != count * len(some):
            raise RuntimeError(f"vLLM gave {tokens} tokens for {len(some)} requests of {count}")


def _reload(worker: Any, pairs: Any) -> None:
    """Load new weights as vLLM does."""
    worker.reload_weights(weights_iterator=pairs, is_checkpoint_format=True)


if __name__ == "__main__":
    serve(Alone().handle)
