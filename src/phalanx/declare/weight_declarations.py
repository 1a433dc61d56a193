"""Declarations of a worker's weights: which it publishes, and which it accepts, by name.

Saying so costs nothing: the tensors are looked at when a sync is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.declare.context import WorkerContext, context_of, current_context
from phalanx.errors import DeclarationError

Load = Callable[[Iterable[tuple[str, Any]]], object]
Memory = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Published:
    """Weights that a role publishes under a name; see :func:`publish_weights`."""

    model: Any
    step: Callable[[], int] | None = None
    boxes: Mapping[str, Any] | None = None
    megatron: Any = None


@dataclass(frozen=True)
class Accepted:
    """Weights that a role accepts under a name; see :func:`accept_weights`."""

    model: Any = None
    load: Load | None = None
    share: bool = False
    boxes: Mapping[str, Any] | None = None
    megatron: Any = None
    memory: Memory | None = None


@dataclass
class WeightsDeclared:
    """Declarations of the roles of a rank, by (role, name), and the versions of their weights.

    ``torn`` says, by role, why its weights mix versions; ``coming`` is the version that was begun last.
    """

    published: dict[tuple[str, str], Published] = field(default_factory=dict[tuple[str, str], Published])
    accepted: dict[tuple[str, str], Accepted] = field(default_factory=dict[tuple[str, str], Accepted])
    versions: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    torn: dict[str, str] = field(default_factory=dict[str, str])
    coming: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])

    @classmethod
    def of(cls, context: WorkerContext) -> WeightsDeclared:
        """Return the declarations of the rank that ``context`` describes."""
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
    """Let the weights of ``model`` be a source of syncs, under ``name``.

    Args:
        worker: the object of the role; ``self`` where a class is no ``px.Worker``.
        name: the target's name of these weights too, unless the sync says otherwise.
        model: an ``nn.Module``, a mapping of names to tensors, or a function that returns either when a sync begins.
            Tensors are plain (whole, the same on all ranks), ``DTensor``, or Megatron's.
        step: returns the count of optimizer steps of the weights, sent with each version.
        boxes: ``px.weights.ShardSpec`` of tensors with a declared layout, by name.
        megatron: ``px.weights.MegatronRank`` where these are a Megatron module's parameters.

    Raises:
        DeclarationError: the name is no text, or the arguments contradict each other.
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
    memory: Memory | None = None,
) -> None:
    """Let syncs write weights named ``name`` into ``model``, in place, or hand them to ``load``.

    Args:
        worker: the object of the role; ``self`` where a class is no ``px.Worker``.
        name: the source's name of these weights too, unless the sync says otherwise.
        model: the module or tensors to write into; as for :func:`publish_weights`. With ``load``, templates of the
            tensors (on the "meta" device if you like); without ``model``, each tensor comes whole, as the source has
            it.
        load: gets an iterable of (name, tensor), of all tensors, in place of writing into ``model``. It must consume
            the iterable before it returns, and copy what it keeps: the next sync writes into the same memory.
        share: for roles in the same process: the parameters use the storage of the source's, so that nothing is copied.
            The source then trains the same weights that the target generates with.
        boxes, megatron: as for :func:`publish_weights`.
        memory: with ``load`` and ``model``: makes the tensors that weights are kept in between their arrival and
            ``load``, from templates by name; for example views of memory that other processes see.

    Raises:
        DeclarationError: the name is no text, or the arguments contradict each other.
    """
    if memory is not None and (load is None or model is None):
        raise DeclarationError(
            f"accept_weights({name!r}, memory=): needs load= and a model that says what is kept"
        )
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
    declared.accepted[context.role, name] = Accepted(model, load, share, boxes, megatron, memory)


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
    """In a worker: the version of the weights ``name`` that this role has, or last published.

    None before the first sync, and while they mix versions.

    Args:
        name: of the weights.
        worker: the object of the role, where several roles of the process have weights of that name.

    Raises:
        DeclarationError: this is no worker, no role here has such weights, or several do and ``worker`` is not given.
    """
    context = current_context() if worker is None else context_of(worker)
    if context is None:
        raise DeclarationError(
            "this was called where there is no worker; call it from a worker's method, or give it the worker"
        )
    declared = WeightsDeclared.of(context)
    known = {*declared.published, *declared.accepted}
    roles = sorted(role for role, own in known if own == name and (worker is None or role == context.role))
    if not roles:
        names = sorted({own for _, own in known})
        raise DeclarationError(f"weights_version({name!r}): this worker has weights {names or 'of no name'}")
    if len(roles) > 1:
        raise DeclarationError(
            f"weights_version({name!r}): roles {roles} of this process have such weights; give "
            "the worker too: weights_version(name, self)"
        )
    return declared.versions.get((roles[0], name))
