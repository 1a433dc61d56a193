"""Enumerations that users extend, as ``verl.utils.py_functional`` has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar


class DynamicEnumMeta(type):
    """Iteration, ``in`` and ``[name]`` over the members of a ``DynamicEnum``."""

    _registry: dict[str, Any]

    def __iter__(cls) -> Iterator[Any]:
        return iter(list(cls._registry.values()))

    def __contains__(cls, item: object) -> bool:
        return item in cls._registry if isinstance(item, str) else item in cls._registry.values()

    def __getitem__(cls, name: str) -> Any:
        return cls._registry[name]

    def names(cls) -> list[str]:
        """Return the members' names, in order of registration."""
        return list(cls._registry)


class DynamicEnum(metaclass=DynamicEnumMeta):
    """An enumeration to which members can be added. Members are class attributes and are pickled by name."""

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
        """Add a member and return it.

        Raises:
            ValueError: if the name is taken.
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
        """Remove a member and return it. Its value is not used again.

        Raises:
            KeyError: if no member has that name.
        """
        member = cls._registry.pop(name.upper())
        delattr(cls, name.upper())
        return member
