"""A frame: the KV of some layers and some token positions of one grant, with a checksum bound to where it belongs.

On the wire, little-endian: header | payload, where the payload is [layers, 2 (K, V), tokens, num_kv_heads, head_dim]
in the layout's dtype, and the header ends with xxh3_64 over (request id, the header before it, payload). Where
`transfer.checksum` is false the payload is left out of it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import xxhash

from workers.errors import FrameError
from workers.kv_transfer.layout import KVLayout

_MAGIC = b"KVF1"
# magic, grant_id, incarnation (16 bytes), layer_start, layer_end, token_start, token_end, payload bytes
_FIELDS = struct.Struct("<4sQ16sIIIIQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Frame:
    """KV of layers [layer_start, layer_end) and positions [token_start, token_end)."""

    grant_id: int
    incarnation: str
    layer_start: int
    layer_end: int
    token_start: int
    token_end: int
    payload: Buffer = b""

    @property
    def area(self) -> int:
        """Layers times tokens: disjoint frames of a hand-off add up to its whole."""
        return (self.layer_end - self.layer_start) * (self.token_end - self.token_start)

    def expected_bytes(self, layout: KVLayout) -> int:
        return self.area * layout.token_bytes_per_layer

    def overlaps(self, other: Frame) -> bool:
        return (
            self.layer_start < other.layer_end
            and other.layer_start < self.layer_end
            and self.token_start < other.token_end
            and other.token_start < self.token_end
        )

    def same_range(self, other: Frame) -> bool:
        mine = (self.layer_start, self.layer_end, self.token_start, self.token_end)
        return mine == (other.layer_start, other.layer_end, other.token_start, other.token_end)


@dataclass(frozen=True, slots=True)
class UnsentFrame:
    """A frame that is to be sent, its payload still in the pool: `fill` copies those `num_bytes` out of it."""

    frame: Frame
    request_id: str
    num_bytes: int
    fill: Callable[[memoryview], None]
    checksum: bool = True

    @property
    def encoded_bytes(self) -> int:
        return HEADER_BYTES + self.num_bytes

    def encode_into(self, room: memoryview) -> None:
        """Fill `room`, encoded_bytes long. The payload is hashed right after it was copied: out of the cache."""
        payload = room[HEADER_BYTES:]
        self.fill(payload)
        room[:HEADER_BYTES] = _header(replace(self.frame, payload=payload), self.request_id, self.checksum)


def encode(frame: Frame, request_id: str, checksum: bool = True) -> bytes:
    return b"".join((_header(frame, request_id, checksum), frame.payload))


def decode(data: Buffer) -> tuple[Frame, int]:
    """The frame, its payload a view into `data`, and the checksum it claims. Raises FrameError when it is no frame."""
    if len(data) < HEADER_BYTES:
        raise FrameError(f"a frame of {len(data)} bytes is shorter than its header of {HEADER_BYTES}")
    magic, grant_id, incarnation, layer_start, layer_end, token_start, token_end, num_bytes = _FIELDS.unpack_from(data)
    payload = memoryview(data)[HEADER_BYTES:]
    if magic != _MAGIC or num_bytes != len(payload) or layer_start >= layer_end or token_start >= token_end:
        raise FrameError("not a KV frame, or a truncated one")
    (checksum,) = _CHECKSUM.unpack_from(data, _FIELDS.size)
    return Frame(grant_id, incarnation.hex(), layer_start, layer_end, token_start, token_end, payload), checksum


def verify(frame: Frame, checksum: int, request_id: str, with_payload: bool = True) -> None:
    """Raise FrameError unless the checksum is that of this frame for this request."""
    if _checksum(frame, request_id, with_payload) != checksum:
        raise FrameError(
            f"checksum mismatch in the KV of request {request_id}, layers [{frame.layer_start}, {frame.layer_end}), "
            f"tokens [{frame.token_start}, {frame.token_end})"
        )


def layers_per_frame(layout: KVLayout, num_tokens: int, frame_bytes: int) -> int:
    """How many layers of `num_tokens` come nearest to `frame_bytes` from below, at least one."""
    return max(1, min(layout.num_layers, frame_bytes // (num_tokens * layout.token_bytes_per_layer)))


def _header(frame: Frame, request_id: str, with_payload: bool) -> bytes:
    return _fields(frame) + _CHECKSUM.pack(_checksum(frame, request_id, with_payload))


def _fields(frame: Frame) -> bytes:
    return _FIELDS.pack(
        _MAGIC,
        frame.grant_id,
        bytes.fromhex(frame.incarnation),
        frame.layer_start,
        frame.layer_end,
        frame.token_start,
        frame.token_end,
        len(frame.payload),
    )


def _checksum(frame: Frame, request_id: str, with_payload: bool) -> int:
    digest = xxhash.xxh3_64(request_id.encode())
    digest.update(_fields(frame))
    if with_payload:
        digest.update(frame.payload)
    return digest.intdigest()
