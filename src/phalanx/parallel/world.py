"""torch's process group of a worker group, and the ranks that share a dp coordinate in it."""

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
    """Form torch's default process group over the group's ranks, unless this process has one.

    Roles that share a process share its process group.

    Args:
        backend: torch's name; default "nccl" where the rank has a CUDA device, else "gloo".
        timeout: seconds after which a collective that some rank does not join fails.

    Returns:
        The rank's device; a CUDA device has become torch's current one.

    Raises:
        PhalanxError: if the group has several ranks with ``backend="inline"``, which cannot wait for each other.
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
    """Return the mesh over the default process group in which this rank has ``coordinates``. A collective.

    Raises:
        DeclarationError: if the ranks' coordinates do not tile the world; the message names the ranks in conflict.
    """
    reported: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reported, dict(coordinates))
    return Mesh.from_coordinates(reported)


class DpPeers:
    """The ranks of this rank's dp coordinate, for ``Dispatch.mesh(leader_only=True)``.

    Only the first of them, the leader, receives the shard, and broadcasts it over the accelerators' links. All ranks
    of the world create their object together, since it forms a process group per dp coordinate.

    Raises:
        DeclarationError: if the mesh is not over the ranks of the default process group.
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
        self._device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    def from_leader(self, value: Any, *, device: torch.device | None = None) -> Any:
        """Return the leader's ``value`` on every peer; values of the others are ignored. A collective of the peers.

        The leader gets its own object back; peers get a copy of any picklable value.

        Args:
            device: device of the peers' tensors; default the CPU.
        """
        if len(self.ranks) == 1:
            return value
        is_leader = dist.get_rank() == self.leader
        message: list[Any] = [encode(value).to_bytes() if is_leader else None]
        dist.broadcast_object_list(message, self.leader, group=self._group, device=self._device)
        if is_leader:
            return value
        with decoding(device=device):
            return decode(message[0])
