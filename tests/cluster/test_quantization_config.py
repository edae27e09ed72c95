"""Weights in fewer bits: of the whole cluster or of a role, refused where they cannot be, shown in status."""

from __future__ import annotations

import pytest
from rich.console import Console

from cluster.config import parse_config
from cluster.render import status_object, status_table
from cluster.worker_configs import worker_configs
from protos import router_pb2, worker_pb2
from workers.errors import ConfigError


def test_a_role_may_have_weights_of_its_own_and_decode_knows_those_of_prefill() -> None:
    config = parse_config("quantization: native\nprefill: {quantization: int8_dynamic}\n", "c.yaml")
    workers = worker_configs(config, cores=range(2))
    assert [(w.name, w.quantization, w.prompt_quantization, w.computes_prompts) for w in workers] == [
        ("prefill-0", "int8_dynamic", "int8_dynamic", True),
        ("decode-0", "native", "int8_dynamic", False),
    ]
    assert config.unequal_roles == "prefill computes with quantization int8_dynamic and decode with native"


@pytest.mark.parametrize("text", ["", "quantization: int4", "{quantization: int8, colocated: {replicas: 1}}"])
def test_roles_of_one_kind_are_equal(text: str) -> None:
    config = parse_config(text, "c.yaml")
    assert config.unequal_roles == ""
    assert all(worker.computes_prompts for worker in worker_configs(config, cores=range(2)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("quantization: int5", "c.yaml:1: quantization: must be 'none', 'native', 'int8', 'int8_dynamic' or 'int4'"),
        ("decode: {quantization: fp8}", "c.yaml:1: decode.quantization: must be 'none', 'native'"),
        ("{quantization: native, device: cuda}", "c.yaml:1: quantization: native runs on device: cpu only so far"),
        (
            "prefill: {quantization: int8, tensor_parallel_size: 3}",
            "c.yaml:1: prefill: quantization: int8 cannot be cut into tensor_parallel_size 3 parts",
        ),
        (
            "{transfer: {resume: replicate}, decode: {quantization: native}}",
            "c.yaml:1: transfer.resume: replicate keeps KV of prompts and answers as one, and prefill computes with "
            "quantization none and decode with native",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "c.yaml")
    assert caught.value.message.startswith(says)


def test_status_shows_weights_and_kernels() -> None:
    native = worker_pb2.WorkerStats(name="decode-0", quantization="native", kernels={"int4pack": 120, "int8pack": 1})
    plain = worker_pb2.WorkerStats(name="prefill-0", quantization="none", kernels={"float32": 121})
    status = router_pb2.GetStatusResponse(workers=[router_pb2.WorkerStatus(stats=one) for one in (native, plain)])
    shown = status_object(status)["workers"]
    assert [(one["quantization"], one["kernels"]) for one in shown] == [
        ("native", {"int4pack": 120, "int8pack": 1}),
        ("none", {"float32": 121}),
    ]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(status_table(status))
    rows = [line.split("any")[1] for line in captured.get().splitlines()[1:]]
    assert rows[0].strip().startswith("native: int4pack + int8pack ")
    assert rows[1].strip().startswith("float32 ")
