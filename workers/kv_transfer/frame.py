"""A frame: the KV of some layers and some token positions of one grant, with a checksum bound to where it belongs.

On the wire, little-endian: header | payload, where the payload is [layers, 2 (K, V), tokens, num_kv_heads, head_dim]
in the layout's dtype. The header ends with xxh3_64 over (request id, the header before it, the CRC-32C of K or V of
each layer and token in the payload): those cost next to nothing while the payload is copied. Where `transfer.checksum`
is false it is over where the payload lies, not over what it holds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import xxhash

from workers.errors import FrameError
from workers.kv_transfer.kv_rows import KVRows
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.rows import Crcs

_MAGIC, _ZEROS = b"KVFRAME2", bytes(80)
# magic, grant_id, incarnation (16 bytes), layer_start, layer_end, token_start, token_end, payload bytes, and zeros:
# in a large `bytes` the payload then lies where copies of it are twice as fast as behind 64 bytes, since no store has
# an address whose last 12 bits are those of a load soon after
_FIELDS = struct.Struct("<8sQ16sIIIIQ80s")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size

Buffer = bytes | bytearray | memoryview
Payload = Buffer | KVRows


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

    def rows(self, payload: Buffer, place: bytes = b"") -> KVRows:
        """Of a payload that lies in order."""
        num_planes, num_tokens = 2 * (self.layer_end - self.layer_start), self.token_end - self.token_start
        return KVRows.of_payload(memoryview(payload), num_planes, num_tokens, place)

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
    locate: Callable[[], KVRows | None] = lambda: None

    @property
    def encoded_bytes(self) -> int:
        return HEADER_BYTES + self.num_bytes

    def encode_into(self, room: memoryview) -> None:
        """Fill `room`, encoded_bytes long."""
        payload, rows, crcs = room[HEADER_BYTES:], self.locate(), None
        if rows is not None and self.checksum:
            crcs = rows.copy_and_check(payload)
        else:
            self.fill(payload)
        room[:HEADER_BYTES] = self.header(payload, crcs)

    def header(self, payload: Payload, crcs: Crcs | None = None) -> bytes:
        """With the checksum of `payload`, which is `num_bytes` long; `crcs` are its, if they are at hand."""
        frame = replace(self.frame, payload=payload)
        digest = Digest(frame, self.request_id)
        if self.checksum:
            digest.see(digest.crcs_of(payload) if crcs is None else crcs)
        else:
            digest.place(payload)
        return _fields(frame) + _CHECKSUM.pack(digest.value)


def decode(data: Buffer, elsewhere: KVRows | None = None) -> tuple[Frame, int]:
    """The frame, its payload a view into `data` or `elsewhere`, and the checksum it claims. Raises FrameError when it
    is no frame."""
    if len(data) < HEADER_BYTES:
        raise FrameError(f"a frame of {len(data)} bytes is shorter than its header of {HEADER_BYTES}")
    magic, grant_id, incarnation, *ranges, num_bytes, zeros = _FIELDS.unpack_from(data)
    layer_start, layer_end, token_start, token_end = ranges
    payload = memoryview(data)[HEADER_BYTES:] if elsewhere is None else elsewhere
    known = magic == _MAGIC and zeros == _ZEROS
    if not known or num_bytes != len(payload) or layer_start >= layer_end or token_start >= token_end:
        raise FrameError("not a KV frame, or a truncated one")
    (checksum,) = _CHECKSUM.unpack_from(data, _FIELDS.size)
    return Frame(grant_id, incarnation.hex(), layer_start, layer_end, token_start, token_end, payload), checksum


class Digest:
    """The checksum of a frame for a request."""

    def __init__(self, frame: Frame, request_id: str) -> None:
        self._frame = frame
        self._what = (
            f"the KV of request {request_id}, layers [{frame.layer_start}, {frame.layer_end}), "
            f"tokens [{frame.token_start}, {frame.token_end})"
        )
        self._hash = xxhash.xxh3_64(request_id.encode())
        self._hash.update(_fields(frame))

    def see(self, crcs: Crcs) -> None:
        """Of its payload."""
        self._hash.update(crcs.astype("<u4", copy=False).data)

    def crcs_of(self, payload: Payload) -> Crcs:
        """Raises FrameError when it is not as much for each layer and token."""
        if not isinstance(payload, KVRows):
            if not self._frame.area or not payload or len(payload) % (2 * self._frame.area):
                raise FrameError(f"{self._what}, cannot be {len(payload)} bytes")
            payload = self._frame.rows(payload)
        return payload.crcs()

    def place(self, payload: Payload) -> None:
        """In place of its payload: where that lies, if not behind the header."""
        if isinstance(payload, KVRows):
            self._hash.update(payload.encode())

    @property
    def value(self) -> int:
        return self._hash.intdigest()

    def require(self, checksum: int) -> None:
        """Raises FrameError when it is another one."""
        if self.value != checksum:
            raise FrameError(f"checksum mismatch in {self._what}")


def ranges_of_frames(
    layout: KVLayout, start: int, end: int, frame_bytes: int
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The layers and the tokens of each frame in which the KV of positions [start, end) goes: payloads come as near to
    `frame_bytes` from below as whole layers of as many blocks as may be allow."""
    # Blocks are copied whole, parts of one token by token.
    block_size = layout.block_size
    most_tokens = max(1, frame_bytes // (block_size * layout.token_bytes_per_layer)) * block_size
    while start < end:
        last = min(start // block_size * block_size + most_tokens, end)
        step = max(1, frame_bytes // ((last - start) * layout.token_bytes_per_layer))
        for layer in range(0, layout.num_layers, step):
            yield (layer, min(layer + step, layout.num_layers)), (start, last)
        start = last


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
        _ZEROS,
    )
