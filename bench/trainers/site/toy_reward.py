"""A reward that differs between answers and can be learned."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> float:
    """Return the fraction of the answer's characters that come before `P` in ASCII."""
    return sum(ord(character) < 80 for character in solution_str) / max(len(solution_str), 1)
