"""Markers that need a machine of a kind skip where it is not, and say what would run them."""

from __future__ import annotations

import shutil

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("nvidia-smi"):
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: run `make test-all` on a machine with one")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
