"""Fused tensors: a tensor that holds several named tensors along a dimension, in sequence or interleaved.

A fused tensor is divided into its parts for planning. A ``View`` maps rows of a part to rows of the fused tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from phalanx.errors import DeclarationError
from phalanx.weights.boxes import Box, LocalBox


class View(NamedTuple):
    """Position of a part in a fused tensor: (start in the fused tensor, start in the part, length) along ``dim``."""

    dim: int
    segments: tuple[tuple[int, int, int], ...]

    @property
    def length(self) -> int:
        """Size of the part along ``dim``."""
        return sum(length for _, _, length in self.segments)


@dataclass(frozen=True)
class Fused:
    """A rule: the component ``name`` of a tensor's name stands for ``parts``, in sequence along ``dim``.

    Args:
        name: a component between dots, such as ``"qkv_proj"``.
        parts: components that replace it in the names of the parts.
        dim: dimension along which the parts are fused.
        shares: relative sizes of the parts. None takes the sizes from the other side, which then must name the
            parts.
        groups: number of groups in the fused tensor. Each group has its share of every part (Megatron's
            ``linear_qkv`` has a group per query group). 1 means part after part.
    """

    name: str
    parts: tuple[str, ...]
    dim: int = 0
    shares: tuple[int, ...] | None = None
    groups: int = 1

    @classmethod
    def megatron_qkv(cls, *, heads: int, query_groups: int, name: str = "linear_qkv") -> Fused:
        """Return the rule of Megatron's ``linear_qkv``: queries, key and value of each query group.

        Args:
            heads: query heads of the complete model, ``num_attention_heads``.
            query_groups: key and value heads of the complete model, ``num_query_groups``; equal to ``heads`` without
                grouped queries.
            name: name of the module.

        Raises:
            DeclarationError: if the groups do not divide the heads.
        """
        if query_groups < 1 or heads < 1 or heads % query_groups:
            raise DeclarationError(
                f"px.weights.Fused.megatron_qkv(heads={heads}, query_groups={query_groups}): the groups have to divide "
                "the heads; pass num_attention_heads and num_query_groups of Megatron's configuration"
            )
        shares = (heads, query_groups, query_groups)
        return cls(name, ("q_proj", "k_proj", "v_proj"), shares=shares, groups=query_groups)

    @classmethod
    def megatron_glu(cls, name: str = "linear_fc1") -> Fused:
        """Return the rule of Megatron's ``linear_fc1`` of a gated MLP: gate, then up."""
        return cls(name, ("gate_proj", "up_proj"), shares=(1, 1))

    def names(self, fused: str) -> tuple[str, ...] | None:
        """Return the names of the parts of the tensor ``fused``; None if the rule does not apply."""
        components = fused.split(".")
        if self.name not in components:
            return None
        at = components.index(self.name)
        return tuple(".".join((*components[:at], part, *components[at + 1 :])) for part in self.parts)

    def sizes(self, rows: int) -> tuple[int, ...] | None:
        """Return the sizes of the parts of a fused tensor of ``rows``; None if the shares do not determine them."""
        if self.shares is None or rows % sum(self.shares):
            return None
        return tuple(rows // sum(self.shares) * share for share in self.shares)

    def views(self, sizes: Sequence[int]) -> tuple[View, ...] | None:
        """Return the views of parts of these sizes; None if the groups do not divide them."""
        return _views(self.dim, self.groups, tuple(sizes))


@lru_cache(1024)
def _views(dim: int, groups: int, sizes: tuple[int, ...]) -> tuple[View, ...] | None:
    if any(size % groups for size in sizes):
        return None
    steps = [size // groups for size in sizes]
    views: list[View] = []
    for part, step in enumerate(steps):
        before = sum(steps[:part])
        starts = ((group * sum(steps) + before, group * step, step) for group in range(groups))
        views.append(View(dim, tuple(starts)))
    return tuple(views)


BUILT_IN = (
    Fused("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    Fused("gate_up_proj", ("gate_proj", "up_proj"), shares=(1, 1)),
)
"""The rules of serving engines. They need no numbers of the model and therefore always apply."""


def seen_through(view: View | None, boxes: Sequence[LocalBox]) -> tuple[LocalBox, ...]:
    """Return boxes of a fused tensor as boxes of the part that ``view`` shows; unchanged without a view."""
    if view is None:
        return tuple(boxes)
    dim = view.dim
    seen: list[LocalBox] = []
    for box, at in boxes:
        begin, end = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
        for start, inside, length in view.segments:
            low, high = max(begin, start), min(end, start + length)
            if high > low:
                offsets = (*box.offsets[:dim], inside + low - start, *box.offsets[dim + 1 :])
                sizes = (*box.sizes[:dim], high - low, *box.sizes[dim + 1 :])
                place = (*at[:dim], at[dim] + low - begin, *at[dim + 1 :])
                seen.append(LocalBox(Box(offsets, sizes), place))
    return tuple(seen)
