"""Fused tensors: one that holds several named ones along a dim, whole after whole or interleaved.

A fused name is split into its parts for planning; a :class:`View` says where rows of a part lie in the fused tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from phalanx.errors import DeclarationError
from phalanx.weights.planning.boxes import Box, Patch

__all__ = ["BUILT_IN", "GATE_UP", "QKV", "Fused", "View", "seen_through"]


class View(NamedTuple):
    """Where a part lies in a fused tensor: (start in the fused one, start in the part, length) along ``dim``."""

    dim: int
    segments: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Fused:
    """A rule: the component ``name`` of a tensor's name stands for ``parts``, one after another along ``dim``.

    Args:
        name: a component between dots, such as ``"qkv_proj"``.
        parts: what stands in its place in the names of the parts.
        dim: along which they are fused.
        shares: relative sizes of the parts; None takes the sizes from the other side, which then must name the
            parts.
        groups: the fused tensor is this many groups, each with its share of every part (Megatron's ``linear_qkv``:
            one per query group); 1 is part after part.
    """

    name: str
    parts: tuple[str, ...]
    dim: int = 0
    shares: tuple[int, ...] | None = None
    groups: int = 1

    @classmethod
    def megatron_qkv(cls, *, heads: int, query_groups: int, name: str = "linear_qkv") -> Fused:
        """Megatron's ``linear_qkv``: for each query group its queries, then its key and its value.

        Args:
            heads: heads of queries of the whole model, ``num_attention_heads``.
            query_groups: heads of keys and values of the whole model, ``num_query_groups``; without grouped queries
                as many as ``heads``.
            name: of the module.

        Raises:
            DeclarationError: the groups do not divide the heads.
        """
        if query_groups < 1 or heads < 1 or heads % query_groups:
            raise DeclarationError(
                f"px.weights.Fused.megatron_qkv(heads={heads}, query_groups={query_groups}): the groups "
                f"have to divide the "
                "heads; give num_attention_heads and num_query_groups of Megatron's configuration"
            )
        shares = (heads, query_groups, query_groups)
        return cls(name, ("q_proj", "k_proj", "v_proj"), shares=shares, groups=query_groups)

    @classmethod
    def megatron_glu(cls, name: str = "linear_fc1") -> Fused:
        """Megatron's ``linear_fc1`` of a gated MLP: gate, then up."""
        return cls(name, ("gate_proj", "up_proj"), shares=(1, 1))

    def names(self, fused: str) -> tuple[str, ...] | None:
        """The parts' names of the tensor ``fused``; None where the rule is not about it."""
        components = fused.split(".")
        if self.name not in components:
            return None
        at = components.index(self.name)
        return tuple(".".join((*components[:at], part, *components[at + 1 :])) for part in self.parts)

    def sizes(self, rows: int) -> tuple[int, ...] | None:
        """How long each part is of a fused tensor of ``rows``, by the shares; None where they do not tell."""
        if self.shares is None or rows % sum(self.shares):
            return None
        return tuple(rows // sum(self.shares) * share for share in self.shares)

    def views(self, sizes: Sequence[int]) -> tuple[View, ...] | None:
        """Where the parts lie, given how long each is; None where the groups do not divide them."""
        return _views(self.dim, self.groups, tuple(sizes))


@lru_cache(1024)
def _views(dim: int, groups: int, sizes: tuple[int, ...]) -> tuple[View, ...] | None:
    if any(size % groups for size in sizes):
        return None
    steps = [size // groups for size in sizes]
    found: list[View] = []
    for part, step in enumerate(steps):
        before = sum(steps[:part])
        starts = ((group * sum(steps) + before, group * step, step) for group in range(groups))
        found.append(View(dim, tuple(starts)))
    return tuple(found)


QKV = Fused("qkv_proj", ("q_proj", "k_proj", "v_proj"))
"""Queries, keys and values one after another, as serving engines have them."""

GATE_UP = Fused("gate_up_proj", ("gate_proj", "up_proj"), shares=(1, 1))
"""The two projections of a gated MLP one after the other."""

BUILT_IN = (QKV, GATE_UP)
"""The rules that need no numbers and therefore always hold."""


def seen_through(view: View | None, patches: Sequence[Patch]) -> tuple[Patch, ...]:
    """Boxes of a fused tensor as boxes of the part that ``view`` shows; as they are where there is none."""
    if view is None:
        return tuple(patches)
    dim = view.dim
    found: list[Patch] = []
    for box, at in patches:
        begin, end = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
        for start, inside, length in view.segments:
            low, high = max(begin, start), min(end, start + length)
            if high > low:
                offsets = (*box.offsets[:dim], inside + low - start, *box.offsets[dim + 1 :])
                sizes = (*box.sizes[:dim], high - low, *box.sizes[dim + 1 :])
                place = (*at[:dim], at[dim] + low - begin, *at[dim + 1 :])
                found.append(Patch(Box(offsets, sizes), place))
    return tuple(found)
