"""States of all kinds: values that cannot be saved are named, and saved values keep their type and owner."""

from __future__ import annotations

import random
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import phalanx as px
from phalanx.checkpoint import rank_checkpoint
from phalanx.checkpoint.save_future import SaveFuture
from phalanx.checkpoint.save_load import GroupLoad
from phalanx.checkpoint.steps import listed
from phalanx.checkpoint.storage import Storage
from phalanx.declare.context import context_of
from tests.checkpoint.save_workers import Bag, Rows, Trainer
from tests.weights.weight_workers import same

WITHIN = 60.0


def holding(group: px.WorkerGroup, **held: Any) -> px.WorkerGroup:
    """Put these values into the state of all ranks, and return the group."""
    group.run(lambda worker: worker.held.update(held))
    return group


class Odd(Bag):
    """Keeps a tensor without separate memory for each element, or a lock."""

    def __init__(self, kind: str) -> None:
        rows = torch.ones(1, 3).expand(4, 3)
        made = {"expanded": rows, "sparse": rows.to_sparse(), "meta": rows.to("meta")}
        made["conjugate"] = (1j * rows).conj()
        super().__init__(data={"odd": made.get(kind, threading.Lock())})


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("kind", "value"), [("expanded", torch.ones(4, 3)), ("conjugate", [[-1j] * 3] * 4)])
def test_a_tensor_that_is_a_view_of_others_values_is_saved_and_loaded(
    here: px.ResourcePool, tmp_path: Path, ranks: int, kind: str, value: Any
) -> None:
    group = px.WorkerGroup(here[0:ranks], Odd.bind(kind))
    px.save(group, tmp_path)
    group.run(lambda worker: worker.held["data"]["odd"][:1].zero_())

    px.load(group, tmp_path)

    loaded = group.run(lambda worker: worker.held["data"]["odd"])
    assert all(one.is_contiguous() and torch.equal(one, torch.as_tensor(value)) for one in loaded)


USES = [px.save, px.save.submit, lambda group, _: px.snapshot(group), px.load]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "use", "why"),
    [
        *(("lock", use, ", a lock, cannot be pickled") for use in USES[:2]),
        *(("sparse", use, " is a tensor .*sparse.* cannot be") for use in USES[:3]),
        *(("meta", use, " is a tensor .*meta.* cannot be") for use in USES),
    ],
)
def test_a_value_that_cannot_be_saved_or_loaded_is_named(
    here: px.ResourcePool, tmp_path: Path, ranks: int, kind: str, use: Any, why: str
) -> None:
    px.save(px.WorkerGroup(here[0:ranks], Odd.bind("expanded")), tmp_path, step=1)
    group = px.WorkerGroup(here[0:ranks], Odd.bind(kind), name="odd")

    with pytest.raises(px.checkpoint.CheckpointError, match=f"'odd'.*: data.odd of the state{why}"):
        use(group, tmp_path)

    assert [step.number for step in listed(str(tmp_path))] == [1]


@pytest.mark.parametrize(
    "value",
    ["\udcff" * 5, Counter("aab"), defaultdict(list, a=[1]), OrderedDict(b=1, a=2), {"b": np.float64(3)}],
    ids=range(5),
)
def test_values_are_loaded_with_their_type_and_order(
    here: px.ResourcePool, tmp_path: Path, value: Any
) -> None:
    group = holding(px.WorkerGroup(here[0:2], Bag), value=value)
    px.save(group, tmp_path)
    holding(group, value=None)

    px.load(group, tmp_path)

    first, found = (one["value"] for one in group.get())
    assert first == found == value
    assert type(found) is (dict if isinstance(value, OrderedDict) else type(value))
    assert not isinstance(value, dict) or list(found) == list(value)


class Stepping(torch.optim.SGD):
    """Keeps a count next to the state of its parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.state["steps"] = torch.zeros(())


class Elsewhere(torch.optim.SGD):
    """Keeps its state in an inner optimizer, as torch's ZeRO does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner, self.moments = torch.optim.SGD(parameters, lr=0.1), 0

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.moments = state_dict["moments"]


