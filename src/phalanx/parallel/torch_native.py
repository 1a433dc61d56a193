"""Workers on torch's own parallelism: the process group and device meshes."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.declare.worker import Worker
from phalanx.topology.mesh import Mesh


def join_world(worker: Worker, *, backend: str | None = None, timeout: float = 600.0) -> torch.device:
    """Form torch's default process group over the group's ranks, unless this process has one.

    Roles that share a process share its process group.

    Args:
        backend: torch's name of the backend; default "nccl" if the rank has a CUDA device, else "gloo".
        timeout: seconds after which a collective that some rank does not join fails.

    Returns:
        The rank's device. A CUDA device becomes torch's current device.

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


class DeviceMeshWorker(Worker):
    """Worker whose mesh is a torch ``DeviceMesh`` of its own.

    On ranks that stay when others are replaced, ``rejoin()`` forms the meshes again, in the same order. A subclass with
    sharded modules overrides it: see :func:`phalanx.parallel.module_rejoining.keep_tensors` and ``declare_instead``.
    """

    def init_mesh(self, name: str = "default", /, **axes: int) -> DeviceMesh:
        """Form the process group and a device mesh over all ranks, and register it for ``Dispatch.mesh(name)``.

        In ``self.init_mesh(dp=-1, tp=2)``, the first axis varies slowest. An axis of -1 takes the remaining ranks.

        Raises:
            DeclarationError: if the sizes do not multiply to the number of ranks.
        """
        mesh = Mesh(**axes).resolve(self.world_size)
        device = join_world(self)
        made = init_device_mesh(device.type, mesh.shape, mesh_dim_names=mesh.axes)
        self.register_mesh(name, made)
        self._axes_of_meshes = {**getattr(self, "_axes_of_meshes", {}), name: axes}
        return made

    def rejoin(self) -> None:
        """Form the process group and the meshes again; see :meth:`phalanx.Worker.rejoin`."""
        super().rejoin()
        for name, axes in getattr(self, "_axes_of_meshes", {}).items():
            self.init_mesh(name, **axes)
