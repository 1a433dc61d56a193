"""The node agents of the nodes of ranks, called in parallel.

The agent of this process's own node is in this process. On every other node it is an actor without resources.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from phalanx.backends.backend_types import Endpoint, ProcessStatus
from phalanx.backends.ray import private
from phalanx.backends.ray.node_agent import NodeAgent
from phalanx.backends.ray.rank_processes import Gpu, ProcessHandle, Usage
from phalanx.display.registry_records import RankRecord
from phalanx.wire.value import Value

_ANSWERS_WITHIN_S = 10.0
_HERE = ""
NOTHING_ANSWERS = ProcessStatus(reachable=False, note="nothing on its node answers")


class AgentTarget(NamedTuple):
    """A rank's process and its node; "" is the node of the calling process."""

    node: str
    target: ProcessHandle


class NodeAgents:
    """An agent per node, created at its first use."""

    def __init__(self) -> None:
        self.local = NodeAgent()
        self._remote: dict[str, Any] = {}
        self._lock = threading.Lock()

    def ask(
        self, places: Sequence[AgentTarget], verb: str, *args: Value, timeout: float, each: bool = False
    ) -> list[Any]:
        """Call ``verb(targets, *args)`` of all agents in parallel; return the results by rank, None without a response.

        With ``each``, ``verb`` takes a single target and is called once per rank.
        """
        answers: list[Any] = [None] * len(places)
        here: list[tuple[list[int], Any]] = []
        elsewhere: list[tuple[list[int], Any]] = []
        for node, members in _by_node(places).items():
            for part in [[i] for i in members] if each else [members]:
                targets = [places[i].target for i in part]
                given = targets[0] if each else targets
                if node == _HERE:
                    here.append((part, given))
                else:
                    elsewhere.append((part, private.call(self._actor(node), verb, given, *args)))
        for part, given in here:  # while the others are at it
            _spread(answers, part, getattr(self.local, verb)(given, *args), each)
        limit = time.monotonic() + timeout
        for part, ref in elsewhere:
            with contextlib.suppress(RayError):
                _spread(answers, part, private.get(ref, timeout=max(0.0, limit - time.monotonic())), each)
        return answers

    def tell(self, places: Sequence[AgentTarget], verb: str) -> None:
        """Call ``verb(targets)`` of the agents of all these nodes, without waiting for other nodes."""
        for node, members in _by_node(places).items():
            targets = [places[i].target for i in members]
            if node == _HERE:
                getattr(self.local, verb)(targets)
            else:
                private.call(self._actor(node), verb, targets)

    def drop(self, nodes: Iterable[str]) -> None:
        """End the agents of some other nodes."""
        with self._lock:
            for node in nodes:
                actor = self._remote.pop(node, None)
                if actor is not None:
                    with contextlib.suppress(RayError, ValueError):
                        private.kill(actor)

    def forget(self) -> None:
        """Forget the agents of other nodes, without calls on the cluster, which was left."""
        self._remote.clear()

    @property
    def others(self) -> list[str]:
        """The other nodes that have an agent."""
        return list(self._remote)

    def _actor(self, node: str) -> Value:
        with self._lock:
            if node not in self._remote:
                where = NodeAffinitySchedulingStrategy(node, soft=False)
                self._remote[node] = private.create_actor(
                    NodeAgent, num_cpus=0, max_restarts=0, scheduling_strategy=where
                )
            return self._remote[node]


