"""vLLM's shared memory on CPUs: names of its own for each engine, and nothing of it left behind.

The one patch of vLLM's inside. Its ranks meet in files of /dev/shm whose names are the same for every engine of a
machine that is launched from outside, and that nobody unlinks: a second engine, or the first after one that was killed,
could not start. There is no setting for it. A version with which this was not tested is refused.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Collection
from multiprocessing import synchronize, util
from typing import Any

from phalanx.engines.vllm.vllm_imports import find, version
from phalanx.errors import DeclarationError

__all__ = ["disown_queues", "disown_semaphores", "own_names", "own_semaphores", "unlink_shared_memory"]

TESTED = ("0.32.0",)
_FOLDER = "/dev/shm"
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


def disown_queues() -> None:
    """Take the names of the memory by which this process tells others of its engine, as its maker, who is not to do so
    again at its end. To be called when they have it open, and before :func:`unlink_shared_memory` anywhere.
    """
    kind = find("vllm.distributed.device_communicators.shm_broadcast.ShmRingBuffer")
    gc.unfreeze()  # vLLM freezes what it has made by then, which is not looked at otherwise
    for one in gc.get_objects():
        if type(one) is kind and getattr(one, "is_creator", False):
            one.shared_memory.unlink()
            one.is_creator = False
    gc.freeze()


def own_semaphores() -> dict[str, util.Finalize]:
    """The semaphores with a name that this process made, as multiprocessing does for processes that are not forked, and
    what takes the name from each at the end of this process.
    """
    # Where Python keeps this is not said; were it elsewhere, none would be found, and names would stay until the end.
    known: dict[Any, Any] = getattr(util, "_finalizer_registry", {})
    cleanup = getattr(synchronize.SemLock, "_cleanup", None)
    return {
        one._args[0]: one
        for one in list(known.values())
        if cleanup is not None and getattr(one, "_callback", None) is cleanup
    }


def disown_semaphores(but: Collection[str] = ()) -> None:
    """Take the names from the semaphores that this process made, except ``but``, now instead of at its end.

    To be called when all who need them have them open. vLLM's workers share a lock, and the progress bars of its loads
    have one in each process. Who is killed together with what would clean up after him leaves such a name.
    """
    for name, end in own_semaphores().items():
        if name not in but:
            end()


def unlink_shared_memory() -> None:
    """Take the names from the segments that this process has open, so that they end with it.

    To be called when every rank of the engine has them open.
    """
    if not os.path.exists("/proc/self/maps"):
        return
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[-1].strip() for line in file if f"{_FOLDER}/" in line}
    for path in sorted(paths):
        name = os.path.basename(path)
        if name.startswith("psm_") or "cpushm" in name:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
