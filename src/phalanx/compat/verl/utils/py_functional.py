"""Small functions over dicts, an environment variable for a while, and enumerations that grow."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

from phalanx.compat.verl._proto.equality import same_value
from phalanx.compat.verl._proto.errors import require

__all__ = [
    "DynamicEnum",
    "DynamicEnumMeta",
    "NestedNamespace",
    "append_to_dict",
    "convert_to_regular_types",
    "list_of_dict_to_dict_of_list",
    "rename_dict",
    "temp_env_var",
    "union_two_dict",
]


def union_two_dict(dict1: dict[Any, Any], dict2: Mapping[Any, Any]) -> dict[Any, Any]:
    """``dict1``, changed in place: with the entries of ``dict2``.

    Raises:
        Refused: both have a key with other values; nothing is changed then.
    """
    for key, value in dict2.items():
        same = key not in dict1 or same_value(dict1[key], value) or _equal(dict1[key], value)
        require(
            same,
            f"{key} in meta_dict1 and meta_dict2 are not the same object: it is {dict1.get(key)!r} on one side of a "
            f"union and {value!r} on the other",
        )
    dict1.update(dict2)
    return dict1


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # arrays, or tensors, of several elements
        return False


def append_to_dict(data: dict[str, Any], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Append each value of ``new_data`` to the list in ``data`` under the same key (after ``prefix``).

    A list is appended element by element. Lists are made where there are none.
    """
    for key, value in new_data.items():
        held = data.setdefault(f"{prefix}{key}", [])
        require(
            isinstance(held, list),
            f"data[{prefix + key!r}] is a {type(held).__name__}: expected a list to append to",
        )
        if isinstance(value, list):
            held.extend(value)
        else:
            held.append(value)


def rename_dict(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The same values under keys with ``prefix`` before."""
    return {f"{prefix}{key}": value for key, value in data.items()}


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """For each key of the first dict, the values of all dicts that have it.

    Raises:
        Refused: a later dict has a key that the first one lacks.
    """
    found: dict[str, list[Any]] = {key: [] for key in list_of_dict[0]} if list_of_dict else {}
    for held in list_of_dict:
        for key, value in held.items():
            require(
                key in found,
                f"Key '{key}' is not present in the keys of the first dictionary in the list. It has {list(found)}",
            )
            found[key].append(value)
    return found


@contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """An environment variable for the time of a block; afterwards it is as before."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


def convert_to_regular_types(obj: Any) -> Any:
    """OmegaConf's dicts and lists, at any depth, as those of Python; other values as they are."""
    if type(obj).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        return OmegaConf.to_container(obj)
    if isinstance(obj, list | tuple):
        return [convert_to_regular_types(value) for value in obj]
    if isinstance(obj, dict):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    return obj


class NestedNamespace(SimpleNamespace):
    """The entries of a dict as attributes, dicts in it likewise."""

    def __init__(self, dictionary: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for key, value in dictionary.items():
            setattr(self, key, NestedNamespace(value) if isinstance(value, dict) else value)


class DynamicEnumMeta(type):
    """Iteration, ``in`` and ``[name]`` over the members of a `DynamicEnum`."""

    _registry: dict[str, Any]

    def __iter__(cls) -> Iterator[Any]:
        return iter(list(cls._registry.values()))

    def __contains__(cls, item: object) -> bool:
        if isinstance(item, str):
            return item in cls._registry
        return any(item is member for member in cls._registry.values())

    def __getitem__(cls, name: str) -> Any:
        return cls._registry[name]

    def names(cls) -> list[str]:
        """Names of the members, in the order in which they were registered."""
        return list(cls._registry)

    def values(cls) -> list[Any]:
        """The members, in the order in which they were registered."""
        return list(cls._registry.values())


class DynamicEnum(metaclass=DynamicEnumMeta):
    """An enumeration to which members can be added: ``class Colour(DynamicEnum): _registry = {}; _next_value = 0``.

    Members are attributes of the class, found by name in any case of letters, and pickled by name.
    """

    _registry: ClassVar[dict[str, Any]] = {}
    _next_value: ClassVar[int] = 0

    def __init__(self, name: str, value: int) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return getattr, (type(self), self.name)

    @classmethod
    def register(cls, name: str) -> Any:
        """A new member.

        Raises:
            ValueError: there is one of that name.
        """
        key = name.upper()
        if key in cls._registry:
            raise ValueError(f"{key} already registered in {cls.__name__}; its members are {cls.names()}")
        member = cls(key, cls._next_value)
        cls._registry[key] = member
        setattr(cls, key, member)
        cls._next_value += 1
        return member

    @classmethod
    def remove(cls, name: str) -> Any:
        """Take a member away, and give it back; its value is not used again.

        Raises:
            KeyError: there is none of that name.
        """
        member = cls._registry.pop(name.upper())
        delattr(cls, name.upper())
        return member

    @classmethod
    def from_name(cls, name: str) -> Any:
        """The member of that name, or None."""
        return cls._registry.get(name.upper())
