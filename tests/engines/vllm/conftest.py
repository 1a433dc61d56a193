"""Fixtures and helpers for tests of vLLM: a cluster, small models and engines, and leftovers of engines."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import phalanx as px
from phalanx.engines.vllm import VllmRollout

HERE = Path(__file__).parent
SMALL: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 32}
"""Options of an engine for tests."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For all ranks: threads that wait for each other are slow on a machine with more ranks than cores."""
KINDS = ("one accelerator", "two accelerators")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, which need the environment of `make test-vllm`."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A cluster for these tests, with logical accelerators."""
    px.init(num_cpus=8, num_gpus=4)
    yield
    px.shutdown()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of small models and of a tokenizer, by name."""
    from tests.engines.vllm.models import save_model, save_tokenizer

    folder = tmp_path_factory.mktemp("models")
    return {
        "untied": save_model(folder / "untied"),
        "tied": save_model(folder / "tied", tied=True),
        "endless": save_model(folder / "endless", end=None),
        "tied Llama": save_model(folder / "llama", "Llama", tied=True),
        "words": save_tokenizer(folder / "words"),
    }


def made(folder: str, kind: str, **options: Any) -> tuple[px.ResourcePool, px.WorkerGroup]:
    """Return a pool, which closes its group, and a group with an engine of the kind on logical accelerators."""
    two = kind == "two accelerators"
    pool = px.ResourcePool([1], use_gpu=two, accelerators_per_slot=1 + two)
    bound = VllmRollout.bind(folder, **SMALL, **options)
    return pool, px.WorkerGroup(pool, bound, name="rollout", env=ONE_THREAD)


def folders_of_sockets() -> set[str]:
    """Return the folders of sockets that engines may leave."""
    return {path.name for path in Path(tempfile.gettempdir()).glob("phalanx-*-*-*")}


def engine_processes() -> set[int]:
    """Return the live processes of engines on this machine."""
    found = psutil.process_iter(["name", "cmdline", "status"])
    return {one.pid for one in found if one.info["status"] != psutil.STATUS_ZOMBIE and _is_engine(one.info)}


def _is_engine(told: dict[str, Any]) -> bool:
    return "VLLM::" in " ".join([told["name"] or "", *(told["cmdline"] or ())])


def file_of_output(_: px.Worker) -> str:
    """Return the file with the output of a rank and its engine."""
    return os.readlink("/proc/self/fd/2")


def refuses(host: str, port: int) -> bool:
    """Return whether no process listens at the address."""
    with socket.socket() as asked:
        return asked.connect_ex((host, port)) == errno.ECONNREFUSED


def shared_memory() -> set[str]:
    """Return the files that engines may leave in /dev/shm."""
    ours = ("psm_", "sem.mp-", "phalanx-")
    return {name for name in os.listdir("/dev/shm") if name.startswith(ours) or "cpushm" in name}


def things_of_engines() -> list[set[Any]]:
    """Return processes, shared memory and sockets of engines on this machine."""
    return [engine_processes(), shared_memory(), folders_of_sockets()]


def left_since(before: list[set[Any]]) -> list[set[Any]]:
    """Return the part of :func:`things_of_engines` that is not in ``before``."""
    return [now - then for now, then in zip(things_of_engines(), before, strict=True)]


def route_paths(app: Any) -> set[str]:
    """Return the paths of all routes of an application, those of mounted applications included."""
    paths: set[str] = set()
    for route in app.routes:
        path = getattr(route, "path", "")
        paths.add(path)
        paths |= {path + inner for inner in route_paths(route)} if getattr(route, "routes", None) else set()
    return paths
