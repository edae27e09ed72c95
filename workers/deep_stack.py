"""Room for deep recursion: llguidance descends once for each rule or subschema on a grammar's way, and a stack that
runs out ends the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

# The worst grammars that pass the router's bound of characters take under 90 MiB; what is not touched costs nothing.
_STACK_BYTES = 256 << 20


@contextmanager
def deep_stack() -> Iterator[None]:
    """Threads that are started meanwhile have such room."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


def call_in_deep_stack(call: Callable[[], T]) -> T:
    """Waits in place: to the caller's event loop it is a call like any other."""
    with deep_stack(), ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()
