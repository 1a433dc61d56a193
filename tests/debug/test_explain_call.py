"""Explanations of calls before they are made, and of groups and their methods."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.debug.explain_call import finished_result

BY_VALUE = True


class Explained(px.Worker):
    def __init__(self) -> None:
        self.calls = 0

    @px.register(px.Dispatch.mesh("default"))
    def update(self, batch: Any, rate: Any = None) -> Any:
        return batch

    @px.register(px.Dispatch.mesh("default", balance="length"))
    def balanced(self, length: Any) -> Any:
        return length

    @px.register(px.Dispatch.DP_COMPUTE_PROTO, pad_to_multiple=4)
    def padded(self, batch: Any) -> Any:
        return batch

    @px.register(px.Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def rows(self, batch: Any) -> Any:
        return batch

    @px.register
    def take(self, value: Any) -> None:
        self.calls += 1

    @px.register
    def count(self) -> int:
        return self.calls

    @px.register({"dispatch_fn": lambda group, x: (([x] * group.world_size,), {}), "collect_fn": sum})
    def custom(self, x: Any) -> Any:
        return x


class Placed(px.Worker):
    def __init__(self) -> None:
        self.register_mesh("own", {"dp": self.rank})

    @px.register(px.Dispatch.mesh("own"))
    def rows(self, batch: Any) -> Any:
        return batch


@pytest.fixture(scope="module")
def group(pool: px.ResourcePool) -> Any:
    return px.WorkerGroup(pool, Explained, mesh=px.Mesh(pp=2, dp=2), name="explained")


def test_an_explanation_shows_equal_rows_of_mesh_peers_and_the_outputs_that_are_kept(group: Any) -> None:
    explanation = group.update.explain(torch.zeros(5, 3), rate="<b>")

    assert [(rank.start, rank.stop) for rank in explanation.ranks] == [(0, 3), (3, 5), (0, 3), (3, 5)]
    assert [rank.returns for rank in explanation.ranks] == ["dropped", "dropped", "kept", "kept"]
    assert "last pp (pp=1)" in explanation.collected
    assert [rank.place for rank in explanation.ranks][1] == {"pp": 0, "dp": 1}
    assert explanation.to_dict()["ranks"][3]["rows"] == 2
    assert "&lt;b&gt;" in explanation._repr_html_()


def test_explain_makes_no_call_and_shortens_large_numbers(group: Any) -> None:
    before = group.statistics()["stored_bytes"], group.count()

    group.take.explain(torch.zeros(100_000))

    assert (group.statistics()["stored_bytes"], group.count()) == before
    assert group.take.explain(10**5000).arguments[0].value == "int of 16610 bits"
    assert group.take.explain(-1e300).arguments[0].value == "-1e+300"
    assert group.take.explain(torch.Tensor).arguments[0].value == "_TensorMeta"


def test_an_explanation_shows_how_each_argument_is_sent(group: Any) -> None:
    batch, stored = torch.zeros(8, 3), px.put(torch.zeros(3))

    arguments = group.update.explain(batch, stored).arguments
    (readonly,) = group.take.explain(px.readonly(batch)).arguments
    with px.Channel(backend=group.core.backend.name) as channel:
        channel.put(batch)
        with channel.take_rows(8) as taken:
            (of_channel,) = group.rows.explain(taken).arguments

    assert [(a.name, a.given, a.travels) for a in arguments] == [
        ("batch", "rows split into 2 shards", "by value"),
        ("rate", "the same to all", "stored before (px.put)"),
    ]
    assert readonly.travels == "stored once, read without a copy"
    assert of_channel.travels == "by reference, rank to rank"


def test_an_explanation_shows_padded_and_balanced_rows(group: Any) -> None:
    padded = group.padded.explain(torch.zeros(6, 2))
    balanced = group.balanced.explain(torch.tensor([9, 1, 1, 9]))

    assert [(rank.rows, rank.given_rows) for rank in padded.ranks] == [(2, 4), (2, 4), (1, 4), (1, 4)]
    assert "without the padding" in padded.collected and "0:2 (padded to 4)" in str(padded)
    assert sorted(row for rank in balanced.ranks[:2] for row in rank.order) == [0, 1, 2, 3]
    assert "in the caller's order" in balanced.collected


def test_an_explanation_names_the_call_of_a_future_and_leaves_its_rows_unknown(group: Any) -> None:
    explanation = group[0:2].rows.explain(group.rows(torch.zeros(8, 3)))

    (argument,) = explanation.arguments
    assert (argument.value, argument.travels) == ("future of explained.rows", "by reference, rank to rank")
    assert [rank.rows for rank in explanation.ranks] == [None, None]


def test_an_explanation_of_a_slice_counts_only_its_ranks_and_a_custom_mode_is_named(group: Any) -> None:
    explanation = group[1:3].rows.explain(torch.zeros(4, 1))
    custom = group.custom.explain(3)

    assert [(rank.rank, rank.start, rank.stop) for rank in explanation.ranks] == [(1, 0, 2), (2, 2, 4)]
    assert not explanation.waits
    assert group[2].take.explain(1).collected == "the output of rank 2 itself"
    assert [argument.given for argument in custom.arguments] == ["one element each"]
    assert custom.collected.startswith("sum(group, outputs), called with all 4")


def test_a_method_of_a_role_is_explained_equally_with_and_without_options(here: px.ResourcePool) -> None:
    roles: Any = px.WorkerGroup(here, px.colocate({"actor": Explained}), mesh=px.Mesh(dp=3))
    plain, with_options = roles.actor.update, roles.actor.update.options(timeout=5.0)

    assert plain.explain(torch.zeros(4, 1)) == with_options.explain(torch.zeros(4, 1))
    assert plain.explain(torch.zeros(4, 1)).call.endswith(".actor.update")
    assert px.explain(roles.actor).title == f"role actor of group {roles.name}, ranks 0-2"


def test_explain_refuses_invalid_arguments_with_the_message_of_the_call(group: Any) -> None:
    for method, args in (group.update, (torch.zeros(3), torch.zeros(4))), (group.take, ()):
        with pytest.raises(px.DispatchError) as explained:
            method.explain(*args)
        with pytest.raises(px.DispatchError) as called:
            method(*args)

        assert str(explained.value) == str(called.value)


def test_explain_describes_a_group_a_view_and_its_methods(group: Any) -> None:
    rows = px.explain(group).to_dict()["rows"]
    methods = {row["method"].split("(")[0]: row for row in px.explain(group[:]).to_dict()["rows"]}

    assert (rows[2]["mesh"], rows[2]["pid"]) == ("pp=1, dp=0", group.core.endpoints[2].facts.pid)
    assert px.explain(group[0:2]).title == "group explained, ranks 0-1"
    assert px.explain(group[1:4]).title == "group explained, ranks 1-3"
    assert px.explain(group.rows).to_dict()["rows"][0]["a bare call"] == "returns a CallFuture"
    assert methods["update"]["arguments"] == "rows, split over dp"
    assert methods["padded"]["options"] == "rows padded to a multiple of 4"
    assert methods["custom"]["result"] == "as sum makes it"
    (update, *_, custom), (of_any,) = px.explain(group[1]).rows, px.explain(group.any.update).rows
    assert update[2:5] == of_any[2:5] == ("one dp coordinate", "as they are", "the value")
    assert custom[2:5] == ("one", "as they are", "the value")


def test_explain_refuses_a_split_by_values_of_an_unfinished_call() -> None:
    pending: Any = SimpleNamespace(done=lambda: False)
    with pytest.raises(px.DispatchError, match="does not wait"):
        finished_result(pending)


def test_an_explanation_of_many_ranks_shows_the_first_with_their_registered_places() -> None:
    with (
        px.ResourcePool([40], use_gpu=False, backend="inline") as slots,
        px.WorkerGroup(slots, Placed) as many,
    ):
        explanation = many.rows.explain(torch.zeros(80, 1))
        table = many.explain()

    assert "and 8 more ranks" in str(explanation)
    assert [rank["start"] for rank in explanation.to_dict()["ranks"]] == list(range(0, 80, 2))
    assert explanation.ranks[2].place == {"dp": 2}
    assert table.to_dict()["rows"][2]["mesh"] == "own: dp=2"
