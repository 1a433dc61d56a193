"""The accelerator table and the arithmetic of device masks."""

from __future__ import annotations

import pytest

from phalanx.errors import DeclarationError, PlacementError
from phalanx.topology.accelerators import (
    accelerator,
    ids_of,
    in_use,
    physical_to_logical,
    resource_names,
    visible_value,
)


@pytest.mark.parametrize(
    ("mask", "physical", "logical"),
    [
        ("4,5,6,7", "5", 1),
        ("4, 5 ,6,7", " 7 ", 3),
        ("7,6,5,4", "4", 3),
        ("1,11", "11", 1),
        ("GPU-aaa,GPU-bbb", "GPU-bbb", 1),
        ("GPU-a,GPU-b", "GPU-bcdef", 1),
        ("GPU-1,GPU-12", "GPU-12", 1),
        ("MIG-x/1/0,MIG-x/2/0", "MIG-x/2/0", 1),
        (None, "3", 3),
    ],
)
def test_a_physical_id_becomes_its_index_in_the_mask(mask, physical, logical):
    assert physical_to_logical(mask, physical) == logical


@pytest.mark.parametrize(
    ("mask", "physical", "words"),
    [
        ("4,5", "6", "does not show"),
        ("", "0", "does not show"),
        ("4,4", "4", "names 2 times"),
        ("GPU-aa,GPU-ab", "GPU-a", "names 2 times"),
        ("4,5", "GPU-4", "does not show"),
        (None, "GPU-x", "without a mask"),
    ],
)
def test_a_device_that_the_mask_does_not_show_once_is_refused(mask, physical, words):
    with pytest.raises(PlacementError, match=words):
        physical_to_logical(mask, physical)


def test_a_mask_is_read_back_as_written():
    assert ids_of(visible_value(["7", "0", "GPU-x"])) == ("7", "0", "GPU-x")


@pytest.mark.parametrize(
    ("name", "torch_device", "backend"),
    [
        ("GPU", "cuda", "nccl"),
        ("rocm", "cuda", "nccl"),
        ("NPU", "npu", "hccl"),
        ("TPU", "xla", "xla"),
        ("HPU", "hpu", "hccl"),
        ("neuron_cores", "xla", "xla"),
    ],
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
        ({"CUDA_VISIBLE_DEVICES": "0"}, "cuda"),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}, "rocm"),
        ({"ROCR_VISIBLE_DEVICES": "0"}, "rocm"),
        ({"ZE_AFFINITY_MASK": "0"}, "xpu"),
    ],
)
def test_the_vendor_behind_gpu_is_told_by_its_variables(env, name):
    assert in_use("GPU", env).name == name


def test_resources_are_named_once():
    assert resource_names() == ("GPU", "NPU", "TPU", "HPU", "neuron_cores")
