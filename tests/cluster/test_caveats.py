"""What a config gives up that its user may not expect is said by `kvferry config check` and `kvferry up`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import up
from cluster.caveats import caveats
from cluster.cli import run
from cluster.config import parse_config
from tests.checkpoints import TinyLlama, write_folder
from workers.config import EngineConfig, Quantization
from workers.engine.model_runner import ModelRunner
from workers.errors import ConfigError

UNEQUAL = "prefill: {quantization: int8_dynamic}\ndecode: {quantization: native}\n"
UNEQUAL_SAYS = (
    "prefill computes with quantization int8_dynamic and decode with native: a stream that goes on elsewhere keeps "
    "both, but while no decode worker answers, prefill workers decode, and streams are not exact"
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no cluster runs."""
    monkeypatch.setenv("HOME", str(tmp_path))


def check(capsys: pytest.CaptureFixture[str], folder: Path, text: str) -> tuple[int, list[str], str]:
    config = folder / "c.yaml"
    config.write_text(f"router: {{http_port: 0, grpc_port: 0}}\n{text}")
    code = run(["config", "check", str(config)])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def test_a_config_that_gives_up_nothing(tmp_path, capsys):
    code, lines, err = check(capsys, tmp_path, "")
    assert (code, err) == (0, "")
    assert lines[-1] == f"{tmp_path / 'c.yaml'} can be served here: prefill-0, decode-0"
    assert not any(line.startswith(("caveat", "problem")) for line in lines)


def test_unequal_roles_are_told_where_they_are_not_exact(tmp_path, capsys):
    code, lines, _ = check(capsys, tmp_path, UNEQUAL)
    assert code == 0
    told = [line for line in lines if line.startswith("caveat: ")]
    assert len(told) == 2
    assert told[0].endswith(f": {UNEQUAL_SAYS}")
    assert "prefill and decode workers compute or keep KV in less than float32: " in told[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", []),
        ("dtype: float32", []),
        ("decode: {kv_cache_dtype: bf16}", ["decode workers compute or keep KV in less than float32"]),
        ("dtype: bfloat16", ["prefill and decode workers compute or keep KV in less than float32"]),
        ("{colocated: {replicas: 2}, device: cuda}", ["colocated workers compute or keep KV in less than float32"]),
        (
            "{prefill: {}, decode: {}, colocated: {replicas: 1, quantization: int4}}",
            [
                "colocated workers compute with quantization int4 and others with none",
                "colocated workers compute or keep",
            ],
        ),
    ],
)
def test_caveats_are_told_where_they_apply(text, says):
    told = [caveat.message for caveat in caveats(parse_config(text, "c.yaml"))]
    assert len(told) == len(says)
    assert all(line.startswith(start) for line, start in zip(told, says, strict=True))


@pytest.mark.parametrize(
    ("quantization", "model", "says"),
    [
        ("native", TinyLlama(), "quantization: native keeps a checkpoint's own bits, GGUF's Q4_0, Q4_1 or Q8_0, and "),
        (
            "int4",
            TinyLlama(intermediate_size=80),
            "quantization: int4 has a scale for 32 columns, and model.layers.0.mlp.",
        ),
    ],
    ids=["native", "int4"],
)
def test_weights_that_cannot_be_kept_so_are_refused_by_the_command_and_by_a_worker(
    tmp_path, capsys, quantization: Quantization, model, says
):
    folder = write_folder(tmp_path / "model", model)
    code, lines, err = check(capsys, tmp_path, f"model: {folder}\ndecode: {{quantization: {quantization}}}")
    problems = [line for line in lines if line.startswith("problem: ")]
    assert (code, err) == (1, "")
    assert says in problems[0]
    with pytest.raises(ConfigError, match="set int8"):
        ModelRunner(EngineConfig(model=str(folder), quantization=quantization, num_gpu_blocks_override=8))


def test_up_tells_the_same(monkeypatch):
    cluster = SimpleNamespace(wait=lambda say, socket: None)

    @contextmanager
    def running(config: Any, say: Any) -> Iterator[Any]:
        yield cluster, SimpleNamespace(http="h", grpc="g")

    monkeypatch.setattr(up, "running", running)
    config, said = parse_config(UNEQUAL, "c.yaml"), list[str]()
    up.serve(config, said.append)
    assert said[:2] == [caveat.message for caveat in caveats(config)]
    assert said[0] == UNEQUAL_SAYS
