"""`phalanx doctor`: describes this machine and the cluster's own count of it, and names problems with their fixes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import re
import resource
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from phalanx.cli.common import Address, AsJson, cluster_reader
from phalanx.config import running_cluster
from phalanx.display.byte_format import size
from phalanx.errors import PlacementError

if TYPE_CHECKING:
    from phalanx.backends.ray.cluster_reader import ClusterReader  # loads Ray

_FINDINGS = 1
_GIB = 2**30
_OLDEST = {"python": "3.10", "ray": "2.57", "torch": "2.6"}
_VERL_LINE = "0.9."
_LIMITS = (
    ("nofile", "n", 8192, "each rank and each connection takes some"),
    ("nproc", "u", 4096, "threads count too, and each rank has dozens"),
)
_EPHEMERAL_PORTS = 5000
_WORKER_PORTS = (10002, 19999)  # of Ray's worker processes, unless `ray start` was told otherwise
_SET_PORTS = '`sysctl -w net.ipv4.ip_local_port_range="32768 60999"`'
_STORE_SHARE = 0.3  # default share of the memory that Ray's object store uses
_STORE_LIMIT = 200 * _GIB
_DISK_FULL = 0.9  # from 0.95 on, Ray refuses to spill objects
_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

_VERL_HOOK = "phalanx.compat.verl_plugin"
_PACKAGES = ("phalanx", "ray", "torch", "numpy")
_LIMIT_NAMES = ("nofile", "nproc", "memlock", "core")
#: Beginnings of the variables that matter to ranks.
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
    *("OMP_NUM_THREADS", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_EXPERIMENTAL_NOSET_"),
    *("PHALANX_VERL", "VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS"),
)
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NO_LIMIT = 1 << 60  # version 1 of control groups says "none" by a number near 2^63

Problems = Iterator[tuple[str, str, str]]
"""Problems of a machine: topic, problem and fix."""

_GPU_HELP = "Check CUDA IPC, NCCL and device tensors through a call, and nothing else."
Gpu = Annotated[bool, typer.Option("--gpu", help=_GPU_HELP)]


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
    """Properties of this machine that concern ranks.

    Sizes are in bytes. ``cores`` counts the cores that this process may use. ``limits`` are soft and hard, None for no
    limit. ``gpus`` are names of accelerators. ``disk_used`` is the used fraction of the disk with Ray's files.
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


class Finding(NamedTuple):
    """A problem of a machine, and its fix."""

    topic: str
    what: str
    fix: str


def doctor(address: Address = None, as_json: AsJson = False, gpu: Gpu = False) -> None:
    """Problems of this machine that concern ranks, each with its fix.

    Looks at versions, cores, accelerators and variables that hide them, shared memory, limits, ports, huge pages; and
    at what a cluster counts on this host, where one runs. Run it on each node that is suspect.

    Examples:

      phalanx doctor

      phalanx doctor --address 10.0.0.1:6379 --json

      phalanx doctor --gpu

    Exit codes: 0 no findings; 1 findings; 2 the cluster that was named does not answer.
    """
    if gpu:
        from phalanx.cli.gpu_check import check_devices, report  # torch: only for this option

        results = check_devices()
        typer.echo(json.dumps([result._asdict() for result in results]) if as_json else report(results))
        raise typer.Exit(_FINDINGS if any(result.result != "ok" for result in results) else 0)
    environment = variables()  # before the cluster is asked, which may show it the user's token
    cluster, why_not = _cluster(address)
    machine = replace(gather(cluster, environment), no_cluster=why_not)
    found = findings(machine)
    if as_json:
        data = {"machine": asdict(machine), "findings": [finding._asdict() for finding in found]}
        typer.echo(json.dumps(data, indent=1))
    else:
        Console().print(render(machine, found))
    raise typer.Exit(_FINDINGS if found else 0)


def _cluster(address: str | None) -> tuple[ClusterReader | None, str]:
    """Return the named cluster or the cluster of this machine; otherwise None and the reason."""
    try:
        return cluster_reader(address), ""
    except PlacementError as error:
        if address or running_cluster():
            raise
        return None, str(error).splitlines()[0]


