from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Every death is logged; thousands of them are of no use to anybody."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
