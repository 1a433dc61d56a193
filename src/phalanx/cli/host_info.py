"""What `phalanx doctor` looks at: this machine, and the cluster's own count of it, as plain values."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import resource
import shutil
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.backends.ray.usage import gpus
from phalanx.display.byte_format import size

if TYPE_CHECKING:
    from phalanx.backends.ray.cluster_reader import ClusterReader  # loads Ray

PACKAGES = ("phalanx", "ray", "torch", "numpy")
VERL_HOOK = "phalanx.compat.verl_plugin"
LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC,
          "memlock": resource.RLIMIT_MEMLOCK, "core": resource.RLIMIT_CORE}  # fmt: skip
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "RAY_ADDRESS",
    "RAY_AUTH_MODE",
    "PHALANX_VERL",
    "VERL_USE_EXTERNAL_MODULES",
    "VERL_USE_EXTERNAL_PLUGINS",
)
_NO_LIMIT = 1 << 60  # version 1 of control groups says "none" by a number near 2^63
_PREFIXES = ("RAY_EXPERIMENTAL_NOSET_",)


@dataclass(frozen=True)
class Cluster:
    """What Ray says: counts of the nodes that are this host, how many nodes there are, versions it was started with."""

    address: str
    nodes: int
    cpus: float = 0.0
    gpus: float = 0.0
    memory: int = 0
    object_store: int = 0
    versions: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Machine:
    """This machine, as far as ranks care.

    Sizes are bytes; ``cores`` are those that this process may use; ``limits`` are soft and hard, None for no limit;
    ``gpus`` are names of accelerators; ``disk_used`` is the full part of the disk with Ray's files, from 0 to 1.
    """

    host: str
    python: str
    versions: Mapping[str, str | None]
    cores: int
    memory: int
    memory_limit: int | None = None
    shared_memory: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    gpus: tuple[str, ...] = ()
    limits: Mapping[str, tuple[int | None, int | None]] = field(
        default_factory=dict[str, tuple[int | None, int | None]]
    )
    ephemeral_ports: tuple[int, int] | None = None
    huge_pages: str | None = None
    infiniband: bool = False
    disk_used: float | None = None
    token: bool = False
    cluster: Cluster | None = None
    no_cluster: str = "none runs here"
    verl: str | None = None
    verl_hook: bool = False
    """Whether verl finds this library's plugin: it does where the library is installed, not merely on the path."""


def variables() -> dict[str, str]:
    """The environment, as far as it matters to ranks."""
    return {k: v for k, v in os.environ.items() if k in VARIABLES or k.startswith(_PREFIXES)}


def gather(
    cluster_reader: ClusterReader | None = None, environment: Mapping[str, str] | None = None
) -> Machine:
    """This machine now, and the cluster that was given; ``environment`` as it was before anybody changed it."""
    host = socket.gethostname()
    return Machine(
        host=host,
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        cores=_cores(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_limit=_memory_limit(),
        shared_memory=_size("/dev/shm"),
        environment=variables() if environment is None else environment,
        gpus=tuple(f"{gpu.number} ({size(gpu.total)})" for gpu in gpus()),
        limits={name: _limit(number) for name, number in LIMITS.items()},
        ephemeral_ports=_ports(_read("/proc/sys/net/ipv4/ip_local_port_range")),
        huge_pages=_chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        infiniband=bool(_names("/sys/class/infiniband")),
        disk_used=_used("/tmp/ray") if os.path.isdir("/tmp/ray") else _used("/tmp"),
        token=os.path.isfile(os.path.expanduser("~/.ray/auth_token")) or "RAY_AUTH_TOKEN" in os.environ,
        cluster=None if cluster_reader is None else _cluster(cluster_reader, host),
        verl=_version("verl"),
        verl_hook=any(
            hook.value == VERL_HOOK for hook in importlib.metadata.entry_points(group="verl.plugins")
        ),
    )


def _cluster(cluster_reader: ClusterReader, host: str) -> Cluster:
    nodes = [node for node in cluster_reader.nodes() if node.alive]
    here = [node.resources for node in nodes if node.host == host]

    def total(name: str) -> float:
        return sum(resources.get(name, 0.0) for resources in here)

    return Cluster(
        address=cluster_reader.address,
        nodes=len(nodes),
        cpus=total("CPU"),
        gpus=total("GPU"),
        memory=int(total("memory")),
        object_store=int(total("object_store_memory")),
        versions=_started_with(cluster_reader.metadata()),
    )


def _started_with(text: bytes | None) -> dict[str, str]:
    """Versions of ray and python in what the cluster notes of itself."""
    with contextlib.suppress(ValueError, AttributeError):
        found = json.loads(text or b"{}")
        pairs = {"ray": found.get("ray_version"), "python": found.get("python_version")}
        return {name: value for name, value in pairs.items() if value}
    return {}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> int:
    """Cores that this process may run on, by its affinity and its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as file:
        quota, period = file.read().split()
        return min(cores, max(1, math.ceil(int(quota) / int(period))))  # "max" is no number: no quota
    return cores


def _memory_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(path).strip()
        if text.isdigit() and int(text) < _NO_LIMIT:
            return int(text)
    return None


def _limit(number: int) -> tuple[int | None, int | None]:
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(number))
    return soft, hard


def _ports(text: str) -> tuple[int, int] | None:
    numbers = [int(part) for part in text.split() if part.isdigit()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


def _chosen(text: str) -> str | None:
    """``always [madvise] never`` -> madvise."""
    inside = text.partition("[")[2].partition("]")[0]
    return inside or None


def _size(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(path).total
    return None


def _used(path: str) -> float | None:
    with contextlib.suppress(OSError, ZeroDivisionError):
        usage = shutil.disk_usage(path)
        return 1 - usage.free / usage.total
    return None


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read()
    return ""


def _names(path: str) -> Iterable[str]:
    with contextlib.suppress(OSError):
        return os.listdir(path)
    return []
