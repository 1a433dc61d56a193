"""Accelerators, and the environment variables of a rank, which are set before its process imports large packages."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.errors import DeclarationError, PlacementError

Visible = Literal["own", "node"]

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Accelerator:
    """A kind of accelerator, named as in Ray's accelerator managers and the vendors' runtimes.

    Attributes:
        resource: name of Ray's resource.
        visible: environment variable that masks devices.
        torch_device: torch's device type.
    """

    resource: str
    visible: str
    torch_device: str


#: In order of preference. HIP reads CUDA_VISIBLE_DEVICES as an alias of its own mask.
ACCELERATORS: tuple[Accelerator, ...] = (
    Accelerator("GPU", "CUDA_VISIBLE_DEVICES", "cuda"),
    Accelerator("NPU", "ASCEND_RT_VISIBLE_DEVICES", "npu"),
    Accelerator("TPU", "TPU_VISIBLE_CHIPS", "xla"),
    Accelerator("HPU", "HABANA_VISIBLE_MODULES", "hpu"),
    Accelerator("neuron_cores", "NEURON_RT_VISIBLE_CORES", "xla"),
)


def accelerator(resource: str) -> Accelerator:
    """Return the accelerator with a Ray resource.

    Raises:
        DeclarationError: if the resource is unknown; the message lists the known resources.
    """
    for found in ACCELERATORS:
        if found.resource == resource:
            return found
    raise DeclarationError(
        f"unknown accelerator {resource!r}; expected one of Ray's resources {list(resource_names())}"
    )


def resource_names() -> tuple[str, ...]:
    """Return Ray's resource names of accelerators, in order of preference."""
    return tuple(kind.resource for kind in ACCELERATORS)


def rank_environment(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    master_addr: str,
    master_port: int,
    visible: Visible = "own",
    own_ids: Sequence[str] = (),
    node_ids: Sequence[str] = (),
    accelerator: Accelerator | None = None,
    cpus_of_node: int | None = None,
    slots_on_node: int = 1,
    threads: str | None = None,
    group_env: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the variables to set in the process of ``rank``, in addition to its initial environment.

    ``group_env`` overrides the thread count; the rank's identity and device mask override ``group_env``.

    ``LOCAL_RANK`` is the index for ``torch.cuda.set_device``: 0 with ``visible="own"`` (the process sees only
    ``own_ids``), the index of its first device with ``visible="node"`` (it sees ``node_ids``, all devices of the group
    on its node, in the same order for all ranks). Without devices it is ``local_rank``. An ``accelerator`` without
    ``own_ids`` hides every device; ``accelerator=None`` sets no masks. ``OMP_NUM_THREADS`` is ``threads``, the value
    that the process was started with, if the user set it; else ``cpus_of_node`` divided by ``slots_on_node``, at least
    1. Ray itself would set it to 1.

    Raises:
        DeclarationError: if a value is not a string.
        PlacementError: if a device of the rank is not among ``node_ids``.
    """
    mask, first = _devices(visible, own_ids, node_ids)
    index = local_rank if first is None else first
    env: dict[str, str] = {}
    if threads is not None:
        env[THREADS] = threads
    elif cpus_of_node is not None:
        # Groups on other slots of the pool work at the same time; groups on the same slots take turns. Threads of a
        # process busy-wait for each other, so more threads than cores make all of them several times slower.
        env[THREADS] = str(max(1, cpus_of_node // slots_on_node))
    env.update(group_env or {})
    env.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(index),
        LOCAL_WORLD_SIZE=str(local_world_size),
        MASTER_ADDR=master_addr,
        MASTER_PORT=str(master_port),
    )
    if accelerator is not None:
        env[accelerator.visible] = ",".join(mask)
    _check_text(env)
    return env


def _devices(
    visible: Visible, own_ids: Sequence[str], node_ids: Sequence[str]
) -> tuple[tuple[str, ...], int | None]:
    """Return the visible ids, and the index of the rank's first device among them (None: the rank has no device)."""
    if not own_ids:
        return (), None
    if visible == "own":
        return tuple(own_ids), 0
    shown = tuple(dict.fromkeys(node_ids))
    missing = [i for i in own_ids if i not in shown]
    if missing:
        raise PlacementError(
            f"devices {missing} of a rank are not among its node's {list(shown)}; expected every rank's "
            "devices there: pass node_ids as all ids that the group's ranks on that node reported"
        )
    return shown, shown.index(own_ids[0])


def _check_text(env: Mapping[str, Any]) -> None:
    for name, value in env.items():
        if not isinstance(value, str):
            raise DeclarationError(
                f"environment variable {name}={value!r} is a {type(value).__name__}; expected text: write "
                f"{name}={str(value)!r}"
            )


@contextlib.contextmanager
def variables_set(variables: dict[str, str]) -> Generator[None]:
    """Set environment variables of this process during a block, and restore the former values afterwards.

    Afterwards ``variables`` has the values from the end of the block.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in variables.items():
            variables[name] = os.environ.pop(name, value)
            if (former := before[name]) is not None:
                os.environ[name] = former
