"""Where a tokenizer comes from: the header of a GGUF file, or a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from workers.errors import ConfigError
from workers.gguf_file import open_gguf


@dataclass(frozen=True)
class TokenizerSource:
    backend: Backend
    # Tokens are written in the byte-level alphabet; False: SentencePiece's, with "▁" and <0xNN>.
    byte_level: bool
    # A text of n characters has at least n / max_token_chars tokens.
    max_token_chars: int
    # SentencePiece puts a space before the text; decoding takes it off again.
    strip_leading_space: bool = False
    eos_token_ids: frozenset[int] = frozenset()
    chat_template: str | None = None
    # bos_token, eos_token, ...: what chat templates may name.
    special_tokens: dict[str, str] = field(default_factory=dict)


_CONTROL, _USER_DEFINED = 3, 4

# Published with the Llama 3 and Qwen2 tokenizers.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level() -> pre_tokenizers.PreTokenizer:
    """With GPT-2's own pattern."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _pattern(regex: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(regex), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _byte_level,
    "gpt-2": _byte_level,
    "gpt2": _byte_level,
    "smollm": _digits,
    "starcoder": _digits,
    "refact": _digits,
    "command-r": _digits,
    "llama-bpe": lambda: _pattern(_LLAMA3),
    "llama3": lambda: _pattern(_LLAMA3),
    "qwen2": lambda: _pattern(_QWEN2),
    "deepseek-r1-qwen": lambda: _pattern(_QWEN2),
}
_NFC = {"qwen2", "deepseek-r1-qwen"}
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3"}


def from_gguf(path: Path) -> TokenizerSource:
    pairs = open_gguf(path).header("tokenizer.")
    _require_known(pairs, path)
    tokens: list[str] = pairs["tokenizer.ggml.tokens"]
    backend = _byte_level_bpe(tokens, pairs["tokenizer.ggml.merges"], pairs.get("tokenizer.ggml.pre", "default"))
    backend.add_tokens(list(_added_tokens(tokens, pairs.get("tokenizer.ggml.token_type", []))))
    if pairs.get("tokenizer.ggml.add_bos_token", False):
        _prepend(backend, tokens, pairs["tokenizer.ggml.bos_token_id"])
    eos = (pairs.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return TokenizerSource(
        backend=backend,
        byte_level=True,
        max_token_chars=max(map(len, tokens)),
        eos_token_ids=frozenset(token_id for token_id in eos if token_id is not None),
        chat_template=pairs.get("tokenizer.chat_template"),
        special_tokens=_named_tokens(tokens, pairs),
    )


def _require_known(pairs: dict[str, Any], path: Path) -> None:
    model, pre = pairs.get("tokenizer.ggml.model"), pairs.get("tokenizer.ggml.pre", "default")
    if model != "gpt2":
        raise ConfigError(
            f"{path.name}: tokenizer.ggml.model is {model!r}; only 'gpt2' (byte-level BPE) is read from GGUF: "
            "use the model's Hugging Face folder",
            param="model",
        )
    if pre not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"{path.name}: unknown tokenizer.ggml.pre {pre!r}; known: {', '.join(_PRE_TOKENIZERS)}. "
            "Use the model's Hugging Face folder",
            param="model",
        )
    bos = ["bos_token_id"] if pairs.get("tokenizer.ggml.add_bos_token") else []
    for key in ("tokens", "merges", *bos):
        if f"tokenizer.ggml.{key}" not in pairs:
            raise ConfigError(f"{path.name} has no tokenizer.ggml.{key}; take a complete GGUF file", param="model")


def _byte_level_bpe(tokens: list[str], merges: list[str], pre: str) -> Backend:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = Backend(BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _added_tokens(tokens: list[str], token_types: list[int]) -> list[AddedToken]:
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, token_types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _prepend(backend: Backend, tokens: list[str], bos_token_id: int) -> None:
    bos = tokens[bos_token_id]
    backend.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, bos_token_id)]
    )


def _named_tokens(tokens: list[str], pairs: dict[str, Any]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    found = {name: pairs.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {f"{name}_token": tokens[at] for name, at in found.items() if at is not None and at < len(tokens)}


def from_folder(folder: Path) -> TokenizerSource:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json; save the model's fast tokenizer beside its weights", param="model"
        )
    text = file.read_text("utf-8")
    try:
        backend, spec = Backend.from_str(text), json.loads(text)
    except Exception as error:  # The Rust parser raises bare Exception.
        raise ConfigError(
            f"{file} cannot be read ({error}); save it again with save_pretrained", param="model"
        ) from error
    tokens = backend.get_vocab(with_added_tokens=True)
    if not tokens:
        raise ConfigError(f"{file} has no token; save it again with save_pretrained", param="model")
    backend.no_truncation()
    backend.no_padding()
    config = _json(folder / "tokenizer_config.json")
    byte_level, strip = _alphabet(spec.get("decoder"), file)
    special_tokens = _special_tokens(config)
    return TokenizerSource(
        backend=backend,
        byte_level=byte_level,
        max_token_chars=max(map(len, tokens)),
        strip_leading_space=strip,
        eos_token_ids=_eos_token_ids(folder, backend, special_tokens),
        chat_template=_chat_template(folder, config),
        special_tokens=special_tokens,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); download it again", param="model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object; download it again", param="model")
    return value


def _alphabet(decoder: dict[str, Any] | None, file: Path) -> tuple[bool, bool]:
    """(byte-level, strip the leading space) of a tokenizer.json's decoder."""
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder] if decoder else []
    kinds = {step["type"]: step for step in steps}
    if "ByteLevel" in kinds:
        return True, False
    if "Metaspace" in kinds:
        return False, kinds["Metaspace"].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in kinds:
        return False, kinds.get("Strip", {}).get("start", 0) > 0
    raise ConfigError(
        f"{file}: decoder {sorted(kinds) or None} is not supported; wanted ByteLevel, Metaspace or ByteFallback",
        param="model",
    )


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _eos_token_ids(folder: Path, backend: Backend, special_tokens: dict[str, str]) -> frozenset[int]:
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    named = backend.token_to_id(special_tokens.get("eos_token", ""))
    return frozenset(ids if named is None else ids | {named})


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # Several, by name.
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None
