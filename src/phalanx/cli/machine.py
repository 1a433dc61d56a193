"""Facts about this machine, and the cluster's own count of it, as plain values: the input of `phalanx doctor`."""

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
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.display.byte_format import size

if TYPE_CHECKING:
    from phalanx.backends.ray.cluster_reader import ClusterReader  # loads Ray

VERL_HOOK = "phalanx.compat.verl_plugin"
_PACKAGES = ("phalanx", "ray", "torch", "numpy")
_LIMITS = ("nofile", "nproc", "memlock", "core")
#: Beginnings of the variables that matter to ranks.
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
    *("OMP_NUM_THREADS", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_EXPERIMENTAL_NOSET_"),
    *("PHALANX_VERL", "VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS"),
)
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NO_LIMIT = 1 << 60  # version 1 of control groups says "none" by a number near 2^63


@dataclass(frozen=True)
class Cluster:
    """Ray's counts of the nodes that are this host, its number of nodes, and versions it was started with."""

    address: str
    nodes: int
    cpus: float = 0.0
    gpus: float = 0.0
    memory: int = 0
    object_store: int = 0
    versions: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Machine:
    """This machine, as far as it matters to ranks.

    Sizes are bytes; ``cores`` are those that this process may use; ``limits`` are soft and hard, None for no limit;
    ``gpus`` are names of accelerators; ``disk_used`` is the full part of the disk with Ray's files, from 0 to 1;
    ``verl_hook`` is True if verl finds this library's plugin: the library is installed, not merely on the path.
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
    limits: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict[str, Any])
    ephemeral_ports: tuple[int, int] | None = None
    huge_pages: str | None = None
    infiniband: bool = False
    disk_used: float | None = None
    token: bool = False
    cluster: Cluster | None = None
    no_cluster: str = "none runs here"
    verl: str | None = None
    verl_hook: bool = False


def variables() -> dict[str, str]:
    """Return the environment variables that matter to ranks."""
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}


def gather(reader: ClusterReader | None = None, environment: Mapping[str, str] | None = None) -> Machine:
    """Describe this machine now, and a cluster; ``environment`` as it was before anybody changed it."""
    from phalanx.backends.ray.usage import gpus  # loads Ray

    host = socket.gethostname()
    ports = [int(part) for part in _read("/proc/sys/net/ipv4/ip_local_port_range").split() if part.isdigit()]
    huge_pages = _read("/sys/kernel/mm/transparent_hugepage/enabled")  # such as "always [madvise] never"
    limits = [int(text) for text in map(_read, _MEMORY_LIMITS) if text.strip().isdigit()]
    shared, disk = _disk("/dev/shm"), _disk("/tmp/ray" if os.path.isdir("/tmp/ray") else "/tmp")
    hooks = importlib.metadata.entry_points(group="verl.plugins")
    return Machine(
        host=host,
        python=platform.python_version(),
        versions={name: _version(name) for name in _PACKAGES},
        cores=_cores(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_limit=next((limit for limit in limits if limit < _NO_LIMIT), None),
        shared_memory=shared and shared.total,
        environment=variables() if environment is None else environment,
        gpus=tuple(f"{gpu.number} ({size(gpu.total)})" for gpu in gpus()),
        limits={name: _limit(getattr(resource, f"RLIMIT_{name.upper()}")) for name in _LIMITS},
        ephemeral_ports=(ports[0], ports[1]) if len(ports) == 2 else None,
        huge_pages=huge_pages.partition("[")[2].partition("]")[0] or None,
        infiniband=os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband")),
        disk_used=1 - disk.free / disk.total if disk and disk.total else None,
        token=os.path.isfile(os.path.expanduser("~/.ray/auth_token")) or "RAY_AUTH_TOKEN" in os.environ,
        cluster=None if reader is None else _cluster(reader, host),
        verl=_version("verl"),
        verl_hook=any(hook.value == VERL_HOOK for hook in hooks),
    )


def _cluster(reader: ClusterReader, host: str) -> Cluster:
    nodes = [node for node in reader.nodes() if node.alive]
    here: Counter[str] = Counter()
    for node in nodes:
        here.update(node.resources if node.host == host else {})
    metadata: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        metadata = json.loads(reader.metadata() or b"{}")
    versions = {name: metadata.get(f"{name}_version") for name in ("ray", "python")}
    return Cluster(
        address=reader.address,
        nodes=len(nodes),
        cpus=here["CPU"],
        gpus=here["GPU"],
        memory=int(here["memory"]),
        object_store=int(here["object_store_memory"]),
        versions={name: version for name, version in versions.items() if version},
    )


def _version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _cores() -> int:
    """Return the cores that this process may run on, by its affinity and its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(ValueError):  # "max" is no number: no quota
        quota, period = _read("/sys/fs/cgroup/cpu.max").split()
        return min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def _limit(number: int) -> tuple[int | None, int | None]:
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(number))
    return soft, hard


def _disk(path: str) -> Any:
    """Return the use of a file system; None if it is not there."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(path)
    return None


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read()
    return ""
