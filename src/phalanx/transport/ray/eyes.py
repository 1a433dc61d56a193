"""Looks at published ranks from outside: on this machine by itself, on other nodes through a helper actor on each.

Nothing of it goes through the driver that the ranks belong to. Only ranks on other nodes make this process a driver
of the cluster, of a job without logs that ends with it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from phalanx.show.published import RankEntry
from phalanx.transport.base import Sight
from phalanx.transport.ray.node_agent import NodeAgent, Target
from phalanx.transport.ray.usage import Gpu, Usage

_ANSWERS_WITHIN_S = 10.0


class Eyes:
    """What can be seen of ranks of a cluster."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._local = NodeAgent()
        self._host = socket.gethostname()
        self._remote: dict[str, Any] = {}
        self._connected = False

    def sights(self, ranks: Sequence[RankEntry], stacks: bool = False) -> list[Sight]:
        """What each rank is doing; with its stack where that is asked for."""
        gone = Sight(reachable=False, note="nothing on its node answers")
        return [gone if sight is None else sight for sight in self._ask(ranks, "sights", stacks)]

    def usage(self, ranks: Sequence[RankEntry]) -> list[Usage | None]:
        """Memory and processor time of each rank's process; None where it is gone."""
        return self._ask(ranks, "usage")

    def gpus(self, ranks: Sequence[RankEntry]) -> list[list[Gpu] | None]:
        """The accelerators of each rank's node."""
        return self._ask(ranks, "gpus", spread=False)

    def read(self, rank: RankEntry, offset: int, limit: int) -> bytes:
        """Bytes of a rank's log; a negative offset counts from its end.

        Raises:
            OSError: it cannot be read.
        """
        if rank.log is None:
            raise FileNotFoundError("it has no file of its own")
        agent = self._agent(rank)
        asked: Any = self._call(agent, "read", _target(rank), rank.log, offset, limit)
        answer = asked(time.monotonic() + _ANSWERS_WITHIN_S)
        if isinstance(answer, bytes):
            return answer
        why = "nothing on that node answers" if answer is None else answer or "there is no such file"
        raise OSError(f"{rank.log} on host {rank.host}: {why}")

    def close(self) -> None:
        """Leave the cluster, where it was joined."""
        if self._connected:
            ray.shutdown()
            self._connected = False

    def _ask(self, ranks: Sequence[RankEntry], verb: str, *args: Any, spread: bool = True) -> list[Any]:
        """``verb(targets, *args)`` of the helpers of all nodes at once; answers by rank, None where none came."""
        answers: list[Any] = [None] * len(ranks)
        asked: list[tuple[list[int], Callable[[float], Any]]] = []
        by_node: dict[str, list[int]] = {}
        for index, rank in enumerate(ranks):
            by_node.setdefault(rank.node_id, []).append(index)
        for members in by_node.values():
            targets = [_target(ranks[index]) for index in members]
            asked.append((members, self._call(self._agent(ranks[members[0]]), verb, targets, *args)))
        limit = time.monotonic() + _ANSWERS_WITHIN_S
        for members, answer_of in asked:
            answer = answer_of(limit)
            for position, index in enumerate(members):
                answers[index] = answer[position] if spread and answer is not None else answer
        return answers

    def _call(self, agent: Any, verb: str, *args: Any) -> Callable[[float], Any]:
        if agent is self._local:
            answer = getattr(agent, verb)(*args)
            return lambda limit: answer
        ref = getattr(agent, verb).remote(*args)

        def fetch(limit: float) -> Any:
            with contextlib.suppress(RayError):
                return ray.get(ref, timeout=max(0.0, limit - time.monotonic()))
            return None

        return fetch

    def _agent(self, rank: RankEntry) -> Any:
        if rank.host == self._host:
            return self._local
        if not self._connected and not ray.is_initialized():
            ray.init(
                address=self._address,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
            self._connected = True
        if rank.node_id not in self._remote:
            where = NodeAffinitySchedulingStrategy(rank.node_id, soft=False)
            options = ray.remote(NodeAgent).options(num_cpus=0, max_restarts=0, scheduling_strategy=where)
            self._remote[rank.node_id] = options.remote()
        return self._remote[rank.node_id]


def _target(rank: RankEntry) -> Target:
    return Target(rank.pid, rank.side, (rank.log,) if rank.log else ())
