"""A defence, how to switch it off, and who must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """`snippet` is there exactly once in `file`; with `replacement` in its place each of `tests` must fail."""

    name: str
    scenario: str
    file: str
    snippet: str
    replacement: str
    tests: tuple[str, ...]
