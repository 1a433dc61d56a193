"""One table of accelerators, and the arithmetic of their visible-device masks.

Variables and resources are named as in Ray's accelerator managers (its accelerator plugins) and the
vendors' runtimes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import DeclarationError, PlacementError


@dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator.

    ``visible`` are the variables that mask devices, all of them set to the same ids for a rank; ``lower`` are
    masks of a layer below, which renumber what ``visible`` then counts, and so must not be set beside it.
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
        lower=("ROCR_VISIBLE_DEVICES",),
    ),
    Accelerator(
        "xpu",
        "GPU",
        ("ZE_AFFINITY_MASK",),
        "xpu",
        "xccl",
        lower=("ONEAPI_DEVICE_SELECTOR",),
    ),
    Accelerator("npu", "NPU", ("ASCEND_RT_VISIBLE_DEVICES",), "npu", "hccl"),
    Accelerator("tpu", "TPU", ("TPU_VISIBLE_CHIPS",), "xla", "xla"),
    Accelerator(
        "hpu",
        "HPU",
        ("HABANA_VISIBLE_MODULES",),
        "hpu",
        "hccl",
        lower=("HABANA_VISIBLE_DEVICES",),
    ),
    Accelerator(
        "neuron",
        "neuron_cores",
        ("NEURON_RT_VISIBLE_CORES",),
        "xla",
        "xla",
    ),
)

MASK_VARIABLES: frozenset[str] = frozenset(
    [v for a in ACCELERATORS for v in (*a.visible, *a.lower)]
    + ["NVIDIA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "NEURON_RT_NUM_CORES", "TPU_VISIBLE_DEVICES"]
)
"""Every variable that masks devices: true on one node only, so never copied from the driver."""


def accelerator(name: str) -> Accelerator:
    """The accelerator of that name (``cuda``), or the first of that Ray resource (``GPU``).

    Raises:
        DeclarationError: neither is known; the message lists what is.
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
    """The kind behind ``resource`` on a node, told by the mask variables in ``env``.

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
    """The index by which a process under ``mask`` must address the device ``physical_id``.

    With mask ``"4,5,6,7"`` the device ``"5"`` is index 1: what ``torch.cuda.set_device`` must get. UUIDs
    (``GPU-...``, ``MIG-...``) match whole or, as CUDA has it, by a prefix that is unique in the mask. Without
    a mask (None) numbers are their own index.

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


def conflicts(env: Mapping[str, str]) -> list[str]:
    """What is wrong with the device masks in ``env``, each with its fix; empty when nothing is."""
    return [
        *_layer_conflicts(env),
        *_alias_conflicts(env),
        *_duplicate_conflicts(env),
        *_empty_conflicts(env),
    ]


def _is_prefix(shown: str, wanted: str) -> bool:
    return not (shown.isdigit() or wanted.isdigit()) and (
        wanted.startswith(shown) or shown.startswith(wanted)
    )


def _layer_conflicts(env: Mapping[str, str]) -> list[str]:
    return [
        f"{low}={env[low]!r} and {high}={env[high]!r} are both set: the first renumbers the devices that the "
        f"second counts, so an index means another device than it says. Unset {low} and keep {high}"
        for kind in ACCELERATORS
        for low in kind.lower
        for high in kind.visible[:1]
        if low in env and high in env
    ]


def _alias_conflicts(env: Mapping[str, str]) -> list[str]:
    return [
        f"{first}={env[first]!r} and {alias}={env[alias]!r} mask the same devices and differ. Unset {alias}, "
        f"or set it to {env[first]!r}"
        for kind in ACCELERATORS
        for first, alias in [(kind.visible[0], other) for other in kind.visible[1:]]
        if first in env and alias in env and ids_of(env[first]) != ids_of(env[alias])
    ]


def _duplicate_conflicts(env: Mapping[str, str]) -> list[str]:
    found: list[str] = []
    for name in sorted(MASK_VARIABLES & set(env)):
        ids = ids_of(env[name])
        twice = sorted({i for i in ids if ids.count(i) > 1})
        if twice:
            fixed = visible_value(list(dict.fromkeys(ids)))
            found.append(
                f"{name}={env[name]!r} names {', '.join(twice)} more than once, which makes the runtime hide "
                f"devices. Set {name}={fixed!r}"
            )
    return found


def _empty_conflicts(env: Mapping[str, str]) -> list[str]:
    """An id after an empty item or -1 is hidden: CUDA stops reading its mask at the first invalid id."""
    found: list[str] = []
    for name in sorted(MASK_VARIABLES & set(env)):
        items = [item.strip() for item in env[name].split(",")]
        invalid = next((i for i, item in enumerate(items) if item in ("", "-1")), None)
        if invalid is not None and len(items) > 1:
            kept = visible_value([item for item in items if item not in ("", "-1")])
            found.append(
                f"{name}={env[name]!r} has the invalid item {items[invalid]!r} at place {invalid}, and "
                f"devices after it are hidden. Set {name}={kept!r}"
            )
    return found
