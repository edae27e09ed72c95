"""Weights that all workers of a host keep once: whoever comes first builds the model, others map what it built.

The model's tensors lie in a memfd, and behind them the rest of it, pickled. A memfd has no name that could leak, and
goes with the last process that has it. A folder of this user's alone tells who that is: by process and file descriptor,
and those that are gone, or are something else by now, are passed over.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import logging
import mmap
import os
import pickle
import stat
import struct
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from workers.allocator import give_back_freed_memory

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Where a tensor begins, its dtype and shape.
_Place = tuple[int, torch.dtype, tuple[int, ...]]
# Process and file descriptor.
_Holder = tuple[int, int]

# The key's digest, and where the pickle begins.
_HEAD = struct.Struct("<32sQ")
# Tensors begin at multiples of it: a line of every CPU's cache.
_ALIGNMENT = 64
# Smaller tensors are pickled with the rest.
_SMALLEST_BYTES = 4096
# For another process that builds the same.
_PATIENCE_S, _POLL_S = 600.0, 0.05


def once_per_host(key: str, build: Callable[[], T]) -> T:
    """What `build` gives; or gave to another process of this user that has it still, for the same `key` and code.

    Nobody may write to its tensors. Where memory cannot be shared so, it is this process's own.
    """
    digest = hashlib.sha256(f"{key} {torch.__version__} {_code()}".encode()).digest()
    with ExitStack() as stack:
        holders, reason = None, "another worker found that they cannot be shared"
        try:
            file = stack.enter_context(_locked(_folder() / digest.hex()))
            holders = _holders(file)
        except OSError as error:
            reason = str(error)
        if holders is not None:
            return _found_or_built(holders, digest, build, file)
    logger.info("weights: of this process alone: %s", reason)
    return build()


def _found_or_built(holders: list[_Holder], digest: bytes, build: Callable[[], T], file: IO[str]) -> T:
    for holder in holders:
        if (fd := _opened(*holder, digest)) is not None:
            model: T = _kept(_read(fd), fd, holders, file)
            logger.info("weights: those that another worker of this host has")
            return model
    model = build()
    try:
        fd = _put(model, digest)
    except (OSError, pickle.PicklingError) as error:
        logger.info("weights: of this process alone: %s", error)
        if isinstance(error, pickle.PicklingError):
            # Who comes next need not wait for who builds.
            _note(None, file)
        return model
    return _kept(model, fd, [], file)


def _kept(model: T, fd: int, holders: list[_Holder], file: IO[str]) -> T:
    weakref.finalize(model, os.close, fd)
    _note([*holders, (os.getpid(), fd)], file)
    return model


def _code() -> int:
    """Another one for what pickled objects are of."""
    package = Path(__file__).parents[1]
    return max(file.stat().st_mtime_ns for file in (*package.rglob("*.py"), *package.rglob("*.so")))


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"kvferry-weights-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    # Whoever could write there could have this process unpickle anything.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone")
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    """Raises OSError, also when another process has it for too long."""
    with path.open("a+", encoding="utf-8") as file:
        give_up_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_s:
                    raise TimeoutError(f"another process has built them for {_PATIENCE_S:.0f} s") from None
            time.sleep(_POLL_S)
        yield file


def _holders(file: IO[str]) -> list[_Holder] | None:
    """None: such weights cannot be shared."""
    file.seek(0)
    try:
        noted = json.load(file)
        found = None if noted is None else [(int(pid), int(fd)) for pid, fd in noted]
    except (ValueError, TypeError):  # New, or cut off: its writer was killed.
        return []
    return found and [(pid, fd) for pid, fd in found if os.path.lexists(f"/proc/{pid}/fd/{fd}")]


def _note(holders: list[_Holder] | None, file: IO[str]) -> None:
    try:
        file.seek(0)
        file.truncate()
        json.dump(holders, file)
        file.flush()
    except OSError as error:
        logger.warning("weights: other workers will not find them: %s", error)


def _opened(pid: int, fd: int, digest: bytes) -> int | None:
    """None: it is something else."""
    try:
        # A pipe would be waited for, and a terminal become this process's.
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        about = os.fstat(own)
        # Nobody else's, and no file: anybody's process may have the number by now.
        if about.st_uid == os.getuid() and not about.st_nlink and os.pread(own, len(digest), 0) == digest:
            return own
    except OSError:
        pass
    os.close(own)
    return None


class _Writer(pickle.Pickler):
    """Puts large tensors aside, and tells where they are to be."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.places: dict[int, tuple[torch.Tensor, _Place]] = {}
        self.num_bytes = _ALIGNMENT * -(-_HEAD.size // _ALIGNMENT)

    def persistent_id(self, obj: Any) -> _Place | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if obj.layout is not torch.strided:
            raise pickle.PicklingError(f"{obj.layout} keeps them in an order of its own")
        if obj.nbytes < _SMALLEST_BYTES or not obj.is_contiguous():
            return None
        if id(obj) not in self.places:
            self.places[id(obj)] = obj, (self.num_bytes, obj.dtype, tuple(obj.shape))
            self.num_bytes += _ALIGNMENT * -(-obj.nbytes // _ALIGNMENT)
        return self.places[id(obj)][1]


class _Reader(pickle.Unpickler):
    def __init__(self, file: IO[bytes], memory: mmap.mmap) -> None:
        super().__init__(file)
        self._memory = memory
        self._tensors: dict[_Place, torch.Tensor] = {}

    def persistent_load(self, pid: _Place) -> torch.Tensor:
        if pid not in self._tensors:
            self._tensors[pid] = _tensor(self._memory, pid)
        return self._tensors[pid]


def _tensor(memory: mmap.mmap, place: _Place) -> torch.Tensor:
    start, dtype, shape = place
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=start).view(shape)


def _put(model: object, digest: bytes) -> int:
    """Move its tensors to a new memfd, with the rest of it. Raises PicklingError or OSError, and has moved none."""
    rest = io.BytesIO()
    writer = _Writer(rest)
    try:
        writer.dump(model)
    except (AttributeError, TypeError) as error:
        raise pickle.PicklingError(str(error)) from error
    fd = os.memfd_create("kvferry-weights", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, writer.num_bytes + rest.tell())
        memory = mmap.mmap(fd, writer.num_bytes + rest.tell())
    except OSError:
        os.close(fd)
        raise
    with torch.inference_mode():
        # One after the other, so that there is never more than one of them twice.
        for tensor, place in writer.places.values():
            there = _tensor(memory, place).copy_(tensor)
            tensor.set_(there.untyped_storage(), there.storage_offset(), there.shape, there.stride())
    memory[writer.num_bytes :] = rest.getvalue()
    memory[: _HEAD.size] = _HEAD.pack(digest, writer.num_bytes)
    give_back_freed_memory()
    return fd


def _read(fd: int) -> Any:
    # What would be written there would be this process's own.
    memory = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    _, start = _HEAD.unpack_from(memory)
    return _Reader(io.BytesIO(memory[start:]), memory).load()
