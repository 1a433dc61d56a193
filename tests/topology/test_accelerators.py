"""The accelerator table and the arithmetic of device masks."""

from __future__ import annotations

import pytest

from phalanx.errors import DeclarationError, PlacementError
from phalanx.topology.accelerators import accelerator, in_use, physical_to_logical, resource_names


@pytest.mark.parametrize(
    ("mask", "physical", "logical"),
    [
        ("7, 5 ,1,11", " 1 ", 2),
        ("GPU-a,GPU-b", "GPU-bcdef", 1),
        ("GPU-1,GPU-12", "GPU-12", 1),
        (None, "3", 3),
    ],
)
def test_a_physical_id_becomes_its_index_in_the_mask(mask, physical, logical):
    assert physical_to_logical(mask, physical) == logical


@pytest.mark.parametrize(
    ("mask", "physical", "words"),
    [
        ("4,5", "6", "does not show"),
        ("4,4", "4", "names 2 times"),
        ("GPU-aa,GPU-ab", "GPU-a", "names 2 times"),
        ("4,5", "GPU-4", "does not show"),
        (None, "GPU-x", "without a mask"),
    ],
)
def test_a_device_that_the_mask_does_not_show_once_is_refused(mask, physical, words):
    with pytest.raises(PlacementError, match=words):
        physical_to_logical(mask, physical)


@pytest.mark.parametrize(
    ("name", "torch_device", "backend"),
    [("GPU", "cuda", "nccl"), ("rocm", "cuda", "nccl"), ("NPU", "npu", "hccl"), ("TPU", "xla", "xla")],
)
def test_an_accelerator_is_found_by_name_or_resource(name, torch_device, backend):
    found = accelerator(name)

    assert (found.torch_device, found.backend) == (torch_device, backend)


def test_an_unknown_accelerator_lists_the_known():
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


def test_resources_are_named_once():
    assert resource_names() == ("GPU", "NPU", "TPU", "HPU", "neuron_cores")
