"""What editors and readers are told of a config is what the config takes."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml

from cluster.cli import run
from cluster.config import ClusterConfig, load_config, parse_config
from cluster.config_docs import MARK, tables
from cluster.config_errors import dotted_keys
from cluster.config_file import packaged_configs
from cluster.config_schema import config_schema

_PAGE = Path(__file__).parents[2] / "docs/configuration.md"


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", packaged_configs())
def test_packaged_configs_are_valid_by_the_schema_and_by_us(name: str, validator) -> None:
    data = yaml.safe_load(packaged_configs()[name])
    assert [error.message for error in validator.iter_errors(data)] == []
    assert load_config(name) == ClusterConfig.model_validate(data)


# Both take, or refuse, the same.
@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("{}", True),
        ("served_model_name: llama", True),
        ("served_model_name: [llama, gpt]", True),
        ("kv_cache_dtype: fp8", True),
        ("kv_cache_dtype: float8_e4m3", True),
        ("decode: {kv_cache_dtype: fp8, cpu_affinity: [0, 1]}", True),
        ("speculative_config: {num_speculative_tokens: 2}", True),
        ("router: {slo: {ttft_ms: 500}}", True),
        ("faults: [{fault: kill, at: commit}, {fault: drop_frame, probability: 0.5}]", True),
        ("kv_cache_dtype: fp7", False),
        ("router: {htp_port: 1}", False),
        ("router: {http_port: 70000}", False),
        ("prefill: 3", False),
        ("speculative_config: {method: eagle}", False),
        ("faults: [{fault: kill, at: lunch}]", False),
        ("transfer: {lease_s: 0}", False),
        ("name: [a]", False),
    ],
)
def test_the_schema_takes_what_the_config_takes(text: str, is_valid: bool, validator) -> None:
    assert validator.is_valid(yaml.safe_load(text)) is is_valid
    if is_valid:
        parse_config(text, "c.yaml")
    else:
        with pytest.raises(Exception, match=r"c\.yaml"):
            parse_config(text, "c.yaml")


def test_every_key_has_a_meaning_in_the_schema() -> None:
    schema = config_schema()
    groups = {"": schema, **schema["$defs"]}
    silent = [
        f"{name}.{key}"
        for name, group in groups.items()
        for key, value in group["properties"].items()
        if len(value.get("description", "")) < 5
    ]
    assert silent == []


def test_the_page_of_all_keys_is_that_of_the_models() -> None:
    prose, mark, made = _PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark, "the line before the tables is gone"
    assert made == tables(), "run `make docs`"
    assert "kvferry config check" in prose


def test_the_page_names_every_key_once_in_each_of_its_tables() -> None:
    rows = [line.split("`")[1] for line in tables().splitlines() if line.startswith("| `")]
    assert {dotted.rpartition(".")[2] for dotted in dotted_keys(ClusterConfig)} == set(rows)


def test_what_is_shown_is_a_config_and_the_same_one(tmp_path: Path, capsys) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nkv_cache_dtype: bf16\nrouter: {replicas: 2}\njobs: {url: 'postgresql://u:secret@h/kvferry?sslmode=require&password=secret'}\n"
        "faults: [{fault: kill, at: commit}]\n"
    )
    assert run(["config", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "secret" not in shown
    assert parse_config(shown.replace("***", "secret"), "shown") == load_config(path, allow_faults=True)


def test_the_schema_is_printed(capsys) -> None:
    assert run(["config", "schema"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == config_schema()
