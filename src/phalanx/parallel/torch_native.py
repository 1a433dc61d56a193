"""Workers on torch's own parallelism: device meshes, tensor-parallel layers, and FSDP2 with sharded checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from phalanx.declare.dispatch_modes import Dispatch
from phalanx.declare.register import register
from phalanx.declare.state_declarations import register_state
from phalanx.declare.worker import Worker
from phalanx.parallel.mlp import LlamaMLP
from phalanx.parallel.module_rejoining import declare_instead, keep_tensors
from phalanx.parallel.world import join_world
from phalanx.topology.mesh import Mesh
from phalanx.weights.local_layout import local_of, reshard


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


def parallelize_mlp(mlp: LlamaMLP, tp_mesh: DeviceMesh) -> LlamaMLP:
    """Shard the MLP over ``tp_mesh``, in place: gate and up by columns, down by rows.

    The first tp rank's weights are used. Inputs and outputs, (..., hidden_size), are equal on all tp ranks.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {
        "gate_proj": ColwiseParallel(),
        "up_proj": ColwiseParallel(),
        "down_proj": RowwiseParallel(),
    }
    parallelize_module(mlp, tp_mesh, plan)
    return mlp


class FSDPTrainer(DeviceMeshWorker):
    """Trainer of a causal language model of transformers, sharded by FSDP2 over all ranks (mesh axis "dp").

    Its model and optimizer are its state, for ``px.save``, ``px.load``, ``px.snapshot`` and ``px.replace_ranks``.

    Args:
        make_model: function that creates the model; called on every rank after ``torch.manual_seed(seed)``, and, if
            other ranks are replaced, under ``torch.device("meta")``.
        lr: learning rate of AdamW.
        max_norm: norm that the gradient is clipped to.
        seed: seed of the initial weights, the same on every rank.
    """

    def __init__(
        self,
        make_model: Callable[[], torch.nn.Module],
        *,
        lr: float = 1e-3,
        max_norm: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._mesh = self.init_mesh(dp=-1)
        torch.manual_seed(seed)
        self.model: Any = _sharded(make_model().to(self.device), self._mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self._max_norm = max_norm
        self._make_model = make_model
        register_state(self, model=self.model, optimizer=self.optimizer)

    def rejoin(self) -> None:
        """Shard the model again around its tensors; see :meth:`phalanx.Worker.rejoin`."""
        self._mesh = self.init_mesh(dp=-1)
        self._shard_again()

    def _shard_again(self) -> None:
        with torch.device("meta"):
            made = self._make_model()
        keep_tensors(_sharded(made, self._mesh), self.model, self.optimizer)
        declare_instead(self, self.model, made)
        self.model = made

    @register(Dispatch.mesh())
    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits (rows, length, vocabulary) of token ids (rows, length)."""
        with torch.no_grad():
            return self._forward(input_ids.to(self.device))

    @register(Dispatch.mesh())
    def train_step(self, input_ids: torch.Tensor) -> dict[str, float]:
        """Take an AdamW step on the mean next-token loss over *all* rows of the call, independent of their sharding.

        Args:
            input_ids: token ids, (rows, length).

        Returns:
            ``loss`` and ``grad_norm`` (before clipping), equal on all ranks.

        Raises:
            ValueError: if no row has a next token.
        """
        loss = self.accumulate(input_ids)
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss, "grad_norm": norm.full_tensor().item()}

    def accumulate(self, input_ids: torch.Tensor) -> float:
        """Add the gradient of the mean loss over the rows of all ranks, and return that loss. A collective."""
        ids = input_ids.to(self.device)
        tokens = _summed(torch.tensor([ids[:, 1:].numel()], dtype=torch.float64, device=self.device))
        if tokens.item() == 0:
            raise ValueError(
                f"train_step(input_ids of {tuple(ids.shape)} on rank {self.rank}): no row of any rank has a next "
                "token; expected token ids of shape (rows, length), at least one row and a length from 2"
            )
        logits = self._forward(ids)[:, :-1].float()
        total = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        share = total / tokens[0].float()
        try:  # FSDP takes the mean of the ranks' gradients, but the shares of the ranks have to be summed
            (share * self.world_size).backward()
        except Exception:
            self._shard_again()  # FSDP cannot continue after an error, and some gradients are of this step
            raise
        return _summed(share.detach().double()).item()

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits; a rank without rows computes a row of zeros, to take part in the collectives."""
        given = ids if len(ids) else ids.new_zeros(1, *ids.shape[1:])
        return self.model(input_ids=given).logits[: len(ids)]

    @register(Dispatch.ONE_TO_ALL)
    def shards(self) -> dict[str, torch.Tensor]:
        """Return this rank's shards of the parameters, on the CPU."""
        return {name: local_of(tensor.detach()).cpu() for name, tensor in self._sharded_parameters()}

    @register(Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, torch.Tensor] | None:
        """Return all parameters on rank 0, on the CPU; None on the other ranks. A collective."""
        full = ((name, tensor.full_tensor()) for name, tensor in self._sharded_parameters())
        weights = {name: tensor.detach().cpu() for name, tensor in full if self.rank == 0}
        return weights if self.rank == 0 else None

    def _sharded_parameters(self) -> Iterator[tuple[str, Any]]:
        reshard(self.model)  # a forward pass alone leaves some gathered
        return self.model.named_parameters()


def _sharded(model: Any, mesh: DeviceMesh) -> Any:
    from torch.distributed.fsdp import fully_shard

    decoder = model.get_decoder()
    for layer in getattr(decoder, "layers", None) or getattr(decoder, "h", ()):  # "h" in GPT-2 and its like
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor
