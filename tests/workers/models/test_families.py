"""Every family against Hugging Face transformers, however a prompt is cut and whoever shares the step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tests.exact import Comparator, Logits
from tests.families import TINY, write_family_gguf
from tests.workers.models.paged import PROMPT_LENGTHS, Paged, assert_close, prompt, share
from tests.workers.scheduled import scheduled
from workers.config import EngineConfig
from workers.engine.model_runner import ModelRunner
from workers.engine.scheduler import SchedulerOutput
from workers.errors import ConfigError
from workers.models.architecture import read_architecture
from workers.models.registry import FAMILIES
from workers.request import SamplingParams

NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Checkpoint:
    """Also tests.exact's Oracle."""

    name: str
    folder: Path
    model: PreTrainedModel

    def expected(self, ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return logits

    def logits(self, token_ids: Sequence[int], num_last: int) -> Logits:
        rows: Logits = self.expected(token_ids)[-num_last:].double().numpy()
        return rows


@pytest.fixture(scope="module", params=TINY)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write(request.param, tmp_path_factory.mktemp(request.param))


def write(name: str, folder: Path) -> Checkpoint:
    model = TINY[name].build()
    model.save_pretrained(folder)
    return Checkpoint(name, folder, model)


def test_each_family_has_a_checkpoint_here() -> None:
    assert {name.split("-")[0].replace("llama3", "llama") for name in TINY} == set(FAMILIES)


def test_logits_equal_transformers_whole_and_chunked(checkpoint: Checkpoint) -> None:
    paged = Paged(checkpoint.folder)
    want = checkpoint.expected(prompt(200))  # A token's logits depend on those before it: one pass tells for all.
    assert want.std() > 0.3
    for length in PROMPT_LENGTHS:
        ids = prompt(200)[:length]
        for size in (length, 1 if length == 17 else 33):
            for end, logits in Paged.chunked(paged, ids, size):
                assert_close(logits, want[end - 1])


def test_a_mixed_step_gives_each_request_its_own_logits(checkpoint: Checkpoint) -> None:
    paged = Paged(checkpoint.folder)
    prompts = [prompt(length, seed=length) for length in (1, 150, 18, 90, 17, 16, 31, 200, 43, 199)]
    tables = [paged.table(len(ids)) for ids in prompts]
    # Requests 1, 2, 4, 6, 8, 9 decode their last token; 3 and 7 are amid their prompts; 0 and 5 have just come.
    cached = [0, 149, 17, 40, 16, 0, 30, 64, 42, 198]
    for ids, done, table in zip(prompts, cached, tables, strict=True):
        if done:
            paged.step(share(ids, 0, done, table))
    got = paged.step(*(share(*r) for r in zip(prompts, cached, map(len, prompts), tables, strict=True)))
    for ids, logits in zip(prompts, got, strict=True):
        assert_close(logits, checkpoint.expected(ids)[-1])


def test_greedy_tokens_equal_transformers_alone_and_in_company(checkpoint: Checkpoint) -> None:
    runner = ModelRunner(
        EngineConfig(model=str(checkpoint.folder), num_gpu_blocks_override=64, max_model_len=300, num_threads=1)
    )
    comparator = Comparator(checkpoint, ())
    prompts = [prompt(length, seed=length) for length in (1, 15, 16, 17, 200)]
    for prompts_together in ([prompts[-1]], prompts):
        answers = generate(runner, prompts_together, chunk=70)
        for ids, answer in zip(prompts_together, answers, strict=True):
            comparator.require_same(ids, GREEDY, answer)
    comparator.check()


def generate(runner: ModelRunner, prompts: Sequence[Sequence[int]], chunk: int) -> list[list[int]]:
    """All requests in one batch, a new one every third step; those that lack tokens compute `chunk` at most."""
    ids = [list(p) for p in prompts]
    done = [0] * len(ids)
    free = list(range(runner.num_blocks))[::-1]
    tables = [[free.pop() for _ in range(-(-(len(p) + NUM_TOKENS) // 16))] for p in ids]
    step = 0
    while running := [i for i, p in enumerate(prompts) if len(ids[i]) < len(p) + NUM_TOKENS]:
        shares = []
        for i in (i for i in running if 3 * i <= step):
            end = min(len(ids[i]), done[i] + chunk)
            params = GREEDY if end == len(ids[i]) else None
            shares.append(scheduled(str(i), ids[i][done[i] : end], done[i], tables[i], params))
            done[i] = end
        step += 1
        results = runner.execute(SchedulerOutput(tuple(shares), sum(len(s.token_ids) for s in shares)))
        for share_, result in zip(shares, results, strict=True):
            ids[int(share_.request_id)] += [token.token_id for token in result.tokens]
    return [tokens[len(p) :] for tokens, p in zip(ids, prompts, strict=True)]


@pytest.mark.parametrize(
    "name", ["llama", "llama3", "llama-linear", "llama-yarn", "qwen2", "qwen3", "gemma2", "gemma3"]
)
def test_a_gguf_of_the_same_weights_gives_the_same_logits(tmp_path: Path, name: str) -> None:
    made = write(name, tmp_path / "hf")
    file = Paged(write_family_gguf(tmp_path / "m.gguf", name, made.model))
    folder = Paged(made.folder)
    ids = prompt(200)
    for (end, got), (_, want) in zip(file.chunked(ids, 60), folder.chunked(ids, 60), strict=True):
        assert_close(got, want, 2e-5)
        assert_close(got, made.expected(ids[:end])[-1])


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_read_as_published_and_as_transformers_stacks_them(tmp_path: Path, name: str) -> None:
    made = write(name, tmp_path / "published")
    made.model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    stored = [set(load_file(tmp_path / kind / "model.safetensors")) for kind in ("published", "stacked")]
    single = {"mixtral": "block_sparse_moe.experts.4.w3", "qwen3_moe": "mlp.experts.4.up_proj"}[name]
    assert f"model.layers.1.{single}.weight" in stored[0]
    assert "model.layers.1.mlp.experts.gate_up_proj" in stored[1]
    ids = prompt(40)
    want = made.expected(ids)[-1]
    for kind in ("published", "stacked"):
        ((_, got),) = Paged(tmp_path / kind).chunked(ids, 40)
        assert_close(got, want)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen3", "mixtral"])
def test_bfloat16_stays_near_fp32(tmp_path: Path, name: str) -> None:
    made = write(name, tmp_path)
    ids = prompt(90)
    want = made.expected(ids)
    for end, logits in Paged(tmp_path, torch.bfloat16).chunked(ids, 50):
        assert torch.nn.functional.cosine_similarity(logits.float(), want[end - 1], dim=0) > 0.98


def test_configs_of_older_files_read_the_same(tmp_path: Path) -> None:
    """rope_theta, rope_local_base_freq and rope_scaling at the top, the pattern a number, defaults left out."""
    made = write("gemma3", tmp_path)
    want = read_architecture(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("rope_parameters", "layer_types", "tie_word_embeddings"):
        config.pop(key, None)
    config |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_architecture(tmp_path) == want
    assert want.windows == (40, 40, 40, 40, 40, None, 40)
    assert made.model.config.layer_types.index("full_attention") == 5


@pytest.mark.parametrize("name", ["qwen2-windows", "gemma2"])
def test_windows_follow_the_family_where_layer_types_are_not_listed(tmp_path: Path, name: str) -> None:
    write(name, tmp_path)
    want = read_architecture(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_architecture(tmp_path) == want
    assert want.windows == {"qwen2-windows": (None, None, 40, 40), "gemma2": (40, None, 40, None)}[name]


def test_longrope_serves_its_original_length_only(tmp_path: Path) -> None:
    write("phi3-longrope", tmp_path)
    assert read_architecture(tmp_path).max_position_embeddings == 320
    with pytest.raises(ConfigError, match="max_model_len 321 exceeds the 320 tokens"):
        ModelRunner(EngineConfig(model=str(tmp_path), num_gpu_blocks_override=64, max_model_len=321))


def test_yarn_stretches_the_limit_that_the_config_has(tmp_path: Path) -> None:
    write("qwen2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_architecture(tmp_path).max_position_embeddings == 4 * 512
