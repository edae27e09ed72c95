"""The header of a GGUF file in milliseconds: as the gguf library reads it, without materialising the vocabulary."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType

from workers.errors import ConfigError

_LENGTH = struct.Struct("<Q")
_ARRAY_HEAD = struct.Struct("<IQ")


class HeaderReader(GGUFReader):
    """Scalars, strings and the tensor table; arrays are stepped over (the library takes 2 s for 50,000 tokens)."""

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
        if int(raw_type) != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        return self._array_bytes(orig_offs), [np.empty(0, np.uint8)], [], [GGUFValueType.ARRAY]

    def _array_bytes(self, start: int) -> int:
        raw_kind, count = _ARRAY_HEAD.unpack(self.data[start : start + _ARRAY_HEAD.size].tobytes())
        kind = GGUFValueType(raw_kind)
        if kind != GGUFValueType.STRING:
            return _ARRAY_HEAD.size + int(count) * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        buffer, offset = self.data.data, start + _ARRAY_HEAD.size
        for _ in range(count):
            offset += 8 + _LENGTH.unpack_from(buffer, offset)[0]
        return offset - start

    def value(self, key: str) -> Any:
        """The scalar or string at `key`, None when the file lacks it; ConfigError when it is an array."""
        field = self.get_field(key)
        if field is not None and field.types[0] == GGUFValueType.ARRAY:
            raise ConfigError(f"{key} differs from layer to layer, which is not supported yet", param="model")
        return None if field is None else field.contents()


def open_gguf(path: Path) -> HeaderReader:
    """Raises ConfigError when `path` is no whole GGUF file."""
    try:
        return HeaderReader(path)
    except (OSError, ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
        raise ConfigError(
            f"{path} is not a readable GGUF file ({type(error).__name__}: {error}); download it again", param="model"
        ) from error
