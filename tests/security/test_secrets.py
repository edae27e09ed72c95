"""What must never be told: passwords of databases, in whatever is said of a config or of a database that fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import run
from router.jobs.database import Database
from workers.errors import UnavailableError

SECRET = "s3cret-word"
URLS = (
    f"postgresql://ann:{SECRET}@127.0.0.1:1/jobs",
    f"postgresql://ann:a/b:{SECRET}@127.0.0.1:1/jobs",
    f"postgresql://127.0.0.1:1/jobs?password={SECRET}",
    f"postgres:/ann:{SECRET}@nowhere",
    f"mysql://ann:{SECRET}@nowhere/jobs",
    f"postgresql://ann:{SECRET}@127.0.0.1:port/jobs",
)


@pytest.mark.parametrize("url", URLS)
def test_a_password_is_in_nothing_that_is_said_of_a_config(tmp_path: Path, capsys: Any, monkeypatch: Any, url: str):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "c.yaml"
    path.write_text(f"address: 127.0.0.1:1\njobs:\n  url: '{url}'\n  ttl_s: 60\n")
    for command in (["config", "check"], ["config", "check", "--json"], ["config", "show"], ["up"]):
        run([*command, str(path)])
    path.write_text(f"address: 127.0.0.1:1\njobs:\n  url: '{url}'\n  ttl_s: -1\n")
    assert run(["config", "show", str(path)]) == 2
    path.write_text(f"address: 127.0.0.1:1\njobs:\n  url: ['{url}']\n")
    assert run(["config", "show", str(path)]) == 2
    told = capsys.readouterr()
    assert "jobs" in told.out + told.err
    assert SECRET not in told.out + told.err


@pytest.mark.parametrize("url", URLS[:3])
def test_a_password_is_in_no_error_or_log_of_a_database_that_is_not_there(url: str, caplog: pytest.LogCaptureFixture):
    pytest.importorskip("psycopg", reason="needs kvferry[postgres]")

    async def main() -> str:
        database = Database(url)
        try:
            with pytest.raises(UnavailableError) as caught:
                await database.run(lambda session: None)
            return caught.value.message
        finally:
            await database.close()

    assert SECRET not in asyncio.run(main()) + caplog.text
    assert "jobs" in caplog.text
