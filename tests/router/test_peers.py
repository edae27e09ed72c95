"""Other people's tests of such an API, run against ours; `make peers` fetches them."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from router.openai.schema import NO_OPS
from tests.router.openai_calls import OPENAPI, nullable
from tests.router.scripted import ScriptedRouter, words
from tests.router.serving import serving
from workers.config import ModelConfig
from workers.request import FinishReason

PEERS = Path(__file__).parents[2] / ".peers"
SERVER = "http://127.0.0.1:{port}"
PYTHON = PEERS / "venv/bin/python"
SUITE = next(iter(sorted(PEERS.glob("openai-*/tests"))), PEERS / "openai/tests").parent
# Names that they ask for.
MODEL = ModelConfig(served_model_name=("gpt-6-astra", "gpt-3.5-turbo-instruct", "model"), max_model_len=1024)
# Of openai-python's tests (the version is in the Makefile) so many pass. Those that cannot, why, and how many: the same
# list is in docs/api.md.
NUM_PASSED = 120
FAILED = {
    "every parameter at once, among them unsupported and contradictory ones": (
        r"completions.*create_with_all_params",
        20,
    ),
    "stored completions": (r"chat/.*::test_(?!path_params)\w+_(retrieve|update|list|delete)", 85),
    "models are not deleted over the API": (r"test_models.*::test_(?!path_params)\w+_delete", 15),
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"needs other people's tests in {PEERS}: make peers"),
]


def run_beside_a_server(*command: str | Path, cwd: Path, timeout_s: float, **env: str) -> tuple[int, str, int]:
    """Exit code, output, and how many requests were good; {port} stands for the server's."""

    async def run() -> tuple[int, str, int]:
        router = ScriptedRouter([*words("one two"), [2]], FinishReason.STOP)
        async with serving(router, MODEL) as server:
            port = str(server.http_port)
            base = {"PATH": os.defpath, "HOME": str(cwd)}
            process = await asyncio.create_subprocess_exec(
                *(str(part).replace("{port}", port) for part in command),
                cwd=cwd,
                env=base | {key: value.replace("{port}", port) for key, value in env.items()},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            try:
                async with asyncio.timeout(timeout_s):
                    output, _ = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
            assert not router.num_running
            return await process.wait(), output.decode(errors="replace"), len(router.calls)

    return asyncio.run(run())


def test_openais_own_tests_pass_or_are_listed():
    resources = SUITE / "tests/api_resources"
    paths = [resources / name for name in ("chat", "test_completions.py", "test_models.py")]
    options = ("-o", "addopts=", "-q", "-rA", "--tb=no", "-p", "no:cacheprovider")
    _, output, _ = run_beside_a_server(
        PYTHON, "-m", "pytest", *options, *paths, cwd=SUITE, timeout_s=200, TEST_API_BASE_URL=f"{SERVER}/v1"
    )
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S+)", output, re.MULTILINE)
    unlisted = [name for outcome, name in outcomes if outcome != "PASSED" and not _reasons(name)]
    needless = [name for outcome, name in outcomes if outcome == "PASSED" and _reasons(name)]
    assert (unlisted, needless) == ([], []), output[-3000:]
    failed = Counter(reason for outcome, name in outcomes if outcome == "FAILED" for reason in _reasons(name))
    assert failed == {reason: count for reason, (_, count) in FAILED.items()}
    assert Counter(outcome for outcome, _ in outcomes) == {"PASSED": NUM_PASSED, "FAILED": failed.total()}


def _reasons(name: str) -> list[str]:
    return [reason for reason, (pattern, _) in FAILED.items() if re.search(pattern, name)]


