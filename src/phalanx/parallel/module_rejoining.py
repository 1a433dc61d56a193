"""Sharded modules in new process groups: on ranks that stay when others are replaced, their tensors stay too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from phalanx.errors import DeclarationError
from phalanx.weights.local_layout import local_of

__all__ = ["keep_tensors", "with_new_groups"]


def keep_tensors(
    made: torch.nn.Module, kept: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Give a sharded model the tensors of one like it whose process groups are gone, without a copy.

    For ``rejoin()`` of workers with FSDP2 or tensor parallel modules: those hold their process groups for good, so the
    model is made again, on the meta device, and sharded over the new mesh.

    Args:
        made: the new one; made under ``torch.device("meta")``, sharded by the same calls.
        kept: the old one, not to be used any more. Gradients are not taken over: those of a step that failed are of no
            use.
        optimizer: of the old one's parameters; of the new one's afterwards, with its state and settings.

    Raises:
        DeclarationError: the two have other parameters or buffers, or another rank's part of one.
    """
    kept.state_dict()  # FSDP has its parameters sharded then, wherever in a step it was cut off
    olds, news = _parameters(kept), _parameters(made)
    old_buffers, new_buffers = dict(kept.named_buffers()), dict(made.named_buffers())
    if olds.keys() != news.keys() or old_buffers.keys() != new_buffers.keys():
        differ = sorted((olds.keys() ^ news.keys()) | (old_buffers.keys() ^ new_buffers.keys()))
        raise DeclarationError(
            f"keep_tensors: {', '.join(differ[:5])} of only one of the two models; make and shard the new one as the "
            "constructor did"
        )
    wrapped: dict[int, torch.nn.Parameter] = {}
    for name, old in olds.items():  # tied ones are one object, and stay so
        if id(old) not in wrapped:
            wrapped[id(old)] = torch.nn.Parameter(
                _around(name, old, news[name]), requires_grad=old.requires_grad
            )
    made.load_state_dict({name: wrapped[id(old)] for name, old in olds.items()}, strict=False, assign=True)
    for path, module in kept.named_modules():
        for name, buffer in module._buffers.items():  # those too that no state_dict has
            made.get_submodule(path)._buffers[name] = buffer
    made.train(kept.training)
    if optimizer is not None:
        _follow(optimizer, {id(old): (old, _parameters(made)[name]) for name, old in olds.items()})


def _parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _around(name: str, old: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The local tensor of ``old``, sharded as ``like`` is."""
    local = local_of(old.detach())
    if not isinstance(like, DTensor):
        expected: tuple[int, ...] = tuple(like.shape)
    else:
        expected = tuple(like.to_local().shape)
    if tuple(local.shape) != expected:
        raise DeclarationError(
            f"keep_tensors: {name} has the local shape {tuple(local.shape)} and would have {expected} in the new "
            "model; shard the new one over a mesh of the same shape, with this rank in the same place"
        )
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _follow(optimizer: torch.optim.Optimizer, now: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Have an optimizer go on with other parameters."""
    state: dict[Any, Any] = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = [now[id(old)][1] if id(old) in now else old for old in group["params"]]
    for old, values in state.items():
        new = now[id(old)][1] if id(old) in now else old
        optimizer.state[new] = {
            key: _around(f"{key} of the optimizer", value, new) if isinstance(value, DTensor) else value
            for key, value in values.items()
        }


def with_new_groups(modules: Iterable[torch.nn.Module], groups: Mapping[int, ProcessGroup]) -> None:
    """Exchange process groups that modules keep as attributes; ``groups`` are the new ones by ``id`` of the old."""
    for root in modules:
        for module in root.modules():
            for name, value in list(vars(module).items()):
                if id(value) in groups:
                    object.__setattr__(module, name, groups[id(value)])
