"""A rank's part of ``group.profile``: a profiler that runs while the calls run that were asked for."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.errors import DeclarationError
from phalanx.wire.lazy import lazy
from phalanx.worker.hooks import End, Only, Seen, Wanted
from phalanx.worker.worker_runtime import WorkerRuntime

if TYPE_CHECKING:
    import torch
    import torch.profiler as torch_profiler

else:
    torch = lazy("torch")
    torch_profiler = lazy("torch.profiler")

#: Set by Nsight Systems in every process that it profiles.
NSYS_VARIABLE = "NSYS_PROFILING_SESSION_ID"

_only = Only(
    "a profile is under way in this process already, and there is one profiler per process: end the other one first "
    "(.wait()); with backend='inline' all ranks are one process, so profile one rank at a time or use the ray backend"
)


@dataclass(frozen=True)
class ProfileOrder:
    """What to profile: the next ``calls`` that fit, by which tool, for which activities ("cpu", "cuda")."""

    calls: int
    wanted: Wanted
    tool: str = "torch"
    activities: tuple[str, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class ProfileReport:
    """What a rank gives back: the profiled calls by name, the trace (gzip of Chrome's JSON) if there is one."""

    calls: tuple[str, ...]
    failed: tuple[str, ...]
    trace: bytes | None
    note: str = ""


class _Session(Protocol):
    def start(self) -> None: ...
    def resume(self) -> None: ...
    def pause(self) -> None: ...
    def span(self, name: str) -> AbstractContextManager[Any]: ...
    def stop(self) -> bytes | None: ...


class Profiling:
    """The hook. The profiler starts with the first call that fits and stops after the last."""

    def __init__(self, key: str, order: ProfileOrder) -> None:
        self._key = key
        self._order = order
        self._session: _Session = _nsys(order) if order.tool == "nsys" else _Torch(order)
        self._calls: list[str] = []
        self._failed: list[str] = []
        self._running = False
        self._over = False
        self._trace: bytes | None = None
        self._note = ""

    def begin(self, seen: Seen) -> End | None:
        if self._over or not self._order.wanted.fits(seen):
            return None
        try:
            (self._session.resume if self._running else self._session.start)()
            self._running = True
            span = self._session.span(seen.name)
            span.__enter__()
        except Exception as error:
            return self._give_up(error)
        self._calls.append(seen.name)

        def end(error: BaseException | None) -> None:
            with self._cautiously():
                span.__exit__(None, None, None)
                if error is not None:
                    self._failed.append(f"{seen.name}: {type(error).__name__}")
                if len(self._calls) >= self._order.calls:
                    self._stop()
                else:
                    self._session.pause()

        return end

    def finish(self) -> ProfileReport:
        with self._cautiously():
            self._stop()
        _only.give_back(self._key)
        return ProfileReport(tuple(self._calls), tuple(self._failed), self._trace, self._note)

    def _stop(self) -> None:
        self._over = True
        running, self._running = self._running, False
        if running:
            self._trace = self._session.stop()

    @contextlib.contextmanager
    def _cautiously(self) -> Generator[None]:
        """A profiler that fails spoils the profile, not the call."""
        try:
            yield
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._over = True
        self._note = f"the profiler failed: {type(error).__name__}: {error}"


class _Torch:
    """torch.profiler, from the first call to the last.

    Without CUDA it is paused between calls. With CUDA it is not, since torch would then put kernels on wrong tracks:
    what the rank does between two calls is in the trace, without a name.
    """

    def __init__(self, order: ProfileOrder) -> None:
        self._kinds = _activities(order.activities)
        self._cuda = torch_profiler.ProfilerActivity.CUDA in self._kinds
        self._profile = torch_profiler.profile(activities=self._kinds, **order.options)

    def start(self) -> None:
        self._profile.start()

    def resume(self) -> None:
        if not self._cuda:
            self._profile.toggle_collection_dynamic(True, self._kinds)

    def pause(self) -> None:
        if not self._cuda:
            self._profile.toggle_collection_dynamic(False, self._kinds)

    def span(self, name: str) -> AbstractContextManager[Any]:
        return torch_profiler.record_function(name)

    def stop(self) -> bytes | None:
        if self._cuda:
            torch.cuda.synchronize()  # kernels that still run would be missing
        self._profile.stop()
        with tempfile.TemporaryDirectory(prefix="phalanx-profile-") as folder:
            path = os.path.join(folder, "trace.json.gz")
            self._profile.export_chrome_trace(path)
            with open(path, "rb") as file:
                return file.read()


def _activities(names: tuple[str, ...] | None) -> list[Any]:
    known = torch_profiler.ProfilerActivity
    available = {"cpu": known.CPU} | ({"cuda": known.CUDA} if torch.cuda.is_available() else {})
    if names is None:
        return list(available.values())
    missing = [name for name in names if name not in available]
    if missing:
        raise DeclarationError(
            f"profile(activities={list(names)}): this rank has no {missing[0]}, only {list(available)}"
        )
    return [available[name] for name in names]


class _Nsys:
    """Nsight Systems around the process: it is told where to begin and where to stop, and writes its own file."""

    def start(self) -> None:
        torch.cuda.profiler.start()

    def resume(self) -> None:
        """It goes on between calls, which have NVTX ranges of their own."""

    def pause(self) -> None:
        """See resume."""

    def span(self, name: str) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name)

    def stop(self) -> bytes | None:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        return None


def _nsys(order: ProfileOrder) -> _Session:
    if NSYS_VARIABLE not in os.environ:
        raise DeclarationError(
            'profile(tool="nsys"): this rank was not started under Nsight Systems, which cannot be attached to a '
            "process that runs. Start the group with runtime_env=px.debug.nsight_environment(), where "
            "nsys is installed on the nodes"
        )
    if not torch.cuda.is_available():
        raise DeclarationError('profile(tool="nsys"): this rank has no CUDA device; use tool="torch"')
    return _Nsys()


def arm_profile(host: WorkerRuntime, key: str, order: ProfileOrder) -> None:
    """Runs on the rank: profile its next calls.

    Raises:
        DeclarationError: the tool or an activity is not to be had here, or another profile is under way.
    """
    if host.place is not None and host.place.asynchronous:
        raise DeclarationError(
            "profile(): the group was made with max_concurrency, so its calls interleave on one thread and no trace "
            "would be of one call; profile a group without it, or call torch.profiler in the worker itself"
        )
    _only.take(key)
    try:
        host.hooks.add(key, Profiling(key, order))
    except BaseException:
        _only.give_back(key)
        raise


def end_profile(host: WorkerRuntime, key: str) -> ProfileReport:
    """Runs on the rank: stop, and give what there is."""
    return host.hooks.take(key).finish()
