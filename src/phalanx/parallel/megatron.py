"""Workers on megatron-core: tensor, pipeline, context and data parallelism behind ordinary calls.

Megatron (``pip install 'phalanx[megatron]'``) is imported in the workers on first use.
"""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from phalanx.api.worker_group import WorkerGroup
from phalanx.declare.worker import Worker
from phalanx.errors import DeclarationError
from phalanx.parallel.mlp import activation
from phalanx.parallel.torch_native import join_world
from phalanx.topology.mesh import Mesh


def parallel_state() -> Any:
    """Import ``megatron.core.parallel_state``.

    Raises:
        DeclarationError: if megatron-core cannot be imported.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Transformer Engine and Apex are not installed")
            from megatron.core import parallel_state as state
    except ImportError as error:
        raise DeclarationError(
            f"phalanx.parallel.megatron needs megatron-core, which cannot be imported here ({error}); install "
            "it where the workers run: pip install 'phalanx[megatron]'"
        ) from error
    return state


def coordinates() -> dict[str, int] | None:
    """Return this rank's pp, dp, cp and tp in Megatron's parallel state, or None before it is initialized."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    return by_axis(state, "rank")


def by_axis(state: Any, what: str) -> dict[str, int]:
    """Return this rank's coordinates (``what="rank"``) or the sizes ("world_size") of a parallel state, by axis."""
    names = {"pp": "pipeline_model", "dp": "data", "cp": "context", "tp": "tensor_model"}
    return {axis: getattr(state, f"get_{name}_parallel_{what}")() for axis, name in names.items()}


def replace_groups(modules: Iterable[torch.nn.Module], state: Any) -> None:
    """Replace process groups that modules have as attributes, or in ``pg_collection``, by those of a parallel state.

    Megatron describes each group by its purpose, such as "TENSOR_MODEL_PARALLEL_GROUP", also in later states.
    """
    groups = {group.group_desc: group for group in vars(state).values() if isinstance(group, ProcessGroup)}
    for module in itertools.chain.from_iterable(root.modules() for root in modules):
        for owner in (module, getattr(module, "pg_collection", None) or module):
            for name, value in list(vars(owner).items()):
                if isinstance(value, ProcessGroup) and value.group_desc in groups:
                    object.__setattr__(owner, name, groups[value.group_desc])


class MegatronWorker(Worker):
    """Worker whose mesh "default" is Megatron's parallel state, for ``Dispatch.MEGATRON_COMPUTE`` and similar modes.

    A subclass calls :meth:`init_model_parallel` in its constructor, or ``init_process_group`` and Megatron's
    own ``initialize_model_parallel``; the group reads the coordinates when it first needs them. Megatron keeps
    a parallel state per process, which roles of the process share. On ranks that stay when others are replaced,
    ``rejoin()`` forms the state of :meth:`init_model_parallel` again.
    """

    #: Arguments of the last :meth:`init_model_parallel`.
    _formed: dict[str, Any] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> MegatronWorker:  # also without super().__init__()
        worker = super().__new__(cls)
        worker.register_mesh("default", coordinates)
        return worker

    def init_model_parallel(
        self, *, tp: int = 1, pp: int = 1, cp: int = 1, seed: int = 1234, **options: Any
    ) -> torch.device:
        """Form the process group and Megatron's parallel state; dp has the remaining ranks. Seed torch.

        The backend is nccl on CUDA devices, else gloo. Weights created on the CPU are initialized completely on every
        rank and then sharded, so that a seed gives the same model for every ``tp``.

        Args:
            tp, pp, cp: sizes of tensor, pipeline and context parallelism.
            seed: seed of torch's generators.
            **options: further options of Megatron's ``initialize_model_parallel``.

        Returns:
            The rank's device.

        Raises:
            DeclarationError: if megatron-core is missing, or tp * pp * cp does not divide the number of ranks.
        """
        if tp < 1 or pp < 1 or cp < 1 or self.world_size % (tp * pp * cp):
            raise DeclarationError(
                f"init_model_parallel(tp={tp}, pp={pp}, cp={cp}) on {self.world_size} ranks: tp * pp * cp must "
                "divide the number of ranks; change the sizes, or start the group on a pool of another size"
            )
        state = parallel_state()
        device = join_world(self)
        state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            **options,
        )
        self._formed = {"tp": tp, "pp": pp, "cp": cp, "seed": seed, **options}
        torch.manual_seed(seed)
        if device.type == "cuda":
            from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

            model_parallel_cuda_manual_seed(seed)
        return device

    def rejoin(self) -> None:
        """Form the parallel state again, and replace its groups in modules that are attributes of the process's roles.

        Parameters of Megatron's modules are plain tensors, and stay. Torch's generators continue. Megatron's own
        generators on CUDA devices are seeded again. Modules that are not attributes of a role, and Megatron's own
        data-parallel wrapper and distributed optimizer, keep the old groups: override this to create them again. See
        :meth:`phalanx.Worker.rejoin`.
        """
        if self._formed is None:
            super().rejoin()
            return
        self.leave_model_parallel()
        with torch.random.fork_rng():
            self.init_model_parallel(**self._formed)
        for role in self._context.roles.values():  # all share the state
            modules = [value for value in vars(role).values() if isinstance(value, torch.nn.Module)]
            replace_groups(modules, parallel_state())

    def model_parallel_config(self, **options: Any) -> Any:
        """Create a ``ModelParallelConfig`` with the sizes of the parallel state, and CPU weights without a GPU.

        Sequence parallelism, activation checkpointing and ``gather_output`` of megatron-core need CUDA.
        """
        from megatron.core import ModelParallelConfig

        state = parallel_state()
        known: dict[str, Any] = {
            "use_cpu_initialization": self.device.type == "cpu",
            "pipeline_dtype": options.get("params_dtype", torch.float32),  # used if pp > 1
        }
        for axis in ("tensor_model", "pipeline_model", "context"):
            known[f"{axis}_parallel_size"] = getattr(state, f"get_{axis}_parallel_world_size")()
        return ModelParallelConfig(**{**known, **options})

    def leave_model_parallel(self) -> None:
        """Destroy the parallel state, so that another can be formed; the process group stays.

        The driver then calls :meth:`MegatronWorkerGroup.refresh_mesh`.
        """
        parallel_state().destroy_model_parallel()


