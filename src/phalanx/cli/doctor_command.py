"""`phalanx doctor`: facts about this machine and Ray's resources of it, and problems with their fixes."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from phalanx.cli.common import Address, AsJson, cluster_reader, show
from phalanx.config import running_cluster
from phalanx.display.text_format import size
from phalanx.errors import PlacementError

_FINDINGS = 1
_GIB = 2**30
_OLDEST = {"python": "3.10", "ray": "2.57", "torch": "2.8"}
_PACKAGES = ("phalanx", "ray", "torch", "numpy", "verl")
_LIMITS = ("nofile", "nproc", "memlock", "core")
#: Minimum soft limits, with the flag of ``ulimit`` and the reason.
_LEAST = {
    "nofile": ("n", 8192, "each rank and each connection takes some"),
    "nproc": ("u", 4096, "threads count too, and each rank has dozens"),
}
_EPHEMERAL_PORTS = 5000
_WORKER_PORTS = (10002, 19999)  # of Ray's worker processes, unless `ray start` was told otherwise
_GOOD_PORTS = (32768, 60999)
_SET_PORTS = '`sysctl -w net.ipv4.ip_local_port_range="{} {}"`'.format(*_GOOD_PORTS)
_STORE_SHARE, _STORE_LIMIT = 0.3, 200 * _GIB  # fraction of the memory for Ray's object store by default
_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
#: Prefixes of the variables that matter to ranks.
_VARIABLES = (
    *(*_MASKS, "ASCEND_RT_VISIBLE_DEVICES", "RAY_EXPERIMENTAL_NOSET_", "OMP_NUM_THREADS"),
    *("RAY_ADDRESS", "RAY_AUTH_MODE", "PHALANX_VERL", "VERL_USE_EXTERNAL_"),
)
_SHARED = "/dev/shm"
_GPUS_WITHIN_S = 3.0
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NO_LIMIT = 1 << 60  # version 1 of control groups stands for "no limit" by a number near 2^63

_GPU_HELP = "Check CUDA IPC, NCCL and device tensors through a call, and nothing else."
Gpu = Annotated[bool, typer.Option("--gpu", help=_GPU_HELP)]


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read()
    return ""


def _relevant_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}


def _version(name: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and its control group's quota."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    return min(cores, max(1, math.ceil(int(quota) / int(period)))) if quota.isdigit() else cores


def _memory_limit() -> int | None:
    limits = [int(text) for text in map(_read, _MEMORY_LIMITS) if text.strip().isdigit()]
    return next((limit for limit in limits if limit < _NO_LIMIT), None)


def _gpu_names() -> tuple[str, ...]:
    """Return number and memory of each NVIDIA accelerator, as ``nvidia-smi`` reports them; empty if it fails."""
    query = ["nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        ran = subprocess.run(query, capture_output=True, text=True, timeout=_GPUS_WITHIN_S, check=True)
        rows = (line.partition(", ") for line in ran.stdout.splitlines())
        return tuple(f"{number} ({memory})" for number, _, memory in rows if memory)
    return ()


def _process_limits() -> dict[str, tuple[int | None, ...]]:
    both = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}")) for name in _LIMITS}
    unlimited = resource.RLIM_INFINITY
    return {name: tuple(None if limit == unlimited else limit for limit in both[name]) for name in both}


def _port_range() -> tuple[int, int] | None:
    low, _, high = _read("/proc/sys/net/ipv4/ip_local_port_range").partition("\t")
    return (int(low), int(high)) if high else None


def _page_mode() -> str | None:
    """Return the mode of transparent huge pages, which a line such as "always [madvise] never" has in brackets."""
    return _read("/sys/kernel/mm/transparent_hugepage/enabled").partition("[")[2].partition("]")[0] or None


@dataclass(frozen=True)
class Cluster:
    """A cluster: its number of nodes, Ray's resources of this host, and the versions that it was started with."""

    address: str
    nodes: int
    cpus: float = 0.0
    gpus: float = 0.0
    memory: int = 0
    object_store: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)


def _probed(probe: Callable[[], Any]) -> Any:
    """Return a dataclass field whose default is the result of ``probe`` on this machine."""
    return field(default_factory=probe)


