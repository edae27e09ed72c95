"""A host's workers keep their weights once: the same numbers, in memory that the last of them takes with it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import TinyLlama, write_folder
from workers.config import EngineConfig
from workers.engine.batch import build_batch
from workers.engine.model_runner import ModelRunner
from workers.engine.scheduler import PromptScores, ScheduledRequest, SchedulerOutput
from workers.layers import compiled
from workers.models.loader import load_model
from workers.models.shared_weights import once_per_host

WIDE = TinyLlama(hidden_size=64, intermediate_size=128, vocab_size=512)
# Builds what it is asked for, says so, and stays.
OTHER = """
import sys
from workers.config import EngineConfig
from workers.engine.model_runner import ModelRunner
runner = ModelRunner(EngineConfig.model_validate_json(sys.argv[1]))
print("there", flush=True)
sys.stdin.read()
"""


class Net:
    """Something like a model, of which it can be told which process built it."""

    def __init__(self, fill: float = 1.0) -> None:
        self.weight = torch.full((64, 64), fill)
        self.tied = self.weight
        self.small = torch.arange(3)
        self.built_by = os.getpid()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where only this test's processes tell who has what."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / f"kvferry-weights-{os.getuid()}"


def config_of(model: Path, **changes: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model": str(model), "num_gpu_blocks_override": 64, **changes})


@contextmanager
def another_process(config: EngineConfig) -> Iterator[int]:
    """A runner of its own, until the end of the block, then killed."""
    command = [sys.executable, "-c", OTHER, config.model_dump_json()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def no_build() -> Net:
    raise AssertionError("it is there already")


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Of a prompt."""
    ids = tuple(range(1, 40))
    request = ScheduledRequest("r", ids, 0, tuple(range(3)), prompt_scores=PromptScores(ids, 0))
    batch = build_batch(
        SchedulerOutput((request,), len(ids)), 16, runner._dtype, torch.device("cpu"), frozenset({None})
    )
    with torch.inference_mode():
        return runner._model.forward(batch, runner._pool.tensor)


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    built: list[str] = []

    def counted(*args: Any) -> Any:
        built.append(args[-1])
        return load_model(*args)

    monkeypatch.setattr("workers.engine.model_runner.load_model", counted)
    return built


def num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:kvferry-weights")


@pytest.mark.parametrize(
    "quantization",
    ["none", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "int8_dynamic", "int4"))],
)
def test_a_model_of_another_process_computes_the_same_and_outlives_it(quantization, tmp_path, monkeypatch):
    config = config_of(write_folder(tmp_path / "model", WIDE), quantization=quantization)
    built = count_builds(monkeypatch)
    expected = logits_of(ModelRunner(config))
    gc.collect()
    with another_process(config):
        runner = ModelRunner(config)
        assert torch.equal(logits_of(runner), expected)
        num_built = len(built)
    # Its maker was killed: it is here still, also for who comes now.
    assert torch.equal(logits_of(runner), expected)
    with another_process(config) as third:
        maps = Path(f"/proc/{third}/maps").read_text()
    # Elsewhere oneDNN keeps them in an order of its own.
    if compiled.multiplies(torch.zeros(64, 64)) and compiled.unpacks(torch.zeros(64, 64)):
        assert num_built == 1  # The first, which nobody shares.
        assert "memfd:kvferry-weights" in maps


def test_two_that_start_at_once_build_once():
    started, go_on, models = threading.Event(), threading.Event(), list[Net]()

    def build() -> Net:
        started.set()
        go_on.wait(10)
        return Net()

    first = threading.Thread(target=lambda: models.append(once_per_host("key", build)))
    first.start()
    assert started.wait(10)
    second = threading.Thread(target=lambda: models.append(once_per_host("key", no_build)))
    second.start()
    go_on.set()
    for thread in (first, second):
        thread.join(10)
    assert len(models) == 2
    assert torch.equal(models[0].weight, models[1].weight)


def test_the_whole_object_is_there_and_what_was_one_tensor_is_one():
    first = once_per_host("key", Net)
    second = once_per_host("key", no_build)
    assert torch.equal(second.weight, torch.ones(64, 64))
    assert second.tied is second.weight
    assert first.tied is first.weight
    assert second.small.tolist() == [0, 1, 2]


def test_what_one_writes_by_mistake_others_do_not_see():
    first = once_per_host("key", Net)
    second, third = once_per_host("key", no_build), once_per_host("key", no_build)
    second.weight.fill_(7)
    assert torch.equal(first.weight, torch.ones(64, 64))
    assert torch.equal(third.weight, first.weight)


