"""Methods that yield, on their rank: what they yield becomes what the process gives back, item by item."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager
from types import AsyncGeneratorType, GeneratorType, TracebackType
from typing import Any, Protocol, cast

from phalanx.declare.context import WorkerContext
from phalanx.errors import DispatchError
from phalanx.tracing.span_writer import Noted
from phalanx.wire.failure import RankFailure
from phalanx.wire.messages import RankCall
from phalanx.wire.method_names import full_name
from phalanx.wire.outputs import StreamEnd
from phalanx.worker.async_runner import Begun, Way, at_once
from phalanx.worker.control import Interrupted
from phalanx.worker.results import encoded
from phalanx.worker.span_writers import Journals, size_of

#: What a method gives that yields.
GENERATORS = (GeneratorType, AsyncGeneratorType)

_OVER = object()
_End = Callable[[Awaitable[Any]], Awaitable[Any]]


async def collected(items: Any, end: _End, *, keep: bool) -> list[Any]:
    """All that a generator yields, for a caller who waits for all of it; without ``keep`` it only runs to its end."""
    if isinstance(items, GeneratorType):
        return list(items) if keep else list(deque(items, maxlen=0))
    return await end(_all_of(items, keep))


async def _all_of(items: AsyncGenerator[Any], keep: bool) -> list[Any]:
    if keep:
        return [item async for item in items]
    async for _ in items:
        pass
    return []


class Rank(Protocol):
    """What a stream needs of the host of its rank."""

    journals: Journals

    @property
    def context(self) -> WorkerContext: ...

    def check_callable(self, call: RankCall) -> None: ...

    def invoke(self, call: RankCall, refs: Sequence[Any], note: Noted | None) -> Any: ...

    def failure(self, error: BaseException, role: str, method: str) -> RankFailure: ...


async def streamed(rank: Rank, call: RankCall, refs: Sequence[Any], way: Way) -> AsyncGenerator[Any]:
    """Run one call whose method yields: its items as they travel, and last a ``StreamEnd``.

    One that was interrupted gives a failure last, and does not raise it: nobody may be there to hear of it.

    Raises:
        RankFailure: whatever the call raised.
    """
    rank.check_callable(call)
    end: StreamEnd | RankFailure
    try:
        noted = rank.journals.of(call.trace, call.call, waits=bool(refs))
        with noted as note, way.steps(call.call, full_name(call.role, call.method)) as step:
            items = Items(step, way.end)
            try:
                await items.begin(lambda: rank.invoke(call, refs, note))
                async for item in items:
                    yield item
            finally:
                await items.close()
            if note is not None:
                note.finished()
                note.returned(items.nbytes)
                note.yielded(items.count)
        end = StreamEnd(items.count)
    except way.passes:
        raise
    except GeneratorExit:
        left = Interrupted("its reader left it between two items")
        raise rank.failure(left, call.role, call.method) from None
    except Interrupted as error:
        end = rank.failure(error, call.role, call.method)
    except BaseException as error:
        raise rank.failure(error, call.role, call.method) from None
    yield end


class Items:
    """What a method yields, as it travels: an async iterator.

    Each item is made and encoded within ``step``, and its caller has the thread between two of them. ``end`` brings
    what an async generator awaits to its end.
    """

    def __init__(self, step: AbstractContextManager[Any], end: _End) -> None:
        self._step = step
        self._end = end
        self._source: Any = None
        self.count = 0
        self.nbytes = 0

    async def begin(self, invoke: Callable[[], Any]) -> None:
        """Call the method.

        Raises:
            DispatchError: it does not yield.
        """
        with self._step:
            source = invoke()
            if isinstance(source, Awaitable):
                source = await self._end(source)
        if not isinstance(source, GENERATORS):
            raise DispatchError(
                f"its items were asked for, but it returned a {type(source).__name__}: call it without .stream(), or "
                "let the method yield"
            )
        self._source = source

    def __aiter__(self) -> Items:
        return self

    async def __anext__(self) -> Any:
        with self._step:
            item = await self._next()
            sent = None if item is _OVER else encoded(item)
        if item is _OVER:
            raise StopAsyncIteration
        self.count += 1
        self.nbytes += size_of(sent)
        return sent

    async def _next(self) -> Any:
        if isinstance(self._source, GeneratorType):
            return next(self._source, _OVER)
        try:
            return await self._end(self._source.__anext__())
        except StopAsyncIteration:
            return _OVER

    async def close(self) -> None:
        """Let the method clean up where it was left in the middle; what it raises then is its error."""
        if isinstance(self._source, GeneratorType):
            self._source.close()
        elif self._source is not None:
            await self._end(self._source.aclose())


def one_by_one(items: AsyncGenerator[Any]) -> Generator[Any]:
    """An async generator that has nothing to wait for, as a plain one; closing it closes the other."""
    try:
        while True:
            try:
                item = at_once(cast(Begun, items.__anext__()))
            except StopAsyncIteration:
                return
            yield item
    finally:
        at_once(cast(Begun, items.aclose()))


class Anew(AbstractContextManager[None]):
    """A context that can be entered again and again, each time one that ``make`` gives; not one within another."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        self._entered = self._make()
        self._entered.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        entered, self._entered = self._entered, None
        return None if entered is None else entered.__exit__(kind, error, trace)
