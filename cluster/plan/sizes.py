"""Sizes as people write them."""

from __future__ import annotations

import re

import click

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_SIZE = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgt]i?)?b?(?:/s)?", re.IGNORECASE)


class Size(click.ParamType):  # type: ignore[type-arg]
    """Bytes: 80GB is 80e9 of them, 80GiB 80 x 2^30."""

    name = "SIZE"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float | int):
            return float(value)
        found = _SIZE.fullmatch(value.strip())
        try:
            assert found is not None
            return float(found[1]) * _UNITS[(found[2] or "").lower()]
        except (AssertionError, ValueError):
            self.fail(f"{value!r} is no size; write 80GB or 64GiB", param, ctx)


def shown(num_bytes: float) -> str:
    """In binary units, as memory is counted."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