def render(machine: Machine, found: list[Finding]) -> Any:
    """Return the facts, then each finding with its fix."""
    wrong = {finding.topic for finding in found}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for name, value in facts(machine).items():
        mark = Text("!", "bold yellow") if name in wrong else Text("✓", "green")
        table.add_row(mark, Text(name, "bold"), Text(value))
    parts: list[Any] = [Text.assemble(("host ", "dim"), (machine.host, "bold")), Padding(table, (1, 0, 1, 2))]
    for number, finding in enumerate(found, 1):
        parts.append(Text.assemble((f"{number}. {finding.topic}: ", "bold yellow"), finding.what))
        parts.append(Padding(Text.assemble(("fix: ", "green"), finding.fix), (0, 0, 1, 3)))
    return Group(*parts, *([] if found else [Text("Nothing is wrong.", "green")]))


def variables() -> dict[str, str]:
    """Return the environment variables that matter to ranks."""
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}


def gather(reader: ClusterReader | None = None, environment: Mapping[str, str] | None = None) -> Machine:
    """Describe this machine now, and a cluster; ``environment`` is the original environment of the process."""
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
        limits={name: _limit(getattr(resource, f"RLIMIT_{name.upper()}")) for name in _LIMIT_NAMES},
        ephemeral_ports=(ports[0], ports[1]) if len(ports) == 2 else None,
        huge_pages=huge_pages.partition("[")[2].partition("]")[0] or None,
        infiniband=os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband")),
        disk_used=1 - disk.free / disk.total if disk and disk.total else None,
        token=os.path.isfile(os.path.expanduser("~/.ray/auth_token")) or "RAY_AUTH_TOKEN" in os.environ,
        cluster=None if reader is None else _describe_cluster(reader, host),
        verl=_version("verl"),
        verl_hook=any(hook.value == _VERL_HOOK for hook in hooks),
    )


def _describe_cluster(reader: ClusterReader, host: str) -> Cluster:
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


def findings(machine: Machine) -> list[Finding]:
    """Return all problems, the gravest topics first."""
    checks = (_check_software, _check_devices, _check_memory, _check_system, _check_cluster, _check_verl)
    return [Finding(*problem) for check in checks for problem in check(machine)]


def _check_software(m: Machine) -> Problems:
    """Check versions and the number of threads."""
    have = {"python": m.python, **m.versions}
    for name, oldest in _OLDEST.items():
        version = have.get(name)
        if version is None:
            yield "versions", f"{name} is not installed", f'pip install "{name}>={oldest}"'
        elif _numbers(version) < _numbers(oldest):
            yield "versions", f"{name} {version} is too old", f"install {name} {oldest} or newer"
    torch = m.versions.get("torch") or ""
    if m.gpus and "+cpu" in torch:
        problem = f"torch {torch} is built without CUDA, and this machine has {len(m.gpus)} GPUs"
        fix = "install the build for your driver: see https://pytorch.org/get-started/locally"
        yield "versions", problem, fix
    for name, version in (m.cluster.versions if m.cluster else {}).items():
        if have.get(name) not in (None, version):
            problem = f"the cluster was started with {name} {version}, here is {have[name]}"
            yield "versions", problem, f"use the same {name} on every node and for the driver"
    if m.cluster and m.cluster.cpus > m.cores:
        problem = (
            f"Ray counts {m.cluster.cpus:g} CPUs on this host, which has {m.cores} cores: it starts more "
        )
        problem += "processes at once than can run"
        fix = f"start it with `ray start --num-cpus={m.cores}`, or px.init(num_cpus={m.cores})"
        yield "cores", problem, fix
    threads = m.environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > m.cores:
        problem = f"OMP_NUM_THREADS={threads} on {m.cores} cores: threads of each process take turns"
        yield "cores", problem, "unset it: each rank then gets the node's cores divided by the ranks on it"