@dataclass(frozen=True)
class Machine:
    """Properties of a machine that concern ranks; by default of this machine.

    Sizes are in bytes. ``cores`` counts the cores that this process may use. ``limits`` are (soft, hard), None for no
    limit. ``gpus`` are names of accelerators.
    """

    host: str = _probed(socket.gethostname)
    python: str = _probed(platform.python_version)
    versions: Mapping[str, str | None] = _probed(lambda: {name: _version(name) for name in _PACKAGES})
    cores: int = _probed(_usable_cores)
    memory: int = _probed(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    memory_limit: int | None = _probed(_memory_limit)
    shared_memory: int | None = _probed(
        lambda: shutil.disk_usage(_SHARED).total if os.path.isdir(_SHARED) else None
    )
    environment: Mapping[str, str] = _probed(_relevant_variables)
    gpus: tuple[str, ...] = _probed(_gpu_names)
    limits: Mapping[str, tuple[int | None, ...]] = _probed(_process_limits)
    ephemeral_ports: tuple[int, int] | None = _probed(_port_range)
    huge_pages: str | None = _probed(_page_mode)
    infiniband: bool = _probed(lambda: bool(glob.glob("/sys/class/infiniband/*")))
    cluster: Cluster | None = None
    no_cluster: str = "none runs here"


class Finding(NamedTuple):
    """A problem of a machine, and its fix."""

    topic: str
    what: str
    fix: str


def doctor(address: Address = None, as_json: AsJson = False, gpu: Gpu = False) -> None:
    """Find problems of this machine that concern ranks, each with its fix.

    Checks versions, cores, accelerators and variables that hide them, shared memory, limits, ports, huge pages; and
    the resources that a running cluster counts on this host. Run it on each suspect node.

    Examples:

      phalanx doctor

      phalanx doctor --address 10.0.0.1:6379 --json

      phalanx doctor --gpu

    Exit codes: 0 no findings; 1 findings; 2 the named cluster does not respond.
    """
    if gpu:
        from phalanx.cli.gpu_check import check_devices, report  # torch: only for this option

        results = check_devices()
        show(as_json, [result._asdict() for result in results], report(results))
        raise typer.Exit(_FINDINGS if any(result.result != "ok" for result in results) else 0)
    environment = _relevant_variables()  # before the connection, which may set RAY_AUTH_MODE
    cluster, why_not = find_cluster(address)
    machine = Machine(environment=environment, cluster=cluster, no_cluster=why_not)
    facts, findings = examine(machine)
    data = {"machine": asdict(machine), "findings": [finding._asdict() for finding in findings]}
    show(as_json, data, render(machine.host, facts, findings))
    raise typer.Exit(_FINDINGS if findings else 0)


def find_cluster(address: str | None) -> tuple[Cluster | None, str]:
    """Describe the named cluster, or the cluster of this machine; without a cluster, return None and the reason.

    Raises:
        PlacementError: if the cluster is named by ``address`` or a variable, and does not respond.
    """
    try:
        reader = cluster_reader(address)
    except PlacementError as error:
        if address or running_cluster():
            raise
        return None, str(error).splitlines()[0]
    nodes, here = reader.nodes(), Counter[str]()
    for host, resources in nodes:
        here.update(resources if host == socket.gethostname() else {})
    versions = {name: version for name, version in reader.versions().items() if version}
    memory, store = int(here["memory"]), int(here["object_store_memory"])
    return Cluster(reader.address, len(nodes), here["CPU"], here["GPU"], memory, store, versions), ""


def render(host: str, facts: Mapping[str, str], findings: list[Finding]) -> Any:
    """Return the facts, then each finding with its fix."""
    wrong = {finding.topic for finding in findings}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for name, value in facts.items():
        mark = Text("!", "bold yellow") if name in wrong else Text("✓", "green")
        table.add_row(mark, Text(name, "bold"), Text(value))
    parts: list[Any] = [Text.assemble(("host ", "dim"), (host, "bold")), Padding(table, (1, 0, 1, 2))]
    for number, finding in enumerate(findings, 1):
        parts.append(Text.assemble((f"{number}. {finding.topic}: ", "bold yellow"), finding.what))
        parts.append(Padding(Text.assemble(("fix: ", "green"), finding.fix), (0, 0, 1, 3)))
    return Group(*parts, *([] if findings else [Text("Nothing is wrong.", "green")]))


def examine(machine: Machine) -> tuple[dict[str, str], list[Finding]]:
    """Return the facts of a machine by topic, and all problems in the order of the topics."""
    cluster = machine.cluster or Cluster("", nodes=0)
    looks = (_software, _processors, _memory, _system, _access)  # in the order of the facts
    return describe(machine), [Finding(*problem) for look in looks for problem in look(machine, cluster)]


def describe(m: Machine) -> dict[str, str]:
    """Return the facts of a machine as text by topic, the most important topics first."""
    cluster = m.cluster
    versions = {"python": m.python, **m.versions}
    limits = ", ".join(f"{name} {_limit(name, soft)}" for name, (soft, _) in m.limits.items())
    variables = ", ".join(f"{name}={value}" for name, value in sorted(m.environment.items()))
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes != 1)}" if cluster else ""
    return {
        "versions": ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items()),
        "cores": f"{m.cores}" + (f"; Ray counts {cluster.cpus:g} here" if cluster else ""),
        "devices": ", ".join(m.gpus) or "none that nvidia-smi shows",
        "memory": size(m.memory) + ("" if m.memory_limit is None else f", limited to {size(m.memory_limit)}"),
        "shared memory": "no /dev/shm" if m.shared_memory is None else size(m.shared_memory),
        "limits": limits or "unknown",
        "ports": "{}-{} ephemeral".format(*m.ephemeral_ports) if m.ephemeral_ports else "unknown",
        "huge pages": m.huge_pages or "unknown",
        "variables": variables or "none that matter to ranks",
        "security": m.environment.get("RAY_AUTH_MODE") or "Ray's default mode",
        "cluster": f"{cluster.address}, {nodes}" if cluster else m.no_cluster,
    }


