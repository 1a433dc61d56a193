"""Methods of a group as objects: call, ``.submit()``, ``.stream()``, ``.options()``, ``.explain()``."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, cast, overload

from phalanx.api.selection import Selection
from phalanx.calls.call import Call
from phalanx.calls.call_state import Streaming
from phalanx.calls.future import CallFuture, Stream
from phalanx.calls.item_stream import ItemStream
from phalanx.calls.send import NO_OPTIONS, CallOptions, planning_began, send
from phalanx.config import is_number
from phalanx.debug.explain_call import CallExplanation, explain_call, finished_result
from phalanx.declare.dispatch_modes import Dispatch
from phalanx.declare.register import MethodSpec
from phalanx.dispatch.plan import CallPlan, GatherPlan, Target
from phalanx.errors import DispatchError, StaleEpoch
from phalanx.members.recovery import ensure_ready
from phalanx.wire.value import Value, checked_number

P = ParamSpec("P")
B = TypeVar("B")
Item = TypeVar("Item")
V = TypeVar("V")
M = TypeVar("M", bound="BoundMethod[..., Any, Any]")

#: Modes with a single plan for calls without arguments, whatever the group's meshes are; every output is kept.
_FIXED = (Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO)


class BoundMethod(Generic[P, B, V]):
    """A method of a group or of a view of it.

    A bare call waits and returns the result; it returns a ``CallFuture`` at once if the method was registered with
    ``blocking=False``. For type checkers: a bare call returns ``B``, the result of a future is ``V``.
    """

    def __init__(
        self, selection: Selection, spec: MethodSpec, handle: Target, options: CallOptions = NO_OPTIONS
    ) -> None:
        self._selection = selection
        self._spec = spec
        self._handle = handle  # passed to custom functions as the group
        self._options = options
        self._fixed = spec.mode in _FIXED and selection.which != "any"
        #: Cached plan of a call without arguments, with the world size that it is for.
        self._empty: tuple[int, CallPlan] | None = None
        self.__name__ = spec.name
        self.__qualname__ = f"{selection.name}.{spec.name}"
        self.__doc__ = spec.doc
        if spec.signature is not None:
            self.__signature__ = spec.signature

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> B:
        if not self._spec.blocking:
            return cast(B, self.submit(*args, **kwargs))
        return cast(B, self._send(args, kwargs, waits=True).result(None))

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> CallFuture[V]:
        """Send the call and return at once with its future."""
        return CallFuture(self._send(args, kwargs, waits=False))

    def _send(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        waits: bool,
        streaming: Streaming | None = None,
    ) -> Call:
        chosen, spec = self._selection, self._spec
        core, describe = chosen.core, not waits and streaming is None
        while True:
            epoch = core.epoch
            try:
                if core.needs_care:
                    ensure_ready(core)
                began = planning_began()
                empty = self._fixed and not args and not kwargs
                plan = self._plan_of_nothing() if empty else chosen.plan(spec, self._handle, args, kwargs)
                if streaming is not None and streaming.by_rows and plan.gather.rows is None:
                    raise DispatchError(
                        f'{self.__qualname__}.stream(by="rows"): no rows are split in this call. Call a method of mode '
                        "ROWS or mesh on the whole group or a slice of it, with rows that are here (of a future, its "
                        "result())"
                    )
                return send(
                    core,
                    plan,
                    spec,
                    chosen.role,
                    collector=self._handle,
                    options=self._options,
                    describe=describe and plan.gather.collect == "join",
                    chosen=chosen.which == "any",
                    streaming=streaming,
                    began=began,
                )
            except (StaleEpoch, DispatchError):  # nothing was sent: retry if the ranks changed meanwhile
                if chosen.fixed is not None or not core.handle.independent or core.epoch is epoch:
                    raise

    def _plan_of_nothing(self) -> CallPlan:
        chosen = self._selection
        size = chosen.world_size
        if self._empty is None or self._empty[0] != size:
            self._empty = size, chosen.plan(self._spec, self._handle, (), {})
        return self._empty[1]

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Stream:
        """Send the call and return an iterator over ``(rank, output)``, in the order in which the ranks finish."""
        return cast(Stream, self.submit(*args, **kwargs).stream())

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> CallExplanation:
        """Describe a call with these arguments, without sending it.

        The description has the rows of each rank, how each argument is sent, which ranks return an output and how
        outputs become the result. Nothing is encoded, sent or stored, and no future is waited for. The call is planned:
        dispatch functions run, and the first plan fetches a mesh that ranks registered, as the first call would.

        Raises:
            DispatchError: if the call cannot be planned, or the split depends on a future that is not done.
        """
        chosen, spec = self._selection, self._spec
        plan = chosen.plan(spec, self._handle, args, kwargs, finished_result)
        return explain_call(chosen, spec, plan, args, kwargs)

    def options(self: M, *, timeout: float | None = None, stall_report_after: float | None = None) -> M:
        """Return the method with options for its calls. Options that are None stay as they are.

        Args:
            timeout: deadline of a call in seconds. A call that misses it is stopped, and the group is broken.
                ``float("inf")``: no deadline, even if the group has a ``call_timeout``.
            stall_report_after: interval in seconds at which a running call is reported, by a warning of the logger
                "phalanx" with the stack of each rank; the call continues.

        Raises:
            DispatchError: if an option is not a number of seconds greater than 0.
        """
        given = {"timeout": timeout, "stall_report_after": stall_report_after}
        chosen = {name: value for name, value in given.items() if value is not None}
        where = f"{self.__qualname__}.options"
        for name, value in chosen.items():
            if not is_number(value) or not value > 0:  # nan
                raise DispatchError(f"{where}({name}={value!r}): expected seconds, more than 0")
        return type(self)(self._selection, self._spec, self._handle, replace(self._options, **chosen))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, with a hint for ``remote``, which users of Ray may expect."""
            where = self.__dict__.get("__qualname__", "a method of a group")
            text = f"{where} has no attribute {name!r}"
            if name == "remote":
                text += f": call it bare, or {self._spec.name}.submit(...) for a future"
            raise AttributeError(text, name=name, obj=self)

    @property
    def spec(self) -> MethodSpec:
        """Specification of the method, as registered."""
        return self._spec

    def __repr__(self) -> str:
        signature = self._spec.signature or inspect.Signature()
        return f"<{self.__qualname__}{signature} by {self._spec.mode!r}>"


