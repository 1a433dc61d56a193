"""Agents of nodes, which observe ranks and end them.

A :class:`NodeAgent` reads the state of a rank from the kernel, because a rank may be busy for hours. The agent of this
process's own node runs in this process. On every other node it is an actor without resources. The agents are called in
parallel.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from phalanx.backends.backend_types import ProcessStatus, read_file
from phalanx.backends.ray import private, reaper
from phalanx.backends.ray.rank_processes import GONE, NO_SIDE, STOPPED, ProcessHandle, stacks_of
from phalanx.backends.ray.ray_errors import PostMortem, oom_kills, read_logs
from phalanx.display.registry_records import RankRecord
from phalanx.wire import call_page
from phalanx.wire.value import Value

_ANSWERS_WITHIN_S = 10.0
NOTHING_ANSWERS = ProcessStatus(reachable=False, note="nothing on its node answers")


class NodeAgent:
    """Observer of the ranks on its own node, with a reaper process that ends them."""

    def __init__(self) -> None:
        self._reaper: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[int, int, str]] = {}
        self._oom_kills = oom_kills()

    def prepare(self) -> None:
        """Start the reaper early, without waiting for it."""
        with self._lock:
            self._reaper = self._reaper or _start_reaper()

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
        """Watch these ranks, so that they end with the process of this agent at the latest."""
        with self._lock:
            self._ask({"watch": self._note(target for target in targets if target.same() is not None)})

    def _note(self, targets: Iterable[ProcessHandle]) -> list[tuple[int, int, str]]:
        """Add ranks to the watched ranks, and return them in the form of the reaper's requests."""
        new = {target.pid: (target.pid, target.side.started, target.side.mark) for target in targets}
        self._watched |= new
        return list(new.values())

    def look(self, targets: Sequence[ProcessHandle]) -> None:
        """Make the reaper record all descendants of the watched ranks, before the ranks are ended."""
        with self._lock:
            if self._watched:
                self._ask({"look": True})

    def end(self, targets: Sequence[ProcessHandle]) -> list[list[int]]:
        """End these ranks and all their descendants. Return, once per rank, the pids of processes that did not end."""
        with self._lock:
            watch = self._note(target for target in targets if target.pid not in self._watched)
            # The pid may belong to a newer rank by now.
            pids = [t.pid for t in targets if self._watched[t.pid][1] == t.side.started]
            left: list[int] = self._ask({"watch": watch, "end": pids}) or []
            for pid in pids:
                self._watched.pop(pid, None)
        self.dismiss()
        return [left] * len(targets)

    def send_signal(self, targets: Sequence[ProcessHandle], signum: int) -> None:
        """Send a signal to each rank's process, unless the process has ended."""
        for target in targets:
            if target.same() is not None:
                os.kill(target.pid, signum)

    def inspect(self, targets: Sequence[ProcessHandle], stacks: bool) -> list[ProcessStatus]:
        """Return the status of each rank's process, without a call; with ``stacks``, its stack if readable."""
        statuses = [self._status(target) for target in targets]
        if not stacks:
            return statuses
        read = stacks_of(targets)
        return [
            replace(status, stack=text, note=status.note or note)
            for status, (text, note) in zip(statuses, read, strict=True)
        ]

    def _status(self, target: ProcessHandle) -> ProcessStatus:
        process = target.same()
        if process is None or target.dies():
            return ProcessStatus(reachable=False, note=GONE, gone=True)
        seen = call_page.CallPageState({}, {})
        with contextlib.suppress(OSError):
            seen = call_page.read(target.page())
        now = time.monotonic()
        return ProcessStatus(
            reachable=not process.stopped,
            running={call: now - begun for call, begun in seen.running.items()},
            note=STOPPED if process.stopped else "",
            methods=seen.methods,
            status=seen.status,
        )

    def cancel(self, targets: Sequence[ProcessHandle]) -> list[bool]:
        """Cancel the ``call`` of each rank: ranks that have not begun it drop it, the others are interrupted.

        A rank first writes that it has begun a call, and then checks for a cancellation. This function works in the
        opposite order: the rank sees the cancellation, or this function sees that the call has begun, or both.

        Returns:
            For each rank, True if it drops the call.
        """
        drops = [self._drops(target) for target in targets]
        self._tell(
            [target for target, drop in zip(targets, drops, strict=True) if not drop], call_page.INTERRUPT
        )
        return drops

    def _drops(self, target: ProcessHandle) -> bool:
        if target.same() is not None:
            with contextlib.suppress(OSError), target.open(target.side.page, "r+b") as page:
                call_page.cancel(page.fileno(), target.call)
                return target.call not in call_page.read(target.page()).running
        return False

    def sever(self, targets: Sequence[ProcessHandle]) -> None:
        """Shut down the connections of the ranks' process groups, so that collectives in flight raise an error."""
        self._tell(targets, call_page.SEVER)

    def _tell(self, targets: Sequence[ProcessHandle], request: bytes) -> None:
        for target in targets:
            if target.same() is not None:
                with contextlib.suppress(OSError):
                    target.request(request)

    def read(
        self, targets: Sequence[ProcessHandle], path: str, offset: int, limit: int
    ) -> list[bytes | OSError]:
        """Return bytes of a file of this node or the error of reading it, once per rank."""
        try:
            return [read_file(path, offset, limit)] * len(targets)
        except OSError as error:
            return [error] * len(targets)

    def post_mortem(self, targets: Sequence[ProcessHandle]) -> list[PostMortem]:
        """Return the last output of ranks whose processes have died, and the node's new out-of-memory kills."""
        kills = oom_kills()
        risen, self._oom_kills = kills - self._oom_kills, kills
        return [read_logs(target.log_paths)._replace(oom_kills=risen) for target in targets]

    def start(self, service: Callable[[str], Any]) -> Value:
        """Call ``service`` with the address of this node, and return its result. Its threads end with this process."""
        return service(ray.util.get_node_ip_address())

    def _ask(self, request: Mapping[str, Any]) -> Value:
        """Send a request to the reaper, which the first request starts. The caller holds the lock."""
        for _ in range(2):
            if self._reaper is None:  # not started yet, or killed: a new reaper has to watch all ranks
                self._reaper = _start_reaper()
                request = {**request, "watch": list(self._watched.values())}
            child: Any = self._reaper
            child.poll()  # reaps the process that forked the reaper and exited
            with contextlib.suppress(BrokenPipeError, ValueError):
                child.stdin.write(json.dumps(request).encode() + b"\n")
                child.stdin.flush()
                if line := child.stdout.readline():
                    return json.loads(line)
            self._dismiss()
        return None

    def _dismiss(self) -> None:
        """Close the pipes of the reaper, which then ends its ranks and exits. The caller holds the lock."""
        child: Any
        child, self._reaper = self._reaper, None
        if child is not None:
            child.wait(10.0)
            for stream in (child.stdin, child.stdout):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def _start_reaper() -> subprocess.Popen[bytes]:
    """Start a process that forks and exits; its child is the reaper."""
    own = reaper.look_at(os.getpid())
    return subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), str(own.started if own else 0)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def agent_on(node: str) -> Any:
    """Start an agent on a node, as an actor that Ray ends with the calling process."""
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    return private.create_actor(NodeAgent, num_cpus=0, max_restarts=0, scheduling_strategy=where)