class Registering(px.Worker):
    def __init__(self, parts: Callable[[Any], dict[str, Any]]) -> None:
        self.parts = parts([torch.nn.Parameter(torch.ones(2))])
        self.kept: list[Any] = []
        px.register_state(self, **self.parts)


def test_an_optimizer_that_keeps_its_state_elsewhere_is_saved_by_its_own_state_dict(
    here: px.ResourcePool, tmp_path: Path
) -> None:
    group = px.WorkerGroup(here, Registering.bind(lambda parameters: {"optimizer": Elsewhere(parameters)}))
    group.run(lambda worker: setattr(worker.parts["optimizer"], "moments", 5))
    px.save(group, tmp_path)
    group.run(lambda worker: setattr(worker.parts["optimizer"], "moments", 0))

    px.load(group, tmp_path)
    assert group.run(lambda worker: worker.parts["optimizer"].moments) == [5] * 3


def test_an_optimizer_whose_groups_have_no_options_is_saved_and_loaded(
    here: px.ResourcePool, tmp_path: Path
) -> None:
    made = Registering.bind(lambda parameters: {"optimizer": torch.optim.Optimizer(parameters, {})})
    group = px.WorkerGroup(here[0:1], made)
    px.save(group, tmp_path)
    px.load(group, tmp_path)


def test_optimizer_state_of_no_parameter_is_refused_except_in_a_part_of_another_name(
    here: px.ResourcePool, tmp_path: Path
) -> None:
    group = px.WorkerGroup(
        here[0:1], Registering.bind(lambda parameters: {"optimizer": Stepping(parameters)})
    )
    with pytest.raises(px.checkpoint.CheckpointError, match="'steps', which is of none"):
        px.save(group, tmp_path)

    group = px.WorkerGroup(here[0:1], Registering.bind(lambda parameters: {"other": Stepping(parameters)}))
    group.run(lambda worker: worker.parts["other"].state["steps"].add_(3))
    px.save(group, tmp_path)
    group.run(lambda worker: worker.parts["other"].state["steps"].zero_())

    px.load(group, tmp_path)
    assert group.run(lambda worker: int(worker.parts["other"].state["steps"])) == [3]


def test_generators_and_objects_in_dicts_and_lists_of_a_state_are_loaded_in_place(
    here: px.ResourcePool, tmp_path: Path
) -> None:
    def parts(_: Any) -> dict[str, Any]:
        more = {"a": random.Random(1), "both": (random.Random(2), [random.Random(3), 4]), "kind": Bag}
        numpy, of_torch = np.random.default_rng(4), torch.Generator().manual_seed(5)
        return {"part": {"more": more, "numbers": [5, 6]}, "numpy": numpy, "torch": of_torch}

    def keep(worker: Registering) -> None:
        more = worker.parts["part"]["more"]
        worker.kept = [more["a"], more["both"][0], more["both"][1][0]]

    def draw(worker: Registering) -> list[float]:
        found = [one.random() for one in (*worker.kept, worker.parts["numpy"])]
        return [*found, torch.rand(1, generator=worker.parts["torch"]).item()]

    group = px.WorkerGroup(here[0:1], Registering.bind(parts))
    group.run(keep)
    px.save(group, tmp_path)
    drawn = group.run(draw)
    px.load(group, tmp_path)

    assert group.run(draw) == drawn
    (part,) = group.run(lambda worker: worker.parts["part"])
    assert (part["numbers"], part["more"]["both"][1][1], part["more"]["kind"]) == ([5, 6], 4, Bag)

    group = px.WorkerGroup(here[0:1], Registering.bind(lambda _: {"part": {"more": {}}}))
    px.load(group, tmp_path, parts=["part"])
    (found,) = group.run(lambda worker: worker.parts["part"]["more"]["a"].random())
    assert found == drawn[0][0]


