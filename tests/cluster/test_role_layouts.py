"""Roles of different KV layouts and numbers of ranks: read from the config file, refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.cli import run
from cluster.config import parse_config
from cluster.gpus import gpu_share
from cluster.worker_configs import worker_configs
from tests.checkpoints import TinyLlama, write_folder
from workers.config import WorkerConfig
from workers.errors import ConfigError


def test_a_role_may_have_a_layout_of_its_own():
    text = """
kv_cache_dtype: fp32
prefill: {replicas: 2, tensor_parallel_size: 2}
decode: {kv_cache_dtype: fp8, block_size: 32}
"""
    workers = worker_configs(parse_config(text, "c.yaml"), cores=range(6))
    layouts = [(w.name, w.tensor_parallel_size, w.kv_cache_dtype, w.block_size) for w in workers]
    assert layouts == [
        ("prefill-0", 2, "float32", 16),
        ("prefill-1", 2, "float32", 16),
        ("decode-0", 1, "float8_e4m3", 32),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("decode: {block_size: 24}", "c.yaml:1: decode: block_size (24) must be a multiple of hash_block_size (16)"),
        ("decode: {kv_cache_dtype: int4}", "c.yaml:1: decode.kv_cache_dtype: must be 'auto', 'float32'"),
        ("tensor_parallel_size: 0", "c.yaml:1: tensor_parallel_size: must be at least 1, not 0"),
        ("prefill: {tensor_parallel_size: two}", "c.yaml:1: prefill.tensor_parallel_size: must be a whole number"),
        ("tensor_parallel: 2", "c.yaml:1: tensor_parallel: unknown key; did you mean tensor_parallel_size?"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_its_key(text, says):
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "c.yaml")
    assert caught.value.message.startswith(says)


@pytest.mark.parametrize("where", ["", "decode: "])
def test_a_model_that_cannot_be_divided_is_refused_in_one_line_before_anything_starts(home: Path, capsys, where):
    config = home / "two.yaml"
    config.write_text(f"{where}{{tensor_parallel_size: 2}}\n")
    assert run(["up", str(config)]) == 2
    out, err = capsys.readouterr()
    assert err == "kvferry: 9 attention heads cannot be divided by tensor_parallel_size 2; this model can have 1, 3\n"
    assert out == ""


def test_each_kind_of_number_is_named(home: Path, capsys):
    write_folder(home / "model", TinyLlama(num_heads=6, num_kv_heads=3))
    config = home / "two.yaml"
    config.write_text(f"model: {home / 'model'}\nprefill: {{tensor_parallel_size: 2}}\n")
    assert run(["up", str(config)]) == 2
    assert (
        "3 KV heads cannot be divided by tensor_parallel_size 2; this model can have 1, 3, 6" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("sizes", "num_gpus", "shares"),
    [([1, 1], 2, [1, 1]), ([2, 1], 4, [2, 1]), ([1, 1], 1, [0.5, 0.5]), ([1, 1, 1], 2, [0.5, 0.5, 0.5])],
)
def test_each_rank_has_a_gpu_and_single_ones_share_where_they_must(sizes, num_gpus, shares):
    workers = [WorkerConfig(device="cuda", tensor_parallel_size=size) for size in sizes]
    assert [gpu_share(worker, [*workers, WorkerConfig()], num_gpus) for worker in workers] == shares


@pytest.mark.parametrize(("sizes", "num_gpus", "param"), [([2, 1], 2, "tensor_parallel_size"), ([1], 0, "device")])
def test_too_few_gpus_are_refused_with_the_numbers(sizes, num_gpus, param):
    workers = [WorkerConfig(device="cuda", tensor_parallel_size=size) for size in sizes]
    with pytest.raises(ConfigError, match=f"Ray finds {num_gpus or 'no GPU'}") as caught:
        gpu_share(workers[0], workers, num_gpus)
    assert caught.value.param == param
