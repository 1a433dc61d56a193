"""``px.adapt``: a group gets as many ranks as its policy decides."""

from __future__ import annotations

import weakref
from collections.abc import Sized
from typing import Protocol, cast

from phalanx.errors import DeclarationError
from phalanx.runtime.api.group import WorkerGroup
from phalanx.runtime.api.resize import engine_ranks, resize
from phalanx.runtime.groups.core import GroupCore
from phalanx.runtime.life.elastic import Elastic, Load, Wish


class Queue(Protocol):
    """Whatever work waits in, such as a ``queue.Queue``."""

    def qsize(self) -> int: ...


_wishes: weakref.WeakKeyDictionary[GroupCore, tuple[Elastic, Wish | None]] = weakref.WeakKeyDictionary()


def adapt(
    group: WorkerGroup, elastic: Elastic, queue: Queue | Sized | int = 0, *, timeout: float | None = None
) -> int:
    """Look at what waits for a group, decide, and resize the group; gives how many ranks it has then, or engines.

    Call it wherever the driver comes by, once a step or once a second; where nothing is to be done it costs some
    microseconds. It waits for ranks that join or leave, so that a loop which must go on calls it on a thread.

    Args:
        group: of a class with ``independent = True``.
        elastic: the policy.
        queue: where work waits that is no call yet: a ``px.Channel``, what has ``qsize()`` or a length, or a number.
        timeout: as of ``px.resize``.

    Raises:
        As ``px.resize``; DeclarationError: no policy, or nothing whose items can be counted.
    """
    if not isinstance(elastic, Elastic):
        raise DeclarationError(f"px.adapt(..., {elastic!r}): expected px.Elastic(min, max, decide)")
    core, queued = group.core, _queued(queue)
    block = engine_ranks(core)
    size_now = core.world_size // block
    load = Load(queued, sum(core.loads().values()) // block, size_now, core.transport.now())
    policy, wish = _wishes.get(core, (elastic, None))
    size, wish = elastic.next_size(load, wish if policy == elastic else None)
    _wishes[core] = elastic, wish
    if size == size_now:
        return size
    resize(group, size, timeout=timeout)
    return core.world_size // block


def _queued(queue: Queue | Sized | int) -> int:
    if isinstance(queue, int) and not isinstance(queue, bool):
        return queue
    count = getattr(queue, "qsize", None)
    if callable(count):
        return cast(int, count())
    if isinstance(queue, Sized):
        return len(queue)
    raise DeclarationError(
        f"px.adapt(..., queue={queue!r}): expected a px.Channel, what has qsize() or a length, or a number"
    )
