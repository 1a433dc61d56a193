"""Declarations of workers, methods and modes, and the errors of wrong declarations."""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import ray

import phalanx as px
from phalanx.api.worker_group import WorkerGroup
from phalanx.declare.classes import RESERVED, registered_methods
from phalanx.declare.context import WorkerContext, context_of, present
from phalanx.declare.worker import make


class Base(px.Worker):
    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def step(self, batch: list[int]) -> list[int]:
        """Do a step."""
        return batch


def test_an_override_keeps_the_registration_or_replaces_it() -> None:
    class Derived(Base):
        def step(self, batch: list[int], scale: int = 1) -> list[int]:
            return batch

    class Anew(Base):
        @px.register(px.Dispatch.ONE_TO_ALL)
        def step(self, batch: list[int]) -> list[int]:
            return batch

    own, spec = registered_methods(Base)["step"], registered_methods(Derived)["step"]
    assert str(own.signature) == "(batch: 'list[int]') -> 'list[int]'"
    assert own.doc == "Do a step."
    assert spec.mode == px.Dispatch.DP_COMPUTE_PROTO
    assert spec.signature is not None
    assert "scale" in spec.signature.parameters
    assert registered_methods(Anew)["step"].mode == px.Dispatch.ONE_TO_ALL


@pytest.mark.parametrize(
    ("base", "members", "words"),
    [
        (Base, {"step": staticmethod(print)}, "step overrides a registered method"),
        (px.Worker, {"go": staticmethod(px.register(lambda: None))}, "staticmethod"),
        *((px.Worker, {name: px.register()(lambda self: None)}, name) for name in sorted(RESERVED)),
        *(
            (px.Worker, {name: px.register()(lambda self: None)}, f"may not be called {name!r}")
            for name in ("rank", "world_size", "local_rank", "device", "register_mesh", "group_name", "bind")
        ),
    ],
)
def test_a_member_that_is_static_or_hides_an_attribute_fails_at_class_creation(
    base: type, members: dict[str, Any], words: str
) -> None:
    with pytest.raises(px.DeclarationError, match=words):
        type("Derived", (base,), members)


def test_a_plain_class_may_use_names_of_worker_attributes_and_is_checked_when_bound() -> None:
    plain = type("Plain", (), {"device": px.register()(lambda self: "cpu")})
    assert list(registered_methods(plain)) == ["device"]
    with pytest.raises(px.DeclarationError, match="close"):
        px.BoundClass(type("Plain", (), {"close": px.register()(lambda self: None)}))
    assert {name for name in dir(WorkerGroup) if not name.startswith("_")} <= RESERVED, "those of a group are"


def test_a_method_can_be_registered_after_its_class_was_created() -> None:
    class Derived(Base):
        def more(self) -> None: ...

    px.register(Derived.more)
    assert list(registered_methods(Derived)) == ["step", "more"]


@pytest.mark.parametrize(
    "members", [{"_context": None}, {"__slots__": ("_context", "__weakref__")}, {"__slots__": ()}], ids=str
)
def test_a_plain_class_knows_its_rank_whatever_its_attributes_or_slots(members: dict[str, Any]) -> None:
    context = WorkerContext(rank=3)
    worker, outside = make(type("Plain", (), members), (), {}, context), Base()
    with present(context):
        assert context_of(worker).rank == 3
    assert (outside.rank, outside.world_size, outside.device.type) == (0, 1, "cpu"), "outside of a group"


def test_a_ray_class_keeps_supported_options_and_unsupported_options_are_refused_with_advice() -> None:
    class Accumulator: ...

    bound = px.BoundClass(ray.remote(memory=500 * 1024 * 1024)(Accumulator))
    assert bound.ray_options == {"memory": 500 * 1024 * 1024}
    assert bound.cls.__name__ == "Accumulator"
    with pytest.raises(px.DeclarationError, match=r"max_restarts=3.*restart"):
        px.BoundClass(ray.remote(max_restarts=3)(Accumulator))


def test_a_function_that_wraps_a_generator_can_be_registered() -> None:
    def steps(self: object) -> Iterator[object]:
        yield self

    @functools.wraps(steps)
    def listed(self: object) -> list[object]:
        return list(steps(self))

    assert px.register(listed) is listed


def test_binding_an_abstract_class_is_refused() -> None:
    class Abstract(px.Worker, abc.ABC):
        @abc.abstractmethod
        def loss(self) -> float: ...

    with pytest.raises(px.DeclarationError, match=r"Abstract is abstract.*loss"):
        Abstract.bind()
