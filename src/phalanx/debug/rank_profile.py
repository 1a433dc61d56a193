"""The side of ``group.profile`` that runs on ranks: a profiler around the requested calls."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.errors import DeclarationError
from phalanx.wire.messages import RUN, full_name, is_library_call
from phalanx.wire.value import lazy

if TYPE_CHECKING:  # a driver needs the names here, and no torch or runtime
    import torch
    import torch.profiler as torch_profiler

    from phalanx.worker.worker_runtime import WorkerRuntime
else:
    torch = lazy("torch")
    torch_profiler = lazy("torch.profiler")

#: Set by Nsight Systems in every process that it profiles.
NSYS_VARIABLE = "NSYS_PROFILING_SESSION_ID"

#: Key of the profile that is armed in this process, "" if none; a process has one profiler, however many ranks.
_running_profile = ""


@dataclass(frozen=True)
class ProfileOrder:
    """The calls to profile, and how.

    Attributes:
        calls: number of calls.
        role: role of the calls; "": every role.
        tool: "torch" or "nsys".
        options: further options of the profiler.
    """

    calls: int
    role: str = ""
    tool: str = "torch"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class ProfileReport:
    """Result of a rank: names of the profiled and failed calls, and the trace, if any, as gzip of Chrome's JSON."""

    calls: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    trace: bytes | None = None
    note: str = ""


class Profiling:
    """The profile of a rank. The profiler starts with the first call of the role and stops after the last.

    Raises:
        DeclarationError: if the rank does not have the tool, or if another profile is armed in this process.
    """

    def __init__(self, key: str, order: ProfileOrder) -> None:
        global _running_profile
        if _running_profile:
            raise DeclarationError(
                "a profile is already running in this process, and there is one profiler per process: end the other "
                "one first (.wait()); with backend='inline' all ranks are one process, so profile one rank at a time "
                "or use the ray backend"
            )
        self.key = key
        self._order = order
        self._tool = _Nsys() if order.tool == "nsys" else _Torch(order)
        self._report = ProfileReport()
        self._running = False
        self._over = False
        _running_profile = key

    def finish(self) -> ProfileReport:
        """Stop the profiler, and return the report."""
        global _running_profile
        if _running_profile == self.key:
            _running_profile = ""
        with self._noting_errors():
            self._stop()
        return self._report

    def lost(self, reason: str) -> None:
        """Free the profiler for other ranks of this process: this rank has ended, and the process lives on."""
        self.finish()

    @contextmanager
    def span(self, role: str, method: str) -> Generator[None]:
        """Run a call in a span, if it is a user's call of the profiled role and the profile is not over."""
        if self._over or is_library_call(method) or self._order.role not in ("", role):
            yield
            return
        name, opened = full_name(role, "run" if method == RUN else method), ExitStack()
        with self._noting_errors():
            if not self._running:
                self._tool.start()
                self._running = True
            opened.enter_context(self._tool.span(name))
            self._report.calls.append(name)
        try:
            yield
        except BaseException as error:
            self._report.failed.append(f"{name}: {type(error).__name__}")
            raise
        finally:
            with self._noting_errors():
                opened.close()
                if len(self._report.calls) >= self._order.calls:
                    self._stop()

    def _stop(self) -> None:
        self._over = True
        if self._running:
            self._running = False
            self._report.trace = self._tool.stop()

    @contextmanager
    def _noting_errors(self) -> Generator[None]:
        """Let an error of the profiler end the profile, but not the call."""
        try:
            yield
        except Exception as error:
            self._over = True
            self._report.note = f"the profiler failed: {type(error).__name__}: {error}"


def arm_profile(runtime: WorkerRuntime, key: str, order: ProfileOrder) -> None:
    """Profile the next calls of this rank.

    Raises:
        DeclarationError: if calls of the rank interleave, or :class:`Profiling` raises it.
    """
    if runtime.context.asynchronous:
        raise DeclarationError(
            "profile(): the group was made with max_concurrency, so its calls interleave on one thread and no trace "
            "would be of one call; profile a group without it, or call torch.profiler in the worker itself"
        )
    runtime.context.shared[key] = profiling = Profiling(key, order)
    runtime.around = profiling.span
    runtime.closers.if_lost.append(profiling.lost)


def end_profile(runtime: WorkerRuntime, key: str) -> ProfileReport:
    """Stop the profile of this rank, and return its report.

    Raises:
        DeclarationError: if the rank refused the profile, or was restarted since.
    """
    profiling: Profiling | None = runtime.context.shared.pop(key, None)
    if profiling is None:
        raise DeclarationError("this rank has no such profile: it refused it, or was restarted since")
    runtime.closers.if_lost.remove(profiling.lost)
    runtime.around = None
    return profiling.finish()


class _Torch:
    """torch.profiler, from the first call to the last.

    Without CUDA it is paused between calls. With CUDA it is not, because torch would then put kernels on wrong
    tracks: the rank's work between two calls is in the trace, without a name.
    """

    def __init__(self, order: ProfileOrder) -> None:
        self._cuda = torch.cuda.is_available()
        self._profile = torch_profiler.profile(**order.options)

    def start(self) -> None:
        self._profile.start()
        self._collect(False)

    @contextmanager
    def span(self, name: str) -> Generator[None]:
        self._collect(True)
        try:
            with torch_profiler.record_function(name):
                yield
        finally:
            self._collect(False)

    def _collect(self, on: bool) -> None:
        if not self._cuda:
            self._profile.toggle_collection_dynamic(on, [torch_profiler.ProfilerActivity.CPU])

    def stop(self) -> bytes | None:
        if self._cuda:
            torch.cuda.synchronize()  # kernels that still run would be missing
        self._profile.stop()
        with tempfile.TemporaryDirectory(prefix="phalanx-profile-") as folder:
            path = os.path.join(folder, "trace.json.gz")
            self._profile.export_chrome_trace(path)
            with open(path, "rb") as file:
                return file.read()


class _Nsys:
    """Nsight Systems around the process. This class starts and stops its recording; it writes its own file.

    It records between calls too, which have NVTX ranges of their own.
    """

    def __init__(self) -> None:
        if NSYS_VARIABLE not in os.environ:
            raise DeclarationError(
                'profile(tool="nsys"): this rank was not started under Nsight Systems, which cannot be attached to a '
                "process that runs. Start the group with runtime_env=px.debug.nsight_environment(), where "
                "nsys is installed on the nodes"
            )
        if not torch.cuda.is_available():
            raise DeclarationError('profile(tool="nsys"): this rank has no CUDA device; use tool="torch"')

    def start(self) -> None:
        torch.cuda.profiler.start()

    def span(self, name: str) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name)

    def stop(self) -> bytes | None:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        return None
