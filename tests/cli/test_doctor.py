"""Findings of ``phalanx doctor`` on described machines, and its check of devices, partly on CPUs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import phalanx as px
from phalanx.backends.ray import private
from phalanx.backends.ray.cluster import find_cluster
from phalanx.cli import doctor_command as doctor
from phalanx.cli.doctor_command import Cluster, Machine, examine
from phalanx.cli.gpu_check import NO_DEVICE, check_call, check_transport, report
from phalanx.cli.main import app

GIB = 2**30
HEALTHY = Machine(
    environment={},
    memory_limit=None,
    infiniband=False,
    host="node0",
    python="3.11.7",
    versions={"phalanx": "0.1.0", "ray": "2.60.0", "torch": "2.13.0+cu128", "numpy": "2.4.6"},
    cores=64,
    memory=512 * GIB,
    shared_memory=256 * GIB,
    gpus=("0 (80 GiB)", "1 (80 GiB)"),
    limits={"nofile": (65536, None), "nproc": (None, None), "memlock": (None, None), "core": (0, None)},
    ephemeral_ports=(32768, 60999),
    huge_pages="madvise",
    cluster=Cluster("10.0.0.1:6379", nodes=2, cpus=64, gpus=2, memory=300 * GIB, object_store=100 * GIB),
)


def planted(**changes: Any) -> list[tuple[str, str, str]]:
    """Return topic, text and fix of each finding on a healthy machine with these changes."""
    facts, findings = examine(dataclasses.replace(HEALTHY, **changes))
    assert {finding.topic for finding in findings} <= facts.keys()
    return [tuple(finding) for finding in findings]


def cluster(**changes: Any) -> Cluster:
    assert HEALTHY.cluster is not None
    return dataclasses.replace(HEALTHY.cluster, **changes)


NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
OLD_CLUSTER = cluster(versions={"ray": "2.55.0"})


SEVERAL = "several clusters run on this machine: say which one by --address or RAY_ADDRESS"
DEAF = "the cluster at 10.0.0.1:6379 does not answer (timed out); is it running there?"
MASKS = {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "2"}


@pytest.mark.parametrize(
    ("changes", "topic", "said", "fix"),
    [
        ({"cluster": None, "no_cluster": SEVERAL}, "cluster", "say which one", "--address"),
        ({"cluster": None, "no_cluster": DEAF}, "cluster", "does not answer", ""),
        ({"python": "3.9.1"}, "versions", "python 3.9.1 is too old", "3.10"),
        ({"versions": {"torch": "2.13.0"}}, "versions", "ray is not installed", "pip install"),
        ({"versions": {"ray": "2.9.0", "torch": "2.13"}}, "versions", "ray 2.9.0 is too old", "2.57"),
        ({"versions": {"ray": "2.60.0", "torch": "2.13.0+cpu"}}, "versions", "without CUDA", "pytorch.org"),
        ({"cluster": OLD_CLUSTER}, "versions", "started with ray 2.55.0", "every node"),
        ({"cluster": cluster(cpus=128)}, "cores", "128 CPUs", "--num-cpus=64"),
        ({"environment": {"OMP_NUM_THREADS": "128"}}, "cores", "OMP_NUM_THREADS=128", "unset"),
        ({"environment": MASKS}, "devices", "CUDA_VISIBLE_DEVICES='0,1', HIP", "unset HIP_VISIBLE_DEVICES"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": ""}}, "devices", "hides all 2 GPUs", "unset"),
        ({"environment": {NOSET: "1"}}, "devices", "every device of the node", 'visible_devices="node"'),
        ({"gpus": ()}, "devices", "Ray counts 2 GPUs", "--num-gpus"),
        ({"memory_limit": 200 * GIB}, "memory", "ends processes at 200.0 GiB", "--memory"),
        ({"limits": {"nofile": (1024, 524288)}}, "limits", "nofile is 1024", "ulimit -n 8192"),
        ({"limits": {"nofile": (1024, 4096)}}, "limits", "nofile is 1024", "hard limit of 4096"),
        ({"limits": {"nproc": (1000, None)}}, "limits", "nproc is 1000", "ulimit -u 4096"),
        ({"infiniband": True, "limits": {"memlock": (65536, None)}}, "limits", "pins memory", "ulimit -l"),
        ({"ephemeral_ports": (60000, 60999)}, "ports", "only 1000", "ip_local_port_range"),
        ({"ephemeral_ports": (1024, 65535)}, "ports", "overlap", "32768 60999"),
        ({"huge_pages": "never"}, "huge pages", "are off", "madvise"),
        ({"environment": {"RAY_AUTH_MODE": "disabled"}}, "security", "several nodes", "RAY_AUTH_MODE=token"),
        ({"shared_memory": GIB // 16}, "shared memory", "/dev/shm has 64.0 MiB", "--shm-size=100g"),
        ({"cluster": None, "shared_memory": 64 * 2**20}, "shared memory", "Ray would take", "--shm-size"),
    ],
)
def test_a_planted_problem_is_found(changes: dict[str, Any], topic: str, said: str, fix: str) -> None:
    ((found_topic, what, how),) = planted(**changes)

    assert (found_topic, said in what, fix in how) == (topic, True, True)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"environment": {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0", NOSET: "0"}},
        {"environment": {"OMP_NUM_THREADS": "8"}},
        {"limits": {"memlock": (65536, None)}},
        {"cluster": None},
        {"shared_memory": None, "ephemeral_ports": None},
        {"cluster": None, "no_cluster": "no Ray cluster runs on this machine: start your driver first"},
    ],
)
def test_harmless_settings_are_no_findings(changes: dict[str, Any]) -> None:
    assert planted(**changes) == []


def test_accelerators_are_those_that_nvidia_smi_lists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for text, gpus in (
        ("0, 81559 MiB\n1, [N/A]", ("0 (81559 MiB)", "1 ([N/A])")),
        ("No devices were found", ()),
    ):
        program.write_text(f"#!/bin/sh\necho '{text}'")
        program.chmod(0o755)

        assert Machine().gpus == gpus


@pytest.mark.parametrize(("changes", "code"), [({}, 0), ({"huge_pages": "never"}, 1)])
def test_findings_are_printed_as_text_or_json_and_set_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], code: int
) -> None:
    monkeypatch.setattr(doctor, "Machine", lambda **_: dataclasses.replace(HEALTHY, **changes))
    monkeypatch.setattr(doctor, "find_cluster", lambda address: (None, ""))

    text, data = (CliRunner().invoke(app, ["doctor", *more]) for more in ([], ["--json"]))

    assert (text.exit_code, "fix:" in text.output) == (data.exit_code, bool(code)) == (code, bool(code))
    found = json.loads(data.output)
    assert (found["machine"]["host"], len(found["findings"])) == ("node0", code)


def test_several_clusters_are_listed_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(private, "cluster_addresses", lambda: {"127.0.0.1:1", "127.0.0.1:2"})
    monkeypatch.setattr(private, "bootstrap_address", lambda: None)
    with pytest.raises(px.PlacementError, match=r"RAY_ADDRESS: 127\.0\.0\.1:1, 127\.0\.0\.1:2$"):
        find_cluster()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is here")
def test_the_gpu_check_without_a_device_says_so_and_exits_with_0() -> None:
    ran = CliRunner().invoke(app, ["doctor", "--gpu"])

    assert (ran.exit_code, ran.output.strip()) == (0, NO_DEVICE)


@pytest.mark.slow
def test_the_transport_check_times_a_sync_and_reports_a_failed_sync_with_its_error(ray_cluster: None) -> None:
    with px.ResourcePool([1], use_gpu=False, backend="ray") as pool:
        done, failed = (check_transport(path, pool, pool, megabytes=4) for path in ("shared memory", "nccl"))

    assert (done.result, done.rate > 0) == ("ok", True)
    assert (failed.rate, "one CUDA device" in failed.result) == (0.0, True)
    assert "one CUDA device" in report([done, failed])


def test_the_call_check_sends_a_tensor_through_a_call() -> None:
    assert check_call("cpu", megabytes=4).result == "ok"
