"""Table of accelerators, and the arithmetic of their visible-device masks.

Variables and resources are named as in Ray's accelerator managers (its accelerator plugins) and the
vendors' runtimes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import DeclarationError, PlacementError


@dataclass(frozen=True)
class Accelerator:
    """A kind of accelerator.

    ``visible`` are the variables that mask devices, all of them set to the same ids for a rank; ``lower`` are masks of
    a layer below, which renumber the devices that ``visible`` then counts, and so must not be set next to it.
    ``backend`` is the name that ``torch.distributed.init_process_group`` takes.
    """

    name: str
    resource: str
    visible: tuple[str, ...]
    torch_device: str
    backend: str
    lower: tuple[str, ...] = ()


ACCELERATORS: tuple[Accelerator, ...] = (
    Accelerator("cuda", "GPU", ("CUDA_VISIBLE_DEVICES",), "cuda", "nccl"),
    # HIP reads CUDA_VISIBLE_DEVICES as an alias of its own mask; where both are set they must agree.
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
    """Return the accelerator of that name (``cuda``), or the first accelerator of that Ray resource (``GPU``).

    Raises:
        DeclarationError: neither is known; the message lists the known names.
    """
    for found in ACCELERATORS:
        if name in (found.name, found.resource):
            return found
    raise DeclarationError(
        f"unknown accelerator {name!r}; expected one of {[a.name for a in ACCELERATORS]} or of Ray's "
        f"resources {list(resource_names())}"
    )


def resource_names() -> tuple[str, ...]:
    """Ray's resource names of accelerators, in the order in which they are preferred."""
    return tuple(dict.fromkeys(a.resource for a in ACCELERATORS))


def in_use(resource: str, env: Mapping[str, str]) -> Accelerator:
    """Return the kind behind ``resource`` on a node, recognized by the mask variables in ``env``.

    Several vendors share the resource ``GPU``; without any of their variables it is the first, CUDA.

    Raises:
        DeclarationError: no accelerator has that resource name.
    """
    kinds = [a for a in ACCELERATORS if a.resource == resource] or [accelerator(resource)]
    specific = [a for a in kinds if {a.visible[0], *a.lower} & set(env)]
    return specific[-1] if specific else kinds[0]


def ids_of(mask: str) -> tuple[str, ...]:
    """The device ids in a mask, in the mask's order; spaces and empty items are dropped."""
    return tuple(item.strip() for item in mask.split(",") if item.strip())


def visible_value(ids: Sequence[str]) -> str:
    """The mask that shows exactly ``ids``, in that order; ``""`` hides every device."""
    return ",".join(str(i) for i in ids)


def physical_to_logical(mask: str | None, physical_id: str) -> int:
    """Return the index by which a process under ``mask`` must address the device ``physical_id``.

    With mask ``"4,5,6,7"`` the device ``"5"`` is index 1, the argument for ``torch.cuda.set_device``. UUIDs
    (``GPU-...``, ``MIG-...``) match completely or, as in CUDA, by a prefix that is unique in the mask. Without a mask
    (None) numbers are their own index.

    Raises:
        PlacementError: the mask does not show that device, or names it ambiguously.
    """
    wanted = str(physical_id).strip()
    if mask is None:
        if wanted.isdigit():
            return int(wanted)
        raise PlacementError(
            f"device {wanted!r} cannot be turned into an index without a mask; set the visible-device "
            "variable to a list that has it"
        )
    ids = ids_of(mask)
    whole = [i for i, shown in enumerate(ids) if shown == wanted]
    found = whole or [i for i, shown in enumerate(ids) if _is_prefix(shown, wanted)]
    if len(found) == 1:
        return found[0]
    problem = "does not show" if not found else f"names {len(found)} times"
    raise PlacementError(
        f"the device mask {mask!r} {problem} device {wanted!r}; expected it exactly once. Give ids in the "
        "same form as the mask (numbers, or GPU-/MIG- UUIDs), and do not set the mask by hand in a worker"
    )


def _is_prefix(shown: str, wanted: str) -> bool:
    return not (shown.isdigit() or wanted.isdigit()) and (
        wanted.startswith(shown) or shown.startswith(wanted)
    )
