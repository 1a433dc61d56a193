"""Declarations of the weights that a worker publishes and accepts, by name.

A declaration is cheap: the tensors are read only when a sync is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.declare.context import WorkerContext, context_of, current_context
from phalanx.errors import DeclarationError
from phalanx.wire.messages import WeightsKey

Load = Callable[[Iterable[tuple[str, Any]]], object]


@dataclass(frozen=True)
class Published:
    """Weights that a role publishes under a name; see :func:`publish`."""

    model: Any
    step: Callable[[], int] | None = None
    boxes: Mapping[str, Any] | None = None
    megatron: Any = None


@dataclass(frozen=True)
class Accepted:
    """Weights that a role accepts under a name; see :func:`accept`."""

    model: Any = None
    load: Load | None = None
    share: bool = False
    boxes: Mapping[str, Any] | None = None
    megatron: Any = None


@dataclass
class WeightsDeclared:
    """Declarations of the roles of a rank, by (role, name), and the versions of their weights.

    ``torn`` has, by role, the reason why its weights mix versions; ``coming`` the latest version that was begun.
    """

    published: dict[WeightsKey, Published] = field(default_factory=dict)
    accepted: dict[WeightsKey, Accepted] = field(default_factory=dict)
    versions: dict[WeightsKey, int] = field(default_factory=dict)
    torn: dict[str, str] = field(default_factory=dict)
    coming: dict[WeightsKey, int] = field(default_factory=dict)

    @classmethod
    def of(cls, context: WorkerContext) -> WeightsDeclared:
        """Return the weight declarations of a rank, given the context of any of its workers."""
        return context.shared.setdefault("weights", cls())


def publish(
    worker: object,
    name: str,
    model: Any,
    *,
    step: Callable[[], int] | None = None,
    boxes: Mapping[str, Any] | None = None,
    megatron: Any = None,
) -> None:
    """Publish the weights of ``model`` under ``name``, as a source of syncs.

    Args:
        worker: the worker object: ``self`` in its class.
        name: name of the weights. Targets accept them by the same name, unless the sync has a ``source_name``.
        model: an ``nn.Module``, a mapping of names to tensors, or a function that returns either when a sync begins.
            Tensors are plain (full, and equal on all ranks), ``DTensor``, or Megatron's.
        step: function that returns the number of optimizer steps of the weights, which is sent with each version.
        boxes: ``px.weights.ShardSpec`` of tensors with a declared layout, by name.
        megatron: ``px.weights.MegatronRank``, if the weights are the parameters of a Megatron module.

    Raises:
        DeclarationError: if the name is not a non-empty string, or the arguments contradict each other.
    """
    _check("publish_weights", name, model, boxes, megatron)
    if step is not None and not callable(step):
        raise DeclarationError(
            f"publish_weights({name!r}, step={step!r}): give a function that returns the count of optimizer steps"
        )
    context = context_of(worker)
    declared = WeightsDeclared.of(context)
    declared.published[context.role, name] = Published(model, step, boxes, megatron)


def accept(
    worker: object,
    name: str,
    model: Any = None,
    *,
    load: Load | None = None,
    share: bool = False,
    boxes: Mapping[str, Any] | None = None,
    megatron: Any = None,
) -> None:
    """Accept weights named ``name`` from syncs: write them into ``model`` in place, or pass them to ``load``.

    Args:
        worker: the worker object: ``self`` in its class.
        name: name of the weights. The source publishes them by the same name, unless the sync has a ``source_name``.
        model: the module or tensors to write into, as in :func:`publish`. With ``load``, templates of the tensors
            (possibly on the "meta" device). With ``load`` and without ``model``, each tensor arrives in full, as the
            source has it.
        load: function that gets an iterable of (name, tensor) pairs of all tensors, in place of a write into ``model``.
            It must consume the iterable before it returns, and copy tensors that it keeps: the next sync writes into
            the same memory, and the end of the connection frees it.
        share: True for roles in the same process, to use the storage of the source's parameters without a copy. The
            source then trains the same tensors that the target generates with.
        boxes, megatron: as in :func:`publish`.

    Raises:
        DeclarationError: if the name is not a non-empty string, or the arguments contradict each other.
    """
    if model is None and load is None:
        raise DeclarationError(f"accept_weights({name!r}): give the model to write into, or load=function")
    if share and (load is not None or model is None):
        raise DeclarationError(
            f"accept_weights({name!r}, share=True): a shared model cannot be loaded as well"
        )
    if load is not None and not callable(load):
        raise DeclarationError(
            f"accept_weights({name!r}, load={load!r}): give a function of (name, tensor) pairs"
        )
    _check("accept_weights", name, model, boxes, megatron)
    context = context_of(worker)
    declared = WeightsDeclared.of(context)
    declared.accepted[context.role, name] = Accepted(model, load, share, boxes, megatron)


def _check(verb: str, name: object, model: Any, boxes: Mapping[str, Any] | None, megatron: Any) -> None:
    if not isinstance(name, str) or not name:
        raise DeclarationError(f"{verb}({name!r}): expected a name such as 'policy'")
    if boxes is not None and megatron is not None:
        raise DeclarationError(f"{verb}({name!r}): give boxes= or megatron=, which says where the boxes are")
    if isinstance(model, str | bytes | int | float):
        raise DeclarationError(
            f"{verb}({name!r}, {model!r}): expected an nn.Module, a mapping of names to tensors, or a function"
        )


def current_version(name: str, worker: object | None = None) -> int | None:
    """Return, in a worker, the version of the weights ``name`` that its role has accepted or published last.

    None before the first sync, and while the weights mix versions.

    Args:
        name: name of the weights.
        worker: the worker object, if several roles of the process have weights of that name.

    Raises:
        DeclarationError: if the code does not run in a worker, or no role here has such weights, or several roles do
            and ``worker`` is not given.
    """
    context = current_context() if worker is None else context_of(worker)
    if context is None:
        raise DeclarationError(
            f"px.weights.current_version({name!r}) was not called in a worker; call it in a worker's "
            "method, or pass the worker"
        )
    declared = WeightsDeclared.of(context)
    known = {*declared.published, *declared.accepted}
    roles = sorted(role for role, own in known if own == name and (worker is None or role == context.role))
    if not roles:
        names = sorted({own for _, own in known})
        raise DeclarationError(
            f"px.weights.current_version({name!r}): this worker has weights {names or 'of no name'}"
        )
    if len(roles) > 1:
        raise DeclarationError(
            f"px.weights.current_version({name!r}): roles {roles} of this process have such weights; pass the worker "
            "too: current_version(name, self)"
        )
    return declared.versions.get((roles[0], name))
