"""Memory that processes of a node share, opened by a handle: anonymous host memory, and device memory by CUDA IPC.

Host memory is a memfd: the kernel frees it with the last process that maps it, even if that process is killed.
Processes of the same user open it by its descriptor under /proc. The limit is the container's memory, not the size of
/dev/shm.

Device memory is allocated with ``cudaMalloc`` instead of torch's allocator, whose reference counts between processes
never drop if a reader is killed. The owner frees the memory on ``close()``, even if readers were killed.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import pickle
import secrets
import weakref
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from phalanx.errors import WeightsTransferError
from phalanx.weights.manifest import Tensors

_HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE
_TOKEN_BYTES = 16
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_ALIGNMENT = 64


class HostMemory:
    """Anonymous host memory as a tensor of bytes; ``handle`` opens it in another process. Owns its descriptor."""

    _alive: weakref.WeakValueDictionary[int, HostMemory] = weakref.WeakValueDictionary()

    def __init__(self, fd: int, nbytes: int, owner: bool = False) -> None:
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._owner = owner
        self._map = mmap.mmap(fd, nbytes)
        self.handle = f"/proc/{os.getpid()}/fd/{fd}".encode()
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._alive[self.tensor.data_ptr()] = self

    @classmethod
    def create(cls, nbytes: int, device: torch.device | None = None) -> HostMemory:
        """Allocate host memory; ``device`` is not used. Pages cost nothing before they are written."""
        fd = os.memfd_create("phalanx-weights", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return cls(fd, nbytes, owner=True)

    @classmethod
    def open(cls, handle: bytes, nbytes: int, device: torch.device | None = None) -> HostMemory:
        """Open host memory of another process by its handle; ``device`` is not used."""
        return cls(os.open(handle, os.O_RDWR | os.O_CLOEXEC), nbytes)

    @classmethod
    def holding(cls, tensor: torch.Tensor) -> HostMemory:
        """Return the open memory in which a tensor's storage begins. Raises KeyError if there is none."""
        return cls._alive[tensor.untyped_storage().data_ptr()]

    def view(self, begin: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor that begins at byte ``begin``."""
        return self.tensor[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def synchronize(self) -> None:
        """Do nothing: copies in host memory have ended when they return."""

    def close(self) -> None:
        """Release the memory. May be called again.

        The owner frees its pages, even if other processes still map them: they read zeros then. Otherwise the memory is
        unmapped once no tensor refers to it.
        """
        self._alive.pop(self.tensor.data_ptr(), None)
        self._close_fd()
        if self._owner:
            self._map.madvise(mmap.MADV_REMOVE)
        self.tensor = torch.empty(0, dtype=torch.uint8)


def allocate_tensors(like: Mapping[str, torch.Tensor]) -> tuple[HostMemory, dict[str, torch.Tensor]]:
    """Allocate tensors of the names, types and shapes of ``like``, whose tensors may be on the meta device."""
    begins: dict[str, int] = {}
    nbytes = 1  # memory is never empty
    for name, tensor in like.items():
        begins[name] = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        nbytes = begins[name] + tensor.numel() * tensor.element_size()
    memory = HostMemory.create(nbytes)
    return memory, {name: memory.view(begins[name], one.dtype, one.shape) for name, one in like.items()}


def location_of(tensors: Tensors) -> bytes:
    """Return the location of tensors, for :func:`open_tensors` in another process of this node and user.

    Raises:
        KeyError: if the tensors are not in memory of :func:`allocate_tensors`.
    """
    memory = HostMemory.holding(next(iter(tensors.values())))
    table = [
        (name, one.storage_offset() * one.itemsize, one.dtype, one.shape) for name, one in tensors.items()
    ]
    # handles are used again, with another inode
    return pickle.dumps((memory.handle, os.stat(memory.handle).st_ino, memory.tensor.numel(), table))


def open_tensors(location: bytes) -> Tensors:
    """Return the tensors at a location. Their memory is unmapped once nothing refers to them.

    Raises:
        WeightsTransferError: if the memory was freed.
    """
    handle, _, nbytes, table = pickle.loads(location)
    try:
        memory = HostMemory.open(handle, nbytes)
    except OSError as error:
        raise WeightsTransferError(
            f"memory for weights was freed ({error}): its process or its sync ended"
        ) from error
    return {name: memory.view(*place) for name, *place in table}


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


@functools.cache
def _runtime() -> Any:
    """Return the CUDA runtime library that torch has loaded: another copy would have a context of its own."""
    torch.cuda.init()
    with open("/proc/self/maps") as file:
        paths = [line.split(maxsplit=5)[-1].strip() for line in file if "libcudart" in line]
    if not paths:
        raise WeightsTransferError("torch has not loaded libcudart, so CUDA IPC cannot be used")
    library = ctypes.CDLL(paths[0])
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _call(name: str, *args: Any) -> None:
    """Call a function of the CUDA runtime. Arguments must have C types, since integers are passed as 32 bits."""
    code = getattr(_runtime(), name)(*args)
    if code:
        _runtime().cudaGetLastError()  # clears the error, which torch would raise later
        message = _runtime().cudaGetErrorString(code).decode()
        raise WeightsTransferError(f"{name} failed: {message} (CUDA error {code})")


class DeviceMemory:
    """Device memory as a tensor of bytes; ``handle`` opens it in another process."""

    def __init__(
        self, pointer: int, nbytes: int, device: torch.device, handle: bytes, *, owner: bool
    ) -> None:
        self._pointer = pointer
        self._device = device
        self._owner = owner
        self.handle = handle
        # the interface by which torch accepts memory of other libraries
        array = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}
        self.tensor = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=array))
        if self.tensor.data_ptr() != pointer:
            self.close()
            raise WeightsTransferError("torch copied the memory of a CUDA IPC handle instead of sharing it")

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> DeviceMemory:
        """Allocate memory on ``device``. It begins with a token, which the handle has too."""
        pointer, handle = ctypes.c_void_p(), _IpcHandle()
        token = secrets.token_bytes(_TOKEN_BYTES)
        with torch.cuda.device(device):
            _call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(max(nbytes, _TOKEN_BYTES)))
            try:
                _call("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
            except WeightsTransferError:
                _call("cudaFree", pointer)
                raise
        memory = cls(pointer.value or 0, nbytes, device, bytes(handle) + token, owner=True)
        memory.tensor[:_TOKEN_BYTES].copy_(torch.frombuffer(bytearray(token), dtype=torch.uint8))
        memory.synchronize()
        return memory

    @classmethod
    def open(cls, handle: bytes, nbytes: int, device: torch.device) -> DeviceMemory:
        """Open another process's memory, and check that it has the token.

        Raises:
            WeightsTransferError: if this process cannot access the memory's device, or the token differs.
        """
        pointer = ctypes.c_void_p()
        ipc_handle = _IpcHandle.from_buffer_copy(handle[:_HANDLE_BYTES])
        with torch.cuda.device(device):
            _call("cudaIpcOpenMemHandle", ctypes.byref(pointer), ipc_handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        memory = cls(pointer.value or 0, nbytes, device, handle, owner=False)
        if bytes(memory.tensor[:_TOKEN_BYTES].cpu().numpy()) != handle[_HANDLE_BYTES:]:
            memory.close()
            raise WeightsTransferError("a CUDA IPC handle opened other memory than its owner's")
        return memory

    def synchronize(self) -> None:
        """Wait for the copies that this process queued on the device."""
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Free or unmap the memory. May be called again."""
        pointer, self._pointer = self._pointer, 0
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if pointer:
            with torch.cuda.device(self._device):
                self.synchronize()
                _call("cudaFree" if self._owner else "cudaIpcCloseMemHandle", ctypes.c_void_p(pointer))


def memory_on(device: torch.device) -> type[HostMemory] | type[DeviceMemory]:
    """Return the class of memory that processes of a node share on ``device``."""
    return HostMemory if device.type == "cpu" else DeviceMemory


def device_id(device: torch.device) -> str:
    """Return a text that identifies the physical device on its node; "" for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
