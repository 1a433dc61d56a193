"""The accelerator table and the arithmetic of device masks."""

from __future__ import annotations

import pytest

from phalanx.errors import DeclarationError
from phalanx.topology.accelerators import accelerator, in_use, resource_names


@pytest.mark.parametrize(
    ("name", "torch_device", "backend"),
    [("GPU", "cuda", "nccl"), ("rocm", "cuda", "nccl"), ("NPU", "npu", "hccl"), ("TPU", "xla", "xla")],
)
def test_an_accelerator_is_found_by_name_or_resource(name, torch_device, backend):
    found = accelerator(name)

    assert (found.torch_device, found.backend) == (torch_device, backend)


def test_resources_are_named_once_and_to_whoever_asks_for_an_unknown_one():
    assert resource_names() == ("GPU", "NPU", "TPU", "HPU", "neuron_cores")
    with pytest.raises(DeclarationError, match="neuron_cores"):
        accelerator("FPGA")


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({}, "cuda"),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}, "rocm"),
        ({"ROCR_VISIBLE_DEVICES": "0"}, "rocm"),
    ],
)
def test_the_vendor_behind_gpu_is_told_by_its_variables(env, name):
    assert in_use("GPU", env).name == name
