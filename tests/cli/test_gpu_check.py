"""The check of device paths: tables on a device, a sentence without one. Its syncs also run on the CPU."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

import phalanx as px
from phalanx.cli.gpu_check import NO_DEVICE, check_call, check_transport, report
from phalanx.cli.main import app


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is here")
def test_without_a_device_it_says_so_and_exits_with_0() -> None:
    ran = CliRunner().invoke(app, ["doctor", "--gpu"])

    assert (ran.exit_code, ran.output.strip()) == (0, NO_DEVICE)


@pytest.mark.slow
def test_a_sync_between_two_processes_is_timed_and_one_that_fails_is_a_row_with_its_error(
    ray_cluster: None,
) -> None:
    with px.ResourcePool([1], use_gpu=False, backend="ray") as pool:
        done, failed = (check_transport(path, pool, pool, megabytes=4) for path in ("shared memory", "nccl"))

    assert (done.result, done.rate > 0) == ("ok", True)
    assert (failed.rate, "one CUDA device" in failed.result) == (0.0, True)
    assert "one CUDA device" in report([done, failed])


def test_a_tensor_passes_through_a_call() -> None:
    assert check_call("cpu", megabytes=4).result == "ok"
