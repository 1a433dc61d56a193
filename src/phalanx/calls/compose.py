"""Messages of a planned call: every distinct value is encoded once and, if large, stored once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from phalanx.backends.backend_types import Ref, ResultHandle
from phalanx.calls.call import Call
from phalanx.calls.future import CallFuture
from phalanx.calls.in_flight import is_busy
from phalanx.calls.values import Readonly, StoredParts, StoredValue, shard_between
from phalanx.dispatch.plan import CallPlan, Each, GatherPlan, Same
from phalanx.dispatch.split import FutureShard, Shard, pad_rows, shard_of
from phalanx.group.group import Group
from phalanx.session.session import session
from phalanx.wire.codec import Encoded, encode, large_leaves
from phalanx.wire.messages import (
    JoinedPlaceholder,
    Message,
    RankCall,
    RefPlaceholder,
    ResultOf,
    StoredPlaceholder,
)
from phalanx.wire.value import Value

Placed = tuple[bytes | None, tuple[Ref, ...]]
"""The body of a message, None if it is stored, and the references of the message: the last is that of a stored body."""


class SeparateValue:
    """A value that a call stores apart from its messages, once, when the first message with it is placed."""

    def __init__(self, value: Value, encoded: Encoded) -> None:
        self.nbytes = encoded.nbytes
        self._value = value  # kept alive, because its id identifies it
        self._content: Encoded | Ref = encoded

    def store(self, core: Group, call: Call | None) -> Ref:
        """Store the value if no message has stored it before; return its reference."""
        if isinstance(self._content, Encoded):
            self._content = core.backend.put(self._content)
            for counts in (core.counts, session.counts):
                counts.stored_bytes += self.nbytes
            core.room.took(self.nbytes)
            if call is not None:
                call.listener.stored(call, self.nbytes)
        return self._content


Separate = dict[tuple[int, bool], SeparateValue | None]
"""Separate values of a call by id and by whether they are read-only; None: a value that no message has contained."""


class Arguments:
    """The encoded arguments of a rank, and the references for the placeholders in them.

    Nothing is stored until ``placed`` is read: large arrays are views of the caller's memory. Values to store are added
    to ``separate``, which the messages of a call share.
    """

    def __init__(self, core: Group, call: Call | None, value: Value, separate: Separate) -> None:
        self._core = core
        self._call = call
        self._backend = core.backend
        self._refs: list[Ref | SeparateValue] = []
        self._separate = separate
        externalize: dict[type, Callable[[Any], Any]] = {
            CallFuture: self._future,
            FutureShard: self._shard,
            StoredValue: self._stored,
            Readonly: lambda marked: self._put(marked.value, readonly=True),
        }
        externalize |= dict.fromkeys(StoredParts.kinds, self._parts)
        externalize |= dict.fromkeys(self._backend.ref_types, lambda ref: RefPlaceholder(self._add(ref)))
        encoded = encode(value, externalize=externalize, externalize_leaf=self._leaf if separate else None)
        self._body = encoded if encoded.nbytes <= core.inline_bytes else None
        if self._body is None:
            separate[id(value), False] = body = SeparateValue(value, encoded)
            self._add(body)

    @cached_property
    def placed(self) -> Placed:
        """The body and the references of the message; the first access stores the values that are not in it."""
        refs, self._refs = self._refs, []
        body = None if self._body is None else self._body.to_bytes()
        return body, tuple(
            ref.store(self._core, self._call) if isinstance(ref, SeparateValue) else ref for ref in refs
        )

    def _add(self, ref: Ref | SeparateValue) -> int:
        self._refs.append(ref)
        return len(self._refs) - 1

    def _put(self, value: Value, readonly: bool = False) -> StoredPlaceholder:
        key = id(value), readonly
        separate = self._separate.get(key)
        if separate is None:
            separate = self._separate[key] = SeparateValue(value, encode(value, readonly=readonly))
        return StoredPlaceholder(self._add(separate))

    def _leaf(self, leaf: Value) -> StoredPlaceholder | None:
        return self._put(leaf) if (id(leaf), False) in self._separate else None

    def _stored(self, stored: StoredValue[Any]) -> StoredPlaceholder:
        if not stored.is_on(self._backend):
            return self._put(stored.get())
        return StoredPlaceholder(self._add(stored.ref))

    def _parts(self, value: StoredParts, shard: Shard | None = None) -> JoinedPlaceholder | StoredPlaceholder:
        """Return the placeholder of a value in parts, or of a shard of it."""
        if value.backend != self._backend.name:
            whole = value.result()
            return self._put(whole if shard is None else shard_of(whole, shard))
        parts = value.parts if shard is None else shard_between(value, shard)
        placed = (
            (source if isinstance(source, bytes) else self._add(source), start, stop, whole)
            for source, start, stop, whole in parts
        )
        padding = None if shard is None else shard.pad_to_multiple
        return JoinedPlaceholder(tuple(placed), value.joined, padding)

    def _shard(self, given: FutureShard) -> ResultOf | StoredPlaceholder | JoinedPlaceholder:
        if isinstance(given.future, StoredParts):
            return self._parts(given.future, given.shard)
        return self._future(given.future, given.shard)

    def _future(self, future: CallFuture, shard: Shard | None = None) -> ResultOf | StoredPlaceholder:
        """Return the placeholder of a future's result, or of a shard of it."""
        if self._call is not None:
            self._call.listener.passed(self._call, future.call)
        gather, parts = future.call.plan.gather, future.parts(self._backend)
        if shard is None:
            return self._put(future.result()) if parts is None else ResultOf(self._add_values(parts), gather)
        if parts is not None and gather.collect == "list":
            return self._elements(parts, gather, shard)
        if parts is not None and gather.collect == "first":
            part = [parts[gather.take[0]]]
            return ResultOf(self._add_values(part), replace(gather, take=(0,)), shard)
        taken = [] if parts is None or gather.collect != "join" else [parts[place] for place in gather.take]
        infos = [part.info for part in taken if part.info is not None]
        if not taken or len(infos) < len(taken):
            return self._put(shard_of(future.result(), shard))
        return ResultOf(self._add_values(taken), gather, shard, tuple(map(self._add, infos)))

    def _elements(self, parts: Sequence[ResultHandle], gather: GatherPlan, shard: Shard) -> ResultOf:
        """Return the placeholder of a shard of a list by rank, whose rows are the outputs."""
        chosen = pad_rows([*range(*shard.bounds(len(gather.take)))], shard.pad_to_multiple)
        taken = [parts[gather.take[place]] for place in chosen]
        trim = None if gather.trim is None else [gather.trim[place] for place in chosen]
        return ResultOf(self._add_values(taken), GatherPlan("list", range(len(taken)), trim))

    def _add_values(self, parts: Sequence[ResultHandle]) -> tuple[int, ...]:
        return tuple(self._add(part.value) for part in parts)


