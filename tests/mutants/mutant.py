"""A defence, how to switch it off, and who must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """`snippet` is there exactly once in `file`; with `replacement` in its place each of `tests` must fail.

    `hangs`: they do it by waiting until they are ended. Of any other that is no proof: it may only be slow.
    """

    name: str
    scenario: str
    file: str
    snippet: str
    replacement: str
    tests: tuple[str, ...]
    hangs: bool = False
