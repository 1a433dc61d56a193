"""Values that go through Ray by themselves, not in a message: plain arguments and results of an actor's methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray._private import worker as ray_worker
from ray.actor import ActorHandle

from phalanx.wire.codec import encode
from phalanx.wire.value import Value

DEAD = 4
"""State of an actor: ray.core.generated.gcs_pb2.ActorTableData.DEAD, as ``ActorHandle._get_local_state`` gives it."""
_AS_THEY_ARE = (type(None), bool, int, float, str, bytes, ray.ObjectRef, ActorHandle)


def _itself(value: Value) -> Value:
    return value


#: Left for Ray to pickle, because it counts who holds them.
_RAYS_OWN = dict.fromkeys((ray.ObjectRef, ActorHandle), _itself)


def portable(value: Value) -> Value:
    """``value`` as it should be given to Ray: tensors out of band, a view without the rest of its storage.

    What comes out at the other end is the value itself, in memory of its own.
    """
    return value if type(value) in _AS_THEY_ARE else encode(value, hoist=_RAYS_OWN)


def _core() -> Any:
    worker: Any = ray_worker.global_worker
    return worker.core_worker


def state_of_actors() -> Callable[[Any], int | None]:
    """What tells the state of an actor by its id, as this process knows it.

    What a handle says of itself is the same, and takes seven times as long; there are thousands to look at, each
    quarter of a second.
    """
    return _core().get_local_actor_state


def address_of(ref: Any) -> tuple[bytes, bytes, bytes]:
    """An object's id, its owner and what that knew of it, for :func:`reference_to`.

    Pickling a reference outside of Ray's own messages would keep its object for as long as this process lives.
    """
    _, owner, status = _core().serialize_object_ref(ref)
    return ref.binary(), owner, status


def reference_to(address: tuple[bytes, bytes, bytes]) -> Any:
    """A reference to an object of another process, which that has to keep until it was read."""
    binary, owner, status = address
    ref = ray.ObjectRef(binary, owner)  # pyright: ignore[reportArgumentType]
    _core().deserialize_and_register_object_ref(binary, ray.ObjectRef.nil(), owner, status)
    return ref
