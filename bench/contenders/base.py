"""What every contender does in the same way: the clock, the batches, the check of what came back.

A contender says how its users would do a thing (`spawn`, `ping`, `broadcast`, ...); this module times it, and
checks outside the clock that it was really done. The batch is float32 of shape (rows, 1024): a row is 4 KB,
one page. A worker *touches* what it receives: it adds one to the first element of every row, in place. That
needs private, writable memory, so the copies counted by the floor cannot be left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.contenders.saves import SaveRoles, forget
from bench.contenders.weights import WeightsRoles

COLUMNS = 1024
ROW_BYTES = 4 * COLUMNS
ROWS_PER_MB = (1 << 20) // ROW_BYTES


def make_batch(rows: int) -> torch.Tensor:
    """float32 (rows, 1024); every element of row i is i mod 1024."""
    return (torch.arange(rows) % 1024).to(torch.float32)[:, None].repeat(1, COLUMNS)


def make_items(count: int) -> Iterator[np.ndarray]:
    """So many arrays of 4 KB; every element of item i is i."""
    for index in range(count):
        yield np.full(COLUMNS, index, np.float32)


def touch(batch: torch.Tensor) -> float:
    """Add one to the first element of every row, in place; the mean of these elements after that."""
    batch[:, 0] += 1
    return float(batch[:, 0].double().mean())


def trim() -> None:
    """Free what this process no longer uses, and give it back to the system (glibc's malloc_trim)."""
    gc.collect()
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Have a thread of this process compute in Python during the block."""
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            sum(range(10_000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, value) of one call, with no garbage left over from before."""
    gc.collect()
    started = time.perf_counter()
    value = work()
    return time.perf_counter() - started, value


def wait_until_gone(pids: list[int], timeout: float = 30.0) -> None:
    """Return once none of the processes is alive (a zombie is not), or after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Contender(ABC):
    """Groups of workers kept by name, and the scenarios over them. `handle` is the protocol's handler."""

    module_to_import = ""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}
        self._batches: dict[int, Any] = {}
        self._weights: WeightsRoles | None = None
        self._saves: SaveRoles | None = None
        self._steps = 0

    def handle(self, op: str, args: dict[str, Any]) -> Any:
        """Dispatch one request of the runner to the method `do_<op>`."""
        method = getattr(self, f"do_{op}", None)
        if method is None:
            raise NotImplementedError(f"{type(self).__name__} has no scenario {op!r}")
        return method(**args)

    @abstractmethod
    def do_connect(self) -> dict[str, str]:
        """Start what is shared by all scenarios (a cluster); gives versions."""

    @abstractmethod
    def spawn(self, ranks: int) -> Any:
        """A group of workers whose class imports torch; may return before they are up."""

    @abstractmethod
    def kill(self, group: Any) -> None:
        """End the group's processes and give its resources back."""

    @abstractmethod
    def pids(self, group: Any) -> list[int]:
        """The process of each rank."""

    @abstractmethod
    def ping(self, group: Any) -> Any:
        """One empty call on every rank; returns when all have answered."""

    @abstractmethod
    def pipeline(self, group: Any, calls: int) -> None:
        """`calls` empty calls on every rank, sent without waiting; returns when all have answered."""

    @abstractmethod
    def wrap(self, batch: torch.Tensor) -> Any:
        """The batch as this contender's users hold it on the driver."""

    @abstractmethod
    def broadcast(self, group: Any, batch: Any) -> list[float]:
        """The whole batch to every rank, each touches its own; the ranks' means."""

    def broadcast_readonly(self, group: Any, batch: Any) -> list[float]:
        """The batch to every rank for reading only; the ranks' means of the first elements."""
        raise NotImplementedError(f"{type(self).__name__} has no read-only arrival")

    def stream(self, group: Any, count: int, buffer: int | None) -> Iterator[np.ndarray]:
        """`count` items of each rank as they come, `buffer` of a rank unread at most (None: any number)."""
        raise NotImplementedError(f"{type(self).__name__} has no methods that yield")

    @abstractmethod
    def split_gather(self, group: Any, batch: Any) -> torch.Tensor:
        """Rows split over the ranks, each touches and returns its piece; the pieces joined in order."""

    @abstractmethod
    def chain(self, groups: list[Any], rows: int) -> list[float]:
        """A makes `rows` rows (kept from before), B touches them, C gives the mean of its piece per rank."""

    def do_open(self, group: str, ranks: int) -> float:
        """Seconds from nothing to the first answered call on all ranks."""
        seconds, made = timed(lambda: self._spawn_and_ping(ranks))
        self._groups[group] = made
        return seconds

    def _spawn_and_ping(self, ranks: int) -> Any:
        group = self.spawn(ranks)
        self.ping(group)
        return group

    def do_close(self, group: str) -> None:
        made = self._groups.pop(group)
        pids = self.pids(made)
        self.kill(made)
        wait_until_gone(pids)

    def do_pids(self, groups: list[str]) -> list[int]:
        return [pid for name in groups for pid in self.pids(self._groups[name])]

    def do_empty(self, group: str, calls: int) -> float:
        """Median seconds of one empty call among `calls` one after another."""
        made = self._groups[group]
        return statistics.median(timed_loop(lambda: self.ping(made), calls))

    def do_pipelined(self, group: str, calls: int) -> float:
        seconds, _ = timed(lambda: self.pipeline(self._groups[group], calls))
        return seconds

    def do_broadcast(self, group: str, megabytes: int) -> float:
        batch = self._batch(megabytes)
        seconds, means = timed(lambda: self.broadcast(self._groups[group], batch))
        expected = _mean_of_touched(megabytes * ROWS_PER_MB)
        check(all(abs(mean - expected) < 1e-6 for mean in means), f"broadcast gave {means}, not {expected}")
        return seconds

    def do_broadcast_readonly(self, group: str, megabytes: int) -> float:
        batch = self._batch(megabytes)
        seconds, means = timed(lambda: self.broadcast_readonly(self._groups[group], batch))
        expected = _mean_of_touched(megabytes * ROWS_PER_MB) - 1
        check(all(abs(mean - expected) < 1e-6 for mean in means), f"reading gave {means}, not {expected}")
        return seconds

    def do_stream(self, group: str, items: int, buffer: int | None) -> float:
        """Seconds until all items of 4 KB that the ranks yield, `items` in all, were read as they came."""
        made = self._groups[group]
        ranks = len(self.pids(made))
        each = items // ranks
        seconds, found = timed(lambda: [float(one[-1]) for one in self.stream(made, each, buffer)])
        expected = sorted(list(range(each)) * ranks)
        check(sorted(found) == expected, f"a stream gave {len(found)} items, not {items}, or others")
        return seconds

    def do_split_gather(self, group: str, megabytes: int) -> float:
        batch = self._batch(megabytes)
        seconds, joined = timed(lambda: self.split_gather(self._groups[group], batch))
        rows = torch.arange(megabytes * ROWS_PER_MB) % 1024
        check(
            tuple(joined.shape) == (len(rows), COLUMNS), f"split and gather gave shape {tuple(joined.shape)}"
        )
        check(
            bool((joined[:, 0] == rows + 1).all()), "split and gather: a row is not touched or out of place"
        )
        check(bool((joined[:, -1] == rows).all()), "split and gather: the payload of a row is wrong")
        return seconds

    def do_chain(self, groups: list[str], megabytes: int) -> float:
        made = [self._groups[name] for name in groups]
        rows = megabytes * ROWS_PER_MB
        seconds, means = timed(lambda: self.chain(made, rows))
        mean = statistics.fmean(means)
        check(abs(mean - 2.0) < 1e-6, f"the chain's mean is {mean}, not 2.0")
        return seconds

    def open_queue(self, items: int) -> Any:
        """A queue that takes so many items and is ready to be used."""
        raise NotImplementedError(f"{type(self).__name__} has no queue between groups")

    def close_queue(self, queue: Any) -> None:
        """End it."""
        raise NotImplementedError(f"{type(self).__name__} has no queue between groups")

    def flow(self, queue: Any, groups: list[Any], kilobytes: int, items: int) -> list[float]:
        """Every rank of A puts `items` tensors into the queue, every rank of B gets as many and touches them; the sums
        of the touched elements by rank of B."""
        raise NotImplementedError(f"{type(self).__name__} has no queue between groups")

    def do_flow(self, groups: list[str], kilobytes: int, items: int, busy: bool = False) -> float:
        """Seconds from the first put to the last item that was touched, while the driver computes if ``busy``."""
        made = [self._groups[name] for name in groups]
        ranks = len(self.pids(made[0]))
        queue = self.open_queue(items * ranks)
        with computing() if busy else contextlib.nullcontext():
            seconds, sums = timed(lambda: self.flow(queue, made, kilobytes, items))
        self.close_queue(queue)
        expected = items * ranks
        check(sum(sums) == expected, f"{sum(sums)} items came out of {expected}")
        return seconds

    def weights(self, layout: str, megabytes: int) -> WeightsRoles:
        """The two roles between which weights go."""
        raise NotImplementedError(f"{type(self).__name__} brings no weights from role to role")

    def do_weights(self, layout: str, megabytes: int, verify: str = "sampled") -> float:
        """Seconds from trained weights to targets that have them."""
        if self._weights is None or (self._weights.layout, self._weights.megabytes) != (layout, megabytes):
            self._close_weights()
            self._weights = self.weights(layout, megabytes)
        made = self._weights
        self._steps += 1
        made.train(self._steps)
        seconds, _ = timed(lambda: made.sync(verify))
        check(made.is_at(self._steps), f"the targets do not have the weights of step {self._steps}")
        return seconds

    def saves(self, megabytes: int) -> SaveRoles:
        """The ranks whose state is saved."""
        raise NotImplementedError(f"{type(self).__name__} saves nothing")

    def do_save(self, megabytes: int) -> float:
        """Seconds until the state of all ranks is on the disk."""
        made = self._saves_of(megabytes)
        with tempfile.TemporaryDirectory() as folder:
            made.change(self._steps)
            seconds, _ = timed(lambda: made.save(Path(folder)))
            made.change(self._steps + 1)
            made.load(Path(folder))
        check(made.is_at(self._steps), "what was loaded is not what was saved")
        return seconds

    def do_load(self, megabytes: int) -> float:
        """Seconds until all ranks have what was saved, from the disk."""
        made = self._saves_of(megabytes)
        with tempfile.TemporaryDirectory() as folder:
            made.change(self._steps)
            made.save(Path(folder))
            forget(Path(folder))
            made.change(self._steps + 1)
            seconds, _ = timed(lambda: made.load(Path(folder)))
        check(made.is_at(self._steps), "what was loaded is not what was saved")
        return seconds

    def do_step(self, megabytes: int, saving: bool = True) -> float:
        """Seconds of a step of every rank, beside a save or without one."""
        made = self._saves_of(megabytes)
        with tempfile.TemporaryDirectory() as folder:
            if saving:
                made.begin(Path(folder))
            seconds, _ = timed(made.work)
            if saving:
                made.end()
        return seconds

    def _saves_of(self, megabytes: int) -> SaveRoles:
        if self._saves is None or self._saves.megabytes != megabytes:
            self._close_weights()
            self._saves = self.saves(megabytes)
        self._steps += 1
        return self._saves

    def _close_weights(self) -> None:
        if self._saves is not None:
            self._saves.close()
            self._saves = None
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def do_tidy(self) -> None:
        """Give back what is left of earlier work, so that the others have the memory: the batch, and free heap."""
        self._close_weights()
        self._batches.clear()
        trim()
        for made in self._groups.values():
            self.trim(made)

    @abstractmethod
    def trim(self, group: Any) -> None:
        """Have every rank of a group call :func:`trim`."""

    def do_import(self) -> float:
        """Seconds to import the library in a fresh interpreter, without the interpreter's own start."""
        clock = "time.perf_counter()"
        program = f"import time; t = {clock}; import {self.module_to_import}; print({clock} - t)"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
        )
        return float(done.stdout.split()[-1])

    def _batch(self, megabytes: int) -> Any:
        if megabytes not in self._batches:
            self._batches.clear()
            self._batches[megabytes] = self.wrap(make_batch(megabytes * ROWS_PER_MB))
        return self._batches[megabytes]


def timed_loop(work: Callable[[], Any], calls: int) -> list[float]:
    """Seconds of each of `calls` calls."""
    gc.collect()
    seconds: list[float] = []
    for _ in range(calls):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return seconds


def check(holds: bool, otherwise: str) -> None:
    """Raise ValueError(otherwise) unless it holds: a wrong result must not count as a fast one."""
    if not holds:
        raise ValueError(otherwise)


def _mean_of_touched(rows: int) -> float:
    return float((torch.arange(rows) % 1024 + 1).double().mean())


def item_of(kilobytes: int) -> torch.Tensor:
    """float32 of so many KiB, all zeros: what flows through a queue."""
    return torch.zeros(kilobytes << 8)


class Shard:
    """What a rank of group A has in hand before the chain starts: its rows, all ones, made once per size."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None

    def take(self, rows: int) -> torch.Tensor:
        """float32 (rows, 1024) of ones; the same object every time."""
        if self._rows is None or len(self._rows) != rows:
            self._rows = torch.ones(rows, COLUMNS)
        return self._rows


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