def _check_devices(m: Machine) -> Problems:
    """Check the accelerators and the variables that hide them."""
    masks = {name: m.environment[name] for name in _MASKS if name in m.environment}
    if len(set(masks.values())) > 1:
        values = ", ".join(f"{name}={value!r}" for name, value in masks.items())
        problem = f"variables that choose visible devices contradict each other: {values}"
        yield "devices", problem, f"keep one of them: `unset {' '.join(list(masks)[1:])}`"
    if "ROCR_VISIBLE_DEVICES" in masks:
        problem = "ROCR_VISIBLE_DEVICES is set, which Ray refuses on machines with AMD GPUs"
        fix = "`export HIP_VISIBLE_DEVICES=$ROCR_VISIBLE_DEVICES; unset ROCR_VISIBLE_DEVICES`"
        yield "devices", problem, f"use HIP_VISIBLE_DEVICES: {fix}"
    if m.gpus and masks.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        problem = f"CUDA_VISIBLE_DEVICES hides all {len(m.gpus)} GPUs of this machine"
        yield "devices", problem, "`unset CUDA_VISIBLE_DEVICES` before Ray is started here"
    for name in sorted(m.environment):
        if name.startswith("RAY_EXPERIMENTAL_NOSET_") and m.environment[name] not in ("", "0"):
            problem = f"{name} is set: Ray's own tasks and actors then see every device of the node"
            fix = (
                f'`unset {name}`; for ranks that are to see all devices, WorkerGroup(visible_devices="node")'
            )
            yield "devices", problem, fix
    if m.cluster and m.cluster.gpus > len(m.gpus):
        problem = (
            f"Ray counts {m.cluster.gpus:g} GPUs on this host, nvidia-smi shows {len(m.gpus)}: ranks on the "
        )
        problem += "others get the CPU as device, or fail"
        fix = "start Ray without --num-gpus and let it count; on a machine without GPUs this is fine to try things"
        yield "devices", problem, fix