class MegatronWorkerGroup(WorkerGroup):
    """Group of :class:`MegatronWorker`: ``group.mesh().size("tp")`` is a size of its parallel state.

    Takes the arguments of ``px.WorkerGroup``; the mesh "default" always comes from the workers.

    Raises:
        DeclarationError: if ``mesh=`` is a single mesh, or names a mesh "default".
    """

    def __init__(self, pool: Any, cls: Any, **options: Any) -> None:
        mesh = options.get("mesh")
        if isinstance(mesh, Mesh) or (mesh is not None and "default" in mesh):
            raise DeclarationError(
                f"MegatronWorkerGroup(mesh={mesh!r}): the mesh 'default' is read from Megatron's parallel state; "
                "give the sizes to init_model_parallel(...) in the worker, and further meshes another name"
            )
        # Megatron requires it for tensor parallelism: kernels start in the order in which they were queued.
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **(options.pop("env", None) or {})}
        super().__init__(pool, cls, env=env, **options)

    def refresh_mesh(self) -> None:
        """Read the parallel state again on the next use, after the workers have formed another."""
        self.core.epoch.meshes.clear()


class ParallelLlamaMLP(torch.nn.Module):
    """:class:`~phalanx.parallel.mlp.LlamaMLP` sharded over the tp ranks, on megatron-core's layers.

    Gate and up are column-parallel, down is row-parallel: an all-reduce forward and backward. Inputs and outputs,
    (sequence, batch, hidden_size), are equal on all tp ranks. Weights of rank ``r`` are the r-th shard of the complete
    weights along :data:`~phalanx.parallel.mlp.SPLIT_DIM`.

    Args:
        hidden_size, intermediate_size: sizes of the complete MLP.
        config: Megatron's ``ModelParallelConfig``, such as ``worker.model_parallel_config()``.
        hidden_act: "silu", "gelu" or "relu".
        init_std: standard deviation of the initial weights.

    Raises:
        DeclarationError: if the activation is unknown, or tp does not divide ``intermediate_size``.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        config: Any,
        *,
        hidden_act: str = "silu",
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        tp = parallel_state().get_tensor_model_parallel_world_size()
        if intermediate_size % tp:
            raise DeclarationError(
                f"ParallelLlamaMLP(intermediate_size={intermediate_size}) over {tp} tp ranks: it must be a "
                f"multiple of {tp}; change it, or tp"
            )
        self.act = activation(hidden_act)
        init = functools.partial(torch.nn.init.normal_, std=init_std)
        common: dict[str, Any] = {"config": config, "init_method": init, "bias": False}
        column = functools.partial(ColumnParallelLinear, gather_output=False, **common)
        self.gate_proj = column(hidden_size, intermediate_size)
        self.up_proj = column(hidden_size, intermediate_size)
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, input_is_parallel=True, skip_bias_add=False, **common
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, _ = self.gate_proj(x)
        up, _ = self.up_proj(x)
        return self.down_proj(self.act(gate) * up)[0]
