"""Sharded modules in new process groups: ranks that stay when others are replaced keep their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from phalanx.declare.context import context_of
from phalanx.declare.state_declarations import declared_states
from phalanx.declare.weight_declarations import WeightsDeclared
from phalanx.errors import DeclarationError
from phalanx.weights.local_layout import local_of, reshard


def keep_tensors(
    made: torch.nn.Module, kept: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Give a new sharded model the tensors of an equal model whose process groups were lost, without a copy.

    For ``rejoin()`` of workers with FSDP2 or tensor-parallel modules. The process groups of such modules cannot be
    replaced, so the model is created again on the meta device and sharded over the new mesh. Tensors of modules that
    are neither parameters nor buffers stay on the meta device: assign them yourself.

    Args:
        made: new model; created under ``torch.device("meta")`` and sharded by the same calls.
        kept: old model, which cannot be used any more. Gradients are dropped, since they are of a failed step.
        optimizer: optimizer of the old parameters; it gets the new parameters, and keeps its state and settings.

    Raises:
        DeclarationError: if the two differ in their parameters, buffers, or local shapes.
    """
    reshard(kept)
    olds, news = _parameters(kept), _parameters(made)
    names = [{*olds, *dict(kept.named_buffers())}, {*news, *dict(made.named_buffers())}]
    if names[0] != names[1]:
        raise DeclarationError(
            f"keep_tensors: {', '.join(sorted(names[0] ^ names[1])[:5])} are in only one of the two models; create and "
            "shard the new one as the constructor did"
        )
    wrapped = {  # tied parameters are a single object, and stay tied
        id(old): torch.nn.Parameter(_sharded_like(name, old, news[name]), old.requires_grad)
        for name, old in kept.named_parameters()
    }
    for name, old in olds.items():
        news[name].requires_grad_(old.requires_grad)  # load_state_dict() sets that of the new model
    made.load_state_dict({name: wrapped[id(old)] for name, old in olds.items()}, strict=False, assign=True)
    for path, module in kept.named_modules():
        made.get_submodule(path)._buffers.update(module._buffers)  # also buffers that state_dict() omits
    made.train(kept.training)
    if optimizer is not None:
        _replace_parameters(optimizer, wrapped)


def declare_instead(worker: object, kept: torch.nn.Module, made: torch.nn.Module) -> None:
    """Declare the model ``made`` in place of ``kept`` in all that a worker declared: its state, and its weights.

    For ``rejoin()``, after :func:`keep_tensors`. Modules within the model are exchanged too, but not tensors in a
    mapping that was given to ``publish_weights``: give it the module, or a function.
    """
    context = context_of(worker)
    states, weights = declared_states(context), WeightsDeclared.of(context)
    news = {id(module): made.get_submodule(path) for path, module in kept.named_modules()}

    def now(part: Any) -> Any:
        return news.get(id(part), part)

    for role, one in states.items():
        others = {name: now(part) for name, part in one.others.items()}
        states[role] = replace(one, model=now(one.model), others=others)
    for declared in cast("list[dict[Any, Any]]", [weights.published, weights.accepted]):
        declared.update({key: replace(one, model=now(one.model)) for key, one in declared.items()})


def _parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _sharded_like(name: str, old: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of ``old``, wrapped in the layout of ``like``."""
    local = local_of(old.detach())
    expected = local_of(like)
    if local.shape != expected.shape:
        raise DeclarationError(
            f"keep_tensors: {name} has the local shape {tuple(local.shape)} and would have {tuple(expected.shape)} in "
            "the new model; shard the new one over a mesh of the same shape, with this rank in the same place"
        )
    if not isinstance(like, DTensor):
        return local
    layout: dict[str, Any] = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, **layout)


def _replace_parameters(optimizer: torch.optim.Optimizer, news: Mapping[int, torch.Tensor]) -> None:
    """Replace the parameters of an optimizer; ``news`` are the new parameters by ``id`` of the old."""
    state: dict[Any, Any] = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = [news.get(id(old), old) for old in group["params"]]
    for old, values in state.items():
        new = news.get(id(old), old)
        optimizer.state[new] = {
            key: _sharded_like(f"{key} of the optimizer", value, new) if isinstance(value, DTensor) else value
            for key, value in values.items()
        }
