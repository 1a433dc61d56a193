"""Encode any picklable value so that tensors and arrays inside it are never copied more than once.

A value becomes a pickle stream (``head``, by cloudpickle, protocol 5) and the bytes of its tensors and arrays
as they are in memory (``buffers``). `phalanx.wire.pack` defines which parts of a tensor or array are sent,
`phalanx.wire.unpack` the memory and the device of the received value. Nothing global is patched: the reductions
belong to this pickler alone.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, NoneType
from typing import Any

import cloudpickle
import numpy as np

from phalanx.errors import DispatchError, InternalError, PhalanxError
from phalanx.wire import pack, unpack
from phalanx.wire.unpack import current_arrival, received
from phalanx.wire.unpack import decoding as decoding
from phalanx.wire.value import Value, is_tensor

PLAIN_HEAD = b"\x80"
"""First byte of an encoded value without buffers and placeholders: pickle's first opcode."""
_MARK = b"PHX2"
"""First bytes of an encoded value with buffers or placeholders; its pickle follows."""
_PROTOCOL = 5
_HEAD_OUT_OF_BAND = 64 << 10  # bytes; a longer head is passed on as a buffer, without a copy

Externalize = Mapping[type, Callable[[Any], Any]]


@dataclass(slots=True, eq=False)
class Encoded:
    """An encoded value. Pickling (by protocol 5) passes its buffers out of band; unpickling returns the decoded value.

    Attributes:
        head: the pickle stream.
        buffers: read-only, contiguous views of the caller's memory, valid until the caller changes that memory.
        own: number of leading buffers that belong to tensors and arrays; the others belong to types with their
            own out-of-band pickling.
        tokens: placeholders of replaced objects, in order.
        readonly: True if the sender wants the value to be read without a copy.
    """

    head: bytes
    buffers: Sequence[memoryview] = ()
    own: int = 0
    tokens: Sequence[Any] = ()
    readonly: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the head and of all buffers."""
        return len(self.head) + sum(memoryview(buffer).nbytes for buffer in self.buffers)

    def to_bytes(self) -> bytes:
        """Return the value as a single bytes object for `decode`."""
        if not self.buffers and not self.tokens:
            return self.head
        return _MARK + (cloudpickle if self.tokens else pickle).dumps(self, _PROTOCOL)

    def __reduce_ex__(self, protocol: Value) -> tuple[Any, ...]:
        head = self.head if len(self.head) < _HEAD_OUT_OF_BAND else pickle.PickleBuffer(self.head)
        buffers = map(pickle.PickleBuffer, self.buffers)
        return _decode_parts, (head, self.own, self.readonly, self.tokens, *buffers)


def encode(
    value: Value,
    *,
    externalize: Externalize | None = None,
    externalize_leaf: Callable[[Any], Any] | None = None,
    readonly: bool = False,
) -> Encoded:
    """Encode a value of any type that cloudpickle supports. The value is not changed.

    Numbers, str, bytes, list, tuple, dict, OrderedDict and set are never replaced by placeholders.

    Args:
        externalize: functions by type. A function takes an object of its type and returns a picklable placeholder to
            send instead, or None to send the object itself. It is called once per object.
        externalize_leaf: such a function for the tensors and arrays of all types.
        readonly: make every receiver decode the value read-only, without a copy.

    Raises:
        DispatchError: if a part cannot be pickled; the error names the type and path of the part.
    """
    if _is_plain(value, _PLAIN_DEPTH):
        return Encoded(pickle.dumps(value, _PROTOCOL))
    file = io.BytesIO()
    pickler = _Pickler(file, externalize or {}, externalize_leaf)
    try:
        pickler.dump(value)
    except (PhalanxError, MemoryError):
        raise
    except Exception as error:
        from phalanx.wire.unpicklable import explain_unpicklable  # seldom needed

        raise DispatchError(explain_unpicklable(value, error, pickler.again)) from error
    own = pickler.sink.buffers
    foreign = [buffer.raw().toreadonly() for buffer in pickler.foreign]
    return Encoded(file.getvalue(), own + foreign, len(own), pickler.tokens, readonly)


def large_leaves(value: Value, threshold: int, skipped: Iterable[type] = ()) -> list[Any]:
    """Return the distinct tensors and arrays of at least ``threshold`` bytes that encoding a value meets.

    Their bytes are not read. Parts of the types ``skipped`` are left out. The search ends at a part that cannot be
    pickled: encoding the value raises the error, with the path of the part.
    """
    leaves: dict[int, Any] = {}

    def note(leaf: Any) -> bool:
        leaves[id(leaf)] = leaf
        return True  # a placeholder, so that the pickler does not enter the leaf

    if not _is_plain(value, _PLAIN_DEPTH):
        with suppress(Exception):
            _Pickler(io.BytesIO(), dict.fromkeys(skipped, lambda _: True), note).dump(value)
    return [leaf for leaf in leaves.values() if _nbytes(leaf) >= threshold]


def _nbytes(leaf: Any) -> int:
    is_sparse = getattr(leaf, "is_sparse", False)  # such a tensor has no nbytes
    return encode(leaf).nbytes if is_sparse else leaf.nbytes


#: Types of values that are pickled as they are, and sent as outputs without being encoded.
ATOMS = frozenset({NoneType, bool, int, float, str, bytes})
_PLAIN_DEPTH = 4


def _is_plain(value: Value, depth: int) -> bool:
    """Return whether plain pickle is enough: atoms in lists, tuples and dicts, at most ``depth`` levels deep."""
    kind = type(value)
    if kind is dict:
        return _is_plain([*value, *value.values()], depth)
    if kind is not tuple and kind is not list:
        return kind in ATOMS
    kinds = set(map(type, value))
    if kinds <= ATOMS:
        return True
    if depth == 0 or not kinds <= _PLAIN_KINDS:
        return False
    for item in value:  # noqa: SIM110 - a generator would double the cost of an empty call
        if item and not _is_plain(item, depth - 1):
            return False
    return True


_PLAIN_KINDS = ATOMS | {list, tuple, dict}


class _Pickler(cloudpickle.Pickler):
    """cloudpickle with tensors and arrays out of band and chosen objects replaced by placeholders.

    ``persistent_id`` is not used for replacement: pickle would call it for every number in a list.
    """

    def __init__(
        self, file: io.BytesIO, externalize: Externalize, externalize_leaf: Callable[[Any], Any] | None
    ) -> None:
        self.foreign: list[pickle.PickleBuffer] = []
        # Not a method of this class: a reference cycle would keep every pickled tensor until a garbage collection.
        super().__init__(file, protocol=_PROTOCOL, buffer_callback=self.foreign.append)
        self.sink = pack.Sink()
        self.tokens: list[Any] = []
        self._externalize = externalize
        self._externalize_leaf = externalize_leaf

    def again(self, value: Value) -> None:
        """Pickle ``value`` in the same way and discard the result, to find out whether pickling raises."""
        _Pickler(io.BytesIO(), self._externalize, self._externalize_leaf).dump(value)

    def reducer_override(self, obj: Value) -> Any:
        kind = type(obj)
        # Without cloudpickle's own checks: a module has ten of the former, every tensor one of the latter.
        if kind is OrderedDict or (kind is FunctionType and obj.__module__ == unpack.__name__):
            return NotImplemented
        is_torch = is_tensor(obj)
        externalize = self._externalize.get(kind)
        if externalize is None and (is_torch or issubclass(kind, np.ndarray)):
            externalize = self._externalize_leaf
        if externalize is not None and (token := externalize(obj)) is not None:
            return self._replace(token)
        reduced = None
        if is_torch:
            reduced = pack.reduce_tensor(self.sink, obj)
        elif kind is np.ndarray or kind is np.memmap:
            reduced = pack.reduce_array(self.sink, obj)
        elif kind in copyreg.dispatch_table and kind.__module__.startswith("tensordict."):
            reduced = unpack.tensor_dict, copyreg.dispatch_table[kind](obj)
        return super().reducer_override(obj) if reduced is None else reduced

    def _replace(self, token: Value) -> tuple[Any, ...]:
        self.tokens.append(token)
        return unpack.token, (len(self.tokens) - 1,)


def decode(data: bytes | Encoded) -> Value:
    """Decode a value with the settings of the enclosing `decoding` block (default: into private memory).

    Raises:
        InternalError: if ``data`` is neither an Encoded nor the result of ``to_bytes``.
        Exception: if unpickling fails, for example ModuleNotFoundError if this process cannot import a class.
    """
    if isinstance(data, Encoded):
        return _load(data)
    if data[:1] == PLAIN_HEAD:
        return pickle.loads(data)
    if data[: len(_MARK)] != _MARK:
        raise InternalError(
            f"decode was given {type(data).__name__} that starts with {bytes(data[:8])!r}; expected an "
            "Encoded, or bytes from Encoded.to_bytes()"
        )
    return pickle.loads(memoryview(data)[len(_MARK) :])


def _decode_parts(head: Value, own: int, readonly: bool, tokens: Sequence[Any], *buffers: Value) -> Value:
    return _load(Encoded(head, list(buffers), own, tokens, readonly))


def _load(encoded: Encoded) -> Value:
    arrival = current_arrival()
    nbytes = encoded.nbytes
    received.add(nbytes)
    if arrival.meter is not None:
        arrival.meter.add(nbytes)
    if not encoded.buffers and not encoded.tokens:
        return pickle.loads(encoded.head)
    frame = unpack.Frame(encoded.buffers, encoded.tokens, encoded.readonly, arrival)
    before = unpack.open_frame.set(frame)
    try:
        foreign = map(frame.array_buffer, range(encoded.own, len(encoded.buffers)))
        return pickle.loads(encoded.head, buffers=foreign)
    finally:
        unpack.open_frame.reset(before)