def _check_memory(m: Machine) -> Problems:
    """Check the shared memory and the memory."""
    store = m.cluster.object_store if m.cluster else 0
    memory = min(m.memory, m.memory_limit or m.memory)
    wanted = store or int(min(_STORE_SHARE * memory, _STORE_LIMIT))
    if m.shared_memory is not None and m.shared_memory < wanted:
        text, gib = size(wanted), -(-wanted // _GIB)
        needed = f"Ray's object store takes {text}" if store else f"Ray would take {text} of it"
        problem = f"/dev/shm has {size(m.shared_memory)}, {needed}: objects would go to disk, which is slow"
        fix = f"`docker run --shm-size={gib}g`, `mount -o remount,size={gib}G /dev/shm`, or a smaller store: "
        yield "shared memory", problem, fix + "px.init(object_store_memory=...)"
    counted = m.cluster.memory + m.cluster.object_store if m.cluster else 0
    if m.memory_limit is not None and counted > m.memory_limit:
        limit = size(m.memory_limit)
        problem = f"Ray counts {size(counted)} of memory here, the control group ends processes at {limit}"
        fix = "start Ray inside the container, or give it --memory and --object-store-memory that fit"
        yield "memory", problem, fix


def _check_system(m: Machine) -> Problems:
    """Check limits, ports, huge pages and the disk."""
    for name, flag, least, why in _LIMITS:
        soft, hard = m.limits.get(name, (None, None))
        if soft is not None and soft < least:
            fix = f"`ulimit -{flag} {least if hard is None else min(least, hard)}` before `ray start`"
            if hard is not None and hard < least:
                fix += f", and raise the hard limit of {hard} (limits.conf)"
            yield "limits", f"ulimit {name} is {soft}: {why}", fix
    soft, _ = m.limits.get("memlock", (None, None))
    if m.infiniband and soft is not None:
        problem = f"ulimit memlock is {size(soft)}, and InfiniBand pins memory"
        yield "limits", problem, "`ulimit -l unlimited` before `ray start` (docker: --ulimit memlock=-1)"
    if m.ephemeral_ports is not None:
        (low, high), (first, last) = m.ephemeral_ports, _WORKER_PORTS
        if high - low < _EPHEMERAL_PORTS:
            problem = f"only {high - low + 1} ephemeral ports ({low}-{high}): collectives of many ranks run out of them"
            yield "ports", problem, _SET_PORTS
        if low <= last and high >= first:
            problem = f"ephemeral ports {low}-{high} overlap those of Ray's workers ({first}-{last})"
            yield "ports", problem, f"{_SET_PORTS}, or `ray start --min-worker-port=...`"
    if m.huge_pages == "never":
        problem = "transparent huge pages are off: receiving large tensors takes up to twice as long"
        yield "huge pages", problem, "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`"
    if m.disk_used is not None and m.disk_used > _DISK_FULL:
        problem = (
            f"the disk with Ray's files is {m.disk_used:.0%} full; at 95% Ray spills no objects any more"
        )
        fix = "remove old folders /tmp/ray/session_*, or `ray start --temp-dir` on another disk"
        yield "disk", problem, fix


def _check_cluster(m: Machine) -> Problems:
    """Check the access to the cluster, and whether it can be reached."""
    mode = m.environment.get("RAY_AUTH_MODE", "").lower()
    if mode == "token" and not m.token:
        fix = "`ray get-auth-token --generate`, or copy ~/.ray/auth_token from the head node"
        yield "security", "RAY_AUTH_MODE=token, but there is no token here", fix
    if mode == "disabled" and m.cluster and m.cluster.nodes > 1:
        problem = "RAY_AUTH_MODE=disabled on a cluster of several nodes: a process that reaches its ports can run code"
        fix = "RAY_AUTH_MODE=token on every node, with one token: `ray get-auth-token --generate`"
        yield "security", problem, fix
    if m.cluster is None and not m.no_cluster.startswith(("none runs", "no Ray cluster runs")):
        fix = "name the one that is meant by --address or RAY_ADDRESS (`ray stop` ends all that run here)"
        yield "cluster", m.no_cluster, fix


def _check_verl(m: Machine) -> Problems:
    reason = _overlay_failure(m)
    if _is_verl_wanted(m) and reason:
        problem = f"PHALANX_VERL is set, but {reason}: programs of verl do not run on Phalanx"
        yield "verl", problem, "start them with `phalanx verl ...`, which needs verl 0.9 and no plugin"


def _is_verl_wanted(m: Machine) -> bool:
    return m.environment.get("PHALANX_VERL", "") not in ("", "0", "false")


def _overlay_failure(m: Machine) -> str:
    """Return why verl cannot be overlaid by PHALANX_VERL; empty if it can."""
    if m.verl is None:
        return "verl is not installed"
    if not m.verl.startswith(_VERL_LINE):
        return f"verl {m.verl} is not of the line {_VERL_LINE}x"
    if _VERL_HOOK in m.environment.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
        return ""
    policy = m.environment.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if policy != "auto" and "phalanx" not in policy.split(","):
        return f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading its plugin"
    return "" if m.verl_hook else "phalanx is on the path but not installed, so verl does not find its plugin"


def facts(m: Machine) -> dict[str, str]:
    """Return the properties of the machine by topic, with or without problems."""
    cluster, mode = m.cluster, m.environment.get("RAY_AUTH_MODE") or "Ray's default mode"
    versions = {"python": m.python, **m.versions}
    limits = [f"{name} {_limit_text(name, soft)}" for name, (soft, _) in m.limits.items()]
    counted = f"; Ray counts {cluster.cpus:g} here" if cluster else ""
    where = (
        f"{cluster.address}, {cluster.nodes} node{'s' * (cluster.nodes != 1)}" if cluster else m.no_cluster
    )
    return {
        "versions": ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items()),
        "cores": f"{m.cores}{counted}",
        "devices": ", ".join(m.gpus) or "none that nvidia-smi shows",
        "memory": size(m.memory) + (f", limited to {size(m.memory_limit)}" if m.memory_limit else ""),
        "shared memory": size(m.shared_memory) if m.shared_memory is not None else "no /dev/shm",
        "limits": ", ".join(limits) or "unknown",
        "ports": "{}-{} ephemeral".format(*m.ephemeral_ports) if m.ephemeral_ports else "unknown",
        "huge pages": m.huge_pages or "unknown",
        "variables": ", ".join(f"{name}={value}" for name, value in sorted(m.environment.items()))
        or "none of those that matter",
        "disk": f"{m.disk_used:.0%} full" if m.disk_used is not None else "unknown",
        "security": f"{mode}, {'with' if m.token else 'without'} a token",
        "cluster": where,
        "verl": _verl_text(m),
    }


def _verl_text(m: Machine) -> str:
    if m.verl is None:
        return "not installed"
    if not _is_verl_wanted(m):
        return f"{m.verl}: `import verl` gives verl's own controller; `phalanx verl ...` gives Phalanx's"
    controller = "no controller of Phalanx" if _overlay_failure(m) else "the controller of Phalanx"
    return f"{m.verl}: `import verl` gives {controller}"


def _limit_text(name: str, soft: int | None) -> str:
    if soft is None:
        return "unlimited"
    return size(soft) if name in ("memlock", "core") and soft else str(soft)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
