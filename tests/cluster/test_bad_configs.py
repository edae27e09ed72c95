"""Two hundred bad configs: each is refused in one line that names the key, and nothing of a cluster is started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.cluster.bad_configs import BadConfig, bad_configs

# In a process of its own, where it shows what was loaded. What it must not come to fails, rather than start something.
_REFUSE_ALL = """
import contextlib, io, json, os, sys
from cluster.cli import run
sys.modules["cluster.launch"] = None
answers = []
for path in sys.argv[1:]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        answers.append((run(["up", path]), out.getvalue(), err.getvalue()))
children = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read()
print(json.dumps({"answers": answers, "children": children, "loaded": sorted({"ray", "torch"} & sys.modules.keys())}))
"""


def test_each_is_refused_in_one_line_that_names_the_key_and_nothing_is_started(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as busy:
        bad = bad_configs(busy.getsockname()[1], str(empty))
        paths = [tmp_path / f"{i}.yaml" for i in range(len(bad))]
        for path, config in zip(paths, bad, strict=True):
            path.write_text(config.text, encoding="utf-8")
        told = subprocess.run(
            [sys.executable, "-c", _REFUSE_ALL, *map(str, paths)],
            capture_output=True, text=True, check=True, timeout=120, env={**os.environ, "HOME": str(tmp_path)},
        )  # fmt: skip
    report = json.loads(told.stdout)
    wrong = [wrongs for pair in zip(bad, report["answers"], strict=True) if (wrongs := _wrongs(*pair))]
    assert wrong == []
    assert (report["children"], report["loaded"]) == ("", [])
    assert not list(tmp_path.rglob("state.json"))
    assert len({config.text for config in bad}) >= 200
    assert min(Counter(config.what for config in bad[:-20]).values()) >= 5


def _wrongs(config: BadConfig, answer: tuple[int, str, str]) -> str:
    """What is wrong with a refusal; empty: nothing."""
    code, out, err = answer
    says = f"{config.what}: {config.text!r}: {code} {out!r} {err!r}"
    if code != 2 or out or err.count("\n") != 1 or len(err) > 600 or "Traceback" in err:
        return says
    return "" if config.key in err else f"not named {config.key}: {says}"
