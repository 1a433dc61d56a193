"""Table of accelerators.

Variables and resources are named as in Ray's accelerator managers (its accelerator plugins) and the vendors' runtimes.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import DeclarationError


@dataclass(frozen=True)
class Accelerator:
    """A kind of accelerator.

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
