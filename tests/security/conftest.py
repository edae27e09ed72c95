from __future__ import annotations

from pathlib import Path

import pytest

from tests.security.certificates import Certificates


@pytest.fixture
def ours(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "ours")


@pytest.fixture
def foreign(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "foreign")
