"""Values that Ray transports outside of messages: plain arguments and results of an actor's methods."""

from __future__ import annotations

import ray
from ray.actor import ActorHandle

from phalanx.wire.codec import encode
from phalanx.wire.value import Value

_AS_THEY_ARE = (type(None), bool, int, float, str, bytes, ray.ObjectRef, ActorHandle)


def _itself(value: Value) -> Value:
    return value


#: Left for Ray to pickle, because it counts who holds them.
_RAYS_OWN = dict.fromkeys((ray.ObjectRef, ActorHandle), _itself)


def portable(value: Value) -> Value:
    """Return ``value`` encoded for Ray: tensors out of band, a view without the rest of its storage.

    The receiver gets the value itself, in its own memory.
    """
    return value if type(value) in _AS_THEY_ARE else encode(value, hoist=_RAYS_OWN)
