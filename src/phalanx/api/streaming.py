"""Methods that yield, as callable objects: their items one by one, or all at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

from phalanx.api.methods import BoundMethod
from phalanx.calls.future import CallFuture
from phalanx.calls.item_stream import ByRow, Form, ItemStream, form_of
from phalanx.calls.stream_rows import StreamedRows
from phalanx.calls.streams import PendingStream, Streaming
from phalanx.dispatch.plan import CallPlan, GatherPlan
from phalanx.errors import DispatchError, InternalError
from phalanx.wire.value import Value

P = ParamSpec("P")
B = TypeVar("B")
Item = TypeVar("Item")
BUFFER = 8


class StreamingMethod(BoundMethod[P, B, B], Generic[P, B, Item]):
    """A method that yields.

    Called bare, it waits for the last item of every rank and gives the lists of items, collected as declared.
    """

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> CallFuture[B]:
        """Send the call and return at once with its future, whose ``stream()`` gives the items as they come.

        The ranks wait for no reader: their items are kept until the future is let go of.
        """
        call = self._send(
            args, kwargs, waits=False, streaming=lambda plan: Streaming(_wanted(plan), kept=True)
        )
        if call.streams is not None and call.core.backend.immediate:
            call.streams.run_to_end()
        return CallFuture(call)

    @overload
    def stream(  # pyright: ignore[reportIncompatibleMethodOverride] it has options of its own
        self,
        *args: Value,
        buffer: int | None = ...,
        by: Literal["items"] = ...,
        **kwargs: Value,
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
        """Send the call, and give what it yields as its ranks make it.

            with group.generate.stream(prompts) as items:
                for rank, item in items:
                    ...

        Items of one rank come in order, those of several as they are made; of a method that goes to one rank they come
        without its number. In a mesh mode the items of the collectors come. Leaving the stream before its end cancels
        the call. Ranks are at the call until their generators have ended.

        Args:
            buffer: how many items a rank makes at most that nobody has read; then it waits for the reader. None: as
                many as there are.
            by: "rows", where rows are split: the method yields ``(index of the row in its piece, result)``, and
                ``(index of the row in the call, result)`` comes as rows are done, whichever rank they are from. Every
                row has to come once.

        Raises:
            DispatchError: the arguments do not fit the method or its mode.
        """
        where = f"{self.__qualname__}.stream"
        if buffer is not None and (isinstance(buffer, bool) or not isinstance(buffer, int) or buffer < 1):
            raise DispatchError(
                f"{where}(buffer={buffer!r}): expected a whole number from 1, or None for no bound"
            )
        if by not in ("items", "rows"):
            raise DispatchError(f'{where}(by={by!r}): expected "items" or "rows"')
        forms: list[Form] = []

        def streaming(plan: CallPlan) -> Streaming:
            forms.append(ByRow(_rows_of(plan, where)) if by == "rows" else form_of(plan.gather))
            return Streaming(_wanted(plan), buffer)

        call = self._send(args, kwargs, waits=False, streaming=streaming)
        arrivals = call.arrivals
        if not isinstance(arrivals, PendingStream):
            raise InternalError(f"{where}: sent, but not as a stream")
        # Nobody gets a value of it: who reads it has what there is.
        call.plan = replace(call.plan, gather=GatherPlan("none", ()))
        return ItemStream(call, arrivals, forms[0], owner=True)


def _wanted(plan: CallPlan) -> frozenset[int]:
    """The positions whose items are part of the result."""
    return frozenset(position for position in range(len(plan.ranks)) if plan.keeps(position))


def _rows_of(plan: CallPlan, where: str) -> StreamedRows:
    """The rows of a call that are to come one by one."""
    gather = plan.gather
    if gather.rows is None:
        raise DispatchError(
            f'{where}(by="rows"): no rows are split in this call. Call a method of mode ROWS or mesh on the whole '
            "group or a slice of it, with rows that are here (of a future, its result())"
        )
    ranks = [plan.ranks[position] for position in gather.take]
    given = None if gather.trim is None else [rows for rows, _ in gather.trim]
    return StreamedRows(gather.rows, ranks, given, gather.order)