class NodeAgents:
    """The agents of all nodes with ranks, each created at its first use."""

    def __init__(self) -> None:
        self.local = NodeAgent()
        self._remote: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._watched: set[tuple[str, int]] = set()

    def ask(
        self,
        targets: Sequence[ProcessHandle],
        verb: str,
        *args: Value,
        timeout: float = _ANSWERS_WITHIN_S,
    ) -> list[Any]:
        """Call the method ``verb`` of the ranks' agents in parallel. Return a result per rank; None: no response.

        ``timeout`` is in seconds; 0: do not wait for agents of other nodes.
        """
        own: dict[str, list[ProcessHandle]] = {}
        for target in targets:
            own.setdefault(target.node, []).append(target)
        agents = {node: self._actor(node) for node in own if node}
        calls = {node: private.call(agent, verb, own[node], *args) for node, agent in agents.items()}
        found: dict[str, Sequence[Any] | None] = {}
        if "" in own:  # while the remote agents work
            found[""] = getattr(self.local, verb)(own[""], *args)
        limit = time.monotonic() + timeout
        for node, call in calls.items():
            try:
                found[node] = private.get(call, timeout=max(0.0, limit - time.monotonic()))
            except ActorDiedError:  # the next request starts another agent
                with self._lock:
                    if self._remote.get(node) is agents[node]:
                        del self._remote[node]
            except RayError:
                pass  # it is late
        answers = {node: iter(found.get(node) or ()) for node in own}
        return [next(answers[target.node], None) for target in targets]

    def watch(self, targets: Sequence[ProcessHandle]) -> None:
        """Make the agents of their nodes watch these ranks, without waiting for agents on other nodes."""
        with self._lock:
            self._watched |= {(target.node, target.pid) for target in targets}
        self.ask(targets, "watch", timeout=0.0)

    def release(self, targets: Sequence[ProcessHandle]) -> None:
        """Forget these ranks, and end agents on other nodes that have no ranks left."""
        with self._lock:
            self._watched -= {(target.node, target.pid) for target in targets}
            for node in self._remote.keys() - {node for node, _ in self._watched}:
                with contextlib.suppress(RayError, ValueError):
                    private.kill(self._remote.pop(node))

    def leave(self) -> None:
        """End the watched ranks of this node and forget the other agents, without calls on the cluster."""
        self.local.leave()
        with self._lock:
            self._remote.clear()
            self._watched.clear()

    def _actor(self, node: str) -> Value:
        with self._lock:
            if node not in self._remote:
                self._remote[node] = agent_on(node)
            return self._remote[node]


