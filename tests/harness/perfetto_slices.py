"""A trace as Perfetto's own definition of the format reads it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Slice:
    name: str
    began_at: float
    ended_at: float
    details: dict[str, object] = field(default_factory=dict)


def perfetto_slices(trace: bytes) -> dict[tuple[str, ...], list[Slice]]:
    """What happened on each track; of tracks of one name, which are shown as one, together.

    A slice that ends without having begun, or never ends, is an error, and so is one that overlaps
    another on its track or comes before its track is described.
    """
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

    names: dict[int, tuple[str, ...]] = {}
    open_slices: dict[int, Slice] = {}
    found: dict[tuple[str, ...], list[Slice]] = {}
    last_ns = 0
    for packet in pb.Trace.FromString(trace).packet:
        assert packet.trusted_packet_sequence_id
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            outer = names[track.parent_uuid] if track.HasField("parent_uuid") else ()
            names[track.uuid] = (*outer, track.name) if track.name else ()
            continue
        event, at = packet.track_event, packet.timestamp / 1e9
        assert packet.timestamp >= last_ns
        last_ns, uuid = packet.timestamp, event.track_uuid
        if event.type == pb.TrackEvent.TYPE_SLICE_END:
            open_slices.pop(uuid).ended_at = at
            continue
        assert uuid not in open_slices
        details = {
            note.name: getattr(note, str(note.WhichOneof("value")))
            for note in event.debug_annotations
        }
        one = Slice(event.name, at, at, details)
        found.setdefault(names[uuid], []).append(one)
        if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            open_slices[uuid] = one
    assert not open_slices
    return found