def _limit(name: str, soft: int | None) -> str:
    if soft is None:
        return "unlimited"
    return size(soft) if soft and name in ("memlock", "core") else f"{soft}"


Problems = Iterator[tuple[str, str, str]]
"""Topic, problem and fix of each problem. Without a cluster, all counts of ``cluster`` are 0."""


def _software(m: Machine, cluster: Cluster) -> Problems:
    have = {"python": m.python, **m.versions}
    for name, oldest in _OLDEST.items():
        version = have.get(name)
        if version is None:
            yield "versions", f"{name} is not installed", f'pip install "{name}>={oldest}"'
        elif _numbers(version) < _numbers(oldest):
            yield "versions", f"{name} {version} is too old", f"install {name} {oldest} or newer"
    torch = m.versions.get("torch") or ""
    if m.gpus and "+cpu" in torch:
        fix = "install the build for your driver: see https://pytorch.org/get-started/locally"
        yield "versions", f"torch {torch} is built without CUDA, and this machine has {len(m.gpus)} GPUs", fix
    for name, version in cluster.versions.items():
        if have.get(name) not in (None, version):
            fix = f"use the same {name} on every node and for the driver"
            yield "versions", f"the cluster was started with {name} {version}, here is {have[name]}", fix


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _processors(m: Machine, cluster: Cluster) -> Problems:
    if cluster.cpus > m.cores:
        fix = f"start it with `ray start --num-cpus={m.cores}`, or px.init(num_cpus={m.cores})"
        what = f"Ray counts {cluster.cpus:g} CPUs on this host, which has {m.cores} cores"
        yield "cores", f"{what}: it starts more processes at once than can run", fix
    threads = m.environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > m.cores:
        fix = "unset it: each rank then gets the node's cores divided by the ranks on it"
        what = f"OMP_NUM_THREADS={threads} on {m.cores} cores: threads of each process take turns"
        yield "cores", what, fix
    masks = {name: m.environment[name] for name in _MASKS if name in m.environment}
    if len(set(masks.values())) > 1:
        values = ", ".join(f"{name}={value!r}" for name, value in masks.items())
        fix = f"keep one of them: `unset {' '.join(list(masks)[1:])}`"
        yield "devices", f"variables that choose visible devices contradict each other: {values}", fix
    if m.gpus and masks.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        fix = "`unset CUDA_VISIBLE_DEVICES` before Ray is started here"
        yield "devices", f"CUDA_VISIBLE_DEVICES hides all {len(m.gpus)} GPUs of this machine", fix
    for name in sorted(m.environment):
        if name.startswith("RAY_EXPERIMENTAL_NOSET_") and m.environment[name] not in ("", "0"):
            fix = f'`unset {name}`; for ranks that need all devices, WorkerGroup(visible_devices="node")'
            what = f"{name} is set: Ray's own tasks and actors then see every device of the node"
            yield "devices", what, fix
    if cluster.gpus > len(m.gpus):
        fix = "start Ray without --num-gpus and let it count; on a machine without GPUs this is fine to try things"
        what = f"Ray counts {cluster.gpus:g} GPUs on this host, nvidia-smi shows {len(m.gpus)}"
        yield "devices", f"{what}: ranks on the others get the CPU as device, or fail", fix


