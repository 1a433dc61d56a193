"""Checks of a machine, each with its fix. Pure: a `Machine` in, findings out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from phalanx.cli.host_info import VERL_HOOK, Machine
from phalanx.display.byte_format import size

GIB = 2**30
_OLDEST = {"python": "3.10", "ray": "2.57", "torch": "2.6"}
_VERL_LINE = "0.9."
_LIMITS = (
    ("nofile", "n", 8192, "each rank and each connection takes some"),
    ("nproc", "u", 4096, "threads count too, and each rank has dozens"),
)
_EPHEMERAL_PORTS = 5000
_WORKER_PORTS = (10002, 19999)  # of Ray's worker processes, unless `ray start` was told otherwise
_SET_PORTS = '`sysctl -w net.ipv4.ip_local_port_range="32768 60999"`'
_STORE_SHARE = 0.3  # of the memory: what Ray's object store takes unless it is told otherwise
_STORE_LIMIT = 200 * GIB
_DISK_FULL = 0.9  # from 0.95 on, Ray refuses to spill objects
_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

Problems = Iterator[tuple[str, str]]
"""Problems of one topic, each with its fix."""


class Finding(NamedTuple):
    """A problem of a machine, and its fix."""

    topic: str
    what: str
    fix: str


def findings(machine: Machine) -> list[Finding]:
    """Return all problems, the gravest topics first."""
    return [Finding(topic, *problem) for topic, check in _CHECKS.items() for problem in check(machine)]


def _check_versions(m: Machine) -> Problems:
    have = {"python": m.python, **m.versions}
    for name, oldest in _OLDEST.items():
        version = have.get(name)
        if version is None:
            yield f"{name} is not installed", f'pip install "{name}>={oldest}"'
        elif _numbers(version) < _numbers(oldest):
            yield f"{name} {version} is too old", f"install {name} {oldest} or newer"
    if m.gpus and "+cpu" in (m.versions.get("torch") or ""):
        problem = (
            f"torch {m.versions['torch']} is built without CUDA, and this machine has {len(m.gpus)} GPUs"
        )
        yield problem, "install the build for your driver: see https://pytorch.org/get-started/locally"
    for name, version in (m.cluster.versions if m.cluster else {}).items():
        if have.get(name) not in (None, version):
            problem = f"the cluster was started with {name} {version}, here is {have[name]}"
            yield problem, f"use the same {name} on every node and for the driver"


def _check_cores(m: Machine) -> Problems:
    if m.cluster and m.cluster.cpus > m.cores:
        yield (
            f"Ray counts {m.cluster.cpus:g} CPUs on this host, which has {m.cores} cores: it starts more processes at "
            "once than can run",
            f"start it with `ray start --num-cpus={m.cores}`, or px.init(num_cpus={m.cores})",
        )
    threads = m.environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > m.cores:
        problem = f"OMP_NUM_THREADS={threads} on {m.cores} cores: threads of each process take turns"
        yield problem, "unset it: each rank then gets the node's cores divided by the ranks on it"


def _check_devices(m: Machine) -> Problems:
    masks = {name: m.environment[name] for name in _MASKS if name in m.environment}
    if len(set(masks.values())) > 1:
        values = ", ".join(f"{name}={value!r}" for name, value in masks.items())
        problem = f"variables that choose visible devices contradict each other: {values}"
        yield problem, f"keep one of them: `unset {' '.join(list(masks)[1:])}`"
    if "ROCR_VISIBLE_DEVICES" in masks:
        yield (
            "ROCR_VISIBLE_DEVICES is set, which Ray refuses on machines with AMD GPUs",
            "use HIP_VISIBLE_DEVICES: `export HIP_VISIBLE_DEVICES=$ROCR_VISIBLE_DEVICES; unset ROCR_VISIBLE_DEVICES`",
        )
    if m.gpus and masks.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        problem = f"CUDA_VISIBLE_DEVICES hides all {len(m.gpus)} GPUs of this machine"
        yield problem, "`unset CUDA_VISIBLE_DEVICES` before Ray is started here"
    for name in sorted(m.environment):
        if name.startswith("RAY_EXPERIMENTAL_NOSET_") and m.environment[name] not in ("", "0"):
            problem = f"{name} is set: Ray's own tasks and actors then see every device of the node"
            yield (
                problem,
                f'`unset {name}`; for ranks that are to see all devices, WorkerGroup(visible_devices="node")',
            )
    if m.cluster and m.cluster.gpus > len(m.gpus):
        yield (
            f"Ray counts {m.cluster.gpus:g} GPUs on this host, nvidia-smi shows {len(m.gpus)}: ranks on the others get "
            "the CPU as device, or fail",
            "start Ray without --num-gpus and let it count; on a machine without GPUs this is fine to try things",
        )


def _check_shared_memory(m: Machine) -> Problems:
    store = m.cluster.object_store if m.cluster else 0
    memory = min(m.memory, m.memory_limit or m.memory)
    wanted = store or int(min(_STORE_SHARE * memory, _STORE_LIMIT))
    if m.shared_memory is not None and m.shared_memory < wanted:
        needed = (
            f"Ray's object store takes {size(wanted)}" if store else f"Ray would take {size(wanted)} of it"
        )
        gib = -(-wanted // GIB)
        yield (
            f"/dev/shm has {size(m.shared_memory)}, {needed}: objects would go to disk, which is slow",
            f"`docker run --shm-size={gib}g`, `mount -o remount,size={gib}G /dev/shm`, or a smaller store: "
            "px.init(object_store_memory=...)",
        )


def _check_memory(m: Machine) -> Problems:
    counted = m.cluster.memory + m.cluster.object_store if m.cluster else 0
    if m.memory_limit is not None and counted > m.memory_limit:
        limit = size(m.memory_limit)
        problem = f"Ray counts {size(counted)} of memory here, the control group ends processes at {limit}"
        yield (
            problem,
            "start Ray inside the container, or give it --memory and --object-store-memory that fit",
        )


def _check_limits(m: Machine) -> Problems:
    for name, flag, least, why in _LIMITS:
        soft, hard = m.limits.get(name, (None, None))
        if soft is not None and soft < least:
            fix = f"`ulimit -{flag} {least if hard is None else min(least, hard)}` before `ray start`"
            low = hard is not None and hard < least
            fix += f", and raise the hard limit of {hard} (limits.conf)" if low else ""
            yield f"ulimit {name} is {soft}: {why}", fix
    soft, _ = m.limits.get("memlock", (None, None))
    if m.infiniband and soft is not None:
        problem = f"ulimit memlock is {size(soft)}, and InfiniBand pins memory"
        yield problem, "`ulimit -l unlimited` before `ray start` (docker: --ulimit memlock=-1)"


def _check_ports(m: Machine) -> Problems:
    if m.ephemeral_ports is None:
        return
    low, high = m.ephemeral_ports
    if high - low < _EPHEMERAL_PORTS:
        count = high - low + 1
        problem = f"only {count} ephemeral ports ({low}-{high}): collectives of many ranks run out of them"
        yield problem, _SET_PORTS
    first, last = _WORKER_PORTS
    if low <= last and high >= first:
        problem = f"ephemeral ports {low}-{high} overlap those of Ray's workers ({first}-{last})"
        yield problem, f"{_SET_PORTS}, or `ray start --min-worker-port=...`"


def _check_huge_pages(m: Machine) -> Problems:
    if m.huge_pages == "never":
        problem = "transparent huge pages are off: receiving large tensors takes up to twice as long"
        yield problem, "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`"


def _check_disk(m: Machine) -> Problems:
    if m.disk_used is not None and m.disk_used > _DISK_FULL:
        problem = (
            f"the disk with Ray's files is {m.disk_used:.0%} full; at 95% Ray spills no objects any more"
        )
        yield problem, "remove old folders /tmp/ray/session_*, or `ray start --temp-dir` on another disk"


def _check_security(m: Machine) -> Problems:
    mode = m.environment.get("RAY_AUTH_MODE", "").lower()
    if mode == "token" and not m.token:
        problem = "RAY_AUTH_MODE=token, but there is no token here"
        yield problem, "`ray get-auth-token --generate`, or copy ~/.ray/auth_token from the head node"
    if mode == "disabled" and m.cluster and m.cluster.nodes > 1:
        yield (
            "RAY_AUTH_MODE=disabled on a cluster of several nodes: whoever reaches its ports can run code there",
            "RAY_AUTH_MODE=token on every node, with one token: `ray get-auth-token --generate`",
        )


def _check_cluster(m: Machine) -> Problems:
    if m.cluster is None and not m.no_cluster.startswith(("none runs", "no Ray cluster runs")):
        fix = "name the one that is meant by --address or RAY_ADDRESS (`ray stop` ends all that run here)"
        yield m.no_cluster, fix


def _check_verl(m: Machine) -> Problems:
    reason = _overlay_failure(m)
    if _is_verl_wanted(m) and reason:
        problem = f"PHALANX_VERL is set, but {reason}: programs of verl do not run on Phalanx"
        yield problem, "start them with `phalanx verl ...`, which needs verl 0.9 and no plugin"


def _is_verl_wanted(m: Machine) -> bool:
    return m.environment.get("PHALANX_VERL", "") not in ("", "0", "false")


def _overlay_failure(m: Machine) -> str:
    """Return why verl cannot be overlaid by PHALANX_VERL; empty if it can."""
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


_CHECKS = {
    "versions": _check_versions,
    "cores": _check_cores,
    "devices": _check_devices,
    "shared memory": _check_shared_memory,
    "memory": _check_memory,
    "limits": _check_limits,
    "ports": _check_ports,
    "huge pages": _check_huge_pages,
    "disk": _check_disk,
    "security": _check_security,
    "cluster": _check_cluster,
    "verl": _check_verl,
}


def facts(m: Machine) -> dict[str, str]:
    """Return what the machine is, by topic, whether or not something is wrong with it."""
    cluster = m.cluster
    counted, where = "", m.no_cluster
    if cluster:
        counted = f"; Ray counts {cluster.cpus:g} here"
        where = f"{cluster.address}, {cluster.nodes} node{'s' * (cluster.nodes != 1)}"
    limited = f", limited to {size(m.memory_limit)}" if m.memory_limit else ""
    versions = {"python": m.python, **m.versions}
    variables = ", ".join(f"{name}={value}" for name, value in sorted(m.environment.items()))
    mode = m.environment.get("RAY_AUTH_MODE") or "Ray's default mode"
    verl = "not installed"
    if m.verl is not None:
        controller = "no controller of Phalanx" if _overlay_failure(m) else "the controller of Phalanx"
        unasked = "verl's own controller; `phalanx verl ...` gives Phalanx's"
        verl = f"{m.verl}: `import verl` gives {controller if _is_verl_wanted(m) else unasked}"
    return {
        "versions": ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items()),
        "cores": f"{m.cores}{counted}",
        "devices": ", ".join(m.gpus) or "none that nvidia-smi shows",
        "memory": size(m.memory) + limited,
        "shared memory": size(m.shared_memory) if m.shared_memory is not None else "no /dev/shm",
        "limits": ", ".join(f"{name} {_limit(name, soft)}" for name, (soft, _) in m.limits.items())
        or "unknown",
        "ports": "{}-{} ephemeral".format(*m.ephemeral_ports) if m.ephemeral_ports else "unknown",
        "huge pages": m.huge_pages or "unknown",
        "variables": variables or "none of those that matter",
        "disk": f"{m.disk_used:.0%} full" if m.disk_used is not None else "unknown",
        "security": f"{mode}, {'with' if m.token else 'without'} a token",
        "cluster": where,
        "verl": verl,
    }


def _limit(name: str, soft: int | None) -> str:
    if soft is None:
        return "unlimited"
    return size(soft) if name in ("memlock", "core") and soft else str(soft)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