def test_another_key_is_another_model_and_memory_goes_with_the_last_that_has_it(folder):
    first = once_per_host("key", Net)
    other = once_per_host("other", lambda: Net(2.0))
    assert float(other.weight[0, 0]) == 2.0
    gc.collect()
    before, num_open = num_mapped(), len(os.listdir("/proc/self/fd"))
    del first
    gc.collect()
    assert num_mapped() == before - 1
    assert len(os.listdir("/proc/self/fd")) < num_open
    again = once_per_host("key", lambda: Net(3.0))
    assert float(again.weight[0, 0]) == 3.0


@pytest.mark.parametrize(
    "holders",
    [b"", b"[[", b"{}", b"[[1]]", b'[["x", 3]]', b"[[999999999, 3]]", b"pipe", b"file"],
    ids=["empty", "cut", "object", "short", "text", "dead", "pipe", "file"],
)
def test_holders_that_are_none_are_passed_over(folder, holders, tmp_path):
    model = once_per_host("key", Net)
    (place,) = folder.iterdir()
    del model
    gc.collect()
    ends = os.pipe()
    with (tmp_path / "file").open("wb+") as file:
        known = {b"pipe": ends[0], b"file": file.fileno()}
        text = json.dumps([[os.getpid(), known[holders]]]).encode() if holders in known else holders
        place.write_bytes(text)
        assert float(once_per_host("key", lambda: Net(5.0)).weight[0, 0]) == 5.0
    for end in ends:
        os.close(end)


def test_a_folder_that_others_may_write_to_is_not_read(folder):
    kept = once_per_host("key", Net)
    folder.chmod(0o777)
    own = once_per_host("key", lambda: Net(4.0))
    assert float(own.weight[0, 0]) == 4.0
    folder.chmod(0o700)
    assert float(once_per_host("key", no_build).weight[0, 0]) == 1.0
    assert float(kept.weight[0, 0]) == 1.0


@pytest.mark.parametrize("error", [ValueError("no model"), OSError("no file")])
def test_a_build_that_fails_fails_once_and_holds_up_nobody(error):
    errors = [error]

    def fail() -> Net:
        raise errors.pop()

    with pytest.raises(type(error), match="no "):
        once_per_host("key", fail)
    assert float(once_per_host("key", Net).weight[0, 0]) == 1.0


@pytest.mark.parametrize("why", ["no rows of numbers", "no pickle"])
def test_what_cannot_be_shared_is_each_ones_own(why):
    def build() -> Net:
        net = Net()
        if why == "no pickle":
            net.small = lambda: 0  # type: ignore[assignment]
        else:
            net.tied = torch.ones(64, 64).to_sparse()
        return net

    assert float(once_per_host("key", build).weight[0, 0]) == 1.0
    # Who comes next knows, and holds up nobody who comes meanwhile.
    other = once_per_host("key", lambda: once_per_host("key", lambda: Net(6.0)))
    assert float(other.weight[0, 0]) == 6.0


def test_a_file_of_the_right_beginning_is_no_shared_memory(folder, tmp_path):
    """The number of a process that is gone may be anybody's, who would have anything unpickled."""
    model = once_per_host("key", Net)
    (place,) = folder.iterdir()
    ((pid, fd),) = json.loads(place.read_text())
    (tmp_path / "forged").write_bytes(Path(f"/proc/{pid}/fd/{fd}").read_bytes())
    del model
    gc.collect()
    with (tmp_path / "forged").open("rb") as forged:
        place.write_text(json.dumps([[os.getpid(), forged.fileno()]]))
        assert float(once_per_host("key", lambda: Net(5.0)).weight[0, 0]) == 5.0


def test_a_disk_that_is_full_costs_nobody_its_weights(monkeypatch):
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workers.models.shared_weights.json.dump", full)
    assert float(once_per_host("key", Net).weight[0, 0]) == 1.0
    monkeypatch.undo()
    monkeypatch.setattr(os, "memfd_create", full)
    assert float(once_per_host("other", Net).weight[0, 0]) == 1.0


def test_a_checkpoint_that_changed_is_built_anew(tmp_path, monkeypatch):
    built = count_builds(monkeypatch)
    model = write_folder(tmp_path / "model", WIDE)
    first = ModelRunner(config_of(model))
    before = logits_of(first)
    write_folder(tmp_path / "other", TinyLlama(hidden_size=64, intermediate_size=128, vocab_size=512, seed=9))
    (tmp_path / "other" / "model.safetensors").replace(model / "model.safetensors")
    second = ModelRunner(config_of(model))
    assert len(built) == 2
    assert not torch.equal(logits_of(second), before)
    assert torch.equal(logits_of(first), before)
