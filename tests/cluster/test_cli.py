from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys

import pytest

from cluster.cli import run
from cluster.ports import why_not_bindable
from cluster.state import State, StateFolder
from tests.cluster.fake_router import WORDS


def kvferry(capsys, *arguments: str) -> tuple[int, str, str]:
    code = run(list(arguments))
    output = capsys.readouterr()
    return code, output.out, output.err


def test_generate_streams_the_text(router, capsys):
    code, out, err = kvferry(
        capsys, "generate", "hi", "--target", router.target, "--max-tokens", "5", "--top-k", "2", "--stop-token-id", "3"
    )
    assert (code, out, err) == (0, "".join(WORDS), "")
    params = router.requests[0].params
    assert (params.max_tokens, params.top_k, list(params.stop_token_ids)) == (5, 2, [3])
    assert not params.HasField("temperature")
    assert not params.HasField("ignore_eos")


def test_generate_chat_sends_messages(router, capsys):
    assert kvferry(capsys, "generate", "hi", "--chat", "--target", router.target)[0] == 0
    message = router.requests[0].messages.messages[0]
    assert (message.role, message.content) == ("user", "hi")


@pytest.mark.parametrize(("prompt", "expected"), [("bad", 2), ("busy", 1), ("broken", 1)])
def test_a_refused_request_is_one_line(router, capsys, prompt, expected):
    code, _, err = kvferry(capsys, "generate", prompt, "--target", router.target)
    assert code == expected
    assert err.count("\n") == 1


def test_status_json_is_one_object(router, capsys):
    code, out, _ = kvferry(capsys, "status", "--json", "--target", router.target)
    status = json.loads(out)
    assert code == 0
    assert (status["name"], status["ready"]) == ("fake", True)
    assert status["endpoints"] == {"http": "http://127.0.0.1:1", "grpc": router.target}
    assert [worker["name"] for worker in status["workers"]] == ["prefill-0", "decode-0"]
    for worker in status["workers"]:
        assert worker["state"] == "ready"
        peer = {"incarnation": "peer", "transport": "grpc", "address": "127.0.0.1:10", "checksum": True, "why": ""}
        assert worker["peers"] == [peer]
        parts = ("blocks_free", "blocks_cached", "blocks_reserved", "blocks_in_use", "blocks_quarantined")
        assert worker["blocks_total"] == sum(worker[part] for part in parts)
        assert {"role", "pid", "node", "incarnation", "num_running", "num_waiting"} <= worker.keys()
    assert status["totals"]["blocks_total"] == 20
    assert status["totals"]["num_queued"] == 2


def test_status_table_names_the_workers(router, capsys):
    code, out, _ = kvferry(capsys, "status", "--target", router.target)
    assert code == 0
    assert "fake is ready" in out
    assert "prefill-0" in out
    assert "decode-0" in out
    assert out.count("grpc") == 2


def test_target_is_taken_from_the_cluster_that_runs_here(router, capsys, home):
    folder = StateFolder("kvferry")
    with folder.claim():
        folder.write(State(os.getpid(), 0.0, "http://127.0.0.1:1", router.target))
        assert kvferry(capsys, "status", "--json")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "expected", "line"),
    [
        (["down"], 1, "no cluster named kvferry runs here"),
        (["status", "--name", "other"], 1, "no cluster named other runs here; start it with `kvferry up`"),
        (["status", "--target", "127.0.0.1:9"], 1, "no router answers at 127.0.0.1:9; start one with `kvferry up`"),
        (["up", "missing.yaml"], 2, "missing.yaml: no such file"),
        (["generate"], 2, "Missing argument 'PROMPT'"),
        (["generate", "x", "--max-tokens", "many"], 2, "Invalid value for '--max-tokens'"),
        (["fly"], 2, "No such command 'fly'"),
    ],
)
def test_errors_are_one_line_on_stderr(capsys, home, arguments, expected, line):
    code, out, err = kvferry(capsys, *arguments)
    assert code == expected
    assert out == ""
    assert err.startswith(f"kvferry: {line}")
    assert err.count("\n") == 1


def test_up_without_the_server_extra_says_what_to_install(capsys, home, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else found(name))
    for arguments in (["up"], ["up", "--detach"]):
        assert kvferry(capsys, *arguments) == (
            2,
            "",
            "kvferry: `kvferry up` needs ray: pip install 'kvferry[server]'\n",
        )


def test_up_on_a_busy_port_starts_nothing(capsys, home, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        config = tmp_path / "c.yaml"
        config.write_text(f"router: {{http_port: {port}, grpc_port: 0}}")
        code, out, err = kvferry(capsys, "up", str(config))
    assert (code, out) == (2, "")
    assert err.startswith(f"kvferry: router.http_port: 127.0.0.1:{port}: the port is in use")
    assert not StateFolder("kvferry").locked()


def test_up_beside_a_cluster_of_that_name_is_refused(capsys, home):
    with StateFolder("kvferry").claim():
        code, out, err = kvferry(capsys, "up")
    assert (code, out) == (2, "")
    assert err.startswith("kvferry: a cluster named kvferry is already up")


def test_ports_that_cannot_be_had_say_why():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        assert "in use" in (why_not_bindable("127.0.0.1", busy.getsockname()[1]) or "")
    assert "this machine" in (why_not_bindable("192.0.2.77", 1234) or "")
    assert "no such host" in (why_not_bindable("nowhere.invalid", 1234) or "")


def test_help_loads_nothing_slow():
    slow = "{'torch', 'ray', 'rich', 'yaml', 'pydantic'}"
    code = f"import sys; from cluster.cli import run; run(['--help']); print({slow} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("set()\n")
