"""Name matching: which source tensor feeds which target tensor, by renames, fused names and ties.

A fused tensor holds several named tensors along a dimension, in sequence or interleaved. It is divided into its parts
for planning. A ``View`` maps rows of a part to rows of the fused tensor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from phalanx.errors import DeclarationError
from phalanx.weights.boxes import Box, LocalBox
from phalanx.weights.manifest import FLOATS, GroupManifest, LayoutFault, TensorLayout
from phalanx.wire.value import Dims

Rename = Mapping[str, str] | Callable[[str], str]
"""Source name to target name: exact names, patterns with ``*`` on both sides, or a function."""


class View(NamedTuple):
    """Position of a part in a fused tensor: (start in the fused tensor, start in the part, length) along ``dim``."""

    dim: int
    segments: tuple[tuple[int, int, int], ...]


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

    def names(self, fused: str) -> tuple[str, ...]:
        """Return the names of the parts of the tensor ``fused``; none if the rule does not apply."""
        components = fused.split(".")
        if self.name not in components:
            return ()
        at = components.index(self.name)
        return tuple(".".join((*components[:at], part, *components[at + 1 :])) for part in self.parts)


@lru_cache(1024)
def _part_views(dim: int, groups: int, rows: int, sizes: tuple[int | None, ...]) -> tuple[View, ...] | None:
    """Return the views of the parts of a fused tensor of ``rows``; None if ``sizes`` do not add up to it."""
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes) or sum(known) != rows or any(size % groups for size in known):
        return None
    steps = [size // groups for size in known]
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
"""The rules of serving engines. They need no sizes of the model and therefore always apply."""


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


class Pair(NamedTuple):
    """A tensor's name on both sides."""

    source: str
    target: str


class NameMapping(NamedTuple):
    """A source layout and a target layout with matched tensors. A view of None is the complete tensor."""

    source: TensorLayout
    target: TensorLayout
    source_view: View | None
    target_view: View | None


