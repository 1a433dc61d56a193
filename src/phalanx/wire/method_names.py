"""What a method is called where it is shown."""

from __future__ import annotations


def full_name(role: str, method: str) -> str:
    """Role and method, ``actor.update``; "" is the role of a group of one class. A library call has a title."""
    if method.startswith("__phalanx_host__ "):
        return method.partition(" ")[2]
    return f"{role}.{method}" if role else method
