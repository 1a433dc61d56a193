"""The check of device paths: tables on a device, a sentence without one. Its transfers also run on the CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from phalanx.cli import gpu_check
from phalanx.cli.gpu_check import check_call, check_transport, report
from phalanx.weights.transport import GLOO, NCCL, SHARED_MEMORY

without_device = pytest.mark.skipif(torch.cuda.is_available(), reason="a device is here")


@without_device
def test_without_a_device_it_says_so_and_exits_with_0() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "doctor", "--gpu"], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == gpu_check.NO_DEVICE


@pytest.mark.parametrize("transport", [SHARED_MEMORY, GLOO])
def test_a_transfer_between_two_processes_is_timed_and_compared(transport: str) -> None:
    found = check_transport(transport, ("cpu", "cpu"), megabytes=4)

    assert found.result == "ok" and found.rate > 0


def test_a_tensor_passes_through_a_call() -> None:
    assert check_call("cpu", megabytes=4).result == "ok"


@without_device
def test_a_path_that_fails_is_a_row_with_its_error() -> None:
    found = check_transport(NCCL, ("cpu", "cpu"), megabytes=4)

    assert "needs all tensors of source rank 0 on one CUDA device" in found.result
    assert found.result in " ".join(report([found]).split())
