"""A PostgreSQL server of the tests' own, from Debian's packages: on a socket in a temporary folder, gone after them."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psycopg
import pytest

_USER = "postgres"
_TIMEOUT_S = 60.0


def programs() -> Path:
    """The folder with initdb and pg_ctl; skips the test where there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("no PostgreSQL server here: apt-get install postgresql")
    return found[-1].parent


def _as_user() -> str | None:
    """Its server refuses to run as root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(_USER).pw_name
    except KeyError:
        pytest.skip(f"PostgreSQL does not run as root, and there is no user {_USER} here")


@dataclass
class Postgres:
    folder: Path
    _bin: Path
    _as: str | None
    _numbers: Iterator[int] = field(default_factory=count)

    def start(self) -> None:
        options = f"-k {self.folder} -c listen_addresses= -c max_connections=50"
        self.run(
            "pg_ctl", "-D", str(self.folder / "data"), "-o", options, "-l", str(self.folder / "log"), "-w", "start"
        )

    def stop(self) -> None:
        """As a power cut does: nothing is finished."""
        self.run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")

    def fresh_database(self) -> str:
        """The URL of an empty one."""
        name = f"jobs{next(self._numbers)}"
        with psycopg.connect(f"host={self.folder} user={_USER} dbname=postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return f"postgresql://{_USER}@/{name}?host={self.folder}"

    def run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._bin / program, *arguments], check=True, user=self._as, cwd="/", timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


@contextmanager
def postgres_server() -> Iterator[Postgres]:
    server = Postgres(Path(tempfile.mkdtemp(prefix="kvferry-pg-")), programs(), _as_user())
    try:
        if server._as is not None:
            shutil.chown(server.folder, server._as)
        server.run("initdb", "-D", str(server.folder / "data"), "-U", _USER, "-A", "trust", "--no-sync")
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(server.folder, ignore_errors=True)
