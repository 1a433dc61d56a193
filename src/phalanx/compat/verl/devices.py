"""Names of accelerators: from the platform of the installed verl, else from Ray and the driver's variables."""

from __future__ import annotations

import importlib
import importlib.util
import os

from phalanx.compat.verl import overlay
from phalanx.topology.accelerators import in_use


def resource_name(device_name: str) -> str:
    """Return Ray's resource name for a device name of torch."""
    if not overlay.active():
        return "NPU" if device_name == "npu" else "GPU"
    return importlib.import_module("verl.plugin.platform").get_platform().ray_resource_name()


def visible_devices_variable() -> str:
    """Return the variable that masks devices, such as ``CUDA_VISIBLE_DEVICES``."""
    if overlay.active():
        return importlib.import_module("verl.utils.device").get_visible_devices_keyword().upper()
    resource = "GPU" if importlib.util.find_spec("torch_npu") is None else "NPU"
    return in_use(resource, os.environ).visible[0]
