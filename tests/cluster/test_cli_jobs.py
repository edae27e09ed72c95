"""kvferry submit and kvferry jobs, against a router with a database."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.job_server import JobServer, job_server
from tests.cluster.test_cli import kvferry
from tests.router.jobs import jobs_config


@pytest.fixture
def server(tmp_path) -> Iterator[JobServer]:
    with job_server(jobs_config(tmp_path)) as server:
        yield server


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two", "seed": 3}\n')
    return str(path)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_submit_prints_the_jobs_id_and_jobs_its_answers(server, prompts, capsys):
    code, job_id, _ = kvferry(capsys, "submit", prompts, "--target", server.target)
    assert code == 0
    job_id = job_id.strip()
    code, out, _ = kvferry(capsys, "jobs", job_id, "--results", "--target", server.target)
    assert code == 0
    assert sorted(line["index"] for line in lines(out)) == [0, 1]
    assert all(line["text"] and line["usage"]["num_completion_tokens"] == 1 for line in lines(out))
    code, out, _ = kvferry(capsys, "jobs", job_id, "--json", "--target", server.target)
    assert (code, json.loads(out)["status"], json.loads(out)["progress"]) == (0, "completed", 1.0)
    code, out, _ = kvferry(capsys, "jobs", "--target", server.target)
    assert (code, job_id in out, "completed" in out) == (0, True, True)


def test_submit_waits_and_writes_to_a_file(server, prompts, tmp_path, capsys):
    output = tmp_path / "answers.jsonl"
    code, out, err = kvferry(
        capsys, "submit", prompts, "--wait", "--output", str(output), "--max-tokens", "4", "--target", server.target
    )
    assert (code, out, err.startswith("job-")) == (0, "", True)
    assert sorted(line["index"] for line in lines(output.read_text())) == [0, 1]
    assert [params.max_tokens for _, params, _ in server.router.calls] == [4, 4]


def test_a_prompt_that_failed_is_in_the_answers_and_in_the_exit_code(server, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "long " * 200}) + "\n" + json.dumps({"prompt": "fine"}))
    code, out, err = kvferry(capsys, "submit", str(path), "--wait", "--target", server.target)
    assert code == 1
    assert "1 of 2 prompts failed" in err
    by_index = {line["index"]: line for line in lines(out)}
    assert by_index[0]["error"]["type"] == "InvalidRequestError"
    assert by_index[1]["text"]


def test_what_is_wrong_with_a_file_is_one_line_that_names_it(server, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\nnonsense\n')
    code, out, err = kvferry(capsys, "submit", str(path), "--target", server.target)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{path}:2: not valid JSON" in err


def test_jobs_cancels_and_says_what_is_not_there(tmp_path, prompts, capsys):
    with job_server(jobs_config(tmp_path), num_permits=0) as server:
        _, job_id, _ = kvferry(capsys, "submit", prompts, "--target", server.target)
        job_id = job_id.strip()
        code, out, _ = kvferry(capsys, "jobs", job_id, "--cancel", "--json", "--target", server.target)
        assert (code, json.loads(out)["status"]) == (0, "cancelled")
        code, _, err = kvferry(capsys, "jobs", "other", "--target", server.target)
        assert (code, err.count("\n"), "there is no job 'other'" in err) == (1, 1, True)
        code, _, err = kvferry(capsys, "jobs", "--cancel", "--target", server.target)
        assert (code, "need the id of a job" in err) == (2, True)


def test_jobs_deletes_what_has_ended(tmp_path, prompts, capsys):
    with job_server(jobs_config(tmp_path), num_permits=0) as server:
        _, job_id, _ = kvferry(capsys, "submit", prompts, "--target", server.target)
        job_id = job_id.strip()
        code, _, err = kvferry(capsys, "jobs", job_id, "--delete", "--target", server.target)
        assert (code, err.count("\n"), "has not ended; cancel it before" in err) == (2, 1, True)
        code, out, err = kvferry(capsys, "jobs", job_id, "--cancel", "--delete", "--target", server.target)
        assert (code, out, err) == (0, "", f"{job_id} is deleted\n")
        code, _, err = kvferry(capsys, "jobs", job_id, "--target", server.target)
        assert (code, "there is no job" in err) == (1, True)