def _memory(m: Machine, cluster: Cluster) -> Problems:
    limit, counted = m.memory_limit, cluster.memory + cluster.object_store
    if limit is not None and counted > limit:
        fix = "start Ray inside the container, or give it --memory and --object-store-memory that fit"
        what = f"Ray counts {size(counted)} of memory, the control group ends processes at {size(limit)}"
        yield "memory", what, fix
    store = cluster.object_store
    wanted = store or int(min(_STORE_SHARE * min(m.memory, limit or m.memory), _STORE_LIMIT))
    if m.shared_memory is not None and m.shared_memory < wanted:
        gib, text = -(-wanted // _GIB), size(wanted)
        needed = f"Ray's object store takes {text}" if store else f"Ray would take {text} of it"
        what = f"/dev/shm has {size(m.shared_memory)}, {needed}: objects would go to disk, which is slow"
        larger = f"`docker run --shm-size={gib}g`, `mount -o remount,size={gib}G /dev/shm`"
        yield "shared memory", what, f"{larger}, or a smaller store: px.init(object_store_memory=...)"


def _system(m: Machine, cluster: Cluster) -> Problems:
    for name, (flag, least, why) in _LEAST.items():
        soft, hard = m.limits.get(name, (None, None))
        if soft is not None and soft < least:
            fix = f"`ulimit -{flag} {least if hard is None else min(least, hard)}` before `ray start`"
            if hard is not None and hard < least:
                fix += f", and raise the hard limit of {hard} (limits.conf)"
            yield "limits", f"ulimit {name} is {soft}: {why}", fix
    locked, _ = m.limits.get("memlock", (None, None))
    if locked is not None and m.infiniband:
        fix = "`ulimit -l unlimited` before `ray start` (docker: --ulimit memlock=-1)"
        yield "limits", f"ulimit memlock is {_limit('memlock', locked)}, and InfiniBand pins memory", fix
    (first, last), (low, high) = _WORKER_PORTS, m.ephemeral_ports or _GOOD_PORTS
    if high - low < _EPHEMERAL_PORTS:
        what = f"only {high - low + 1} ephemeral ports ({low}-{high})"
        yield "ports", f"{what}: collectives of many ranks run out of them", _SET_PORTS
    if low <= last and high >= first:
        what = f"ephemeral ports {low}-{high} overlap those of Ray's workers ({first}-{last})"
        yield "ports", what, f"{_SET_PORTS}, or `ray start --min-worker-port=...`"
    if m.huge_pages == "never":
        what = "transparent huge pages are off: receiving large tensors takes up to twice as long"
        yield "huge pages", what, "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`"


def _access(m: Machine, cluster: Cluster) -> Problems:
    if m.environment.get("RAY_AUTH_MODE", "").lower() == "disabled" and cluster.nodes > 1:
        what = "RAY_AUTH_MODE=disabled on a cluster of several nodes: a process that reaches its ports can run code"
        fix = "RAY_AUTH_MODE=token on every node, with one token: `ray get-auth-token --generate`"
        yield "security", what, fix
    if m.cluster is None and not m.no_cluster.startswith(("none runs", "no Ray cluster runs")):
        fix = "choose a cluster with --address or RAY_ADDRESS (`ray stop` stops all clusters here)"
        yield "cluster", m.no_cluster, fix
