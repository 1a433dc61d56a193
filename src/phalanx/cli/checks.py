"""What is wrong with a machine, and what to do about it. Pure: a `Machine` in, findings out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from phalanx.cli.host_info import VERL_HOOK, Machine
from phalanx.display.byte_format import size

GIB = 2**30
_OLDEST = {"python": (3, 10), "ray": (2, 57), "torch": (2, 6)}
_VERL_LINE = "0.9."
_OPEN_FILES = 8192
_PROCESSES = 4096
_EPHEMERAL_PORTS = 5000
_RAYS_PORTS = (10002, 19999)  # of worker processes, unless `ray start` was told otherwise
_STORE_SHARE = 0.3  # of the memory: what Ray's object store takes unless it is told otherwise
_STORE_LIMIT = 200 * GIB
_DISK_FULL = 0.9  # from 0.95 on, Ray refuses to spill objects
_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Finding(NamedTuple):
    """Something that is wrong, and its fix."""

    topic: str
    what: str
    fix: str


def findings(machine: Machine) -> list[Finding]:
    """All that is wrong, the gravest topics first."""
    return [finding for check in CHECKS for finding in check(machine)]


def _versions(m: Machine) -> Iterator[Finding]:
    have = {"python": m.python, **m.versions}
    for name, oldest in _OLDEST.items():
        wanted = ".".join(map(str, oldest))
        version = have.get(name)
        if version is None:
            yield Finding("versions", f"{name} is not installed", f'pip install "{name}>={wanted}"')
        elif _numbers(version) < oldest:
            yield Finding("versions", f"{name} {version} is too old", f"install {name} {wanted} or newer")
    if m.gpus and "+cpu" in (m.versions.get("torch") or ""):
        yield Finding(
            "versions",
            f"torch {m.versions['torch']} is built without CUDA, and this machine has {len(m.gpus)} GPUs",
            "install the build for your driver: see https://pytorch.org/get-started/locally",
        )
    for name, version in (m.cluster.versions if m.cluster else {}).items():
        if have.get(name) not in (None, version):
            yield Finding(
                "versions",
                f"the cluster was started with {name} {version}, here is {have[name]}",
                f"use the same {name} on every node and for the driver",
            )


def _cores(m: Machine) -> Iterator[Finding]:
    if m.cluster and m.cluster.cpus > m.cores:
        yield Finding(
            "cores",
            f"Ray counts {m.cluster.cpus:g} CPUs on this host, which has {m.cores} cores: it starts more processes at "
            "once than can run",
            f"start it with `ray start --num-cpus={m.cores}`, or px.init(num_cpus={m.cores})",
        )
    threads = m.environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > m.cores:
        yield Finding(
            "cores",
            f"OMP_NUM_THREADS={threads} on {m.cores} cores: threads of each process take turns",
            "unset it: each rank then gets the node's cores divided by the ranks on it",
        )


def _devices(m: Machine) -> Iterator[Finding]:
    masks = {name: m.environment[name] for name in _MASKS if name in m.environment}
    if len(set(masks.values())) > 1:
        said = ", ".join(f"{name}={value!r}" for name, value in masks.items())
        yield Finding(
            "devices",
            f"variables that choose visible devices contradict each other: {said}",
            f"keep one of them: `unset {' '.join(list(masks)[1:])}`",
        )
    if "ROCR_VISIBLE_DEVICES" in masks:
        yield Finding(
            "devices",
            "ROCR_VISIBLE_DEVICES is set, which Ray refuses on machines with AMD GPUs",
            "use HIP_VISIBLE_DEVICES: `export HIP_VISIBLE_DEVICES=$ROCR_VISIBLE_DEVICES; unset ROCR_VISIBLE_DEVICES`",
        )
    if m.gpus and masks.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Finding(
            "devices",
            f"CUDA_VISIBLE_DEVICES hides all {len(m.gpus)} GPUs of this machine",
            "`unset CUDA_VISIBLE_DEVICES` before Ray is started here",
        )
    for name in sorted(m.environment):
        if name.startswith("RAY_EXPERIMENTAL_NOSET_") and m.environment[name] not in ("", "0"):
            yield Finding(
                "devices",
                f"{name} is set: Ray's own tasks and actors then see every device of the node",
                f'`unset {name}`; for ranks that are to see all devices, WorkerGroup(visible_devices="node")',
            )
    if m.cluster and m.cluster.gpus > len(m.gpus):
        yield Finding(
            "devices",
            f"Ray counts {m.cluster.gpus:g} GPUs on this host, nvidia-smi shows {len(m.gpus)}: ranks on the others get "
            "the CPU as device, or fail",
            "start Ray without --num-gpus and let it count; on a machine without GPUs this is fine to try things",
        )


def _shared_memory(m: Machine) -> Iterator[Finding]:
    if m.shared_memory is None:
        return
    memory = min(m.memory, m.memory_limit or m.memory)
    store = m.cluster.object_store if m.cluster else 0
    wanted = store or int(min(_STORE_SHARE * memory, _STORE_LIMIT))
    if m.shared_memory < wanted:
        asked = (
            f"Ray's object store takes {size(wanted)}" if store else f"Ray would take {size(wanted)} of it"
        )
        yield Finding(
            "shared memory",
            f"/dev/shm has {size(m.shared_memory)}, {asked}: objects would go to disk, which is slow",
            f"`docker run --shm-size={-(-wanted // GIB)}g`, `mount -o remount,size={-(-wanted // GIB)}G /dev/shm`, or "
            "a smaller store: px.init(object_store_memory=...)",
        )


def _memory(m: Machine) -> Iterator[Finding]:
    if m.memory_limit is None or m.cluster is None:
        return
    counted = m.cluster.memory + m.cluster.object_store
    if counted > m.memory_limit:
        yield Finding(
            "memory",
            f"Ray counts {size(counted)} of memory here, the control group ends processes at {size(m.memory_limit)}",
            "start Ray inside the container, or give it --memory and --object-store-memory that fit",
        )


def _limits(m: Machine) -> Iterator[Finding]:
    for name, least, flag, why in (
        ("nofile", _OPEN_FILES, "n", "each rank and each connection takes some"),
        ("nproc", _PROCESSES, "u", "threads count too, and each rank has dozens"),
    ):
        soft, hard = m.limits.get(name, (None, None))
        if soft is not None and soft < least:
            raise_it = f"`ulimit -{flag} {least if hard is None or hard >= least else hard}`"
            more = (
                "" if hard is None or hard >= least else f", and raise the hard limit of {hard} (limits.conf)"
            )
            yield Finding("limits", f"ulimit {name} is {soft}: {why}", f"{raise_it} before `ray start`{more}")
    soft, _ = m.limits.get("memlock", (None, None))
    if m.infiniband and soft is not None:
        yield Finding(
            "limits",
            f"ulimit memlock is {size(soft)}, and InfiniBand pins memory",
            "`ulimit -l unlimited` before `ray start` (docker: --ulimit memlock=-1)",
        )


def _ports(m: Machine) -> Iterator[Finding]:
    if m.ephemeral_ports is None:
        return
    low, high = m.ephemeral_ports
    if high - low < _EPHEMERAL_PORTS:
        yield Finding(
            "ports",
            f"only {high - low + 1} ephemeral ports ({low}-{high}): collectives of many ranks run out of them",
            '`sysctl -w net.ipv4.ip_local_port_range="32768 60999"`',
        )
    if low <= _RAYS_PORTS[1] and high >= _RAYS_PORTS[0]:
        yield Finding(
            "ports",
            f"ephemeral ports {low}-{high} overlap those of Ray's workers ({_RAYS_PORTS[0]}-{_RAYS_PORTS[1]})",
            '`sysctl -w net.ipv4.ip_local_port_range="32768 60999"`, or `ray start --min-worker-port=...`',
        )


def _kernel(m: Machine) -> Iterator[Finding]:
    if m.huge_pages == "never":
        yield Finding(
            "huge pages",
            "transparent huge pages are off: receiving large tensors takes up to twice as long",
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`",
        )
    if m.disk_used is not None and m.disk_used > _DISK_FULL:
        yield Finding(
            "disk",
            f"the disk with Ray's files is {m.disk_used:.0%} full; at 95% Ray spills no objects any more",
            "remove old folders /tmp/ray/session_*, or `ray start --temp-dir` on another disk",
        )


def _security(m: Machine) -> Iterator[Finding]:
    mode = m.environment.get("RAY_AUTH_MODE", "").lower()
    if mode == "token" and not m.token:
        yield Finding(
            "security",
            "RAY_AUTH_MODE=token, but there is no token here",
            "`ray get-auth-token --generate`, or copy ~/.ray/auth_token from the head node",
        )
    if mode == "disabled" and m.cluster and m.cluster.nodes > 1:
        yield Finding(
            "security",
            "RAY_AUTH_MODE=disabled on a cluster of several nodes: whoever reaches its ports can run code there",
            "RAY_AUTH_MODE=token on every node, with one token: `ray get-auth-token --generate`",
        )


def _which_cluster(m: Machine) -> Iterator[Finding]:
    if m.cluster is None and not m.no_cluster.startswith(("none runs", "no Ray cluster runs")):
        yield Finding(
            "cluster",
            m.no_cluster,
            "name the one that is meant by --address or RAY_ADDRESS (`ray stop` ends all that run here)",
        )


def _why_not_verls(m: Machine) -> str:
    """Why verl is not overlaid though that was asked for; empty where it is."""
    if m.verl is None:
        return "verl is not installed"
    if not m.verl.startswith(_VERL_LINE):
        return f"verl {m.verl} is not of the line {_VERL_LINE}x"
    if VERL_HOOK in m.environment.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
        return ""
    policy = m.environment.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if policy != "auto" and "phalanx" not in policy.split(","):
        return f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading its plugin"
    return "" if m.verl_hook else "phalanx is on the path but not installed, so verl does not find its plugin"


def _asked_for_verl(m: Machine) -> bool:
    return m.environment.get("PHALANX_VERL", "") not in ("", "0", "false")


def _verl(m: Machine) -> Iterator[Finding]:
    why_not = _why_not_verls(m) if _asked_for_verl(m) else ""
    if why_not:
        yield Finding(
            "verl",
            f"PHALANX_VERL is set, but {why_not}: programs of verl do not run on Phalanx",
            "start them with `phalanx verl ...`, which needs verl 0.9 and no plugin",
        )


def _verl_fact(m: Machine) -> str:
    if m.verl is None:
        return "not installed"
    if not _asked_for_verl(m):
        return f"{m.verl}: `import verl` gives verl's own controller; `phalanx verl ...` gives Phalanx's"
    ours = not _why_not_verls(m)
    return (
        f"{m.verl}: `import verl` gives {'the controller of Phalanx' if ours else 'no controller of Phalanx'}"
    )


CHECKS = (
    _versions,
    _cores,
    _devices,
    _shared_memory,
    _memory,
    _limits,
    _ports,
    _kernel,
    _security,
    _which_cluster,
    _verl,
)


def facts(m: Machine) -> list[tuple[str, str]]:
    """What the machine is, whether or not something is wrong with it."""
    limits = ", ".join(f"{name} {_limit(name, soft)}" for name, (soft, _) in m.limits.items())
    cluster = m.cluster
    return [
        (
            "versions",
            ", ".join(f"{k} {v or 'missing'}" for k, v in {"python": m.python, **m.versions}.items()),
        ),
        ("cores", f"{m.cores}" + (f"; Ray counts {cluster.cpus:g} here" if cluster else "")),
        ("devices", ", ".join(m.gpus) or "none that nvidia-smi shows"),
        ("memory", size(m.memory) + (f", limited to {size(m.memory_limit)}" if m.memory_limit else "")),
        ("shared memory", size(m.shared_memory) if m.shared_memory is not None else "no /dev/shm"),
        ("limits", limits or "unknown"),
        ("ports", "{}-{} ephemeral".format(*m.ephemeral_ports) if m.ephemeral_ports else "unknown"),
        ("huge pages", m.huge_pages or "unknown"),
        (
            "variables",
            ", ".join(f"{k}={v}" for k, v in sorted(m.environment.items())) or "none of those that matter",
        ),
        ("disk", f"{m.disk_used:.0%} full" if m.disk_used is not None else "unknown"),
        ("security", _security_fact(m)),
        (
            "cluster",
            f"{cluster.address}, {cluster.nodes} node{'s' * (cluster.nodes != 1)}"
            if cluster
            else m.no_cluster,
        ),
        ("verl", _verl_fact(m)),
    ]


def _security_fact(m: Machine) -> str:
    mode = m.environment.get("RAY_AUTH_MODE") or "Ray's default mode"
    return f"{mode}, {'with' if m.token else 'without'} a token"


def _limit(name: str, soft: int | None) -> str:
    if soft is None:
        return "unlimited"
    return size(soft) if name in ("memlock", "core") and soft else str(soft)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