class OwnRanks:
    """The agents of all nodes on which this process has ranks. They observe the ranks and end them."""

    def __init__(self) -> None:
        self._agents = NodeAgents()
        self._here: str | None = None
        self._watched: dict[str, set[int]] = {}

    def prepare(self) -> None:
        """Start the reaper of this node while ranks start."""
        self._agents.local.prepare()

    def dismiss(self) -> None:
        """Undo :meth:`prepare`, if the start of the ranks failed."""
        self._agents.local.dismiss()

    def watch(self, endpoints: Sequence[Endpoint]) -> None:
        """Let the agents of their nodes watch these ranks. Does not wait for agents on other nodes to start."""
        places = self._places(endpoints)
        for place in places:
            self._watched.setdefault(place.node, set()).add(place.target.pid)
        self._agents.tell(places, "watch")

    def ask(
        self, endpoints: Sequence[Endpoint], verb: str, *args: Value, timeout: float, each: bool = False
    ) -> list[Any]:
        """Call the agents of the ranks; see :meth:`NodeAgents.ask`."""
        return self._agents.ask(self._places(endpoints), verb, *args, timeout=timeout, each=each)

    def release(self, endpoints: Sequence[Endpoint]) -> None:
        """Forget these ranks, and end the agents on other nodes that have no ranks left."""
        for place in self._places(endpoints):
            self._watched.get(place.node, set()).discard(place.target.pid)
        self._agents.drop(node for node in self._agents.others if not self._watched.get(node))

    def leave(self) -> None:
        """End the ranks on this node and forget all agents, without calls on the cluster, which was left."""
        self._agents.local.leave()
        self._agents.forget()
        self._watched.clear()

    def _places(self, endpoints: Sequence[Endpoint]) -> list[AgentTarget]:
        if self._here is None:
            self._here = private.runtime_context().get_node_id()
        nodes = [endpoint.facts.slot.node_id for endpoint in endpoints]
        return [
            AgentTarget(_HERE if node == self._here else node, _target_of(endpoint))
            for node, endpoint in zip(nodes, endpoints, strict=True)
        ]


class RankObserver:
    """Observes published ranks from outside, without their driver.

    Ranks on this machine are observed directly. For ranks on other nodes this process joins the cluster as a driver,
    with a job without logs that ends with the process.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._agents = NodeAgents()
        self._host = socket.gethostname()
        self._connected = False

    def sights(self, ranks: Sequence[RankRecord], stacks: bool = False) -> list[ProcessStatus]:
        """Observe each rank, with its stack if ``stacks`` is true."""
        return [NOTHING_ANSWERS if sight is None else sight for sight in self._ask(ranks, "sights", stacks)]

    def usage(self, ranks: Sequence[RankRecord]) -> list[Usage | None]:
        """Return the memory and processor time of each rank's process, None if it has ended."""
        return self._ask(ranks, "usage")

    def gpus(self, ranks: Sequence[RankRecord]) -> list[list[Gpu] | None]:
        """Return the accelerators of each rank's node."""
        return self._ask(ranks, "gpus")

    def read(self, rank: RankRecord, offset: int, limit: int) -> bytes:
        """Return bytes of a rank's log; a negative offset counts from its end.

        Raises:
            OSError: the log cannot be read.
        """
        if rank.log is None:
            raise FileNotFoundError("it has no file of its own")
        answer = self._ask([rank], "read", rank.log, offset, limit, each=True)[0]
        if isinstance(answer, bytes):
            return answer
        why = "nothing on that node answers" if answer is None else answer or "there is no such file"
        raise OSError(f"{rank.log} on host {rank.host}: {why}")

    def close(self) -> None:
        """Leave the cluster if this observer joined it."""
        if self._connected:
            ray.shutdown()
            self._connected = False

    def _ask(self, ranks: Sequence[RankRecord], verb: str, *args: Value, each: bool = False) -> list[Any]:
        places = [
            AgentTarget(_HERE if rank.host == self._host else rank.node_id, _target(rank)) for rank in ranks
        ]
        if any(place.node != _HERE for place in places):
            self._connect()
        return self._agents.ask(places, verb, *args, timeout=_ANSWERS_WITHIN_S, each=each)

    def _connect(self) -> None:
        if not self._connected and not ray.is_initialized():
            ray.init(
                address=self._address,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
            self._connected = True


def _target_of(endpoint: Endpoint) -> ProcessHandle:
    """Return the process of an endpoint."""
    facts = endpoint.facts
    own = (facts.log,) if facts.log and facts.files else ()
    return ProcessHandle(facts.pid, facts.side, (*own, *facts.log_paths))


def _target(rank: RankRecord) -> ProcessHandle:
    return ProcessHandle(rank.pid, rank.side, (rank.log,) if rank.log else ())


def _by_node(places: Sequence[AgentTarget]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, place in enumerate(places):
        found.setdefault(place.node, []).append(index)
    return found


def _spread(answers: list[Any], part: Sequence[int], answer: Value, each: bool) -> None:
    """Assign a node's response to its ranks: a list by rank, or a value for all ranks of ``part``."""
    if each or not isinstance(answer, list):
        for index in part:
            answers[index] = answer
        return
    for index, one in zip(part, answer, strict=False):
        answers[index] = one
