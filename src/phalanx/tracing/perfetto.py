"""Traces in Perfetto's own protobuf format; needs the extra ``phalanx[trace]``.

The format: perfetto.dev/docs/reference/synthetic-track-event. A track per lane under a track per group; arrows are flow
ids that a slice on the driver and one on a rank share.
"""

from __future__ import annotations

import itertools
from typing import Any

from phalanx.errors import DeclarationError
from phalanx.tracing.events import Trace, TrackKey
from phalanx.tracing.slices import Slice, driver_slices, rank_slices, sources_of

_SEQUENCE = 1


def to_perfetto(trace: Trace) -> bytes:
    """The content of the file.

    Raises:
        DeclarationError: the package ``perfetto`` is not installed.
    """
    writer = _Writer(_messages(), trace)
    writer.write()
    return writer.content()


def _messages() -> Any:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError as error:
        raise DeclarationError(
            "a trace as .pftrace needs the package perfetto: pip install 'phalanx[trace]', or write it as .json, "
            "which Perfetto opens too"
        ) from error
    return perfetto_trace_pb2


class _Writer:
    """Packets of one trace, one after another."""

    def __init__(self, messages: Any, trace: Trace) -> None:
        self._messages = messages
        self._trace = trace
        self._file = messages.Trace()
        self._uuids = itertools.count(1)
        self._flows_out: dict[tuple[Any, int], list[int]] = {}  # of a call on a track, by track and call
        self._flows_in: dict[tuple[Any, int], list[int]] = {}

    def content(self) -> bytes:
        return self._file.SerializeToString()

    def write(self) -> None:
        trace = self._trace
        self._connect()
        driver = self._track(f"driver {trace.host} ({trace.pid})", None, 0)
        for order, (name, slices) in enumerate(driver_slices(trace).items()):
            self._lanes(name, name, slices, driver, order)
        groups: dict[tuple[str, int], int] = {}
        for key, slices in sorted(rank_slices(trace).items(), key=lambda item: item[0]):
            place = key.group, key.epoch
            if place not in groups:
                epoch = f" (epoch {key.epoch})" if key.epoch else ""
                groups[place] = self._track(f"group {key.group}{epoch}", None, len(groups) + 1)
            self._lanes(key, f"rank {key.rank}", slices, groups[place], key.rank)

    def _connect(self) -> None:
        """Numbers for the arrows, by the slices at their two ends."""
        numbers = itertools.count(1)
        calls = {call.id: call for call in self._trace.calls}
        for call in self._trace.calls:
            for index, part in enumerate(call.parts):
                key = call.key(part)
                ends = [(call.group, call.id)]
                ends += [(source.key(of), source.id) for source, of in sources_of(call, index, calls)]
                for end in ends:
                    number = next(numbers)
                    self._flows_out.setdefault(end, []).append(number)
                    self._flows_in.setdefault((key, call.id), []).append(number)

    def _packet(self) -> Any:
        packet = self._file.packet.add()
        packet.trusted_packet_sequence_id = _SEQUENCE
        return packet

    def _track(self, name: str, parent: int | None, order: int) -> int:
        uuid = next(self._uuids)
        descriptor = self._packet().track_descriptor
        descriptor.uuid = uuid
        descriptor.name = name
        descriptor.sibling_order_rank = order
        descriptor.child_ordering = self._messages.TrackDescriptor.EXPLICIT
        if parent is not None:
            descriptor.parent_uuid = parent
        return uuid

    def _lanes(self, key: str | TrackKey, label: str, slices: list[Slice], parent: int, order: int) -> None:
        for lane in range(max((one.lane for one in slices), default=0) + 1):
            name = label if lane == 0 else f"{label} ({lane + 1})"
            uuid = self._track(name, parent, order * 100 + lane)
            marks = [
                mark
                for index, one in enumerate(slices)
                if one.lane == lane
                for mark in ((one.start, 1, one.depth, index, one), (one.end, 0, -one.depth, index, one))
            ]
            # At one time, ends come before starts, inner ends first and outer starts first; an empty slice starts
            # before it ends.
            for time, begins, _, _, one in sorted(marks, key=_order):
                self._event(uuid, key, time, bool(begins), one)

    def _event(self, uuid: int, key: str | TrackKey, time: int, begins: bool, one: Slice) -> None:
        packet = self._packet()
        packet.timestamp = time
        event = packet.track_event
        event.track_uuid = uuid
        kinds = self._messages.TrackEvent
        event.type = kinds.TYPE_SLICE_BEGIN if begins else kinds.TYPE_SLICE_END
        if not begins:
            return
        event.name = one.name
        event.categories.append(one.kind)
        if one.kind == "call" and one.call is not None:
            event.flow_ids.extend(self._flows_out.get((key, one.call), ()))
            event.terminating_flow_ids.extend(self._flows_in.get((key, one.call), ()))
        facts: dict[str, Any] = {"call": one.call, "error": one.error, **one.attributes}
        for name, value in {**facts, "unfinished": one.open or None}.items():
            if value is not None:
                _annotate(event.debug_annotations.add(), name, value)


def _order(mark: tuple[int, int, int, int, Slice]) -> tuple[int, int, int, int]:
    time, begins, depth, index, one = mark
    if one.duration == 0:
        return time, 2, index, 1 - begins
    return time, begins, depth, index


def _annotate(annotation: Any, name: str, value: Any) -> None:
    annotation.name = name
    if isinstance(value, bool):
        annotation.bool_value = value
    elif isinstance(value, int):
        annotation.int_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    else:
        annotation.string_value = str(value)
