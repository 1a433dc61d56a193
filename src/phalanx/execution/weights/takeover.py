"""How a target takes over a second set of tensors: storages are swapped where that can be done, else values are copied.

Two storages can be swapped where the tensor is a parameter or buffer of a module and nothing else looks at its memory:
no tensor of another name, no larger buffer of which it is a part, no sharded parameter that keeps its memory elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from phalanx.declare.weights import Accepted
from phalanx.execution.weights.ends import model_of
from phalanx.execution.weights.orders import Takeover
from phalanx.transfer.readers.plain import Reading, local_of, named_tensors
from phalanx.transfer.tensors import Tensors, total_bytes

__all__ = ["spare_tensors", "take_over", "takeover"]


def takeover(accepted: Accepted, reading: Reading) -> tuple[Takeover, ...]:
    """What a commit will do with the tensors of a target, by way: how many, and their bytes."""
    own = [name for name, _ in reading.manifest.items()]
    if accepted.load is not None:
        return _counted(load=[reading.tensors[name] for name in own])
    swapped = swappable(accepted, reading)
    return _counted(
        swap=[reading.tensors[name] for name in own if name in swapped],
        copy=[reading.tensors[name] for name in own if name not in swapped],
    )


def _counted(**ways: Sequence[torch.Tensor]) -> tuple[Takeover, ...]:
    found: Sequence[tuple[Literal["swap", "copy", "load"], Sequence[torch.Tensor]]] = (
        ("swap", ways.get("swap", ())),
        ("copy", ways.get("copy", ())),
        ("load", ways.get("load", ())),
    )
    return tuple(Takeover(how, len(some), total_bytes(some)) for how, some in found if some)


def swappable(accepted: Accepted, reading: Reading) -> frozenset[str]:
    """Names, without those of ties, of the tensors whose storage can be swapped."""
    model = model_of(accepted)
    if not accepted.swap or accepted.megatron is not None or not isinstance(model, torch.nn.Module):
        return frozenset()
    tensors = named_tensors(model)
    own = [name for name, _ in reading.manifest.items()]
    storages = Counter(local_of(tensors[name]).untyped_storage().data_ptr() for name in own)
    return frozenset(
        name
        for name in own
        if _alone(tensors[name]) and storages[tensors[name].untyped_storage().data_ptr()] == 1
    )


def _alone(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor that fills its storage."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )


def spare_tensors(reading: Reading) -> dict[str, torch.Tensor]:
    """A second set of tensors like those of a rank; tied names have one tensor there too."""
    made = {name: torch.empty_like(reading.tensors[name]) for name, _ in reading.manifest.items()}
    return {**made, **{alias: made[name] for alias, name in reading.manifest.ties}}


def take_over(
    accepted: Accepted, reading: Reading, now: Tensors, spare: dict[str, torch.Tensor]
) -> tuple[Takeover, ...]:
    """Put the values of ``spare`` into a target's tensors; what held them before is the spare set afterwards.

    Args:
        reading: what the target had when the plan was made. now: its local tensors as they are now.
    """
    swapped = swappable(accepted, reading)
    owners = named_tensors(model_of(accepted)) if swapped else {}
    copied = [name for name, _ in reading.manifest.items() if name not in swapped]
    with torch.no_grad():
        for name in swapped:
            _swap(owners[name], spare, name)
        for alias, name in reading.manifest.ties:
            if name in swapped:
                _follow(alias, name, owners, spare)
        for name in copied:
            now[name].copy_(spare[name])
    return _counted(swap=[spare[name] for name in swapped], copy=[spare[name] for name in copied])


def _swap(owner: torch.Tensor, spare: dict[str, torch.Tensor], name: str) -> None:
    before = owner.data
    owner.data = spare[name]
    spare[name] = before


def _follow(
    alias: str, name: str, owners: Mapping[str, torch.Tensor], spare: dict[str, torch.Tensor]
) -> None:
    if owners[alias] is not owners[name]:
        owners[alias].data = owners[name].data
    spare[alias] = spare[name]
