"""A platform for verl 0.9.1 on machines without accelerators, loaded by VERL_USE_EXTERNAL_MODULES=verl_on_cpu.

This module registers `cpu` in verl's registry of platforms, and VERL_PLATFORM=cpu selects it. It does not touch verl's
controller, and both compared controllers run with it.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
import transformers
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

NOUGHT = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
NOTHING = (
    "empty_cache",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
)
MEMORY = 1 << 34


class _Device(types.ModuleType):
    """torch.cpu with the missing functions of a device module: no memory used, nothing to empty or to seed."""

    def __getattr__(self, name: str) -> Any:
        if name in NOTHING:
            return lambda *args, **kwargs: None
        if name in NOUGHT:
            return lambda *args, **kwargs: 0
        if name == "get_rng_state":
            return torch.get_rng_state
        if name == "mem_get_info":
            return lambda *args, **kwargs: (MEMORY, MEMORY)
        if name == "get_device_name":
            return lambda *args, **kwargs: "cpu"
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """verl's platform, method by method; Ray's logical GPUs stand for the accelerators."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("verl_on_cpu.device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return (None, None)

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def get_device_uuid(self, device_id: int) -> str:
        return "cpu"

    def apply_model_patches(self, model_type: str) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, float]:
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {}

    def get_collective_module(self) -> None:
        return None

    def cudart(self) -> None:
        return None


_init_process_group = torch.distributed.init_process_group


def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
    """Call torch's function with verl's CPU backend in torch's syntax, which rejects a device named twice."""
    return _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


torch.distributed.init_process_group = init_process_group
torch.distributed.distributed_c10d.init_process_group = init_process_group

# A reference policy is always offloaded under fsdp2, into pinned memory: there is nothing to pin for.
torch.Tensor.pin_memory = lambda self, *args, **kwargs: self

# verl/utils/model.py loads the value model with flash_attention_2, whatever the configuration says.
_from_pretrained = transformers.AutoModelForTokenClassification.from_pretrained.__func__


def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Call transformers' function with an attention that runs on CPUs."""
    if kwargs.get("attn_implementation") == "flash_attention_2":
        kwargs["attn_implementation"] = "sdpa"
    return _from_pretrained(cls, *args, **kwargs)


transformers.AutoModelForTokenClassification.from_pretrained = classmethod(from_pretrained)
