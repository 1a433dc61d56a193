"""vLLM's ``AsyncLLM`` on a thread with an event loop of its own; its engine core is another process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from phalanx.backends.temp_folder import OwnFolder
from phalanx.engines.vllm.shared_memory import disown_semaphores, own_semaphores, unlink_shared_memory
from phalanx.engines.vllm.vllm_imports import arguments_of, find
from phalanx.errors import PhalanxError
from phalanx.worker.control import MARK_VARIABLE

__all__ = ["AsyncCore"]

T = TypeVar("T")

_SOCKETS = "VLLM_RPC_BASE_PATH"
_END_S = 10.0
_TELL_S = 60.0
_log = logging.getLogger("phalanx")


class AsyncCore:
    """An ``AsyncLLM`` and its loop. ``llm`` is only to be used on that loop.

    Args:
        arguments: of vLLM's ``AsyncEngineArgs``.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.cache_use = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="phalanx-vllm", daemon=True)
        self._thread.start()
        self.llm: Any = None
        try:
            self.llm = self._patiently(self._made(arguments))
        except BaseException:
            self._end_loop()
            raise

    def _patiently(self, work: Coroutine[Any, Any, T]) -> T:
        """As :meth:`wait`; now and then the log says what for."""
        began, future = time.monotonic(), asyncio.run_coroutine_threadsafe(work, self._loop)
        while not concurrent.futures.wait([future], _TELL_S).done:
            late = ", ".join(f"{one.name} (pid {one.pid})" for one in multiprocessing.active_children())
            _log.warning(
                "vLLM's engine is not up after %.0f s: waiting for %s",
                time.monotonic() - began,
                late or "vLLM to start its processes",
            )
        return future.result()

    async def _made(self, arguments: dict[str, Any]) -> Any:
        """Start the engine; afterwards nothing of it has a name, so that nothing is left however it ends."""
        before, others, ends = os.environ.get(_SOCKETS), own_semaphores(), contextlib.ExitStack()
        os.environ[_SOCKETS] = _folder_of_sockets(ends)
        try:
            given = arguments_of("AsyncEngineArgs", arguments)
            engine = find("vllm.v1.engine.async_llm.AsyncLLM")
            made = engine.from_engine_args(given, stat_loggers=[self._listener()])
            try:
                await made.collective_rpc("phalanx_disown")
                await made.collective_rpc("phalanx_unlink")
            except BaseException:
                made.shutdown()
                raise
            disown_semaphores(but=others)
            unlink_shared_memory()
            return made
        finally:
            # All ends of the sockets are connected by now.
            ends.close()
            if before is None:
                del os.environ[_SOCKETS]
            else:
                os.environ[_SOCKETS] = before

    def _listener(self) -> Any:
        """The class of what vLLM tells its statistics."""
        core = self

        class Listener(find("vllm.v1.metrics.loggers.StatLoggerBase")):  # vLLM is there only now
            def __init__(self, vllm_config: object, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is not None:
                    core.cache_use = float(scheduler_stats.kv_cache_usage)

            def log_engine_initialized(self) -> None:
                pass

        return Listener

    def wait(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run this on the loop, and wait for what it gives; not to be called on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def soon(self, work: Coroutine[Any, Any, object]) -> None:
        """Run this on the loop."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End the engine's processes, and the loop."""
        if self.llm is not None:
            self.wait(self._ended(), _END_S)
        self._end_loop()

    async def _ended(self) -> None:
        llm, self.llm = self.llm, None
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2.0)
        llm.shutdown(timeout=5)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)
        if self._thread.is_alive():
            raise PhalanxError("the thread of vLLM's client did not end")
        self._loop.close()


def _folder_of_sockets(ends: contextlib.ExitStack) -> str:
    """A folder that ``ends`` removes. It goes with this process, too, where that is killed during the start."""
    mark = os.environ.get(MARK_VARIABLE)
    if mark is None:  # inline
        own = OwnFolder()
        ends.callback(own.close)
        return own.path
    folder = tempfile.mkdtemp(prefix=f"phalanx-{mark}-")
    ends.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder
