from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres import Postgres, postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=[pytest.mark.postgres, pytest.mark.slow])])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres").fresh_database())
    return f"sqlite:///{tmp_path}/jobs.sqlite"
