"""Which accelerator this process computes on, and how it is called: as it is, CPU-only machines included.

Where Ray counts accelerators that torch does not see (logical GPUs), the device is the CPU, and the resource and the
mask variable are still those of the accelerator.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch

from phalanx.compat.verl.errors import CheckFailed
from phalanx.topology.accelerators import CPU_BACKEND, accelerator, in_use

__all__ = [
    "auto_set_device",
    "get_device_capability",
    "get_device_id",
    "get_device_name",
    "get_nccl_backend",
    "get_resource_name",
    "get_torch_device",
    "get_vendor",
    "get_visible_devices_keyword",
    "is_cuda_available",
    "is_device_available",
    "is_npu_available",
    "is_torch_npu_available",
    "manual_seed",
    "manual_seed_all",
    "set_expandable_segments",
]

is_cuda_available: bool
is_npu_available: bool

_VENDORS = {"cuda": "nvidia", "rocm": "amd", "xpu": "intel", "npu": "huawei"}


def __getattr__(name: str) -> Any:
    # Asked at import they would be answered before a worker's device mask is set.
    if name == "is_cuda_available":
        return torch.cuda.is_available()
    if name == "is_npu_available":
        return is_torch_npu_available()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_torch_npu_available(check_device: bool = True) -> bool:
    """Whether torch computes on Ascend NPUs here; without ``check_device``, whether its plug-in is installed."""
    if importlib.util.find_spec("torch_npu") is None:
        return False
    if not check_device:
        return True
    importlib.import_module("torch_npu")
    npu = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_available())


def is_device_available() -> bool:
    """Whether torch sees an accelerator."""
    return get_device_name() != "cpu"


def get_device_name() -> str:
    """``"cuda"`` (also for AMD), ``"npu"`` or ``"cpu"``."""
    if torch.cuda.is_available():
        return "cuda"
    return "npu" if is_torch_npu_available() else "cpu"


def get_torch_device() -> Any:
    """``torch.cuda`` or ``torch.npu``; on a CPU ``torch.cpu``, with memory functions that answer nought."""
    name = get_device_name()
    return _CPU if name == "cpu" else getattr(torch, name)


def get_device_id() -> int:
    """Index of the current device; 0 on a CPU."""
    return 0 if get_device_name() == "cpu" else int(get_torch_device().current_device())


def get_nccl_backend() -> str:
    """The backend of ``torch.distributed`` for the device: nccl, hccl or gloo."""
    name = get_device_name()
    return CPU_BACKEND if name == "cpu" else accelerator(name).backend


def get_resource_name() -> str:
    """Ray's name of the resource: ``"GPU"``, or ``"NPU"`` where torch computes on NPUs."""
    return "NPU" if get_device_name() == "npu" else "GPU"


def get_visible_devices_keyword() -> str:
    """The variable that masks devices, such as ``CUDA_VISIBLE_DEVICES``."""
    return in_use(get_resource_name(), os.environ).visible[0]


def get_vendor() -> str:
    """Who makes the accelerator; ``"cpu"`` without one."""
    if get_device_name() == "cpu":
        return "cpu"
    return _VENDORS.get("rocm" if torch.version.hip else get_device_name(), "nvidia")


def get_device_capability(device_id: int = 0) -> tuple[int | None, int | None]:
    """Compute capability of a CUDA device; (None, None) elsewhere."""
    return torch.cuda.get_device_capability(device_id) if torch.cuda.is_available() else (None, None)


def set_expandable_segments(enable: bool) -> None:
    """Let torch's CUDA allocator grow segments, or not; without CUDA nothing is done."""
    if torch.cuda.is_available():
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{enable}")


def auto_set_device(config: Any) -> None:
    """Set ``config.trainer.device``, where there is one, to the device of this machine.

    Raises:
        CheckFailed: it asks for another kind of accelerator than the machine has.
    """
    trainer = getattr(config, "trainer", None)
    if trainer is None or not hasattr(trainer, "device"):
        return
    found = get_device_name()
    if trainer.device not in (None, "cuda", "cpu", found):
        raise CheckFailed(
            f"config.trainer.device is {trainer.device!r}, but this machine computes on {found!r}"
        )
    trainer.device = found


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    get_torch_device().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices of this process."""
    get_torch_device().manual_seed_all(seed)


def torch_device_of(device: Any) -> torch.device:
    """A device from its name or index; an index is one of the accelerator, and on a CPU the CPU."""
    if isinstance(device, int) and not isinstance(device, bool):
        name = get_device_name()
        return torch.device("cpu") if name == "cpu" else torch.device(name, device)
    return torch.device(device)


class _Cpu:
    """``torch.cpu``, and what code written for an accelerator asks besides."""

    __name__ = "torch.cpu"

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def ipc_collect(self) -> None:
        """Nothing is shared."""

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Nothing is counted."""

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes in use on the device: none."""
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total bytes of the device: none."""
        return 0, 0

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(new_state)


_CPU = _Cpu()
