"""Methods of a group, and the encoding of their arguments for Ray."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from phalanx.backends.ray.worker_actor import portable
from phalanx.compat.verl.batches import is_future, protocol
from phalanx.compat.verl.single_controller.base.dispatch_functions import _padding_size_key, each
from phalanx.config import settings
from phalanx.wire.codec import Encoded

if TYPE_CHECKING:
    from phalanx.compat.verl.single_controller.ray.native import Call  # loads the runtime


@dataclass(eq=False)
class GroupMethod:
    """A registered method of a group, which dispatches, calls and collects."""

    group: Any
    method_name: str
    dispatch_fn: Callable[..., Any]
    collect_fn: Callable[..., Any]
    execute_fn: Callable[..., Any]
    blocking: bool

    def __post_init__(self) -> None:
        self.__name__ = self.method_name
        self.__qualname__ = f"{type(self.group).__name__}.{self.method_name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = each(_own, args, kwargs)
        args, kwargs = self.dispatch_fn(self.group, *args, **kwargs)
        padding = int(kwargs.pop(_padding_size_key, 0))
        output = self.execute_fn(self.__name__, *args, **kwargs)
        call = None
        if self.blocking:
            output = self.group._wait(output)
        else:
            call = self.group._call_of(output)
        output = self.collect_fn(self.group, output)
        if call is not None:
            output = _tracked(output, call)
        return _without_padding(output, padding, args, kwargs) if padding else output

    def __repr__(self) -> str:
        return f"<{self.__qualname__} of {self.group.world_size} ranks>"


#: verl's name of the constructor of a group's methods.
func_generator = GroupMethod


def _tracked(output: Any, call: Call) -> Any:
    """Return a ``DataProtoFuture`` that raises the error of the call instead of Ray's error of one rank.

    Other outputs are returned unchanged.
    """
    if not is_future(output):
        return output
    future = _future_class(type(output))(output.collect_fn, output.futures, output.dispatch_fn)
    future._call = call
    return future


@functools.cache
def _future_class(base: type) -> Any:
    class TrackedFuture(base):  # type: ignore[misc, valid-type]
        """A future of verl with a tracked call."""

        _call: Call

        def get(self) -> Any:
            try:
                return super().get()
            except Exception:
                if self._call.over or self._call.has_failed():
                    self._call.result(None)
                raise

        def __reduce__(self) -> Any:  # calls are tracked by the process that made them
            return base, (self.collect_fn, self.futures, self.dispatch_fn)

    return TrackedFuture


def _own(value: Any) -> Any:
    """Return a copy of a list or dict: a dispatch function may change its arguments, but not the caller's."""
    return value.copy() if type(value) in (list, dict) else value


def _without_padding(output: Any, padding: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Remove the added rows from a joined output, or from the value of a future once it is joined.

    Lists by rank are returned unchanged.
    """
    shards = next((value for value in [*args, *kwargs.values()] if _is_data_protos(value)), [])
    total = sum(map(len, {id(shard): shard for shard in shards}.values()))
    if is_future(output):
        output.dispatch_fn = functools.partial(_trimmed, padding, total)
        return output
    return _trimmed(padding, total, output)


def _is_data_protos(value: Any) -> bool:
    data_proto = protocol().DataProto
    return isinstance(value, list) and bool(value) and all(isinstance(shard, data_proto) for shard in value)


def _trimmed(padding: int, total: int, output: Any) -> Any:
    if isinstance(output, list | tuple) or not hasattr(output, "__len__") or len(output) != total:
        return output
    return output[: total - padding]


class PayloadEncoder:
    """Encoder of one call's arguments. A value for several ranks is encoded and stored once.

    Attributes:
        stored: bytes of the large values, which go into the object store; Ray itself stores values for a single rank.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any, int]] = {}
        self._limit = settings().inline_bytes
        self.stored = 0

    def of(self, value: Any, shared: bool) -> Any:
        """Return the payload of ``value`` for one rank, or for several ranks if ``shared``."""
        known = self._made.get(id(value))
        if known is None:
            made = portable(value)
            nbytes = made.nbytes if isinstance(made, Encoded) else 0
            if nbytes > self._limit:
                self.stored += nbytes
                made = ray.put(made) if shared else made
            # The value is kept, so that its id is not reused.
            known = self._made[id(value)] = (value, made, nbytes)
        return known[1]

    def nbytes(self, values: Iterable[Any]) -> int:
        """Return the bytes of encoded values, as received by one rank."""
        return sum(self._made[id(value)][2] for value in values if id(value) in self._made)
