"""``meta_info`` of several batches, together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.compat.verl._proto.equality import same_value
from phalanx.compat.verl._proto.errors import require
from phalanx.compat.verl.utils.py_functional import list_of_dict_to_dict_of_list

_METRICS = "metrics"


def join_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All keys of all; ``metrics``, a dict or a list of dicts in each, as one dict of lists.

    Raises:
        Refused: a key has several values, or later metrics have a key that the first lack.
    """
    joined: dict[str, Any] = {}
    metrics: list[dict[str, Any]] = []
    for meta in metas:
        for key, value in meta.items():
            if key == _METRICS:
                metrics += value if isinstance(value, list) else [] if value is None else [value]
                continue
            same = key not in joined or same_value(joined[key], value)
            require(
                same,
                f"Conflicting values for meta_info key '{key}': {joined.get(key)!r} and {value!r}; batches that are "
                "to be joined need the same",
            )
            joined[key] = value
    if metrics:
        joined[_METRICS] = list_of_dict_to_dict_of_list(metrics)
    return joined


def require_union_of_meta(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Refuse where both have a key with other values."""
    for key in other:
        same = key not in one or same_value(one[key], other[key])
        require(
            same,
            f"{key} in meta_dict1 and meta_dict2 are not the same object: meta_info[{key!r}] is {one.get(key)!r} on "
            f"one side of a union and {other[key]!r} on the other",
        )
