"""KVLayout: what two pools must agree on before KV moves between them, and what is converted on the way.

Ranges on the wire are in tokens, so that each side maps them through blocks of its own size. A sender of another dtype
casts to the receiver's. Whatever the tensor-parallel sizes, KV on the wire has all KV heads, in the model's order.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from protos import kv_transfer_pb2 as pb
from workers.errors import LayoutMismatchError

# Of layouts and of frames: another one with every change that an older worker would take wrong.
SCHEMA_VERSION = 2
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}
# Of the scale behind each head (workers/layers/kv_codec.py).
SCALE_BYTES = {"float8_e4m3": 4}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape and meaning of KV. A range on the wire is [layers, 2 (K, V), tokens, num_kv_heads, head_bytes]."""

    # Of the weights and the kernels that compute with them, not of the pool: KV of one fingerprint
    # differs by the rounding of several ranks at most.
    fingerprint: str
    num_layers: int
    # The whole model's.
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    schema_version: int = SCHEMA_VERSION

    @property
    def head_bytes(self) -> int:
        """One head of K or V of one token in one layer, with its scale where the dtype has one."""
        return self.head_dim * DTYPE_BYTES[self.dtype] + SCALE_BYTES.get(self.dtype, 0)

    @property
    def token_bytes_per_layer(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_bytes

    @property
    def token_bytes(self) -> int:
        """2 x layers x kv_heads x head bytes."""
        return self.num_layers * self.token_bytes_per_layer

    def require_convertible(self, other: KVLayout) -> None:
        """Raise LayoutMismatchError naming the first field in which KV of one cannot become KV of the other."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            converted = f.name == "block_size" or (f.name == "dtype" and theirs in DTYPE_BYTES)
            if mine != theirs and not converted:
                mend = "start both workers from one config"
                if f.name == "fingerprint":
                    mend += (
                        ", on processors and with builds of kvferry that compute alike (`kvferry status` shows kernels)"
                    )
                raise LayoutMismatchError(
                    f"KV layouts differ in {f.name}: {mine!r} here, {theirs!r} at the peer; {mend}",
                    param=f.name,
                )

    def to_proto(self) -> pb.KVLayout:
        return pb.KVLayout(**{f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def from_proto(cls, message: pb.KVLayout) -> KVLayout:
        return cls(**{f.name: getattr(message, f.name) for f in fields(cls)})


def require_same_checksum(mine: bool, theirs: bool) -> None:
    """Raise LayoutMismatchError where one side hashes payloads and the other does not: every frame would be refused."""
    if mine != theirs:
        raise LayoutMismatchError(
            f"transfer.checksum is {str(mine).lower()} here and {str(theirs).lower()} at the peer; "
            "start both workers from one config",
            param="checksum",
        )
