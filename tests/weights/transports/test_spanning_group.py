"""A process group over some ranks of both sides of a sync."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed import HashStore

from phalanx.weights.transports.deadline import Deadline
from phalanx.weights.transports.process_group import SpanningGroup


def test_only_ranks_that_have_something_for_each_other_need_to_come() -> None:
    store, arrived = HashStore(), torch.zeros(4, dtype=torch.uint8)

    def take_part(**side: Any) -> None:
        group = SpanningGroup(store, "one", sources=[1, 2], targets=[3], timeout=30, **side)
        with group.syncing():
            if "target" in side:
                for number, source in enumerate((1, 2)):
                    group.receive(arrived[2 * number :][:2], number, source, Deadline(30))
            else:
                sent = torch.full((2,), side["source"], dtype=torch.uint8)
                group.send(sent, side["source"] - 1, 3, Deadline(30))
        group.close()

    with ThreadPoolExecutor(3) as threads:
        for done in [
            threads.submit(take_part, **side) for side in ({"source": 1}, {"source": 2}, {"target": 3})
        ]:
            done.result(60)

    assert arrived.tolist() == [1, 1, 2, 2]
