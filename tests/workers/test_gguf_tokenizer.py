"""Tokenizers out of small GGUF files written here, good and bad."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from workers.errors import ConfigError
from workers.tokenizer import Tokenizer, load_tokenizer


def gguf(pairs: dict[str, Any]) -> bytes:
    """A header with these pairs and no tensors."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    def value(item: Any) -> tuple[int, bytes]:
        match item:
            case bool():
                return 7, struct.pack("<?", item)
            case int():
                return 4, struct.pack("<I", item)
            case str():
                return 8, string(item)
        kind = value(item[0])[0]
        return 9, struct.pack("<IQ", kind, len(item)) + b"".join(value(one)[1] for one in item)

    body = b"".join(string(key) + struct.pack("<I", value(item)[0]) + value(item)[1] for key, item in pairs.items())
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, len(pairs)) + body


def small_gguf(**changes: Any) -> bytes:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = {
        "general.tags": ["skipped", "strings"],
        "general.sizes": [1, 2, 3],
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*letters, "12", "<s>", "<tool>", "Ġa"],
        "token_type": [1] * 257 + [3, 4, 1],
        "merges": ["1 2", "Ġ a"],
        "bos_token_id": 257,
        "eos_token_id": 257,
        "add_bos_token": True,
    } | changes
    return gguf({key if "." in key else f"tokenizer.ggml.{key}": v for key, v in pairs.items() if v is not None})


def load_bytes(data: bytes, tmp_path: Path) -> Tokenizer:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return load_tokenizer(path)


def test_gguf_special_tokens_and_bos(tmp_path: Path):
    tokenizer = load_bytes(small_gguf(), tmp_path)
    assert tokenizer.encode(" a<s><tool>12") == [257, 259, 257, 258, 256]
    assert tokenizer.encode(" a", add_special_tokens=False) == [259]
    assert tokenizer.decode([257, 259, 258]) == " a<tool>"
    assert tokenizer.decode([257, 259, 258], skip_special_tokens=False) == "<s> a<tool>"
    assert not tokenizer.has_chat_template


@pytest.mark.parametrize(("pre", "joined"), [("gpt-2", True), ("llama-bpe", True), ("qwen2", False), ("smollm", False)])
def test_pre_tokenizers_split_digits_as_published(pre: str, joined: bool, tmp_path: Path):
    assert len(load_bytes(small_gguf(pre=pre, add_bos_token=False), tmp_path).encode("12")) == (1 if joined else 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre": "made-up"}, "unknown tokenizer.ggml.pre 'made-up'"),
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"bos_token_id": None}, "no tokenizer.ggml.bos_token_id"),
    ],
)
def test_unknown_gguf_tokenizers_are_refused(changes: dict[str, Any], reason: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=reason):
        load_bytes(small_gguf(**changes), tmp_path)


@pytest.mark.parametrize("data", [b"", b"GGUF", b"PK\3\4" * 20, small_gguf()[:-9], small_gguf()[:200]])
def test_a_damaged_gguf_is_refused(data: bytes, tmp_path: Path):
    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        load_bytes(data, tmp_path)
