"""How malloc treats memory of the size of frames."""

from __future__ import annotations

import ctypes

# Of mallopt, in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 256 << 20
# The most that glibc takes.
_LARGEST_FROM_HEAP_BYTES = 32 << 20


def keep_freed_memory() -> None:
    """Let this process use freed memory again instead of returning it to the kernel, which clears each page anew.

    Frames come and go by the megabyte: of the time that receiving by gRPC took, a third went into page faults.
    Where libc is not glibc, nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP_BYTES)


def give_back_freed_memory() -> None:
    """To the kernel, now: so much was freed that will not be used again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
