"""`phalanx doctor`: describes this machine and the cluster's own count of it, and names problems with their fixes."""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import platform
import re
import resource
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from phalanx.cli.common import Address, AsJson, cluster_reader
from phalanx.config import running_cluster
from phalanx.display.byte_format import size
from phalanx.errors import PlacementError

_FINDINGS = 1
_GIB = 2**30
_OLDEST = {"python": "3.10", "ray": "2.57", "torch": "2.6"}
_VERL_LINE = "0.9."
_VERL_HOOK = "phalanx.compat.verl_plugin"
#: Least soft limits, with the flag of ``ulimit``.
_LEAST = {
    "nofile": ("n", 8192, "each rank and each connection takes some"),
    "nproc": ("u", 4096, "threads count too, and each rank has dozens"),
}
_EPHEMERAL_PORTS = 5000
_WORKER_PORTS = (10002, 19999)  # of Ray's worker processes, unless `ray start` was told otherwise
_SET_PORTS = '`sysctl -w net.ipv4.ip_local_port_range="32768 60999"`'
_STORE_SHARE, _STORE_LIMIT = 0.3, 200 * _GIB  # default share of the memory that Ray's object store uses
_DISK_FULL = 0.9  # from 0.95 on, Ray refuses to spill objects
_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
#: Beginnings of the variables that matter to ranks.
_VARIABLES = (
    *(*_MASKS, "ASCEND_RT_VISIBLE_DEVICES", "RAY_EXPERIMENTAL_NOSET_", "OMP_NUM_THREADS"),
    *("RAY_ADDRESS", "RAY_AUTH_MODE", "PHALANX_VERL", "VERL_USE_EXTERNAL_"),
)
_SHARED, _TOKEN = "/dev/shm", "~/.ray/auth_token"
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NO_LIMIT = 1 << 60  # version 1 of control groups says "none" by a number near 2^63

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
    """Return the cores that this process may run on, by its affinity and its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    return min(cores, max(1, math.ceil(int(quota) / int(period)))) if quota.isdigit() else cores


def _memory_limit() -> int | None:
    limits = [int(text) for text in map(_read, _MEMORY_LIMITS) if text.strip().isdigit()]
    return next((limit for limit in limits if limit < _NO_LIMIT), None)


def _gpu_names() -> tuple[str, ...]:
    from phalanx.backends.ray.rank_processes import gpus  # loads Ray

    return tuple(f"{gpu.number} ({size(gpu.total)})" for gpu in gpus())


def _process_limit(name: str) -> tuple[int | None, int | None]:
    soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
    return None if soft == resource.RLIM_INFINITY else soft, None if hard == resource.RLIM_INFINITY else hard


def _port_range() -> tuple[int, int] | None:
    low, _, high = _read("/proc/sys/net/ipv4/ip_local_port_range").partition("\t")
    return (int(low), int(high)) if high else None


def _page_mode() -> str | None:
    """Return the chosen mode of a line such as "always [madvise] never"."""
    return _read("/sys/kernel/mm/transparent_hugepage/enabled").partition("[")[2].partition("]")[0] or None


def _used_share_of_disk() -> float:
    disk = shutil.disk_usage("/tmp/ray" if os.path.isdir("/tmp/ray") else "/tmp")
    return 1 - disk.free / disk.total


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
    """Properties of a machine that concern ranks; by default those of this machine.

    Sizes are in bytes. ``cores`` counts the cores that this process may use. ``limits`` are soft and hard, None for no
    limit. ``gpus`` are names of accelerators. ``disk_used`` is the used fraction of the disk with Ray's files.
    ``verl_hook`` is True if verl finds this library's plugin: the library is installed, not merely on the path.
    """

    host: str = field(default_factory=socket.gethostname)
    python: str = field(default_factory=platform.python_version)
    versions: Mapping[str, str | None] = field(
        default_factory=lambda: {name: _version(name) for name in ("phalanx", "ray", "torch", "numpy")}
    )
    cores: int = field(default_factory=_usable_cores)
    memory: int = field(default_factory=lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    memory_limit: int | None = field(default_factory=_memory_limit)
    shared_memory: int | None = field(
        default_factory=lambda: shutil.disk_usage(_SHARED).total if os.path.isdir(_SHARED) else None
    )
    environment: Mapping[str, str] = field(default_factory=_relevant_variables)
    gpus: tuple[str, ...] = field(default_factory=_gpu_names)
    limits: Mapping[str, tuple[int | None, int | None]] = field(
        default_factory=lambda: {
            name: _process_limit(name) for name in ("nofile", "nproc", "memlock", "core")
        }
    )
    ephemeral_ports: tuple[int, int] | None = field(default_factory=_port_range)
    huge_pages: str | None = field(default_factory=_page_mode)
    infiniband: bool = field(default_factory=lambda: bool(glob.glob("/sys/class/infiniband/*")))
    disk_used: float = field(default_factory=_used_share_of_disk)
    token: bool = field(
        default_factory=lambda: os.path.isfile(os.path.expanduser(_TOKEN)) or "RAY_AUTH_TOKEN" in os.environ
    )
    cluster: Cluster | None = None
    no_cluster: str = "none runs here"
    verl: str | None = field(default_factory=lambda: _version("verl"))
    verl_hook: bool = field(
        default_factory=lambda: (
            _VERL_HOOK in {hook.value for hook in metadata.entry_points(group="verl.plugins")}
        )
    )


class Finding(NamedTuple):
    """A problem of a machine, and its fix."""

    topic: str
    what: str
    fix: str


Report = Callable[[str, str], None]
"""Reports a problem of a topic and its fix."""


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
    environment = _relevant_variables()  # before the cluster is asked, which may show it the user's token
    cluster, why_not = find_cluster(address)
    machine = Machine(environment=environment, cluster=cluster, no_cluster=why_not)
    facts, findings = examine(machine)
    if as_json:
        data = {"machine": asdict(machine), "findings": [finding._asdict() for finding in findings]}
        typer.echo(json.dumps(data, indent=1))
    else:
        Console().print(render(machine.host, facts, findings))
    raise typer.Exit(_FINDINGS if findings else 0)


def find_cluster(address: str | None) -> tuple[Cluster | None, str]:
    """Describe the named cluster, or the cluster of this machine; without a cluster return None and the reason."""
    try:
        reader = cluster_reader(address)
    except PlacementError as error:
        if address or running_cluster():
            raise
        return None, str(error).splitlines()[0]
    nodes, here = [node for node in reader.nodes() if node.alive], Counter[str]()
    for node in nodes:
        here.update(node.resources if node.host == socket.gethostname() else {})
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
    """Return the facts of a machine by topic, and all problems, the gravest topics first."""
    facts: dict[str, str] = {}
    findings: list[Finding] = []
    for look in TOPICS:
        topic = look.__name__.strip("_").replace("_", " ")
        facts[topic] = look(machine, lambda *problem, topic=topic: findings.append(Finding(topic, *problem)))
    return facts, findings


def _versions(m: Machine, problem: Report) -> str:
    have = {"python": m.python, **m.versions}
    for name, oldest in _OLDEST.items():
        version = have.get(name)
        if version is None:
            problem(f"{name} is not installed", f'pip install "{name}>={oldest}"')
        elif _numbers(version) < _numbers(oldest):
            problem(f"{name} {version} is too old", f"install {name} {oldest} or newer")
    torch = m.versions.get("torch") or ""
    if m.gpus and "+cpu" in torch:
        fix = "install the build for your driver: see https://pytorch.org/get-started/locally"
        problem(f"torch {torch} is built without CUDA, and this machine has {len(m.gpus)} GPUs", fix)
    for name, version in (m.cluster.versions if m.cluster else {}).items():
        if have.get(name) not in (None, version):
            fix = f"use the same {name} on every node and for the driver"
            problem(f"the cluster was started with {name} {version}, here is {have[name]}", fix)
    return ", ".join(f"{name} {version or 'missing'}" for name, version in have.items())


def _cores(m: Machine, problem: Report) -> str:
    if m.cluster and m.cluster.cpus > m.cores:
        fix = f"start it with `ray start --num-cpus={m.cores}`, or px.init(num_cpus={m.cores})"
        what = f"Ray counts {m.cluster.cpus:g} CPUs on this host, which has {m.cores} cores"
        problem(f"{what}: it starts more processes at once than can run", fix)
    threads = m.environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > m.cores:
        fix = "unset it: each rank then gets the node's cores divided by the ranks on it"
        problem(f"OMP_NUM_THREADS={threads} on {m.cores} cores: threads of each process take turns", fix)
    return f"{m.cores}" + (f"; Ray counts {m.cluster.cpus:g} here" if m.cluster else "")


def _devices(m: Machine, problem: Report) -> str:
    masks = {name: m.environment[name] for name in _MASKS if name in m.environment}
    if len(set(masks.values())) > 1:
        values = ", ".join(f"{name}={value!r}" for name, value in masks.items())
        fix = f"keep one of them: `unset {' '.join(list(masks)[1:])}`"
        problem(f"variables that choose visible devices contradict each other: {values}", fix)
    if "ROCR_VISIBLE_DEVICES" in masks:
        fix = "`export HIP_VISIBLE_DEVICES=$ROCR_VISIBLE_DEVICES; unset ROCR_VISIBLE_DEVICES`"
        what = "ROCR_VISIBLE_DEVICES is set, which Ray refuses on machines with AMD GPUs"
        problem(what, f"use HIP_VISIBLE_DEVICES: {fix}")
    if m.gpus and masks.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        fix = "`unset CUDA_VISIBLE_DEVICES` before Ray is started here"
        problem(f"CUDA_VISIBLE_DEVICES hides all {len(m.gpus)} GPUs of this machine", fix)
    for name in sorted(m.environment):
        if name.startswith("RAY_EXPERIMENTAL_NOSET_") and m.environment[name] not in ("", "0"):
            fix = f'`unset {name}`; for ranks that need all devices, WorkerGroup(visible_devices="node")'
            problem(f"{name} is set: Ray's own tasks and actors then see every device of the node", fix)
    if m.cluster and m.cluster.gpus > len(m.gpus):
        fix = "start Ray without --num-gpus and let it count; on a machine without GPUs this is fine to try things"
        what = f"Ray counts {m.cluster.gpus:g} GPUs on this host, nvidia-smi shows {len(m.gpus)}"
        problem(f"{what}: ranks on the others get the CPU as device, or fail", fix)
    return ", ".join(m.gpus) or "none that nvidia-smi shows"


def _memory(m: Machine, problem: Report) -> str:
    if m.memory_limit is None:
        return size(m.memory)
    limit, counted = size(m.memory_limit), m.cluster.memory + m.cluster.object_store if m.cluster else 0
    if counted > m.memory_limit:
        fix = "start Ray inside the container, or give it --memory and --object-store-memory that fit"
        problem(f"Ray counts {size(counted)} of memory, the control group ends processes at {limit}", fix)
    return f"{size(m.memory)}, limited to {limit}"


def _shared_memory(m: Machine, problem: Report) -> str:
    if m.shared_memory is None:
        return "no /dev/shm"
    store = m.cluster.object_store if m.cluster else 0
    memory = min(m.memory, m.memory_limit or m.memory)
    wanted = store or int(min(_STORE_SHARE * memory, _STORE_LIMIT))
    there, text, gib = size(m.shared_memory), size(wanted), -(-wanted // _GIB)
    if m.shared_memory < wanted:
        needed = f"Ray's object store takes {text}" if store else f"Ray would take {text} of it"
        problem(
            f"/dev/shm has {there}, {needed}: objects would go to disk, which is slow",
            f"`docker run --shm-size={gib}g`, `mount -o remount,size={gib}G /dev/shm`, or a smaller store: "
            "px.init(object_store_memory=...)",
        )
    return there


def _limits(m: Machine, problem: Report) -> str:
    texts: list[str] = []
    for name, (soft, hard) in m.limits.items():
        text = size(soft) if soft and name in ("memlock", "core") else f"{soft}"
        texts.append(f"{name} {'unlimited' if soft is None else text}")
        flag, least, why = _LEAST.get(name, ("", 0, ""))
        if soft is not None and soft < least:
            fix = f"`ulimit -{flag} {least if hard is None else min(least, hard)}` before `ray start`"
            if hard is not None and hard < least:
                fix += f", and raise the hard limit of {hard} (limits.conf)"
            problem(f"ulimit {name} is {soft}: {why}", fix)
        if soft is not None and name == "memlock" and m.infiniband:
            fix = "`ulimit -l unlimited` before `ray start` (docker: --ulimit memlock=-1)"
            problem(f"ulimit memlock is {text}, and InfiniBand pins memory", fix)
    return ", ".join(texts) or "unknown"


def _ports(m: Machine, problem: Report) -> str:
    if m.ephemeral_ports is None:
        return "unknown"
    (low, high), (first, last) = m.ephemeral_ports, _WORKER_PORTS
    if high - low < _EPHEMERAL_PORTS:
        what = f"only {high - low + 1} ephemeral ports ({low}-{high})"
        problem(f"{what}: collectives of many ranks run out of them", _SET_PORTS)
    if low <= last and high >= first:
        what = f"ephemeral ports {low}-{high} overlap those of Ray's workers ({first}-{last})"
        problem(what, f"{_SET_PORTS}, or `ray start --min-worker-port=...`")
    return f"{low}-{high} ephemeral"


def _huge_pages(m: Machine, problem: Report) -> str:
    if m.huge_pages == "never":
        what = "transparent huge pages are off: receiving large tensors takes up to twice as long"
        problem(what, "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`")
    return m.huge_pages or "unknown"


def _variables(m: Machine, problem: Report) -> str:
    texts = ", ".join(f"{name}={value}" for name, value in sorted(m.environment.items()))
    return texts or "none of those that matter"


def _disk(m: Machine, problem: Report) -> str:
    if m.disk_used > _DISK_FULL:
        fix = "remove old folders /tmp/ray/session_*, or `ray start --temp-dir` on another disk"
        problem(f"the disk with Ray's files is {m.disk_used:.0%} full; Ray spills nothing above 95%", fix)
    return f"{m.disk_used:.0%} full"


def _security(m: Machine, problem: Report) -> str:
    mode = m.environment.get("RAY_AUTH_MODE") or "Ray's default mode"
    if mode.lower() == "token" and not m.token:
        fix = "`ray get-auth-token --generate`, or copy ~/.ray/auth_token from the head node"
        problem("RAY_AUTH_MODE=token, but there is no token here", fix)
    if mode.lower() == "disabled" and m.cluster and m.cluster.nodes > 1:
        what = "RAY_AUTH_MODE=disabled on a cluster of several nodes: a process that reaches its ports can run code"
        problem(what, "RAY_AUTH_MODE=token on every node, with one token: `ray get-auth-token --generate`")
    return f"{mode}, with a token" if m.token else f"{mode}, without a token"


def _cluster(m: Machine, problem: Report) -> str:
    if m.cluster is not None:
        return f"{m.cluster.address}, {m.cluster.nodes} node{'s' * (m.cluster.nodes != 1)}"
    if not m.no_cluster.startswith(("none runs", "no Ray cluster runs")):
        fix = "name the one that is meant by --address or RAY_ADDRESS (`ray stop` ends all that run here)"
        problem(m.no_cluster, fix)
    return m.no_cluster


def _verl(m: Machine, problem: Report) -> str:
    is_wanted, reason = m.environment.get("PHALANX_VERL", "") not in ("", "0", "false"), _overlay_failure(m)
    if is_wanted and reason:
        fix = "start them with `phalanx verl ...`, which needs verl 0.9 and no plugin"
        problem(f"PHALANX_VERL is set, but {reason}: programs of verl do not run on Phalanx", fix)
    if m.verl is None:
        return "not installed"
    if not is_wanted:
        return f"{m.verl}: `import verl` gives verl's own controller; `phalanx verl ...` gives Phalanx's"
    return f"{m.verl}: `import verl` gives {'no' if reason else 'the'} controller of Phalanx"


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


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


#: Functions that return a fact of a machine as text and report its problems; named by topic.
TOPICS: tuple[Callable[[Machine, Report], str], ...] = (
    *(_versions, _cores, _devices, _memory, _shared_memory, _limits, _ports, _huge_pages),
    *(_variables, _disk, _security, _cluster, _verl),
)
