"""verl's checkpoint engine between actors of Ray, one of which is told that it is on another node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from phalanx.compat.verl_weights.engine import WeightsEngine
from phalanx.errors import WeightsLost

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

WEIGHTS = {
    "large": torch.arange(5000.0),
    "small": torch.ones(3, 4, dtype=torch.bfloat16),
    "none": torch.ones(0),
}


def start(**options: Any) -> Any:
    """An actor that has one end."""
    import ray

    class Rank:
        def __init__(self) -> None:
            self.engine = WeightsEngine(4096, **options)

        def do(self, method: str, *args: Any) -> Any:
            return getattr(self.engine, method)(*args)

        async def send(self, weights: dict[str, Any]) -> dict[str, int]:
            return await self.engine.send_weights(weights.items(), global_steps=3)

        async def receive(self) -> dict[str, Any]:
            return {name: tensor async for name, tensor in self.engine.receive_weights(global_steps=3)}

    return ray.remote(Rank).options(num_cpus=0).remote()


@pytest.fixture
def ranks() -> Iterator[list[Any]]:
    """A sender, a reader beside it, and one that is not."""
    import ray

    made = [start(is_master=True, timeout=60.0), start(timeout=60.0), start(timeout=60.0)]
    yield made
    for rank in made:
        ray.kill(rank)


def begin(ranks: list[Any], get: Callable[[Any], Any]) -> None:
    said = get([rank.do.remote("prepare") for rank in ranks])
    said[2]["place"] = "another node"
    actor, rollout = WeightsEngine.build_topology(1, 2, said)
    routes = [*actor["route"], *rollout["route"]]
    get([rank.do.remote("init_process_group", route) for rank, route in zip(ranks, routes, strict=True)])


def test_weights_arrive_over_segments_and_over_the_object_store_update_after_update(ranks: list[Any]) -> None:
    import ray

    for factor in (1, 2):
        sent = {name: tensor * factor for name, tensor in WEIGHTS.items()}
        begin(ranks, ray.get)
        told, near, far = ray.get(
            [ranks[0].send.remote(sent), *(rank.receive.remote() for rank in ranks[1:])], timeout=120
        )
        ray.get([rank.do.remote("finalize") for rank in ranks])

        assert told["sync/tensors"] == 3
        for found in (near, far):
            assert list(found) == list(sent)
            assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())


def test_readers_of_both_kinds_hear_of_the_death_of_their_sender(ranks: list[Any]) -> None:
    import ray

    begin(ranks, ray.get)
    reading = [rank.receive.remote() for rank in ranks[1:]]
    ray.kill(ranks[0])

    for one in reading:
        with pytest.raises(WeightsLost, match="source rank 0"):
            ray.get(one, timeout=30)