class NameMatch:
    """Matches of target names with source tensors. Names that have no match are added to ``faults``.

    Attributes:
        mappings: pairs of names by mapping.
        copies: (target name, its twin) that are tied at the source and have two storages at the target. The tensor
            is sent once and copied there.
        surplus: source names that no target takes.
    """

    def __init__(
        self,
        source: GroupManifest,
        target: GroupManifest,
        rename: Rename | None,
        rules: tuple[Fused, ...],
        faults: list[LayoutFault],
    ) -> None:
        self._source, self._target, self._rules, self._faults = source, target, rules, faults
        self.mappings: dict[NameMapping, list[Pair]] = defaultdict(list)
        self.copies: list[tuple[str, str]] = []
        #: Source name of the storage, by the target's name for it.
        self._named = self._renamed(renamer(rename))
        #: Fused tensor, rule and place of each name that exists only inside a fused source tensor.
        self._parts = {
            part: (name, rule, place)
            for name in self._named
            if name not in target.layouts
            for rule in rules
            for place, part in enumerate(rule.names(name))
        }
        self._match_all()
        used = {pair.source for pairs in self.mappings.values() for pair in pairs}
        self.surplus = [name for name in source.layouts if name not in used]

    def _renamed(self, as_target: Callable[[str], str]) -> dict[str, str]:
        renamed: dict[str, str] = {}
        layouts, ties = self._source.layouts, self._source.ties
        for alias in dict.fromkeys((*layouts, *ties)):
            new = as_target(alias)
            if new in renamed:
                found = f"{renamed[new]} and {alias}, both renamed"
                self._faults.append(LayoutFault(new, "one source", found, "source"))
            renamed[new] = alias if alias in layouts else ties[alias]
        return renamed

    def _match_all(self) -> None:
        twins: dict[str, list[str]] = defaultdict(list)
        for alias, name in self._target.ties.items():
            twins[name].append(alias)
        first: dict[tuple[str, TensorLayout], str] = {}
        for name, layout in self._target.layouts.items():
            # the name, or a name of the same storage
            known = [other for other in (name, *twins[name]) if other in self._named]
            origins = list(dict.fromkeys(self._named[other] for other in known))
            if len(origins) > 1:
                wanted = f"one source: {' and '.join(known[1:])} is the same storage at the target"
                self._faults.append(LayoutFault(name, wanted, " and ".join(origins), "source"))
            if not known and name not in self._parts:
                self._match_fused(name, layout)
            elif not known:
                self._feed(name, name, None)
            elif (twin := first.setdefault((origins[0], layout), name)) == name:
                self._feed(known[0], name, None)
            else:
                self.copies.append((twin, name))

    def _match_fused(self, name: str, layout: TensorLayout) -> None:
        """Map the parts of the source that make up the fused tensor ``name``."""
        for rule in self._rules:
            names = rule.names(name)
            if names and all(other in self._named or other in self._parts for other in names):
                found = map(self._find, names)
                sizes = [_shape_seen(*one[1:])[rule.dim] if one else None for one in found]
                for other, view in zip(names, self._views(name, rule, layout, sizes, "target"), strict=False):
                    self._feed(other, name, view)
                return
        close = next((n for n in self._named if n.rpartition(".")[2] == name.rpartition(".")[2]), None)
        text = "no such name at the source" + (f" (it has {close}, for example)" if close else "")
        self._faults.append(LayoutFault(name, str(layout), text, f"target {layout.holder_names}"))

    def _feed(self, part: str, name: str, target_view: View | None) -> None:
        """Map ``part`` of the source to ``name``, or to its part under ``target_view``."""
        found = self._find(part)
        if found is None:
            return
        origin, source, view = found
        target = self._target.layouts[name]
        shape, wanted = _shape_seen(source, view), _shape_seen(target, target_view)
        if shape == wanted and (source.dtype == target.dtype or {source.dtype, target.dtype} <= {*FLOATS}):
            self.mappings[NameMapping(source, target, view, target_view)].append(Pair(origin, name))
            return
        text = f"{source.dtype} {list(shape)}" + (f" as {origin}" if origin != name else "")
        fault = LayoutFault(name, f"{target.dtype} {list(wanted)}", text, f"target {target.holder_names}")
        self._faults.append(fault)

    def _find(self, part: str) -> tuple[str, TensorLayout, View | None] | None:
        """Return name, layout and view of the source tensor with ``part``; None, and add a fault, if none fits."""
        if part in self._named:
            origin = self._named[part]
            return origin, self._source.layouts[origin], None
        fused, rule, place = self._parts[part]
        origin, wanted = self._named[fused], self._target.layouts
        layout = self._source.layouts[origin]
        sizes = [wanted[name].shape[rule.dim] if name in wanted else None for name in rule.names(fused)]
        views = self._views(fused, rule, layout, sizes, "source")
        return (origin, layout, views[place]) if views else None

    def _views(
        self, name: str, rule: Fused, layout: TensorLayout, sizes: Sequence[int | None], side: str
    ) -> tuple[View, ...]:
        """Return the views of the parts of a fused tensor; none, and add a fault, if the sizes do not fit.

        Args:
            sizes: sizes of the parts on the other side, used if the rule's shares do not determine them.
        """
        rows, shares = layout.shape[rule.dim], rule.shares
        if shares is not None and rows % sum(shares) == 0:
            sizes = [rows // sum(shares) * share for share in shares]
        views = _part_views(rule.dim, rule.groups, rows, tuple(sizes))
        if views is not None:
            return views
        found = "parts of unknown size" if None in sizes else " + ".join(map(str, sizes))
        groups = f", in {rule.groups} groups" if rule.groups > 1 else ""
        wanted = f"{rows} along dim {rule.dim} from {', '.join(rule.names(name))}{groups}"
        self._faults.append(LayoutFault(name, wanted, found, side))
        return ()


def _shape_seen(layout: TensorLayout, view: View | None) -> Dims:
    shape = layout.shape
    if view is None:
        return shape
    return (*shape[: view.dim], sum(length for *_, length in view.segments), *shape[view.dim + 1 :])


def renamer(rename: Rename | None) -> Callable[[str], str]:
    """Return a function from source names to target names.

    Raises:
        DeclarationError: if ``rename`` is neither a mapping of strings nor a function, or a pattern has more ``*`` in
            the new name than in the old name. The returned function raises it if ``rename`` does not return a string.
    """
    if rename is None:
        return lambda name: name
    if callable(rename):
        return lambda name: _checked_name(rename, name)
    if not isinstance(rename, Mapping):
        raise DeclarationError(
            f"rename={rename!r}: pass a mapping of source names to target names, or a function"
        )
    patterns: list[tuple[re.Pattern[str], list[str]]] = []
    for old, new in rename.items():
        if not isinstance(old, str) or not isinstance(new, str) or new.count("*") > old.count("*"):
            raise DeclarationError(
                f"rename={{{old!r}: {new!r}}}: expected texts, with no more * in the new name than in the old one: "
                "each * is replaced by the text that it matched, in order"
            )
        if "*" in old:
            patterns.append((re.compile(re.escape(old).replace(r"\*", "(.*)")), new.split("*")))

    def renamed(name: str) -> str:
        if name in rename:
            return rename[name]
        for pattern, (first, *rest) in patterns:
            if match := pattern.fullmatch(name):
                # Not strict: the new name may leave out texts that the pattern matched.
                return first + "".join(map("".join, zip(match.groups(), rest)))  # noqa: B905
        return name

    return renamed


def _checked_name(rename: Callable[[str], str], name: str) -> str:
    new = rename(name)
    if not isinstance(new, str):
        raise DeclarationError(
            f"rename({name!r}) returned {new!r}; expected the target's name, or the same name if it stays"
        )
    return new
