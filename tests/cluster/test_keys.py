"""`kvferry keys new`, and how a config names the file of keys."""

from __future__ import annotations

import asyncio
import os

from cluster.cli import run
from cluster.config import parse_config
from router.tenants import KeyRing


def test_a_new_key_opens_the_door_once_its_line_is_in_the_file(tmp_path, capsys):
    options = ["--tenant", "acme: #1", "--requests-per-minute", "5", "--max-priority", "-2"]
    path = tmp_path / "keys.yaml"
    assert run(["keys", "new", *options]) == 0
    key, *_, line = capsys.readouterr().out.splitlines()
    path.write_text(f"keys:\n{line}\n")

    async def main() -> None:
        caller = KeyRing(str(path)).caller(f"Bearer {key}")
        assert (caller.key.tenant, caller.key.requests_per_minute, caller.key.max_priority) == ("acme: #1", 5, -2)
        assert caller.tokens is None

    asyncio.run(main())
    assert key not in path.read_text()


def test_no_two_keys_are_alike_and_none_is_easily_guessed(capsys):
    for _ in range(3):
        assert run(["keys", "new", "--tenant", "a"]) == 0
    keys = {line for line in capsys.readouterr().out.splitlines() if line.startswith("kvf-")}
    assert len(keys) == 3
    assert all(len(key) > 40 for key in keys)


def test_what_a_key_cannot_be_is_one_line(capsys):
    assert run(["keys", "new", "--tenant", ""]) == 2
    assert run(["keys", "new"]) == 2
    assert all(line.startswith("kvferry: ") for line in capsys.readouterr().err.splitlines())


def test_the_file_of_keys_is_found_from_whatever_folder_the_router_runs_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_config("router: {api_keys: keys.yaml}", "x").router.api_keys == os.path.join(tmp_path, "keys.yaml")
    assert parse_config("router: {api_keys: ~/keys.yaml}", "x").router.api_keys == os.path.expanduser("~/keys.yaml")
    assert parse_config("{}", "x").router.api_keys is None