def messages(core: Group, plan: CallPlan, header: RankCall, call: Call | None = None) -> Iterator[Message]:
    """Yield a message for each called rank, in the plan's order, each created when it is needed.

    So the first rank copies its shard while the next shard is stored. All arguments are pickled, and the object store
    has capacity for them, before the first message is yielded.

    Raises:
        DispatchError: if a value cannot be pickled, or the object store cannot hold the values.
    """
    columns = [a for a in (*plan.args, *plan.kwargs.values()) if isinstance(a, Each)]
    if columns:
        yield from _messages_each(core, plan, columns, header, call)
        return
    refs: tuple[Ref, ...] = ()
    if plan.ranks and (plan.args or plan.kwargs):
        body, refs = encode_body(core, next(plan.arguments()), call)
        header = header._replace(body=body)
    if len(plan.gather.take) == len(plan.ranks):
        yield from itertools.repeat(header.pack(refs), len(plan.ranks))
        return
    packed = {keep: header._replace(keep=keep).pack(refs) for keep in (True, False)}
    yield from (packed[plan.keeps(position)] for position in range(len(plan.ranks)))


def _messages_each(
    core: Group, plan: CallPlan, columns: list[Each], header: RankCall, call: Call | None
) -> Iterator[Message]:
    # Ranks that get the very same objects (tp, pp and cp peers) get the same stored bytes.
    keys: list[tuple[int, ...]] = list(zip(*(map(id, column.values) for column in columns), strict=True))
    # The large tensors and arrays that several ranks get, each once.
    same = [argument.value for argument in (*plan.args, *plan.kwargs.values()) if isinstance(argument, Same)]
    skipped = *_SEPARATE, *StoredParts.kinds, *core.backend.ref_types
    leaves = large_leaves((same, plan.shared), core.inline_bytes, skipped)
    separate: Separate = dict.fromkeys((id(leaf), False) for leaf in leaves)
    encoded: dict[tuple[int, ...], Arguments] = {}
    for key, arguments in zip(keys, plan.arguments(), strict=True):
        if key not in encoded:
            encoded[key] = Arguments(core, call, arguments, separate)
    _admit(core, separate)
    for position, key in enumerate(keys):
        body, refs = encoded[key].placed
        yield header._replace(body=body, keep=plan.keeps(position)).pack(refs)


_SEPARATE = (CallFuture, FutureShard, StoredValue, Readonly)


def _admit(core: Group, separate: Separate) -> None:
    """Wait until the object store has capacity for the values that messages need."""
    sizes = [value.nbytes for value in separate.values() if value is not None]
    if sizes:
        core.room.admit(sizes, is_busy=lambda: any(map(is_busy, session.groups())))


def encode_body(core: Group, value: Value, call: Call | None = None) -> Placed:
    """Encode ``value`` as the body of a message: bytes if small; None and a reference, added last, if large.

    Raises:
        DispatchError: if the value cannot be pickled, or the object store cannot hold it.
    """
    separate: Separate = {}
    arguments = Arguments(core, call, value, separate)
    if separate:
        _admit(core, separate)
    return arguments.placed