def test_empty_values_are_loaded_as_empty_and_copies_of_removed_tensors_are_freed(
    here: px.ResourcePool, tmp_path: Path
) -> None:
    group = holding(px.WorkerGroup(here[0:2], Bag), state={}, rows=torch.ones(2))
    px.save.submit(group, tmp_path, step=0).result()
    for step in (1, 2):
        holding(group, state={step: torch.ones(3)})
        px.save.submit(group, tmp_path, step=step).result()

    def copies(worker: Bag) -> int:
        return sum(len(buffers) for buffers in context_of(worker).shared["checkpoint"].buffers.values())

    assert sum(group.run(copies)) == 2  # of the rows, and of the only tensor of the state
    px.load(group, tmp_path, step=0)
    assert [one["state"] for one in group.get()] == [{}, {}]


def test_a_run_saves_slices_of_one_group_and_resume_waits_for_a_pending_save(
    here: px.ResourcePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, write_items = threading.Event(), rank_checkpoint.write_items

    def held_up(*args: Any) -> Any:
        assert may_write.wait(WITHIN)
        return write_items(*args)

    group = px.WorkerGroup(here, Bag)
    group.put([{"rank": rank} for rank in range(3)])
    with px.checkpoint.CheckpointManager(str(tmp_path), {"first": group[0:2], "rest": group[2:3]}) as run:
        assert run.save(1).number == 1  # and does not wait for itself
        monkeypatch.setattr(rank_checkpoint, "write_items", held_up)
        pending = run.save.submit(2)
        group.put([{"rank": None}] * 3)
        monkeypatch.setattr(pending, "exception", lambda: may_write.set() or SaveFuture.exception(pending))

        assert run.resume() == 2

    assert [one["rank"] for one in group.get()] == [0, 1, 2]


def test_a_run_resumes_on_another_number_of_ranks_with_selected_parts(
    here: px.ResourcePool, tmp_path: Path
) -> None:
    three, two = px.WorkerGroup(here, Bag), px.WorkerGroup(here[0:2], Bag)
    for group, weight in ((three, 3.0), (two, 0.0)):
        group.put([{"model": weight, "data": {"position": 100 * rank}} for rank in group.ranks])
    with px.checkpoint.CheckpointManager(str(tmp_path), {"sampling": three}) as run:
        run.save(1)
    with px.checkpoint.CheckpointManager(str(tmp_path), {"sampling": two}) as run:
        with pytest.raises(px.checkpoint.CheckpointMismatch, match=r"data\.position; .*parts=\['model'\]"):
            run.resume()
        assert [one["model"] for one in two.get()] == [0.0, 0.0]

        assert run.resume(parts={"sampling": ["model"]}) == 1

    assert two.get() == [{"model": 3.0}] * 2


@pytest.mark.parametrize("parts", [{"other": ["model"]}, {"rows": "model"}])
def test_resume_refuses_parts_of_unknown_groups_and_parts_that_are_no_list(
    here: px.ResourcePool, tmp_path: Path, parts: dict[str, Any]
) -> None:
    with (
        px.checkpoint.CheckpointManager(str(tmp_path), {"rows": px.WorkerGroup(here[0:2], Rows)}) as run,
        pytest.raises(px.DeclarationError, match=r"run\.resume"),
    ):
        run.resume(parts=parts)


def test_a_group_is_loaded_from_a_run_by_its_name_or_as_its_only_group(
    here: px.ResourcePool, tmp_path: Path
) -> None:
    groups = {name: holding(px.WorkerGroup(here, Bag), of=name) for name in ("actor", "critic")}
    fresh = px.WorkerGroup(here[0:1], Bag, name="critic")
    with px.checkpoint.CheckpointManager(str(tmp_path), groups) as run:
        run.save(1)

        px.load(fresh, tmp_path)  # a reader needs no lock
        assert fresh[0].get() == {"of": "critic"}
        px.load(fresh, tmp_path, name="actor")
        assert fresh[0].get() == {"of": "actor"}
        why = "has the groups actor, critic, and none is named 'policy'"
        with pytest.raises(px.checkpoint.CheckpointMismatch, match=why):
            px.load(fresh, tmp_path, name="policy")

    with px.checkpoint.CheckpointManager(tmp_path / "one", {"actor": groups["critic"]}) as run:
        run.save(1)
    px.load(fresh, tmp_path / "one")  # its only group, of whatever name
    assert fresh[0].get() == {"of": "critic"}
    px.save(fresh, tmp_path / "unnamed")
    with pytest.raises(px.checkpoint.CheckpointMismatch, match="leave out name='actor'"):
        px.load(fresh, tmp_path / "unnamed", name="actor")


@pytest.mark.parametrize(
    ("reads", "method"), [(Storage, "facts"), (GroupLoad, "read")], ids=["verified", "after it was verified"]
)
def test_a_step_that_is_removed_during_a_load_is_not_reported_as_damaged(
    here: px.ResourcePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: type, method: str
) -> None:
    writer, reader = px.WorkerGroup(here[0:2], Rows), px.WorkerGroup(here[0:2], Rows.bind(fill=0.0))
    px.save(writer, tmp_path, step=1)
    real = getattr(reads, method)

    def removed_first(*given: Any) -> Any:
        monkeypatch.undo()
        px.save(writer, tmp_path, step=2, keep=1)
        return real(*given)

    monkeypatch.setattr(reads, method, removed_first)

    with pytest.raises(px.checkpoint.CheckpointError, match=r"was removed.*keep=") as caught:
        px.load(reader, tmp_path)

    assert not isinstance(caught.value, px.checkpoint.CheckpointCorrupted)
    assert px.load(reader, tmp_path).step == 2


def test_a_generator_that_was_not_saved_keeps_its_state(
    here: px.ResourcePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = px.WorkerGroup(here[0:1], Registering.bind(lambda _: {}))
    px.save(group, tmp_path)
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(4)
    module = SimpleNamespace(
        get_rng_state=lambda device: generator.get_state(),
        set_rng_state=lambda state, device: generator.set_state(state),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    px.load(group, tmp_path)

    assert generator.initial_seed() == 4


@pytest.mark.parametrize(
    ("width", "parts", "why"),
    [
        (10, None, "others had made no step; step on all ranks"),
        (11, ["model"], r"model.0.weight is \[10, 6\] torch.float32 where it was saved, and \[11, 6\] tor"),
    ],
    ids=["an optimizer that only some ranks stepped", "a model of another shape"],
)
def test_a_mismatched_state_is_refused_before_anything_is_loaded(
    here: px.ResourcePool, tmp_path: Path, width: int, parts: list[str] | None, why: str
) -> None:
    group, other = (px.WorkerGroup(here[0:2], Trainer.bind(width=units)) for units in (10, width))
    group[0].step()
    px.save(group, tmp_path)
    other[0].step()
    before = other.values()

    with pytest.raises(px.checkpoint.CheckpointMismatch, match=why):
        px.load(other, tmp_path, parts=parts)

    assert all(map(same, other.values(), before))


class Uneven(px.Worker):
    """Rank 0 has all rows of a matrix and the other rank none, as under FSDP; a second tensor has no elements."""

    def __init__(self, fill: float = 1.0) -> None:
        share = (2, 0)[self.rank] if self.world_size > 1 else 2
        self.rows = torch.nn.Parameter(torch.full((share, 3), fill))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.optimizer = torch.optim.Adam([self.rows, self.empty], lr=0.1)
        boxes = {
            "rows": px.weights.ShardSpec((2, 3), (((0, 0), (2, 3)),) if share else ()),
            "empty": px.weights.ShardSpec((0, 3), ()),
        }
        model = {"rows": self.rows, "empty": self.empty}
        px.register_state(self, model=model, optimizer=self.optimizer, boxes=boxes, rng=False)

    @px.register
    def step(self) -> None:
        for parameter in (self.rows, self.empty):
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    @px.register
    def held(self) -> list[torch.Tensor]:
        return [self.rows.detach(), self.optimizer.state[self.rows]["exp_avg"]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_without_a_box_are_saved_and_loaded(here: px.ResourcePool, tmp_path: Path, ranks: int) -> None:
    group = px.WorkerGroup(here[0:2], Uneven)
    group.step()
    px.save(group, tmp_path)
    wanted = group.held()[0]

    fresh = px.WorkerGroup(here[0:ranks], Uneven.bind(fill=0.0))
    px.load(fresh, tmp_path)

    assert all(torch.equal(*pair) for pair in zip(fresh.held()[0], wanted, strict=True))
