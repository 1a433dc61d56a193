"""Helpers of the planning tests: a target without workers, and calls without a backend."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from phalanx.collect.join import gather
from phalanx.declare.register import MethodSpec
from phalanx.dispatch.modes import plan
from phalanx.dispatch.plan import CallPlan
from phalanx.errors import DispatchError
from phalanx.topology.mesh import Mesh


@dataclass(frozen=True)
class FakeTarget:
    world_size: int
    meshes: Mapping[str, Mesh] = field(default_factory=dict)

    def mesh(self, name: str = "default") -> Mesh:
        if name not in self.meshes:
            raise DispatchError(f"there is no mesh {name!r}")
        return self.meshes[name]


def meshed(**axes: int) -> FakeTarget:
    mesh = Mesh(**axes)
    return FakeTarget(mesh.world_size, {"default": mesh, "actor": mesh})


@dataclass(frozen=True)
class FakeFuture:
    value: Any
    __phalanx_future__ = True

    def result(self) -> Any:
        return self.value


def spec_of(mode: Any, function: Callable[..., Any] | None = None, **options: Any) -> MethodSpec:
    signature = None if function is None else inspect.signature(function)
    return MethodSpec("update", mode, signature=signature, **options)


def echo(x: Any) -> Any:
    return x


def by_rank(call: CallPlan) -> list[tuple[int, tuple[Any, ...], dict[str, Any]]]:
    """Return each called rank with its arguments."""
    return [(rank, *given) for rank, given in zip(call.ranks, call.arguments(), strict=True)]


def run(
    spec: MethodSpec, target: FakeTarget, *args: Any, method: Callable[..., Any] = echo, **kwargs: Any
) -> Any:
    """Return the value of a call whose ranks run ``method`` in this process. A dropped output is None."""
    call = plan(spec, target, args, kwargs)
    outputs = [
        method(*args, **kwargs) if call.keeps(position) else None
        for position, (_, args, kwargs) in enumerate(by_rank(call))
    ]
    return gather(call.gather, outputs, target)


@dataclass
class Batch:
    ids: Any
    names: list[str]
    extra: dict[str, Any] = field(default_factory=dict)


def same(left: Any, right: Any) -> bool:
    """Return whether values are equal in type and content, including dtype and shape."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and np.array_equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "batch_size"):
        return left.batch_size == right.batch_size and same(left.to_dict(), right.to_dict())
    if dataclasses.is_dataclass(left):
        return same(vars(left), vars(right))
    return bool(left == right)
