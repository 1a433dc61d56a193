"""The common part of all contenders: the clock, the batches, the check of results.

A contender implements the operations as its users would (`spawn`, `ping`, `broadcast`, ...). This module times
them and checks the results outside the clock. The batch is float32 of shape (rows, 1024): a row is 4 KB, a
page. A worker *touches* a received batch: it adds one to the first element of every row, in place. That needs
private, writable memory, so the copies counted by the floor cannot be left out.
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
    """Return float32 (rows, 1024); every element of row i is i mod 1024."""
    return (torch.arange(rows) % 1024).to(torch.float32)[:, None].repeat(1, COLUMNS)


def make_items(count: int) -> Iterator[np.ndarray]:
    """Yield `count` arrays of 4 KB; every element of item i is i."""
    for index in range(count):
        yield np.full(COLUMNS, index, np.float32)


def touch(batch: torch.Tensor) -> float:
    """Add one to the first element of every row, in place. Return the mean of these elements after that."""
    batch[:, 0] += 1
    return float(batch[:, 0].double().mean())


def trim() -> None:
    """Free unused memory of this process and return it to the system (glibc's malloc_trim)."""
    gc.collect()
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Compute in Python on a thread of this process during the block."""
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
    """Return (seconds, value) of a call, after a garbage collection."""
    gc.collect()
    started = time.perf_counter()
    value = work()
    return time.perf_counter() - started, value


def wait_until_gone(pids: list[int], timeout: float = 30.0) -> None:
    """Return once all processes have ended (zombies count as ended), or after `timeout` seconds."""
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
    """Groups of workers by name, and the scenarios over them. `handle` is the protocol's handler."""

    module_to_import = ""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}
        self._batches: dict[int, Any] = {}
        self._weights: WeightsRoles | None = None
        self._saves: SaveRoles | None = None
        self._steps = 0

    def handle(self, op: str, args: dict[str, Any]) -> Any:
        """Dispatch a request of the runner to the method `do_<op>`."""
        method = getattr(self, f"do_{op}", None)
        if method is None:
            raise NotImplementedError(f"{type(self).__name__} has no scenario {op!r}")
        return method(**args)

    @abstractmethod
    def do_connect(self) -> dict[str, str]:
        """Start the shared parts of all scenarios (a cluster). Return versions."""

    @abstractmethod
    def spawn(self, ranks: int) -> Any:
        """Return a group of workers whose class imports torch, possibly before they are up."""

    @abstractmethod
    def kill(self, group: Any) -> None:
        """End the group's processes and release its resources."""

    @abstractmethod
    def pids(self, group: Any) -> list[int]:
        """Return the process of each rank."""

    @abstractmethod
    def ping(self, group: Any) -> Any:
        """Make an empty call on every rank and wait for all."""

    @abstractmethod
    def pipeline(self, group: Any, calls: int) -> None:
        """Send `calls` empty calls to every rank without waiting, then wait for all."""

    @abstractmethod
    def wrap(self, batch: torch.Tensor) -> Any:
        """Return the batch in the form that this contender's users have on the driver."""

    @abstractmethod
    def broadcast(self, group: Any, batch: Any) -> list[float]:
        """Send the whole batch to every rank, which touches it. Return the ranks' means."""

    def broadcast_readonly(self, group: Any, batch: Any) -> list[float]:
        """Send the batch to every rank for reading only. Return the ranks' means of the first elements."""
        raise NotImplementedError(f"{type(self).__name__} has no read-only arrival")

    def stream(self, group: Any, count: int, buffer: int | None) -> Iterator[np.ndarray]:
        """Yield `count` items of each rank as they arrive, at most `buffer` of a rank unread (None: any number)."""
        raise NotImplementedError(f"{type(self).__name__} has no methods that yield")

    @abstractmethod
    def split_gather(self, group: Any, batch: Any) -> torch.Tensor:
        """Split rows over the ranks, which touch and return their shards. Return the shards joined in order."""

    @abstractmethod
    def chain(self, groups: list[Any], rows: int) -> list[float]:
        """Send A's `rows` rows (made before) to B, which touches them, and on to C. Return the mean of each rank of
        C.
        """

    def do_open(self, group: str, ranks: int) -> float:
        """Return the seconds until all ranks of a new group have answered a call."""
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
        """Return the median seconds of an empty call among `calls` successive calls."""
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
        """Return the seconds until `items` items of 4 KB that the ranks yield were read as they arrived."""
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
        """Return an open queue with a capacity of `items`."""
        raise NotImplementedError(f"{type(self).__name__} has no queue between groups")

    def close_queue(self, queue: Any) -> None:
        """Close the queue."""
        raise NotImplementedError(f"{type(self).__name__} has no queue between groups")

    def flow(self, queue: Any, groups: list[Any], kilobytes: int, items: int) -> list[float]:
        """Send `items` tensors of each rank of A to B. Return the sums of the touched elements by rank."""
        raise NotImplementedError(f"{type(self).__name__} has no queue between groups")

    def do_flow(self, groups: list[str], kilobytes: int, items: int, busy: bool = False) -> float:
        """Return the seconds from the first put to the last touched item, while the driver computes if ``busy``."""
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
        """Return the source and target roles."""
        raise NotImplementedError(f"{type(self).__name__} brings no weights from role to role")

    def do_weights(self, layout: str, megabytes: int, verify: str = "sampled") -> float:
        """Return the seconds of a sync of trained weights to the targets."""
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
        """Return the ranks whose state is saved."""
        raise NotImplementedError(f"{type(self).__name__} saves nothing")

    def do_save(self, megabytes: int) -> float:
        """Return the seconds until the state of all ranks is on disk."""
        made = self._saves_of(megabytes)
        with tempfile.TemporaryDirectory() as folder:
            made.change(self._steps)
            seconds, _ = timed(lambda: made.save(Path(folder)))
            made.change(self._steps + 1)
            made.load(Path(folder))
        check(made.is_at(self._steps), "what was loaded is not what was saved")
        return seconds

    def do_load(self, megabytes: int) -> float:
        """Return the seconds until all ranks have loaded the saved state from disk."""
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
        """Return the seconds of a step of every rank, during a save or without a save."""
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
        """Free memory of earlier work for the other contenders: the batch, and unused heap."""
        self._close_weights()
        self._batches.clear()
        trim()
        for made in self._groups.values():
            self.trim(made)

    @abstractmethod
    def trim(self, group: Any) -> None:
        """Call :func:`trim` on every rank of a group."""

    def do_import(self) -> float:
        """Return the seconds to import the library in a fresh interpreter, without the interpreter's start."""
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
    """Return the seconds of each of `calls` calls."""
    gc.collect()
    seconds: list[float] = []
    for _ in range(calls):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return seconds


def check(holds: bool, otherwise: str) -> None:
    """Raise ValueError(otherwise) unless it holds: a wrong result must not count as a fast result."""
    if not holds:
        raise ValueError(otherwise)


def _mean_of_touched(rows: int) -> float:
    return float((torch.arange(rows) % 1024 + 1).double().mean())


def item_of(kilobytes: int) -> torch.Tensor:
    """Return float32 zeros of `kilobytes` KiB, an item of a queue."""
    return torch.zeros(kilobytes << 8)


class Shard:
    """The rows of a rank of group A before the chain starts: all ones, made once per size."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None

    def take(self, rows: int) -> torch.Tensor:
        """Return float32 (rows, 1024) of ones; the same object every time."""
        if self._rows is None or len(self._rows) != rows:
            self._rows = torch.ones(rows, COLUMNS)
        return self._rows


def cpu_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
