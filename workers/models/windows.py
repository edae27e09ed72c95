"""Which layers look back over a sliding window: one rule a family. Neither torch nor ray here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# A layer's window in tokens, its own token included; None: everything before it.
Windows = tuple[int | None, ...]
# From a config.json with its family's defaults.
WindowRule = Callable[[Mapping[str, Any]], Windows]


def no_layer(raw: Mapping[str, Any]) -> Windows:
    return _where(raw, lambda layer: False)


def every_layer(raw: Mapping[str, Any]) -> Windows:
    return _where(raw, lambda layer: bool(raw.get("use_sliding_window", True)))


def upper_layers(raw: Mapping[str, Any]) -> Windows:
    """Those from max_window_layers on, or as layer_types says."""
    if not raw.get("use_sliding_window"):
        return no_layer(raw)
    return _by_type(raw) if raw.get("layer_types") else _where(raw, lambda layer: layer >= raw["max_window_layers"])


def by_pattern(raw: Mapping[str, Any]) -> Windows:
    """All but every sliding_window_pattern-th, or as layer_types says."""
    if raw.get("layer_types"):
        return _by_type(raw)
    return _where(raw, lambda layer: bool((layer + 1) % raw["sliding_window_pattern"]))


def _by_type(raw: Mapping[str, Any]) -> Windows:
    return _where(raw, lambda layer: bool(raw["layer_types"][layer] == "sliding_attention"))


def _where(raw: Mapping[str, Any], slides: Callable[[int], bool]) -> Windows:
    window = raw.get("sliding_window")
    return tuple(window if slides(layer) else None for layer in range(raw["num_hidden_layers"]))
