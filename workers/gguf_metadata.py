"""The key-value header of a GGUF file, read without its tensors and without numpy.

Layout (GGUF 2 and 3): magic, version, number of tensors, number of pairs, then the pairs: key, type, value.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path

from workers.errors import ConfigError

Value = int | float | bool | str | list["Value"]

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_TYPE = struct.Struct("<I")


def read_gguf_metadata(path: Path, wanted: Callable[[str], bool]) -> dict[str, Value]:
    """Values of the keys that `wanted` accepts; the others are stepped over. ConfigError when it is no GGUF file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_pairs(data, wanted)
    except (OSError, ValueError, KeyError, struct.error, OverflowError) as error:
        raise ConfigError(
            f"{path} is not a readable GGUF file ({type(error).__name__}: {error}); download it again", param="model"
        ) from error


def _read_pairs(data: mmap.mmap, wanted: Callable[[str], bool]) -> dict[str, Value]:
    magic, version, _num_tensors, num_pairs = struct.unpack_from("<4sIQQ", data, 0)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"magic {magic!r}, version {version}; wanted GGUF 2 or 3, little-endian")
    pairs: dict[str, Value] = {}
    at = 24
    for _ in range(num_pairs):
        key, at = _string(data, at)
        (kind,) = _TYPE.unpack_from(data, at)
        at += 4
        if wanted(key):
            pairs[key], at = _value(data, at, kind)
        else:
            at = _skip(data, at, kind)
    return pairs


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    start = at + 8
    end = start + _LENGTH.unpack_from(data, at)[0]
    if end > len(data):
        raise ValueError(f"a string ends at byte {end}, past the end of the file")
    return data[start:end].decode("utf-8", "replace"), end


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[Value, int]:
    if kind == _STRING:
        return _string(data, at)
    if kind == _ARRAY:
        return _array(data, at)
    code = "<" + _SCALARS[kind]
    return struct.unpack_from(code, data, at)[0], at + struct.calcsize(code)


def _array(data: mmap.mmap, at: int) -> tuple[list[Value], int]:
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind in _SCALARS:
        code = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack_from(code, data, at)), at + struct.calcsize(code)
    values: list[Value] = []
    for _ in range(count):
        value, at = _value(data, at, kind)
        values.append(value)
    return values, at


def _skip(data: mmap.mmap, at: int, kind: int) -> int:
    if kind == _STRING:
        return at + 8 + int(_LENGTH.unpack_from(data, at)[0])
    if kind != _ARRAY:
        return at + struct.calcsize("<" + _SCALARS[kind])
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind in _SCALARS:
        return at + int(count) * struct.calcsize("<" + _SCALARS[kind])
    for _ in range(count):
        at = _skip(data, at, kind)
    return at
