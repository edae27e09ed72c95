"""Memory of one process that others on its host map to read.

It is a memfd: it has no name that could leak, and goes with the last process that maps it. Others open it by way of
/proc/<pid>/fd, which works for processes of one user that see each other's ids.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable

from workers.errors import FrameError

# pid, file descriptor, the segment's token, its bytes
_PLACE = struct.Struct("<II16sQ")
PLACE_BYTES = _PLACE.size
_TOKEN_BYTES = 16
# The token, and what keeps the memory behind it aligned.
_HEAD_BYTES = 4096
# Mappings that a reader keeps; one more costs the unmapping of the least recently used.
_MAX_MAPPINGS = 64


class Segment:
    """`memory`, behind a token that no other segment has."""

    def __init__(self, num_bytes: int) -> None:
        """Zeros, which are no memory yet until something is written. Raises OSError where there is no memfd."""
        self.num_bytes = num_bytes
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._fd = os.memfd_create("kvferry", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _HEAD_BYTES + num_bytes)
        whole = mmap.mmap(self._fd, _HEAD_BYTES + num_bytes)
        whole[:_TOKEN_BYTES] = self._token
        # Unmapped with the last view into it.
        self.memory = memoryview(whole)[_HEAD_BYTES:]
        # Also of one that was packed and never sent, since its hand-off had ended.
        self._close_fd = weakref.finalize(self, os.close, self._fd)

    @property
    def place(self) -> bytes:
        """What `Mappings.memory` finds it by."""
        return _PLACE.pack(os.getpid(), self._fd, self._token, self.num_bytes)

    def close(self) -> None:
        """Whoever has it mapped keeps what is in it."""
        self.memory = memoryview(b"")
        self._close_fd()


class Mappings:
    """Segments of other processes, mapped to be read."""

    def __init__(self, on_process: Callable[[int], None] = lambda pid: None) -> None:
        """`on_process` is told of a process when memory of it is mapped for the first time since it was forgotten."""
        self._on_process = on_process
        # Processes that were told of: also those of which nothing is mapped now.
        self._watched: set[int] = set()
        # By token, with the process that it is of.
        self._mapped: OrderedDict[bytes, tuple[int, memoryview]] = OrderedDict()

    def memory(self, place: bytes) -> memoryview:
        """The segment's. Raises FrameError when this process cannot see it."""
        try:
            pid, fd, token, num_bytes = _PLACE.unpack(place)
        except struct.error as error:
            raise FrameError(f"not the place of shared memory: {error}") from error
        mapped = self._mapped.get(token)
        if mapped is None:
            mapped = self._mapped[token] = pid, _map(pid, fd, token)
            if pid not in self._watched:
                self._watched.add(pid)
                self._on_process(pid)  # Which may tell that it is gone by now.
        else:
            self._mapped.move_to_end(token)
        if len(self._mapped) > _MAX_MAPPINGS:
            _unmap([self._mapped.popitem(last=False)])
        return mapped[1][_HEAD_BYTES : _HEAD_BYTES + num_bytes]

    def forget(self, pid: int) -> None:
        self._watched.discard(pid)
        its = [token for token, (owner, _) in self._mapped.items() if owner == pid]
        if its:
            _unmap([self._mapped.pop(token) for token in its])


def when_ended(pid: int, call: Callable[[], None]) -> None:
    """Call it on the running loop once that process is gone, where the kernel tells; never of this process itself."""
    if pid == os.getpid():
        return None
    try:
        life = os.pidfd_open(pid)
    except ProcessLookupError:
        return call()
    except (AttributeError, OSError):
        return None
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(life)
        os.close(life)
        call()

    loop.add_reader(life, ended)
    return None


def _unmap(mappings: list[object]) -> None:
    """Once the last view into them is gone, too. On a thread: memory goes with the last process that has it mapped, and
    that takes 0.2 s a GiB."""
    threading.Thread(target=mappings.clear, name="unmap").start()


def _map(pid: int, fd: int, token: bytes) -> memoryview:
    # In another container it may be anything: a pipe that would be waited for, or a terminal.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", flags)
        try:
            whole = memoryview(mmap.mmap(own, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(own)
    except (OSError, ValueError) as error:
        raise FrameError(f"the shared memory of process {pid} cannot be read here: {error}") from error
    if whole[:_TOKEN_BYTES] != token:
        raise FrameError(f"file descriptor {fd} of process {pid} is not the segment that was sent")
    return whole
