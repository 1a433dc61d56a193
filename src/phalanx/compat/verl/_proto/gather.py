"""The rows of all ranks of a process group, on every rank."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from phalanx.compat.verl._proto import columns
from phalanx.compat.verl._proto.data import DataProto
from phalanx.compat.verl._proto.errors import require


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Make ``data``, in place, the rows of all ranks in rank order. A collective of ``process_group``.

    Every rank needs the same columns; row counts may differ. Tensors travel over the group's backend (on the
    device that it serves) and end on the device they came from; arrays of objects are pickled.

    Raises:
        Refused: the ranks have not the same columns.
    """
    import torch.distributed as dist

    world = dist.get_world_size(process_group)
    keys = [] if data.batch is None else list(data.batch.keys())
    facts = (len(data), keys, data.non_tensor_batch)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, facts, group=process_group)
    unlike = [theirs for _, theirs, _ in gathered if theirs != keys]
    require(not unlike, f"ranks hold other tensors: {keys} here, {unlike[:1]} elsewhere")
    arrays = columns.join([theirs for *_, theirs in gathered])
    rows = [count for count, *_ in gathered]
    if data.batch is not None:
        held = {key: _gathered(data.batch.get(key), rows, process_group) for key in keys}
        data.batch = TensorDict(held, batch_size=[sum(rows)], device=data.batch.device)
    data.non_tensor_batch = arrays


def _gathered(tensor: torch.Tensor, rows: list[int], group: Any) -> torch.Tensor:
    import torch.distributed as dist

    require(not tensor.is_nested, "nested tensors cannot be gathered: pad them first")
    served = _device_of(dist.get_backend(group), tensor.device)
    # Collectives want the same shape of every rank: fill up to the longest, and cut afterwards.
    mine = tensor.new_zeros((max(rows), *tensor.shape[1:]), device=served)
    mine[: tensor.shape[0]] = tensor.detach().to(served)
    parts = [torch.empty_like(mine) for _ in rows]
    dist.all_gather(parts, mine, group=group)
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)]).to(tensor.device)


def _device_of(backend: str, given: torch.device) -> torch.device:
    if backend == "nccl" and given.type != "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if backend == "gloo" else given