class RankObserver:
    """Observer of ranks whose records were published, for programs that are not their driver.

    Ranks on this machine are observed directly. For ranks on other nodes, this process joins the cluster as a driver
    that shows no logs of workers.
    """

    def __init__(self, address: str) -> None:
        self._agents = NodeAgents()
        self._address = address
        self._host = socket.gethostname()
        self._connected = False

    def inspect(self, ranks: Sequence[RankRecord], stacks: bool = False) -> list[ProcessStatus]:
        """Return the status of each rank's process, with its stack if ``stacks``."""
        return [status or NOTHING_ANSWERS for status in self._ask(ranks, "inspect", stacks)]

    def read(self, rank: RankRecord, offset: int, limit: int) -> bytes:
        """Return at most ``limit`` bytes of a rank's log; a negative offset counts from its end.

        Raises:
            OSError: if the log cannot be read.
        """
        if rank.log is None:
            raise FileNotFoundError(f"rank {rank.rank} has no log file of its own")
        (content,) = self._ask([rank], "read", rank.log, offset, limit)
        return content_of(content, rank.log, rank.host)

    def close(self) -> None:
        """Leave the cluster if this observer joined it."""
        if self._connected:
            ray.shutdown()
            self._connected = False

    def _ask(self, ranks: Sequence[RankRecord], verb: str, *args: Value) -> list[Any]:
        """Call the agents of the ranks, after joining the cluster if any rank is on another node."""
        targets = [
            ProcessHandle(
                rank.pid, rank.side or NO_SIDE, node="" if rank.host == self._host else rank.node_id
            )
            for rank in ranks
        ]
        if any(target.node for target in targets) and not ray.is_initialized():
            ray.init(
                address=self._address,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
            self._connected = True
        return self._agents.ask(targets, verb, *args)


def content_of(answer: bytes | OSError | None, path: str, host: str) -> bytes:
    """Return the bytes that an agent read from a file, given its response.

    Raises:
        FileNotFoundError: if there is no such file.
        OSError: if the file could not be read or the agent did not respond.
    """
    if isinstance(answer, bytes):
        return answer
    if isinstance(answer, FileNotFoundError):
        raise FileNotFoundError(f"{path}: there is no such file on host {host}")
    raise OSError(f"{path} on host {host}: {answer or 'nothing on that node answers'}")
