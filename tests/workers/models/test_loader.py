from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from tests.checkpoints import TinyLlama, write_folder, write_gguf, write_tensors
from workers.errors import ConfigError
from workers.models.architecture import read_architecture
from workers.models.loader import load_model, open_weights


def load(path: Path) -> None:
    config = read_architecture(path)
    load_model(config, open_weights(path, config), torch.float32, torch.device("cpu"))


def folder_with(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    write_folder(path)
    write_tensors(path, tensors)
    return path


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = TinyLlama().tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder_with(tmp_path, tensors))


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    tensors = TinyLlama().tensors() | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}
    with pytest.raises(ConfigError, match=r"unexpected tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(folder_with(tmp_path, tensors))


def test_a_mis_shaped_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = TinyLlama().tensors() | {"model.norm.weight": torch.ones(65)}
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has shape \(65,\), its config says \(64,\)"):
        load(folder_with(tmp_path, tensors))


def test_a_head_stored_beside_a_tied_embedding_and_old_buffers_are_passed_over(tmp_path: Path) -> None:
    model = TinyLlama(tied=True)
    tensors = model.tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    write_folder(tmp_path, model)
    write_tensors(tmp_path, tensors)
    load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks model-00002-of-00003\.safetensors"):
        load(tmp_path)


def test_a_truncated_safetensors_file_is_refused(tmp_path: Path) -> None:
    file = write_folder(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        load(tmp_path)


def test_a_truncated_gguf_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", GGMLQuantizationType.Q8_0)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        load(path)


def test_a_gguf_tells_its_quantisation_and_dtype(tmp_path: Path) -> None:
    for kind, quantisation, dtype in (
        (GGMLQuantizationType.Q4_0, "Q4_0", torch.bfloat16),
        (GGMLQuantizationType.F16, "none", torch.float16),
    ):
        path = write_gguf(tmp_path / f"{kind.name}.gguf", kind)
        weights = open_weights(path, read_architecture(path))
        assert (weights.quantisation, weights.dtype) == (quantisation, dtype)
