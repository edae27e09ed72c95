from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from cluster.guard import Guard, descendants, start_time
from cluster.state import State, StateFolder
from workers.errors import ConfigError


def test_nothing_runs_where_nothing_was_claimed(tmp_path):
    folder = StateFolder("kvferry", tmp_path)
    assert not folder.locked()
    assert folder.running() is None


def test_a_claim_is_seen_and_ends(tmp_path):
    folder, other = StateFolder("kvferry", tmp_path), StateFolder("kvferry", tmp_path)
    with folder.claim():
        state = other.running()
        assert state is not None
        assert state.pid == os.getpid()
        assert not state.ready
        folder.write(State(os.getpid(), 1.0, "http://a", "b:1"))
        assert other.running() == State(os.getpid(), 1.0, "http://a", "b:1")
        with (
            pytest.raises(ConfigError, match=r"already up \(pid \d+, gRPC b:1\): stop it with `kvferry down`"),
            other.claim(),
        ):
            pass
        assert other.locked()
    assert other.running() is None
    with other.claim():
        pass


def test_a_failed_claimant_leaves_nothing(tmp_path):
    folder = StateFolder("kvferry", tmp_path)
    with pytest.raises(ValueError, match="boom"), folder.claim():
        raise ValueError("boom")
    assert not folder.locked()
    assert not (folder.path / "state.json").exists()


def test_what_a_killed_process_left_fools_nobody(tmp_path):
    folder = StateFolder("kvferry", tmp_path)
    with folder.claim():
        pass
    # Its pid is somebody else's by now.
    (folder.path / "state.json").write_text(json.dumps({"pid": os.getpid(), "started_at_s": 1.0}))
    assert folder.running() is None


def test_names_do_not_meet(tmp_path):
    with StateFolder("a", tmp_path).claim(), StateFolder("b", tmp_path).claim():
        assert StateFolder("a", tmp_path).locked()


OWNER = """
import subprocess, sys, time
from pathlib import Path
from cluster.guard import Guard
guard = Guard(Path(sys.argv[1]))
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
guard.watch_descendants()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_guard_ends_the_children_of_a_killed_owner_and_removes_its_folder(tmp_path):
    folder = tmp_path / "ray"
    folder.mkdir()
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        child = int(owner.stdout.readline())
    assert start_time(child)
    owner.kill()
    owner.wait()
    deadline_s = time.monotonic() + 10
    while (start_time(child) or folder.exists()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert start_time(child) is None
    assert not folder.exists()


ORPHANING_OWNER = """
import subprocess, sys, time
from pathlib import Path
from cluster.guard import Guard
guard = Guard(Path(sys.argv[1]))
parent = "import subprocess as s; p = s.Popen(['sleep', '60'], stdout=s.DEVNULL, start_new_session=True); print(p.pid)"
orphan = subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True).stdout
guard.watch_descendants()
print(orphan, flush=True)
time.sleep(60)
"""


def test_guard_ends_those_whose_own_parent_is_gone_already(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", ORPHANING_OWNER, str(tmp_path / "ray")], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner.stdout:
        orphan = int(owner.stdout.readline())
    assert start_time(orphan)
    owner.kill()
    owner.wait()
    deadline_s = time.monotonic() + 10
    while start_time(orphan) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert start_time(orphan) is None


def test_closing_a_guard_waits_until_it_is_done(tmp_path):
    folder = tmp_path / "ray"
    folder.mkdir()
    with Guard(folder):
        child = subprocess.Popen([shutil.which("sleep") or "sleep", "60"])
        assert child.pid in descendants(os.getpid())
    assert not folder.exists()
    assert start_time(child.pid)
    child.kill()
    child.wait()
