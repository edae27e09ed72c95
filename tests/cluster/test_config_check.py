"""`kvferry config check`: what cannot work is refused before anything starts, and what is not exact is said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from cluster import up
from cluster.caveats import caveats
from cluster.cli import run
from cluster.config import parse_config
from tests.checkpoints import TinyLlama, write_folder, write_gguf
from workers.config import EngineConfig, Quantization
from workers.engine.model_runner import ModelRunner
from workers.errors import ConfigError

UNEQUAL = "prefill: {quantization: int8_dynamic}\ndecode: {quantization: native}\n"
UNEQUAL_SAYS = (
    "prefill computes with quantization int8_dynamic and decode with native: a stream that goes on elsewhere keeps "
    "both, but while no decode worker answers, prefill workers decode, and streams are not exact"
)


def check(capsys: pytest.CaptureFixture[str], folder: Path, text: str) -> tuple[int, list[str], str]:
    config = folder / "c.yaml"
    config.write_text(text)
    code = run(["config", "check", str(config)])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def test_a_config_that_can_be_served_and_gives_up_nothing(tmp_path, capsys):
    model = write_folder(tmp_path / "model")
    code, lines, err = check(capsys, tmp_path, f"model: {model}")
    assert (code, lines, err) == (0, [f"{tmp_path / 'c.yaml'} can be served: prefill-0, decode-0 of {model}"], "")


def test_unequal_roles_are_told_where_they_are_not_exact(tmp_path, capsys):
    model = write_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_1)
    code, lines, _ = check(capsys, tmp_path, f"model: {model}\n{UNEQUAL}")
    assert code == 0
    assert lines[0] == UNEQUAL_SAYS
    assert lines[1].startswith("prefill and decode workers compute or keep KV in less than float32: ")


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
    told = list(caveats(parse_config(text, "c.yaml")))
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
    assert (code, lines) == (2, [])
    assert err.startswith(f"kvferry: {says}")
    assert err.count("\n") == 1
    with pytest.raises(ConfigError, match="set int8"):
        ModelRunner(EngineConfig(model=str(folder), quantization=quantization, num_gpu_blocks_override=8))


@pytest.mark.parametrize("text", ["{quantization: int8, device: cuda}", "model: /nowhere", "quantisation: int8"])
def test_what_up_would_refuse_is_refused_in_one_line(tmp_path, capsys, text):
    code, lines, err = check(capsys, tmp_path, text)
    assert (code, lines) == (2, [])
    assert err.count("\n") == 1


def test_up_tells_the_same(monkeypatch):
    cluster = SimpleNamespace(wait=lambda say: None)

    @contextmanager
    def running(config: Any, say: Any) -> Iterator[Any]:
        yield cluster, SimpleNamespace(http="h", grpc="g")

    monkeypatch.setattr(up, "running", running)
    config, said = parse_config(UNEQUAL, "c.yaml"), list[str]()
    up.serve(config, said.append)
    assert said[:2] == list(caveats(config))
    assert said[0] == UNEQUAL_SAYS
