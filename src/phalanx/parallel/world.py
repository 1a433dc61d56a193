"""The process group of a worker group, and the ranks that share a dp coordinate in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.declare.worker import Worker
from phalanx.errors import DeclarationError
from phalanx.topology.mesh import DP, Mesh
from phalanx.wire.codec import decode, decoding, encode


def join_world(worker: Worker, *, backend: str | None = None, timeout: float = 600.0) -> torch.device:
    """Form torch's default process group over the group's ranks, unless this process has one already.

    Roles that share a process share its process group.

    Args:
        backend: torch's name; default "nccl" where the rank has a CUDA device, else "gloo".
        timeout: seconds after which a collective that some rank does not join fails.

    Returns:
        The rank's device; a CUDA device has become torch's current one.

    Raises:
        PhalanxError: more than one rank with ``backend="inline"``, where ranks cannot wait for each other.
    """
    device = worker.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            backend or ("nccl" if device.type == "cuda" else "gloo"),
            rank=worker.rank,
            world_size=worker.world_size,
            timeout=timedelta(seconds=timeout),
        )
    return device


def agreed_mesh(coordinates: Mapping[str, int]) -> Mesh:
    """The mesh over the default process group in which this rank has these coordinates; all ranks call it.

    Raises:
        DeclarationError: the ranks' coordinates do not tile the world; the message names those in conflict.
    """
    reported: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reported, dict(coordinates))
    return Mesh.from_coordinates(reported)


class DpPeers:
    """The ranks of this rank's dp coordinate, for ``Dispatch.mesh(leader_only=True)``.

    There only the first of them, the leader, is sent the piece, and hands it on over the accelerators' own
    links. Made by all ranks of the world together, once: it makes a process group per dp coordinate.

    Raises:
        DeclarationError: the mesh is not over the ranks of the default process group.
    """

    def __init__(self, mesh: Mesh, dp_axes: Sequence[str] = DP) -> None:
        world_size, rank = dist.get_world_size(), dist.get_rank()
        if mesh.world_size != world_size:
            raise DeclarationError(
                f"DpPeers({mesh!r}): a mesh of {mesh.world_size} ranks, but the default process group has "
                f"{world_size}; pass a mesh over all of them, such as agreed_mesh(coordinates)"
            )
        for ranks in mesh.dp_groups(dp_axes):
            group = dist.new_group(list(ranks))  # a collective: every rank makes every group
            if rank in ranks:
                self.ranks = ranks
                self._group: Any = group
        self.leader = self.ranks[0]
        self._on = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")

    def from_leader(self, value: Any, *, device: torch.device | None = None) -> Any:
        """The leader's ``value`` on every peer; what the others pass is ignored. A collective of the peers.

        The leader gets its own value back; to the peers any picklable value travels as bytes.

        Args:
            device: where the peers' tensors are to be; default the CPU.
        """
        if len(self.ranks) == 1:
            return value
        leads = dist.get_rank() == self.leader
        data = _as_bytes(value).to(self._on) if leads else None
        size = torch.tensor([0 if data is None else data.numel()], device=self._on)
        dist.broadcast(size, self.leader, group=self._group)
        if data is None:
            data = torch.empty(int(size.item()), dtype=torch.uint8, device=self._on)
        dist.broadcast(data, self.leader, group=self._group)
        if leads:
            return value
        with decoding(device=device):
            return decode(data.cpu().numpy().tobytes())


def _as_bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(encode(value).to_bytes()), dtype=torch.uint8)
