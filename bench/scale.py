"""What a call to many ranks costs the driver, through relays and without: `python bench/scale.py --ranks 16 64`.

With `--objects` the ranks are objects in the relays' processes, 32 in each, which answer at once: messages, hops and
what the driver does are those of that many processes, what ranks do is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

import phalanx as px  # noqa: E402
from phalanx.wire.relayed import Batch, Envelope, batch_of, packed_output  # noqa: E402

ROUNDS, CALLS = 5, 20


class Light(px.Worker):
    """Does nothing."""

    @px.register(px.Dispatch.ONE_TO_ALL)
    def nothing(self) -> None: ...

    @px.register(px.Dispatch.ONE_TO_ALL)
    def take(self, value: float) -> float:
        return value


def measured(call: Callable[[], Any], calls: int = CALLS) -> tuple[float, float]:
    """Milliseconds of one call, by the clock and of this process's CPU."""
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e3, (time.process_time() - cpu) / calls * 1e3


def real(ranks: int) -> dict[str, Any]:
    """A group of processes, called through relays and directly in turns."""
    from phalanx.runtime.calls.door import DirectDoor

    os.environ["PHALANX_RELAY_FROM"] = "2"
    with px.ResourcePool([ranks], use_gpu=False) as pool:
        began = time.perf_counter()
        group = px.WorkerGroup(pool, Light, show_ranks="none", start_timeout=600)
        started = time.perf_counter() - began
        core = group.core
        ways = {"relays": core.door, "direct": DirectDoor(core.transport)}
        found: dict[str, list[tuple[float, float]]] = {}
        for turn in range(ROUNDS + 1):
            for name, door in ways.items():
                core.door = door
                for what, call in (("empty", group.nothing), ("argument", lambda: group.take(1.5))):
                    taken = measured(call)
                    if turn:  # the first turn warms up
                        found.setdefault(f"{what}, {name}", []).append(taken)
        core.door = ways["relays"]
        return {"ranks": ranks, "start_s": round(started, 1), **{k: _median(v) for k, v in found.items()}}


def _median(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    clock, cpu = zip(*pairs, strict=True)
    return {"ms": round(statistics.median(clock), 2), "cpu_ms": round(statistics.median(cpu), 2)}


class Answers:
    """A call to ranks that are objects here."""

    def __init__(self, count: int) -> None:
        self._count = count

    def collect(self) -> Batch:
        """What they return: nothing."""
        return batch_of([packed_output(None)] * self._count, [None] * self._count)


def objects(ranks: int) -> dict[str, Any]:
    """Relays over objects, 32 in each process beside the ranks."""
    import ray

    from phalanx.topology.relays import plan_relays
    from phalanx.topology.slots import Slot, SlotFacts
    from phalanx.transport.ray.relay import Relay
    from phalanx.transport.ray.relays import RayRelays
    from phalanx.transport.values import Endpoint
    from phalanx.wire.messages import Facts
    from phalanx.wire.relayed import Shares, part_of

    class OverObjects(Relay):
        def _to_ranks(self, envelope: Envelope, refs: Sequence[Any]) -> Any:
            return Answers(len(self._below.ranks) if envelope.ranks is None else len(envelope.ranks))

    node = ray.get_runtime_context().get_node_id()
    tree = plan_relays([node] * ranks)
    nobody = Endpoint(Slot(0, 0, ""), None, Facts(SlotFacts(node, "", ""), 0, 0.0, 0))
    began = time.perf_counter()
    relays = RayRelays(tree, [nobody] * ranks, lambda: True, actor=OverObjects)
    relays.whereabouts()
    started = time.perf_counter() - began
    shares = Shares([tree.relays[index].ranks for index in tree.head_indices])
    serial = iter(range(1 << 40))

    def call() -> None:
        envelope = Envelope(next(serial), "", "nothing", 1, None, [(b"x" * 200, [])], None)
        refs = [relays.send(head, part_of(envelope, None, some)[0], ()) for head, _, some in shares.of(None)]
        batches = relays.batches(refs, None)
        outputs = [output for some in relays.outputs(batches, None) for output in some]
        if outputs != [None] * ranks:
            raise RuntimeError(f"{len(outputs)} outputs of {ranks} ranks")

    call()
    taken = [measured(call, 10) for _ in range(ROUNDS)]
    relays.end()
    return {
        "objects": ranks,
        "relays": len(tree.relays),
        "heads": tree.heads,
        "hops": tree.hops,
        "messages": len(tree.relays) + ranks,
        "start_s": round(started, 1),
        **_median(taken),
    }


def main() -> None:
    """Measure what is asked for; a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[])
    parser.add_argument("--objects", type=int, nargs="*", default=[])
    given = parser.parse_args()
    px.init(num_cpus=max(4, *given.ranks, 0) if given.ranks else 4)
    for ranks in given.ranks:
        print(json.dumps(real(ranks)), flush=True)
    for ranks in given.objects:
        print(json.dumps(objects(ranks)), flush=True)
    px.shutdown()


if __name__ == "__main__":
    main()
