"""Name matching: which source tensor feeds which target tensor, by renames, fused names, ties and casts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx.errors import DeclarationError
from phalanx.weights.fused import Fused, View
from phalanx.weights.manifest import FLOATS
from phalanx.weights.shard_index import LayoutFault, ShardIndex, TensorLayout

Rename = Mapping[str, str] | Callable[[str], str]
"""Source name to target name: exact names, patterns with ``*`` on both sides, or a function."""


class NameMapping(NamedTuple):
    """Tensors of a source layout that feed tensors of a target layout. None as a view is the complete tensor."""

    source: int
    target: int
    source_view: View | None = None
    target_view: View | None = None


class _Part(NamedTuple):
    """A tensor that exists only inside a fused tensor."""

    fused: str
    rule: Fused
    place: int


@dataclass
class NameMatch:
    """Pairs (source name, target name) by mapping, and findings for the report.

    ``copies`` are (target name, its twin) that are tied at the source and have two storages at the target. The tensor
    is sent once and copied there. ``surplus`` are source names that no target takes.
    """

    mappings: dict[NameMapping, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    copies: list[tuple[str, str]] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)
    ties: list[tuple[str, str]] = field(default_factory=list)


class NameMatcher:
    """Finds a source for every name of ``target``. Names without a source or of another shape go to ``faults``."""

    def __init__(
        self,
        source: ShardIndex,
        target: ShardIndex,
        rename: Rename | None,
        rules: tuple[Fused, ...],
        faults: list[LayoutFault],
    ) -> None:
        self.source, self.target, self.rules, self.faults = source, target, rules, faults
        self.match = NameMatch()
        self.named = self._renamed(rename)
        self.parts = dict(self._source_parts())
        self.used: set[str] = set()
        self.twins: dict[str, list[str]] = defaultdict(list)
        for alias, name in target.ties.items():
            self.twins[name].append(alias)

    def run(self) -> NameMatch:
        """Match all names of the target."""
        first: dict[tuple[str, int], str] = {}
        for name, layout in self.target.layouts.items():
            origin = self._direct_source(name)
            if origin is None:
                self._match_fused(name, layout)
            elif (twin := first.setdefault((origin, layout), name)) != name:
                self.match.copies.append((twin, name))
            else:
                self._feed(origin, name, layout, None, None)
        self._check_layouts()
        self.match.surplus = [name for name in self.source.layouts if name not in self.used]
        self.match.ties = sorted(self.target.ties.items())
        return self.match

    def _feed(
        self, origin: str, name: str, layout: int, source_view: View | None, target_view: View | None
    ) -> None:
        self.used.add(origin)
        mapping = NameMapping(self.source.layouts[origin], layout, source_view, target_view)
        self.match.mappings[mapping].append((origin, name))

    def _renamed(self, rename: Rename | None) -> dict[str, str]:
        """Return the source name of the storage of each name that the target may ask for."""
        as_target = renamer(rename)
        renamed: dict[str, str] = {}
        layouts = self.source.layouts
        aliases = ((alias, name) for alias, name in self.source.ties.items() if alias not in layouts)
        for alias, name in (*((name, name) for name in layouts), *aliases):
            new = as_target(alias)
            if new in renamed:
                found = f"{renamed[new]} and {alias}, both renamed"
                self.faults.append(LayoutFault(new, "one source", found, "source"))
            renamed[new] = name
        return renamed

    def _source_parts(self) -> Iterator[tuple[str, _Part]]:
        for name in self.named:
            if name in self.target.layouts:
                continue
            for rule in self.rules:
                if rule.name in name and (parts := rule.names(name)):
                    yield from ((part, _Part(name, rule, index)) for index, part in enumerate(parts))

    def _direct_source(self, name: str) -> str | None:
        """Return the source of ``name``, or of a name that has the same storage at the target."""
        origin = self.named.get(name)
        for twin in self.twins.get(name, ()):
            other = self.named.get(twin)
            if origin is not None and other is not None and origin != other:
                wanted = f"one source: {twin} is the same storage at the target"
                self.faults.append(LayoutFault(name, wanted, f"{origin} and {other}", "source"))
            origin = origin or other
        return origin

    def _match_fused(self, name: str, layout: int) -> None:
        part = self.parts.get(name)
        if part is not None:
            self._feed_part(name, layout, part, None)
            return
        for rule in self.rules:
            names = rule.names(name) if rule.name in name else None
            if names and all(other in self.named or other in self.parts for other in names):
                self._split_target(name, layout, rule, names)
                return
        wanted = self.target.table[layout]
        close = next((n for n in self.named if n.rpartition(".")[2] == name.rpartition(".")[2]), None)
        found = "no such name at the source" + (f" (it has, for one, {close})" if close else "")
        self.faults.append(LayoutFault(name, str(wanted), found, f"target {_ranks(wanted)}"))

    def _split_target(self, name: str, layout: int, rule: Fused, names: Sequence[str]) -> None:
        rows = self.target.table[layout].shape[rule.dim]
        sizes = rule.sizes(rows) or tuple(self._length(other, rule.dim) for other in names)
        views = rule.views(sizes) if sum(sizes) == rows else None
        if views is None:
            self._refuse_sizes(name, rule, rows, names, sizes, "target")
            return
        for other, view in zip(names, views, strict=True):
            if other in self.named:
                self._feed(self.named[other], name, layout, None, view)
            else:
                self._feed_part(name, layout, self.parts[other], view)

    def _feed_part(self, name: str, layout: int, part: _Part, view: View | None) -> None:
        """Feed ``name``, or its part under ``view``, from a fused source tensor."""
        source_view = self._view(part)
        if source_view is not None:
            self._feed(self.named[part.fused], name, layout, source_view, view)

    def _view(self, part: _Part) -> View | None:
        names = part.rule.names(part.fused) or ()
        rows = self.source.layout(self.named[part.fused]).shape[part.rule.dim]
        sizes = part.rule.sizes(rows)
        if sizes is None and all(name in self.target.layouts for name in names):
            sizes = tuple(self.target.layout(name).shape[part.rule.dim] for name in names)
        views = part.rule.views(sizes) if sizes is not None and sum(sizes) == rows else None
        if views is None:
            self.used.add(self.named[part.fused])
            self._refuse_sizes(part.fused, part.rule, rows, names, sizes or (), "source")
            return None
        return views[part.place]

    def _length(self, part: str, dim: int) -> int:
        if part in self.named:
            return self.source.layout(self.named[part]).shape[dim]
        view = self._view(self.parts[part])
        return view.length if view else 0

    def _refuse_sizes(
        self, name: str, rule: Fused, rows: int, names: Sequence[str], sizes: Sequence[int], side: str
    ) -> None:
        known = " + ".join(str(size) for size in sizes) or "parts of unknown size"
        groups = f", in {rule.groups} groups" if rule.groups > 1 else ""
        wanted = f"{rows} along dim {rule.dim} from {', '.join(names)}{groups}"
        self.faults.append(LayoutFault(name, wanted, known, side))

    def _check_layouts(self) -> None:
        """Check once per mapping that types can be cast and shapes are equal."""
        for mapping, pairs in list(self.match.mappings.items()):
            source, target = self.source.table[mapping.source], self.target.table[mapping.target]
            shape = _shape_seen(source.shape, mapping.source_view)
            wanted = _shape_seen(target.shape, mapping.target_view)
            castable = source.dtype == target.dtype or {source.dtype, target.dtype} <= FLOATS.keys()
            if shape == wanted and castable:
                continue
            del self.match.mappings[mapping]
            for origin, name in pairs:
                found = f"{source.dtype} {list(shape)}" + (f" as {origin}" if origin != name else "")
                where = f"target {_ranks(target)}"
                self.faults.append(LayoutFault(name, f"{target.dtype} {list(wanted)}", found, where))


def _shape_seen(shape: tuple[int, ...], view: View | None) -> tuple[int, ...]:
    return shape if view is None else (*shape[: view.dim], view.length, *shape[view.dim + 1 :])


def _ranks(layout: TensorLayout) -> str:
    ranks = sorted(rank for rank, _ in layout.holders)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:4]))}{', ...' if len(ranks) > 4 else ''}"


def renamer(rename: Rename | None) -> Callable[[str], str]:
    """Return a function from source names to target names.

    Raises:
        DeclarationError: if ``rename`` is no mapping of texts and no function, or a pattern has more ``*`` in the new
            name than in the old name. The returned function raises it if ``rename`` returns no text.
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
    exact = {old: new for old, new in rename.items() if "*" not in old}

    def renamed(name: str) -> str:
        if name in exact:
            return exact[name]
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
            f"rename({name!r}) gave {new!r}; expected the target's name, or the same name if it stays"
        )
    return new