BUFFER = 8


class StreamingMethod(BoundMethod[P, B, B], Generic[P, B, Item]):
    """A method that yields.

    A bare call waits for the last item of every rank and returns the lists of items, collected as declared.
    """

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> CallFuture[B]:
        """Send the call and return at once with its future, whose ``stream()`` returns the items as they are yielded.

        The ranks do not wait for a reader: items are kept until the future is garbage-collected.
        """
        call = self._send(args, kwargs, waits=False, streaming=Streaming(kept=True))
        if call.streams is not None and call.core.backend.immediate:
            call.streams.run_to_end()
        return CallFuture(call)

    @overload
    def stream(  # pyright: ignore[reportIncompatibleMethodOverride] it has options of its own
        self, *args: Value, buffer: int | None = ..., by: Literal["items"] = ..., **kwargs: Value
    ) -> ItemStream[Item]: ...
    @overload
    def stream(
        self, *args: Value, buffer: int | None = ..., by: Literal["rows"], **kwargs: Value
    ) -> ItemStream[tuple[int, Any]]: ...
    def stream(  # pyright: ignore[reportIncompatibleMethodOverride] an option of its own
        self,
        *args: Value,
        buffer: int | None = BUFFER,
        by: Literal["items", "rows"] = "items",
        **kwargs: Value,
    ) -> ItemStream[Any]:
        """Send the call, and return an iterator over the items that its ranks yield.

            with group.generate.stream(prompts) as items:
                for rank, item in items:
                    ...

        The items of a rank arrive in order, items of several ranks as they are yielded. If only a single rank runs the
        method, the stream has the items without the rank. In a mesh mode, the stream has the items of the ranks whose
        outputs are collected. Leaving the stream before its end cancels the call. A rank is busy until its generator
        has ended.

        Args:
            buffer: maximum number of unread items of a rank, which then waits for the reader. None: no limit.
            by: "items", or "rows" for a mode that splits rows: the method yields ``(index of the row in its shard,
                result)``, and the stream returns ``(index of the row in the call, result)`` as rows are done, from any
                rank. Every row has to be yielded exactly once.

        Raises:
            DispatchError: if the arguments or options do not fit the method or its mode.
        """
        where = f"{self.__qualname__}.stream"
        if buffer is not None:
            advice = "expected a whole number from 1, or None for no bound"
            buffer = checked_number(f"{where}: buffer", buffer, 1, advice, DispatchError)
        if by not in ("items", "rows"):
            raise DispatchError(f'{where}(by={by!r}): expected "items" or "rows"')

        call = self._send(args, kwargs, waits=False, streaming=Streaming(buffer, by_rows=by == "rows"))
        stream = ItemStream[Any](call, owner=True)
        # The call has no value: its outputs are read as a stream.
        call.plan = replace(call.plan, gather=GatherPlan("none", ()))
        return stream
