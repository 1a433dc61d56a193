"""The node agents of all nodes on which a process has ranks.

On the driver's own node that is the driver itself; on every other node an actor that asks for no resources.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from phalanx.transport.base import Endpoint
from phalanx.transport.ray.node_agent import NodeAgent, Target


def target_of(endpoint: Endpoint) -> Target:
    """The process behind an endpoint."""
    facts = endpoint.facts
    own = (facts.log,) if facts.log and facts.files else ()
    return Target(facts.pid, facts.side, (*own, *facts.log_paths))


class Agents:
    """The agents of all nodes on which this process has ranks."""

    def __init__(self) -> None:
        self._local = NodeAgent()
        self._remote: dict[str, Any] = {}
        self._here: str | None = None
        self._lock = threading.Lock()
        self._ranks: dict[str, set[int]] = {}

    def prepare(self) -> None:
        """Start the reaper of this node while something else, the start of ranks, takes its time."""
        threading.Thread(target=self._local.prepare, daemon=True).start()

    def dismiss(self) -> None:
        """Take :meth:`prepare` back, where no ranks came of it."""
        self._local.dismiss()

    def watch(self, endpoints: Sequence[Endpoint]) -> None:
        """Put ranks under the care of their nodes' agents; does not wait for agents on other nodes to start."""
        for node, members in self._by_node(endpoints).items():
            targets = [target_of(endpoints[i]) for i in members]
            self._ranks.setdefault(node, set()).update(target.pid for target in targets)
            if node == self._own_node():
                self._local.watch(targets)
            else:
                self._actor(node).watch.remote(targets)

    def ask(
        self, endpoints: Sequence[Endpoint], verb: str, *args: Any, timeout: float, each: bool = False
    ) -> list[Any]:
        """``verb(targets, *args)`` of the agents of all these ranks' nodes at once, by rank; None where none came.

        With ``each``, the verb takes one target and is asked once per rank.
        """
        answers: list[Any] = [None] * len(endpoints)
        waiting: list[tuple[Any, list[int]]] = []
        local: list[tuple[Callable[[], Any], list[int]]] = []
        for node, members in self._by_node(endpoints).items():
            for part in [[i] for i in members] if each else [members]:
                targets = [target_of(endpoints[i]) for i in part]
                given = targets[0] if each else targets
                if node == self._own_node():
                    local.append((lambda v=given: getattr(self._local, verb)(v, *args), part))
                else:
                    waiting.append((getattr(self._actor(node), verb).remote(given, *args), part))
        for work, part in local:
            _spread(answers, part, work(), each)
        limit = time.monotonic() + timeout
        for ref, part in waiting:
            with contextlib.suppress(RayError):
                answer = ray.get(ref, timeout=max(0.0, limit - time.monotonic()))
                _spread(answers, part, answer, each)
        return answers

    def release(self, endpoints: Sequence[Endpoint]) -> None:
        """Let go of agents on other nodes that have no ranks left to care for."""
        for endpoint in endpoints:
            node = endpoint.facts.slot.node_id
            self._ranks.get(node, set()).discard(endpoint.facts.pid)
        with self._lock:
            for node in [node for node in self._remote if not self._ranks.get(node)]:
                actor = self._remote.pop(node)
                with contextlib.suppress(RayError, ValueError):
                    ray.kill(actor)

    def leave(self) -> None:
        """Let go of everything, without asking the cluster, which was left: what is still watched here is ended."""
        self._local.leave()
        self._remote.clear()
        self._ranks.clear()

    def _by_node(self, endpoints: Sequence[Endpoint]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for index, endpoint in enumerate(endpoints):
            found.setdefault(endpoint.facts.slot.node_id, []).append(index)
        return found

    def _own_node(self) -> str:
        if self._here is None:
            self._here = ray.get_runtime_context().get_node_id()
        return self._here

    def _actor(self, node: str) -> Any:
        with self._lock:
            if node not in self._remote:
                where = NodeAffinitySchedulingStrategy(node, soft=False)
                cls = ray.remote(NodeAgent)
                self._remote[node] = cls.options(
                    num_cpus=0, max_restarts=0, scheduling_strategy=where
                ).remote()
            return self._remote[node]


def _spread(answers: list[Any], part: Sequence[int], answer: Any, each: bool) -> None:
    """Give a node's answer to its ranks: one value for a single one, else a list by rank."""
    if each or not isinstance(answer, list):
        for index in part:
            answers[index] = answer
        return
    for index, one in zip(part, answer, strict=False):
        answers[index] = one
