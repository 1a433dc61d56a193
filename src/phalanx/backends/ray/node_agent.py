"""Agent of a node, which observes ranks and ends them.

A :class:`NodeAgent` asks the kernel, never the rank, which may be busy for hours.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.backends.backend_types import ProcessStatus
from phalanx.backends.file_ranges import read_file
from phalanx.backends.ray import reaper
from phalanx.backends.ray.rank_processes import STOPPED, Gpu, ProcessHandle, Usage, gpus, stacks_of, usage_of
from phalanx.backends.ray.ray_errors import PostMortem, node_memory, oom_kills, read_logs
from phalanx.wire import call_page
from phalanx.wire.value import Value


class NodeAgent:
    """Looks at processes of its own node, and has the node's reaper end them."""

    def __init__(self) -> None:
        self._reaper: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._expected = False
        self._watched: dict[int, tuple[int, int, str]] = {}
        self._oom_kills = oom_kills()

    def prepare(self) -> None:
        """Start the reaper in a thread before it is needed."""
        self._expected = True
        threading.Thread(target=self._prepare, daemon=True).start()

    def _prepare(self) -> None:
        with self._lock:
            if self._expected and self._reaper is None:  # else it was dismissed before it was there
                self._reaper = _start_reaper()

    def dismiss(self) -> None:
        """End the reaper, unless it watches ranks."""
        with self._lock:
            if not self._watched:
                self._dismiss()

    def leave(self) -> None:
        """End the reaper, which first ends all ranks that it still watches."""
        with self._lock:
            self._watched.clear()
            self._dismiss()

    def watch(self, targets: Sequence[ProcessHandle]) -> None:
        """Make these ranks end with the process that created this agent, at the latest."""
        targets = [target for target in targets if target.same() is not None]
        with self._lock:
            self._note(targets)
            self._ask({"watch": [self._watched[t.pid] for t in targets if t.pid in self._watched]})

    def _note(self, targets: Sequence[ProcessHandle]) -> None:
        for target in targets:
            if target.side is not None:
                side = target.side
                self._watched[target.pid] = (target.pid, side.started, side.mark)

    def look(self, targets: Sequence[ProcessHandle]) -> None:
        """Note all descendants of the watched ranks, before these are ended."""
        with self._lock:
            if self._watched:
                self._ask({"look": True})

    def end(self, targets: Sequence[ProcessHandle]) -> tuple[int, ...]:
        """End these ranks with all their descendants; return the pids that could not be ended."""
        pids = [target.pid for target in targets]
        with self._lock:
            new = [target for target in targets if target.pid not in self._watched]
            self._note(new)
            watch = [self._watched[target.pid] for target in new if target.pid in self._watched]
            left: list[int] = self._ask({"watch": watch, "end": pids}) or []
            for pid in pids:
                self._watched.pop(pid, None)
            if not self._watched:
                self._dismiss()
        return tuple(left)

    def send_signal(self, target: ProcessHandle, signum: int) -> bool:
        """Send a signal to a rank's process, if it is still that process."""
        if target.same() is None:
            return False
        os.kill(target.pid, signum)
        return True

    def sights(self, targets: Sequence[ProcessHandle], stacks: bool) -> list[ProcessStatus]:
        """Observe each rank without calling it; with ``stacks``, also its stack if that can be read."""
        sights = [self._sight(target) for target in targets]
        if not stacks:
            return sights
        read = stacks_of(targets)
        return [sight.with_stack(text, note) for sight, (text, note) in zip(sights, read, strict=True)]

    def _sight(self, target: ProcessHandle) -> ProcessStatus:
        process = target.same()
        if process is None or target.dies():
            return ProcessStatus(reachable=False, note="its process is gone", gone=target.side is not None)
        seen = call_page.Reading({}, {})
        with contextlib.suppress(OSError):
            seen = call_page.read(target.page())
        now = time.monotonic()
        stopped = process.stopped
        return ProcessStatus(
            reachable=not stopped,
            running={call: now - begun for call, begun in seen.running.items()},
            note=STOPPED if stopped else "",
            methods=seen.methods,
            told=seen.told,
        )

    def cancel(self, targets: Sequence[ProcessHandle], calls: Mapping[str, int]) -> list[bool]:
        """Cancel a call: ranks that have not begun it drop it, the others are interrupted.

        A rank first writes that it has begun a call, and then looks for its cancellation. This function works in the
        opposite order: the rank sees the cancellation, or this function sees that the call has begun, or both.

        Args:
            targets: the processes of the ranks.
            calls: the ids of the call, by the marks of the processes: pids repeat on other nodes.

        Returns:
            For each rank whether it drops the call.
        """
        drops: list[bool] = []
        for target in targets:
            began = True
            if target.side is not None and target.same() is not None:
                with contextlib.suppress(OSError):
                    fd = target.open(target.side.page, os.O_RDWR)
                    call = calls[target.side.mark]
                    try:
                        call_page.cancel(fd, call)
                        began = call in call_page.read(os.pread(fd, call_page.SIZE, 0)).running
                    finally:
                        os.close(fd)
            drops.append(not began)
        self._tell(
            [target for target, drop in zip(targets, drops, strict=True) if not drop], call_page.INTERRUPT
        )
        return drops

    def sever(self, targets: Sequence[ProcessHandle]) -> None:
        """Cut the connections of the ranks' process groups, so that threads in a collective get an error."""
        self._tell(targets, call_page.SEVER)

    def _tell(self, targets: Sequence[ProcessHandle], request: bytes) -> None:
        for target in targets:
            if target.same() is not None:
                with contextlib.suppress(OSError):
                    target.request(request)

    def usage(self, targets: Sequence[ProcessHandle]) -> list[Usage | None]:
        """Return the memory and processor time of each process, None if it has ended."""
        return [usage_of(t.pid, t.side.started) if t.side is not None else None for t in targets]

    def gpus(self, targets: Sequence[ProcessHandle]) -> list[list[Gpu]]:
        """Return the accelerators of this node, once for each rank."""
        return [gpus()] * len(targets)

    def read(self, target: ProcessHandle, path: str, offset: int, limit: int) -> bytes | str:
        """Return bytes of a file of this node, or the error as text ("": the file does not exist)."""
        try:
            return read_file(path, offset, limit)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return str(error)

    def post_mortem(self, target: ProcessHandle) -> PostMortem:
        """Return the last output of a rank whose process has died."""
        kills = oom_kills()
        with self._lock:
            memory = self._ask({"memory": target.pid}) if target.pid in self._watched else 0
        risen, self._oom_kills = kills - self._oom_kills, kills
        return read_logs(target.log_paths)._replace(
            oom_kills=risen, memory=memory or 0, node_memory=node_memory()
        )

    def _ask(self, request: Mapping[str, Any]) -> Value:
        """Send a request to the reaper, which the first request starts. The caller holds the lock."""
        for _ in range(2):
            if self._reaper is None:  # or the reaper was killed: a new process is told of all ranks
                self._reaper = _start_reaper()
                request = {**request, "watch": list(self._watched.values())}
            child = self._reaper
            if child.stdin is None or child.stdout is None:
                return None
            try:
                child.stdin.write(json.dumps(request).encode() + b"\n")
                child.stdin.flush()
                line = child.stdout.readline()
                if line:
                    return json.loads(line)
            except (BrokenPipeError, ValueError):
                pass
            self._dismiss()
        return None

    def _dismiss(self) -> None:
        """Close the pipes of the reaper: it ends the ranks that it still watches, and exits. Under the lock."""
        child, self._reaper, self._expected = self._reaper, None, False
        if child is not None:
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()


def _start_reaper() -> subprocess.Popen[bytes]:
    own = reaper.look_at(os.getpid())
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), str(own.started if own else 0)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    child.wait(10.0)  # this process forks and exits; its child is the reaper
    return child
