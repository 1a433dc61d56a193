"""vLLM's ``AsyncLLM`` as a model runner. Its engine samples tokens in its own processes; steps collect them."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from pkgutil import resolve_name
from typing import Any

import torch

from phalanx.backends.ray.reaper import remove_folder
from phalanx.engines.engine import TAGS
from phalanx.engines.engine_requests import Answer, ModelRunner, SampledToken
from phalanx.engines.engine_types import Capabilities, Decode, Vocabulary, end_tokens
from phalanx.engines.vllm.endpoint import EndpointServer
from phalanx.engines.vllm.vllm_sampling import PROCESSOR, sampled_tokens, sampling_params
from phalanx.engines.vllm.vllm_weights import EXTENSION
from phalanx.errors import DeclarationError, InternalError, PhalanxError, WeightsError
from phalanx.weights.shared_memory import location_of
from phalanx.worker.control import MARK_VARIABLE

_CPU_CACHE_BYTES = 512 << 20
_END_S = 10.0
_EXIT_S = 2.0
"""Seconds for the shutdown of vLLM, which takes about one. Processes that take longer to exit are killed."""


class VllmRunner(ModelRunner):
    """Model runner of an ``AsyncLLM``, whose own event loop and thread continue while the rank is busy.

    Args:
        options: the user's options of vLLM's ``AsyncEngineArgs``.
        text: function that decodes tokens, or None.
        server: HTTP server that serves the ``AsyncLLM`` until :meth:`close`, or None.
        seeds: see :func:`sampling_params`.

    Raises:
        DeclarationError: if an option is unknown to vLLM, or set by the runner itself.
    """

    def __init__(
        self, options: dict[str, Any], text: Decode | None, server: EndpointServer | None, *, seeds: bool
    ) -> None:
        self._server, self._seeds = server, seeds
        self._running: dict[int, Future[None]] = {}
        self._sampled: list[SampledToken] = []  # for the next step; used on the loop of ``llm`` only
        self._changed = asyncio.Event()  # the pending step may end
        self._is_held = False
        self._asleep = frozenset[str]()
        self._broken: str | None = None
        self._version, self._cache_use = 0, 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="phalanx-vllm", daemon=True)
        self._thread.start()
        # If the rank is killed, folders with its mark are removed, together with what they link to.
        mark = os.environ.get(MARK_VARIABLE, "inline")
        self._sockets = tempfile.mkdtemp(prefix=f"phalanx-{mark}-")
        os.environ["VLLM_RPC_BASE_PATH"] = self._sockets
        self.llm: Any = None
        try:
            self.wait(self._start(_engine_arguments(options)))
        except BaseException:
            self.close()
            raise
        # Only copies of weights use torch here; more threads would compete with the threads of vLLM's processes.
        torch.set_num_threads(1)
        self.model_config = config = self.llm.vllm_config.model_config
        self._slots: int = self.llm.vllm_config.scheduler_config.max_num_seqs
        generation = config.try_get_generation_config() or {}
        end = generation.get("eos_token_id", getattr(config.hf_text_config, "eos_token_id", None))
        self.vocabulary = Vocabulary(config.max_model_len, end_tokens(end), config.get_vocab_size(), text)
        sleep = bool(config.enable_sleep_mode) and not on_cpu()
        top = config.get_vocab_size() if config.max_logprobs < 0 else config.max_logprobs
        self.capabilities = Capabilities(config.max_model_len, sleep, top=top, text=text is not None)

    async def _start(self, arguments: Any) -> None:
        runner = self

        class Metrics(resolve_name("vllm.v1.metrics.loggers:PrometheusStatLogger")):
            def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
                super().record(scheduler_stats, *args, **kwargs)
                if scheduler_stats is not None:
                    runner._cache_use = float(scheduler_stats.kv_cache_usage)

        llm_class = resolve_name("vllm.v1.engine.async_llm:AsyncLLM")
        self.llm = llm_class.from_engine_args(arguments, stat_loggers=[Metrics])
        for path in set[str]().union(*await self.llm.collective_rpc("phalanx_shared_memory")):
            os.symlink(path, f"{self._sockets}/{os.path.basename(path)}")
        if self._server is not None:
            await self._server.start(self.llm, arguments)

    def wait(self, work: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        """Run ``work`` on the event loop of ``llm``, and return its result. Must not be called on that loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def room(self) -> int | None:
        return max(0, 2 * self._slots - len(self._running))  # so that vLLM never waits for answers

    def add(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._running[answer.key] = asyncio.run_coroutine_threadsafe(self._follow(answer), self._loop)

    async def _follow(self, answer: Answer) -> None:
        """Generate the tokens of an answer. Clients of vLLM's server cannot guess the names of its requests."""
        name = f"{secrets.token_hex(8)}-{answer.key}"
        try:
            prompt = {"type": "token", "prompt_token_ids": answer.so_far, "arrival_time": time.time()}
            params = sampling_params(answer, seeds=self._seeds)
            async for output in self.llm.generate(prompt, params, name):
                self._sampled += list(sampled_tokens(answer, output.outputs[0], self._version))
                self._changed.set()
        except Exception as error:
            why = f"vLLM raised {type(error).__name__}: {error}"
            if self.llm.errored:
                self._broken = why  # the next step raises the error
            else:
                self._sampled.append(SampledToken(answer, None, finish="error", error=why))
            self._changed.set()

    async def step(self) -> Iterable[SampledToken]:
        self._check()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._next_tokens(), self._loop))

    async def _next_tokens(self) -> Iterable[SampledToken]:
        """Wait for the tokens of a step of vLLM: the tasks that the step wakes run before this one."""
        while self._running and not (self._sampled or self._is_held or self._broken):
            self._changed.clear()
            await self._changed.wait()
        sampled, self._sampled = self._sampled, []
        return sampled

    def _end_step(self) -> None:
        """End the pending step, if there is a reason."""
        self._loop.call_soon_threadsafe(self._changed.set)

    def remove(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if answer.key in self._running:
                self._running.pop(answer.key).cancel()
        self._end_step()

    def weights_changed(self) -> None:
        """Do nothing: :meth:`load` drops vLLM's results of the old weights."""

    def hold(self) -> None:
        if not self._is_held and self._broken is None:
            self.wait(self.llm.pause_generation(mode="keep", clear_cache=False))
        self._is_held = True
        self._end_step()

    def release(self) -> None:
        if self._is_held and self._broken is None:
            self.wait(self.llm.resume_generation())
        self._is_held = False

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load the weights of a version from all pairs of name and tensor; running answers continue with them.

        Raises:
            WeightsError: if vLLM fails to load them; the engine cannot be used any more.
        """
        self._check()
        location = location_of(dict(pairs))
        try:
            self.wait(self._load(location, version))
        except BaseException as error:
            self._broken = f"a load of weights failed in vLLM: {type(error).__name__}: {error}"
            self._end_step()  # so that running answers raise WeightsTorn
            raise WeightsError(f"{self._broken}; the group has to be restarted: group.restart()") from error

    async def _load(self, location: bytes, version: int) -> None:
        # not pause_generation, which waits 20 ms more for tokens on their way: the load takes longer anyway
        await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        await self.llm.collective_rpc("phalanx_load", args=(location,))
        await self._reset_cache()
        await self.llm.update_weight_version(str(version))
        self._version = version
        if not self._is_held:
            await self.llm.resume_generation()

    async def _reset_cache(self) -> None:
        if not await self.llm.reset_prefix_cache(reset_running_requests=True):
            raise InternalError("vLLM did not drop its cache of prompts")

    def reset_cache(self) -> None:
        self._check()
        self.wait(self._reset_cache())

    def cache_use(self) -> float:
        return self._cache_use

    def sleep(self, tags: Sequence[str]) -> None:
        self.reset_cache()
        if not self._asleep.issuperset(tags):  # vLLM puts all parts to sleep together, from awake
            awake = set(TAGS).difference(tags, self._asleep)
            self.wake(TAGS)
            self.wait(self.llm.sleep(level=1, mode="keep"))
            self._asleep = frozenset(TAGS)
            self.wake([*awake])

    def wake(self, tags: Sequence[str]) -> None:
        if asleep := self._asleep.intersection(tags):
            self.wait(self.llm.wake_up(tags=sorted(asleep, key=TAGS.index)))
            self._asleep -= asleep
            if self._is_held and not self._asleep:  # vLLM continues as soon as all parts are awake
                self.wait(self.llm.pause_generation(mode="keep", clear_cache=False))

    def close(self) -> None:
        if self._thread.is_alive():
            self._broken = "it was closed"
            try:
                self.wait(self._shut_down(), _END_S)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(_END_S)
                if not self._thread.is_alive():
                    self._loop.close()
                remove_folder(self._sockets)  # vLLM removes its shared memory, unless it was killed

    async def _shut_down(self) -> None:
        if self._server is not None:
            await self._server.stop()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        if self.llm is not None:
            self.llm.shutdown(timeout=_EXIT_S)

    def _check(self) -> None:
        if self._broken is not None:
            raise PhalanxError(f"this engine cannot be used any more, since {self._broken}: group.restart()")


def on_cpu() -> bool:
    """Return whether this vLLM was built for CPUs."""
    return bool(resolve_name("vllm.platforms:current_platform").is_cpu())


def _engine_arguments(options: dict[str, Any]) -> Any:
    """Return vLLM's ``AsyncEngineArgs`` from defaults, the user's options, and the runner's needs.

    Raises:
        DeclarationError: if an option is unknown to vLLM, or set by the runner itself.
    """
    defaults: dict[str, Any] = {
        "seed": secrets.randbits(31),
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "logprobs_mode": "raw_logprobs",
    }
    size = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    if on_cpu():
        defaults["enforce_eager"] = True
        if options.get("enforce_eager", True):
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else log_softmax is compiled: half a minute
        if not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & options.keys():
            defaults["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES  # vLLM would take most of the memory
        if size > 1:  # the engine's processes share the threads of the rank
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            threads = os.environ.get("OMP_NUM_THREADS", "")
            if threads.isdigit():
                os.environ["OMP_NUM_THREADS"] = str(max(1, int(threads) // size))
    needed: dict[str, Any] = {
        "async_scheduling": False,  # a token is reported before the next step
        "data_parallel_size": 1,
        "distributed_executor_backend": "mp" if size > 1 else None,  # inside Ray, vLLM would start actors
        "logits_processors": [PROCESSOR],
        "worker_extension_cls": EXTENSION,
    }
    for name in needed.keys() & options.keys():
        raise DeclarationError(f"VllmRollout({name}=...): this engine sets {name}; leave it out")
    try:
        return resolve_name("vllm.engine.arg_utils:AsyncEngineArgs")(**{**defaults, **options, **needed})
    except TypeError as error:
        raise DeclarationError(f"VllmRollout: {error}; expected options of this vLLM's engine") from error
