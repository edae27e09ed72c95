"""Mistral (Jiang et al. 2023): Llama, each of whose layers looks back over a sliding window."""

from __future__ import annotations

from workers.models.llama import build

__all__ = ["build"]
