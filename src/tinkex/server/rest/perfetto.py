"""Perfetto's trace format, as much of it as named tracks with slices and instants need.

A trace is a sequence of protobuf `TracePacket`s; the numbers of fields are those of Perfetto's
`protos/perfetto/trace/`. Knows the format, not what is traced.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import NamedTuple

_PACKET = 1  # of Trace
_TIMESTAMP, _SEQUENCE, _EVENT, _TRACK = 8, 10, 11, 60  # of TracePacket
_UUID, _NAME, _PROCESS, _PARENT = 1, 2, 3, 5  # of TrackDescriptor
_PID, _PROCESS_NAME = 1, 6  # of ProcessDescriptor
_ANNOTATION, _TYPE, _ON_TRACK, _EVENT_NAME = 4, 9, 11, 23  # of TrackEvent
_INT, _DOUBLE, _STRING, _KEY = 4, 5, 6, 10  # of DebugAnnotation
_BEGIN, _END, _INSTANT = 1, 2, 3
_ONE_SEQUENCE = 1
"""All packets are written by one thread, in one sequence."""

_ROOT = 1

Details = Mapping[str, str | int | float]
Track = tuple[str, ...]
"""Its names, the outermost first."""


class _Slice(NamedTuple):
    began_ns: int
    ended_ns: int
    name: str
    details: Details
    is_instant: bool = False


@dataclass(slots=True)
class Trace:
    """Tracks under one process, and what happened on them."""

    name: str
    _slices: dict[Track, list[_Slice]] = field(default_factory=dict)
    _uuids: Iterator[int] = field(default_factory=lambda: count(_ROOT + 1))

    def slice(
        self, track: Track, name: str, began_at: float, ended_at: float, details: Details
    ) -> None:
        """Add something that lasted from one moment to another, in seconds of the epoch."""
        began_ns = _ns(began_at)
        # At one moment ends come before begins, so nothing may begin and end in the same one.
        ended_ns = max(_ns(ended_at), began_ns + 1)
        self._slices.setdefault(track, []).append(_Slice(began_ns, ended_ns, name, details))

    def instant(self, track: Track, name: str, at: float, details: Details) -> None:
        moment = _Slice(_ns(at), _ns(at), name, details, is_instant=True)
        self._slices.setdefault(track, []).append(moment)

    def encoded(self) -> bytes:
        process = _field(_PID, 1) + _field(_PROCESS_NAME, self.name)
        packets = [_packet(_field(_TRACK, _field(_UUID, _ROOT) + _field(_PROCESS, process)))]
        events: list[tuple[int, int, bytes]] = []
        folders: dict[Track, int] = {(): _ROOT}
        for track, slices in self._slices.items():
            parent = self._folder(track[:-1], folders, packets)
            events += self._events(slices, parent, track[-1], packets)
        events.sort(key=lambda event: event[:2])
        return b"".join([*packets, *(event for _, _, event in events)])

    def _folder(self, track: Track, folders: dict[Track, int], packets: list[bytes]) -> int:
        """The number of a track that holds others."""
        if track not in folders:
            parent = self._folder(track[:-1], folders, packets)
            folders[track] = self._new_track(parent, track[-1], packets)
        return folders[track]

    def _new_track(self, parent: int, name: str, packets: list[bytes]) -> int:
        uuid = next(self._uuids)
        described = _field(_UUID, uuid) + _field(_PARENT, parent) + _field(_NAME, name)
        packets.append(_packet(_field(_TRACK, described)))
        return uuid

    def _events(
        self, slices: list[_Slice], parent: int, name: str, packets: list[bytes]
    ) -> Iterator[tuple[int, int, bytes]]:
        """The events of a track, each with its moment and its place among those of one moment.

        Slices of one track must not overlap. Those that do go to further tracks of the same name,
        which are shown as one.
        """
        free: list[tuple[int, int]] = []  # a heap: from when on a track is free, and its number
        for began_ns, ended_ns, title, details, is_instant in sorted(
            slices, key=attrgetter("began_ns")
        ):
            if free and free[0][0] <= began_ns:
                _, uuid = heapq.heappop(free)
            else:
                uuid = self._new_track(parent, name, packets)
            heapq.heappush(free, (ended_ns, uuid))
            if is_instant:
                yield began_ns, 1, _event(_INSTANT, uuid, began_ns, title, details)
                continue
            yield began_ns, 1, _event(_BEGIN, uuid, began_ns, title, details)
            yield ended_ns, 0, _event(_END, uuid, ended_ns)


def _ns(at: float) -> int:
    return max(0, int(at * 1e9))


def _event(
    kind: int, track: int, at_ns: int, name: str = "", details: Details | None = None
) -> bytes:
    body = _field(_TYPE, kind) + _field(_ON_TRACK, track)
    if name:
        body += _field(_EVENT_NAME, name)
    body += b"".join(_field(_ANNOTATION, part) for part in _annotations(details or {}))
    return _packet(_field(_TIMESTAMP, at_ns) + _field(_EVENT, body))


def _annotations(details: Details) -> Iterator[bytes]:
    for key, value in details.items():
        number = {int: _INT, float: _DOUBLE, str: _STRING}[type(value)]
        yield _field(_KEY, key) + _field(number, value)


def _packet(body: bytes) -> bytes:
    return _field(_PACKET, _field(_SEQUENCE, _ONE_SEQUENCE) + body)


def _field(number: int, value: int | float | str | bytes) -> bytes:
    """A field of a protobuf message, with its tag."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value & (1 << 64) - 1)
    if isinstance(value, float):
        return _varint(number << 3 | 1) + struct.pack("<d", value)
    # A lone surrogate is no UTF-8, and a name may be anything that a client sent.
    data = value.encode(errors="replace") if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    pieces = bytearray()
    while number > 0x7F:
        pieces.append(number & 0x7F | 0x80)
        number >>= 7
    pieces.append(number)
    return bytes(pieces)
