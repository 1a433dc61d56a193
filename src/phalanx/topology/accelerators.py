"""Table of accelerators, and their visible-device masks.

Variables and resources are named as in Ray's accelerator managers (its accelerator plugins) and the vendors' runtimes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import DeclarationError


@dataclass(frozen=True)
class Accelerator:
    """A kind of accelerator.

    Attributes:
        name: name of the kind, such as "rocm".
        resource: name of Ray's resource.
        visible: environment variables that mask devices; all are set to the same ids for a rank.
        torch_device: torch's device type.
        backend: backend of ``torch.distributed.init_process_group``.
        lower: masks of a lower layer, which renumber the devices and so must not be set together with ``visible``.
    """

    name: str
    resource: str
    visible: tuple[str, ...]
    torch_device: str
    backend: str
    lower: tuple[str, ...] = ()


ACCELERATORS: tuple[Accelerator, ...] = (
    Accelerator("cuda", "GPU", ("CUDA_VISIBLE_DEVICES",), "cuda", "nccl"),
    # HIP reads CUDA_VISIBLE_DEVICES as an alias of its own mask; if both are set, they must be equal.
    Accelerator(
        "rocm",
        "GPU",
        ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        "cuda",
        "nccl",
        ("ROCR_VISIBLE_DEVICES",),
    ),
    Accelerator("xpu", "GPU", ("ZE_AFFINITY_MASK",), "xpu", "xccl", ("ONEAPI_DEVICE_SELECTOR",)),
    Accelerator("npu", "NPU", ("ASCEND_RT_VISIBLE_DEVICES",), "npu", "hccl"),
    Accelerator("tpu", "TPU", ("TPU_VISIBLE_CHIPS",), "xla", "xla"),
    Accelerator("hpu", "HPU", ("HABANA_VISIBLE_MODULES",), "hpu", "hccl", ("HABANA_VISIBLE_DEVICES",)),
    Accelerator("neuron", "neuron_cores", ("NEURON_RT_VISIBLE_CORES",), "xla", "xla"),
)


def accelerator(name: str) -> Accelerator:
    """Return the accelerator with a name (``cuda``), or the first accelerator with a Ray resource (``GPU``).

    Raises:
        DeclarationError: if the name is unknown; the message lists the known names.
    """
    for found in ACCELERATORS:
        if name in (found.name, found.resource):
            return found
    raise DeclarationError(
        f"unknown accelerator {name!r}; expected one of {[a.name for a in ACCELERATORS]} or of Ray's "
        f"resources {list(resource_names())}"
    )


def resource_names() -> tuple[str, ...]:
    """Return Ray's resource names of accelerators, in order of preference."""
    return tuple(dict.fromkeys(a.resource for a in ACCELERATORS))


def in_use(resource: str, env: Mapping[str, str]) -> Accelerator:
    """Return the accelerator with ``resource`` on a node, recognized by the mask variables in ``env``.

    Several vendors share the resource ``GPU``; without mask variables, the first kind (CUDA) is returned.

    Raises:
        DeclarationError: if no accelerator has that resource name.
    """
    kinds = [a for a in ACCELERATORS if a.resource == resource] or [accelerator(resource)]
    specific = [a for a in kinds if {a.visible[0], *a.lower} & set(env)]
    return specific[-1] if specific else kinds[0]


def visible_value(ids: Sequence[str]) -> str:
    """Return the mask that shows exactly ``ids``, in that order; ``""`` hides every device."""
    return ",".join(str(i) for i in ids)
