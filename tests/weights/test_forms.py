"""Forms of published and accepted weights, and the mapping of their names, types and shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import phalanx as px
from tests.weights.weight_workers import (
    NAME,
    Accepter,
    Actor,
    Publisher,
    Rollout,
    arrived,
    groups,
    halves,
    joined,
    linked,
    same,
    told,
)


def ramp(*shape: int, dtype: torch.dtype = torch.float32, start: float = 0.0) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(start, start + 1, count).reshape(shape).to(dtype)


class Plain:
    """A class that is no px.Worker, with tensors of inference mode."""

    def __init__(self, publishes: bool) -> None:
        with torch.inference_mode():
            self.model = {"w": ramp(4) if publishes else torch.zeros(4)}
        verb = px.weights.publish if publishes else px.weights.accept
        verb(self, NAME, self.model)


class Loading(px.Worker):
    """Loads weights as an engine does: pairs of name and tensor, into its own memory."""

    def __init__(self, like: Callable[[int], Any] = lambda rank: None, most: int | None = None) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.most = most
        self.accept_weights(NAME, like(self.rank), load=self.load)

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            self.loaded[name] = tensor.clone()
            if len(self.loaded) == self.most:
                return


def test_any_class_can_publish_and_accept_tensors_of_inference_mode() -> None:
    with linked(px.BoundClass(Plain, True), px.BoundClass(Plain, False)) as (_, target, sync):
        sync()

        assert torch.equal(target.run(lambda plain: plain.model["w"])[0], ramp(4))


class Changing(px.Worker):
    """Publishes or accepts a tensor that can be replaced."""

    def __init__(self, publishes: bool) -> None:
        self.tensor = ramp(4) if publishes else torch.zeros(4)
        verb = self.publish_weights if publishes else self.accept_weights
        verb(NAME, lambda: {"w": self.tensor})

    @px.register(needs_weights=False)
    def put(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_a_model_function_is_called_at_each_sync_and_new_shapes_fail_one_sync() -> None:
    with linked(Changing.bind(True), Changing.bind(False)) as (source, target, sync):
        sync()
        source.put(ramp(4, start=5))
        target.put(torch.ones(4))
        sync()
        assert torch.equal(target.run(lambda worker: worker.tensor)[0], ramp(4, start=5))

        source.put(ramp(5))
        target.put(torch.zeros(5))
        with pytest.raises(px.weights.WeightsMismatch, match="do not match the plan of this sync: w"):
            sync()
        sync()
        assert torch.equal(target.run(lambda worker: worker.tensor)[0], ramp(5))


class Moving(px.Worker):
    """Publishes two of four rows, and two tensors that are tied at first."""

    def __init__(self) -> None:
        self.model = {"rows": torch.full((2,), self.rank + 1.0)} | dict.fromkeys("ab", torch.ones(2))
        self.move_rows(0)

    @px.register(needs_weights=False)
    def move_rows(self, first: int) -> None:
        start = first if self.rank == 0 else 2 - first
        self.publish_weights(
            NAME, self.model, boxes={"rows": px.weights.ShardSpec((4,), (((start,), (2,)),))}
        )

    @px.register(needs_weights=False)
    def untie(self) -> None:
        self.model["b"] = torch.full((2,), 7.0)


def test_untied_tensors_and_moved_rows_fail_one_sync_and_are_planned_again() -> None:
    wanted = {"rows": torch.tensor([1.0, 1, 2, 2]), "a": torch.ones(2), "b": torch.ones(2)}
    with linked(Moving, Accepter.bind(told(wanted)), (2, 1)) as (source, target, sync):
        sync()
        source.untie()
        with pytest.raises(px.weights.WeightsMismatch, match="the plan of this sync: b"):
            sync()
        sync()
        assert same(arrived(target), wanted | {"b": torch.full((2,), 7.0)})

        source.move_rows(2)
        with pytest.raises(px.weights.WeightsMismatch, match="the plan of this sync: rows"):
            sync()
        sync()
        assert arrived(target)["rows"].tolist() == [2.0, 2, 1, 1]


def test_a_parameter_added_to_the_target_after_the_plan_is_an_error() -> None:
    def grow(worker: Accepter) -> None:
        worker.model["new"] = torch.zeros(2)

    with joined({"w": ramp(4)}, {"w": torch.zeros(4)}) as (sync, target):
        sync()
        target.run(grow)
        with pytest.raises(px.weights.WeightsMismatch, match="do not match the plan of this sync: new"):
            sync()
        with pytest.raises(px.weights.WeightsMismatch, match="new"):  # the source does not have it
            sync()


def test_a_load_function_gets_the_declared_tensors_with_the_declared_types() -> None:
    published = {"a": ramp(3), "b": ramp(2)}
    like = {"a": torch.empty(3, dtype=torch.bfloat16, device="meta")}
    with linked(Publisher.bind(told(published)), Loading.bind(told(like))) as (_, target, sync):
        sync()

        assert same(target.run(lambda worker: worker.loaded)[0], {"a": ramp(3).bfloat16()})


def test_a_load_function_gets_complete_renamed_tensors_from_sharded_sources() -> None:
    sides = linked(halves({"w": ramp(4, 3)}), Loading, sizes=(2, 1), rename={"w": "v"})
    with sides as (_, target, sync):
        sync()

        assert same(target.run(lambda worker: worker.loaded)[0], {"v": ramp(4, 3)})


def test_a_rank_that_accepts_no_tensors_has_the_version_of_the_rank_that_loads_them() -> None:
    loading = Loading.bind(lambda rank: {"w": torch.zeros(4)} if rank == 0 else {})
    with linked(Publisher.bind(told({"w": ramp(4)})), loading, sizes=(1, 2)) as (_, target, sync):
        sync()

        assert [list(loaded) for loaded in target.run(lambda worker: worker.loaded)] == [["w"], []]
        assert [str(state) for state in px.weights.status(target, NAME).values()] == ["complete(1)"] * 2


def test_a_load_function_that_skips_tensors_is_an_error_and_tears_the_weights() -> None:
    published = {"a": ramp(3), "b": ramp(2, 2)}
    with groups(Publisher.bind(told(published)), Loading.bind(most=1)) as (source, target):
        with pytest.raises(px.weights.WeightsError, match=r"took 1 of 2 tensors and left [ab];"):
            px.WeightSync(source, target, NAME)()

        assert str(px.weights.status(target, NAME)[0]) == "torn(1)"


def test_one_sync_updates_several_groups_to_one_version() -> None:
    with groups(Actor, Rollout, Rollout, sizes=(1, 1, 2)) as (source, one, other):
        sync = px.WeightSync(source, [one, other], NAME)
        assert sync().number == 1
        source.train()
        version = sync()

        assert (version.number, version.changed) == (2, 4)
        assert one.version() + other.version() == [2, 2, 2]
        trained = source.values()[0]
        assert all(same(found, trained) for found in one.values() + other.values())
        assert version.nbytes == 3 * 4 * sum(one.numel() for one in trained.values())


@pytest.mark.parametrize(
    "rename",
    [{"model.*": "*"}, {"model.w": "w"}, lambda name: name.removeprefix("model.")],
    ids=["pattern", "name", "function"],
)
def test_tensors_can_be_renamed_by_pattern_name_or_function(rename: Any) -> None:
    with joined({"model.w": ramp(3)}, {"w": torch.zeros(3)}, rename=rename) as (sync, target):
        sync()

        assert same(arrived(target), {"w": ramp(3)})


PARTS = {
    "a.q_proj.weight": ramp(8, 3),
    "a.k_proj.weight": ramp(4, 3, start=2),
    "a.v_proj.weight": ramp(4, 3, start=4),
    "a.gate_proj.weight": ramp(5, 3, start=6),
    "a.up_proj.weight": ramp(5, 3, start=8),
}
FUSED = {
    "a.qkv_proj.weight": torch.cat([PARTS[f"a.{part}_proj.weight"] for part in "qkv"]),
    "a.gate_up_proj.weight": torch.cat([PARTS[f"a.{part}_proj.weight"] for part in ("gate", "up")]),
}


@pytest.mark.parametrize(
    ("published", "wanted", "rules"),
    [
        (PARTS, FUSED, ()),
        (FUSED, PARTS, ()),
        (
            {"a": ramp(2), "b": ramp(3, start=7)},
            {"ab": torch.cat([ramp(2), ramp(3, start=7)])},
            [px.weights.Fused("ab", ("a", "b"))],
        ),
    ],
    ids=["fused", "split", "by a rule of the user"],
)
def test_a_sync_fuses_and_splits_tensors(
    published: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rules: Any
) -> None:
    blank = {name: torch.zeros_like(one) for name, one in wanted.items()}
    with joined(published, blank, fused=rules) as (sync, target):
        sync()

        assert same(arrived(target), wanted)


class Tied(torch.nn.Module):
    def __init__(self, tied: bool, start: float) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 2)
        self.lm_head = torch.nn.Linear(2, 5, bias=False)
        self.embed.weight.data = ramp(5, 2, start=start)
        self.lm_head.weight.data = ramp(5, 2, start=start + 9)
        if tied:
            self.lm_head.weight = self.embed.weight


@pytest.mark.parametrize("tied", [True, False], ids=["one storage", "two"])
def test_tied_weights_are_sent_once_and_arrive_under_both_names(tied: bool) -> None:
    accepting = Accepter.bind(lambda _: Tied(tied, 3))
    with groups(Publisher.bind(lambda _: Tied(True, 0)), accepting) as (source, target):
        version = px.WeightSync(source, target, NAME)()
        model = arrived(target)

    assert version.nbytes == 5 * 2 * 4
    assert torch.equal(model.embed.weight, ramp(5, 2))
    assert torch.equal(model.lm_head.weight, ramp(5, 2))
