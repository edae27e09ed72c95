"""A GGUF file as the gguf library reads it, with the arrays of its header left where they are until they are asked for:
the library takes 2 s over a vocabulary of 50,000 tokens.
"""

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


class GGUFFile(GGUFReader):
    """`value`, `array` and `header` read the header, `tensors` is the library's table of tensors."""

    def value(self, key: str, default: Any = None) -> Any:
        """The scalar or string at `key`; ConfigError when it is an array."""
        field = self.get_field(key)
        if field is not None and field.types[0] == GGUFValueType.ARRAY:
            raise ConfigError(f"{key} differs from layer to layer, which is not supported yet", param="model")
        return default if field is None else field.contents()

    def array(self, key: str) -> list[Any] | None:
        """The strings or numbers at `key`; None when the file lacks it."""
        field = self.get_field(key)
        if field is None:
            return None
        start = int(field.parts[-1][0])
        kind, count = self._array_head(start)
        start += _ARRAY_HEAD.size
        if kind == GGUFValueType.STRING:
            return self._strings(start, count)
        numbers = np.frombuffer(self.data.data, self.gguf_scalar_to_np[kind], count, start)
        return numbers.tolist()  # type: ignore[no-any-return]

    def header(self, prefix: str) -> dict[str, Any]:
        """Every key that begins with `prefix`, arrays included."""
        fields = {key: field for key, field in self.fields.items() if key.startswith(prefix)}
        is_array = {key: field.types[0] == GGUFValueType.ARRAY for key, field in fields.items()}
        return {key: self.array(key) if is_array[key] else field.contents() for key, field in fields.items()}

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
        if int(raw_type) != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        return self._array_bytes(orig_offs), [np.array([orig_offs])], [], [GGUFValueType.ARRAY]

    def _array_head(self, start: int) -> tuple[GGUFValueType, int]:
        kind, count = _ARRAY_HEAD.unpack_from(self.data.data, start)
        return GGUFValueType(kind), count

    def _array_bytes(self, start: int) -> int:
        kind, count = self._array_head(start)
        if kind != GGUFValueType.STRING:
            return _ARRAY_HEAD.size + count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        buffer, offset = self.data.data, start + _ARRAY_HEAD.size
        for _ in range(count):
            offset += 8 + _LENGTH.unpack_from(buffer, offset)[0]
        return offset - start

    def _strings(self, start: int, count: int) -> list[str]:
        buffer, strings = self.data.data, []
        for _ in range(count):
            end = start + 8 + _LENGTH.unpack_from(buffer, start)[0]
            strings.append(bytes(buffer[start + 8 : end]).decode("utf-8", "replace"))
            start = end
        return strings


def open_gguf(path: Path) -> GGUFFile:
    """Raises ConfigError when `path` is no whole GGUF file."""
    try:
        return GGUFFile(path)
    except (OSError, ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
        raise ConfigError(
            f"{path} is not a readable GGUF file ({type(error).__name__}: {error}); download it again", param="model"
        ) from error
