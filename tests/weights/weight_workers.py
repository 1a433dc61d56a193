"""Workers that publish and accept weights, and inline groups of such workers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import phalanx as px

NAME = "policy"


def network(seed: int) -> torch.nn.Module:
    """Return two linear layers with random values by ``seed``."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))


class Network(px.Worker):
    model: torch.nn.Module

    @px.register
    def values(self) -> dict[str, torch.Tensor]:
        return {name: one.detach() for name, one in self.model.named_parameters()}


class Actor(Network):
    """Publishes a small network and trains it by adding to it."""

    def __init__(self) -> None:
        self.model = network(0)
        self.steps = 0
        self.publish_weights(NAME, self.model, step=lambda: self.steps)

    @px.register
    def train(self) -> None:
        self.steps += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1.0)


class Rollout(Network):
    """Accepts a small network in place."""

    def __init__(self) -> None:
        self.model = network(1)
        self.accept_weights(NAME, self.model)

    @px.register
    def version(self) -> int | None:
        return px.weights.current_version(NAME)


class Loading(Rollout):
    """Accepts the network by a function, as an engine does, and calls ``loaded`` after each load."""

    def __init__(self) -> None:
        self.model = network(1)
        self.accept_weights(NAME, self.model, load=self.load)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in tensors:
                self.model.get_parameter(name).copy_(tensor)
        self.loaded()

    def loaded(self) -> None:
        """Run after each load. Tests override this method."""


class Fussy(Loading):
    """Loads weights, or fails in a load while it refuses them."""

    refuses = False

    def loaded(self) -> None:
        if self.refuses:
            raise ValueError("no room")

    @px.register(needs_weights=False)
    def refuse(self, refuses: bool) -> None:
        self.refuses = refuses


class Publisher(px.Worker):
    """Publishes the weights that ``make`` returns for its rank."""

    def __init__(self, make: Callable[[int], Any], **stated: Any) -> None:
        self.model = make(self.rank)
        self.publish_weights(NAME, self.model, **{key: of(self.rank) for key, of in stated.items()})


class Accepter(px.Worker):
    """Accepts weights into the model that ``make`` returns for its rank. The model is its state, too."""

    def __init__(self, make: Callable[[int], Any], **stated: Any) -> None:
        self.model = make(self.rank)
        px.register_state(self, model=self.model)
        self.accept_weights(NAME, self.model, **{key: of(self.rank) for key, of in stated.items()})


def told(value: Any) -> Callable[[int], Any]:
    """Return a function that returns ``value`` for each rank."""
    return lambda rank: value


def halves(full: Mapping[str, torch.Tensor], **stated: Any) -> Any:
    """Return a class of which two ranks publish half of the rows of each matrix."""

    def box(one: torch.Tensor, rank: int) -> px.weights.ShardSpec:
        rows, columns = one.shape
        return px.weights.ShardSpec((rows, columns), (((rank * rows // 2, 0), (rows // 2, columns)),))

    return Publisher.bind(
        lambda rank: {name: one.chunk(2)[rank].clone() for name, one in full.items()},
        boxes=lambda rank: {name: box(one, rank) for name, one in full.items()},
        **stated,
    )


@contextmanager
def groups(*bound: Any, sizes: tuple[int, ...] = ()) -> Generator[list[px.WorkerGroup]]:
    """Start an inline group of each class, with one rank if ``sizes`` is empty."""
    with ExitStack() as stack:
        pools = [
            stack.enter_context(px.ResourcePool([size], use_gpu=False, backend="inline"))
            for size in sizes or (1,) * len(bound)
        ]
        yield [px.WorkerGroup(pool, one) for pool, one in zip(pools, bound, strict=True)]


@contextmanager
def linked(
    source: Any, target: Any, sizes: tuple[int, int] = (1, 1), **options: Any
) -> Generator[tuple[px.WorkerGroup, px.WorkerGroup, px.WeightSync]]:
    """Start inline groups of two classes, and yield them with a sync from the first to the second."""
    with groups(source, target, sizes=sizes) as (one, other):
        yield one, other, px.WeightSync(one, other, NAME, **options)


@contextmanager
def joined(published: Any, accepted: Any, **options: Any) -> Generator[tuple[px.WeightSync, px.WorkerGroup]]:
    """Yield an inline sync from one rank to another, and the group of the target.

    Ranks have copies of the arguments.
    """
    publishing, accepting = Publisher.bind(told(published)), Accepter.bind(told(accepted))
    with linked(publishing, accepting, **options) as (_, target, sync):
        yield sync, target


def arrived(target: px.WorkerGroup, rank: int = 0) -> Any:
    """Return the model of a rank of ``target``."""
    return target[rank].run(lambda worker: worker.model)


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Return whether names, types and every bit are equal."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )
