"""vLLM's shared memory on CPUs: names of its own for each engine, and nothing of it left behind.

The one patch of vLLM's inside. Its ranks meet in files of /dev/shm whose names are the same for every engine of a
machine that is launched from outside, and that nobody unlinks: a second engine, or the first after one that was killed,
could not start. There is no setting for it. A version with which this was not tested is refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any

from phalanx.engines.vllm.library import find, version
from phalanx.errors import DeclarationError

__all__ = ["name_again", "own_names", "unlink", "unlink_own_queue", "unlink_shared_memory"]

TESTED = ("0.32.0",)
_FOLDER = "/dev/shm"
_GONE = " (deleted)"
"""How the kernel marks the path of memory that has no name any more."""
_PATCHED = "_phalanx_token"


def own_names(token: str) -> None:
    """Let this process's engine have ``token``, equal on all its ranks, in the names of its shared memory.

    Raises:
        DeclarationError: this version of vLLM is none that it was tested with.
    """
    if version() not in TESTED:
        raise DeclarationError(
            f"tensor_parallel_size above 1 on CPUs needs vLLM {' or '.join(TESTED)}, and this is {version()}: names of "
            "shared memory are changed inside of it; use one of these versions, or one rank per engine"
        )
    shared: Any = find("vllm.distributed.device_communicators.cpu_communicator._CPUSHMDistributed")
    if not hasattr(shared, _PATCHED):
        named, joined = shared.make_group_name, shared._init_cpu_shm

        def make_group_name(communicator: Any) -> str:
            # vLLM's begins with the slashes of "env://", which are allowed nowhere else in such a name.
            return f"{getattr(shared, _PATCHED)}{named(communicator).replace('/', '')}"

        def init_cpu_shm(self: Any) -> int:
            handle = joined(self)
            # All ranks have it open now; what has no name ends with the last of them, however they end.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{_FOLDER}/{self.group_name}_{self.communicator.rank}")
            return handle

        shared.make_group_name = staticmethod(make_group_name)
        shared._init_cpu_shm = init_cpu_shm
    setattr(shared, _PATCHED, token)


def unlink_shared_memory() -> list[str]:
    """Take the names from the segments and semaphores that this process has open, so that they end with it.

    To be called when every rank of the engine has them open. Gives the names.
    """
    if not os.path.exists("/proc/self/maps"):
        return []
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[-1].strip() for line in file if f"{_FOLDER}/" in line}
    ours = [path for path in sorted(paths) if _is_of_engine(os.path.basename(path))]
    unlink(ours)
    return ours


def _is_of_engine(name: str) -> bool:
    return (name.startswith(("psm_", "sem.mp-")) or "cpushm" in name) and not name.endswith(_GONE)


def unlink(paths: Iterable[str]) -> None:
    """Take these names, those that there are."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def name_again(paths: Iterable[str]) -> None:
    """Give these names to empty files, for processes that end in good order take the names of their memory themselves,
    and print a traceback where there are none.
    """
    for path in paths:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def unlink_own_queue() -> None:
    """Take the name of the memory by which this rank tells the others of its engine, as its maker, who is not to do so
    again at its end. To be called when they have it open, and before they take names.
    """
    queue: Any = find("vllm.distributed.parallel_state.get_tp_group")().mq_broadcaster
    memory = getattr(queue, "buffer", None)
    if getattr(memory, "is_creator", False):
        memory.shared_memory.unlink()
        memory.is_creator = False