def described(tmp_path: Path) -> Path:
    """OpenAI's description, with what our errors look like."""
    document: dict[str, Any] = json.loads(OPENAPI.read_text(), object_hook=nullable)
    del document["paths"]["/embeddings"]
    # Names that it makes up are of no model here.
    for body in re.findall(r"Create\w*CompletionRequest", " ".join(document["components"]["schemas"])):
        properties = _properties(document["components"]["schemas"][body])
        properties["model"] = {"const": "model"}
        # What is refused in any case, or without stream: true, would hide all else.
        for name in (*NO_OPS, "stream_options"):
            properties.pop(name, None)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"] |= {
                code: {"description": "an error", "content": {"application/json": {"schema": ERROR}}}
                for code in ("4XX", "5XX")
            }
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(document))
    return path


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in [schema, *schema.get("allOf", ())] if "properties" in one)["properties"]
    return found


@pytest.mark.skipif(not OPENAPI.is_file(), reason=f"needs OpenAI's description at {OPENAPI}")
def test_what_schemathesis_makes_up_is_answered_as_described(tmp_path: Path):
    code, output, num_answered = run_beside_a_server(
        PEERS / "venv/bin/schemathesis", "run", described(tmp_path),
        *("--url", f"{SERVER}/v1", "--seed", "1", "--max-examples", "20", "--request-timeout", "10"),
        *("--phases", "examples,coverage,fuzzing", "--suppress-health-check", "all"),
        *("--checks", "not_a_server_error,content_type_conformance,response_schema_conformance"),
        cwd=tmp_path, timeout_s=240,
    )  # fmt: skip
    assert code == 0, output[-4000:]
    counted = re.search(r"^ *(\d+) generated, (\d+) passed$", output, re.MULTILINE)
    assert counted is not None, output[-4000:]
    num_made, num_passed = map(int, counted.groups())
    assert num_made == num_passed >= 1000
    assert num_answered >= num_made / 10


LLAMA = PEERS / "llama-cpp/tests"
# Those that depend neither on its model nor on paths of its own. It refuses two assistants in a row, too, which here is
# the template's to do.
MODEL_FREE = (
    "(invalid_chat_completion_req and not messages7) or mutual_exclusion or "
    "response_format4 or response_format5 or response_format6 or response_format7"
)


@pytest.mark.skipif(not LLAMA.is_dir(), reason=f"needs llama.cpp's tests of its server in {LLAMA}: make peers")
def test_llama_cpps_tests_of_what_is_refused_pass(tmp_path: Path):
    # They ask without /v1.
    (tmp_path / "under_v1.py").write_text(
        "import utils\nurl = utils.ServerProcess.make_url\n"
        "utils.ServerProcess.make_url = lambda self, path, host=None: url(self, '/v1' + path, host)\n"
    )
    code, output, num_answered = run_beside_a_server(
        *(PYTHON, "-m", "pytest", "-q", "-p", "under_v1", "-p", "no:cacheprovider", "-k", MODEL_FREE),
        "unit/test_chat_completion.py",
        cwd=LLAMA, timeout_s=100, PYTHONPATH=f"{tmp_path}:{LLAMA}", DEBUG_EXTERNAL="1", PORT="{port}",
    )  # fmt: skip
    assert code == 0, output[-3000:]
    assert "12 passed" in output
    assert num_answered == 0


GUIDELLM = PEERS / "guidellm/bin/guidellm"


@pytest.mark.skipif(not GUIDELLM.exists(), reason=f"needs guidellm in {GUIDELLM}: make peers")
def test_guidellm_measures_streams(tmp_path: Path):
    prompts = [{"prompt": f"Name {count} rivers.", "output_tokens_count": 8} for count in range(20)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    code, output, num_answered = run_beside_a_server(
        *(GUIDELLM, "run", "--disable-progress", "--output", "kind=json,path=out.json"),
        *("--backend", f"kind=openai_http,target={SERVER}", "--profile", "kind=concurrent,streams=2"),
        *("--constraint", "kind=max_requests,count=16", "--data", "kind=json_file,path=data.jsonl"),
        cwd=tmp_path, timeout_s=200,
    )  # fmt: skip
    assert code == 0, output[-3000:]
    [benchmark] = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (16, 0)
    assert all(one["output"] == "one two" for one in benchmark["requests"]["successful"])
    assert all(one["output_tokens"] == 3 for one in benchmark["requests"]["successful"])
    assert num_answered >= 16
