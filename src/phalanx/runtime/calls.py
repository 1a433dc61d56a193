"""Methods of a group as callable objects: bare call, ``.submit()``, ``.options()``, ``.stream()``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from phalanx.declare.spec import MethodSpec
from phalanx.dispatch.plan import CallPlan
from phalanx.errors import DispatchError
from phalanx.runtime.future import CallFuture

if TYPE_CHECKING:
    from phalanx.runtime.views import GroupView

P = ParamSpec("P")
R = TypeVar("R")
Planner = Callable[[tuple[Any, ...], dict[str, Any]], CallPlan]


@dataclass(frozen=True)
class CallOptions:
    """Options of one call, which never mix with the method's own arguments."""

    timeout: float | None = None


class BoundMethod(Generic[P, R]):
    """One method of a group or of a view of it.

    Called bare, it waits as declared and gives the result (a ``CallFuture`` where it was registered with
    ``blocking=False``).
    """

    def __init__(
        self, view: GroupView, spec: MethodSpec, planner: Planner, options: CallOptions | None = None
    ) -> None:
        self._view = view
        self._spec = spec
        self._planner = planner
        self._options = options or CallOptions()
        self.__name__ = spec.name
        self.__qualname__ = f"{view.name}.{spec.name}"
        self.__doc__ = spec.doc
        if spec.signature is not None:
            self.__signature__ = spec.signature

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self._spec.blocking:
            return self.submit(*args, **kwargs)  # pyright: ignore[reportReturnType]
        return self._send(args, kwargs, describe=False).result()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> CallFuture[R]:
        """Send the call and return at once with its future."""
        return self._send(args, kwargs, describe=True)

    def _send(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, describe: bool) -> CallFuture[R]:
        plan = self._planner(args, kwargs)
        describe = describe and plan.gather.how == "rows"
        view = self._view
        return view.core.send(plan, self._spec, view.role, self._options.timeout, view, describe=describe)

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[tuple[int, Any]]:
        """Send the call; give ``(rank, output)`` of each rank as it finishes."""
        return self.submit(*args, **kwargs).stream()

    def options(self, *, timeout: float | None = None) -> BoundMethod[P, R]:
        """The same method with options for the next call.

        Args:
            timeout: deadline of the call in seconds. A call that misses it is stopped, and the group is broken.
        """
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0
        ):
            raise DispatchError(
                f"{self.__qualname__}.options(timeout={timeout!r}): expected seconds, more than 0"
            )
        return BoundMethod(self._view, self._spec, self._planner, replace(self._options, timeout=timeout))

    @property
    def spec(self) -> MethodSpec:
        """How the method was registered."""
        return self._spec

    def __repr__(self) -> str:
        signature = self._spec.signature or inspect.Signature()
        return f"<{self.__qualname__}{signature} by {self._spec.mode!r}>"
