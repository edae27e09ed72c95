from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.fake_router import FakeRouter, serving


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with serving() as router:
        yield router


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has run nothing yet."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path
