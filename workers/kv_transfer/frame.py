"""A frame: the KV of some layers and some token positions of one grant, with a checksum bound to where it belongs.

On the wire, little-endian: header | payload, where the payload is [layers, 2 (K, V), tokens, num_kv_heads, head_dim]
in the layout's dtype, and the header ends with xxh3_64 over (request id, the header before it, payload). Where
`transfer.checksum` is false it is over where the payload lies, not over the payload.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import xxhash

from workers.errors import FrameError
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.shared_rows import SharedRows

_MAGIC = b"KVFRAME1"
# magic, grant_id, incarnation (16 bytes), layer_start, layer_end, token_start, token_end, payload bytes; with the
# checksum 64 bytes, after which the payload lies where copies of it are fast
_FIELDS = struct.Struct("<8sQ16sIIIIQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size

Buffer = bytes | bytearray | memoryview
Payload = Buffer | SharedRows


@dataclass(frozen=True, slots=True)
class Frame:
    """KV of layers [layer_start, layer_end) and positions [token_start, token_end)."""

    grant_id: int
    incarnation: str
    layer_start: int
    layer_end: int
    token_start: int
    token_end: int
    payload: Payload = b""

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
    """A frame that is to be sent, its payload still in the pool: `fill` copies those `num_bytes` out of it, `locate`
    tells where others may read them themselves, if they can."""

    frame: Frame
    request_id: str
    num_bytes: int
    fill: Callable[[memoryview], None]
    checksum: bool = True
    locate: Callable[[], SharedRows | None] = lambda: None

    @property
    def encoded_bytes(self) -> int:
        return HEADER_BYTES + self.num_bytes

    def encode_into(self, room: memoryview) -> None:
        """Fill `room`, encoded_bytes long. The payload is hashed right after it was copied: out of the cache."""
        payload = room[HEADER_BYTES:]
        self.fill(payload)
        room[:HEADER_BYTES] = self.header(payload)

    def header(self, payload: Payload) -> bytes:
        """With the checksum of `payload`, which is `num_bytes` long."""
        return _header(replace(self.frame, payload=payload), self.request_id, self.checksum)


def decode(data: Buffer, elsewhere: SharedRows | None = None) -> tuple[Frame, int]:
    """The frame, its payload a view into `data` or `elsewhere`, and the checksum it claims. Raises FrameError when it
    is no frame."""
    if len(data) < HEADER_BYTES:
        raise FrameError(f"a frame of {len(data)} bytes is shorter than its header of {HEADER_BYTES}")
    magic, grant_id, incarnation, layer_start, layer_end, token_start, token_end, num_bytes = _FIELDS.unpack_from(data)
    payload = memoryview(data)[HEADER_BYTES:] if elsewhere is None else elsewhere
    if magic != _MAGIC or num_bytes != len(payload) or layer_start >= layer_end or token_start >= token_end:
        raise FrameError("not a KV frame, or a truncated one")
    (checksum,) = _CHECKSUM.unpack_from(data, _FIELDS.size)
    return Frame(grant_id, incarnation.hex(), layer_start, layer_end, token_start, token_end, payload), checksum


class Digest:
    """The checksum of a frame for a request, over as much of its payload as has been seen."""

    def __init__(self, frame: Frame, request_id: str) -> None:
        self._what = (
            f"the KV of request {request_id}, layers [{frame.layer_start}, {frame.layer_end}), "
            f"tokens [{frame.token_start}, {frame.token_end})"
        )
        self._hash = xxhash.xxh3_64(request_id.encode())
        self._hash.update(_fields(frame))

    def see(self, piece: Buffer) -> None:
        """The next piece of its payload."""
        self._hash.update(piece)

    def payload(self, payload: Payload) -> None:
        for piece in payload.pieces() if isinstance(payload, SharedRows) else (payload,):
            self.see(piece)

    def place(self, payload: Payload) -> None:
        """In place of its payload: where that lies, if not behind the header."""
        if isinstance(payload, SharedRows):
            self.see(payload.encode())

    @property
    def value(self) -> int:
        return self._hash.intdigest()

    def require(self, checksum: int) -> None:
        """Raises FrameError when it is another one."""
        if self.value != checksum:
            raise FrameError(f"checksum mismatch in {self._what}")


def layers_per_frame(layout: KVLayout, num_tokens: int, frame_bytes: int) -> int:
    """How many layers of `num_tokens` come nearest to `frame_bytes` from below, at least one."""
    return max(1, min(layout.num_layers, frame_bytes // (num_tokens * layout.token_bytes_per_layer)))


def _header(frame: Frame, request_id: str, with_payload: bool) -> bytes:
    digest = Digest(frame, request_id)
    if with_payload:
        digest.payload(frame.payload)
    else:
        digest.place(frame.payload)
    return _fields(frame) + _CHECKSUM.pack(digest.value)


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
