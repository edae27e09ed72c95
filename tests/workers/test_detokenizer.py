"""Text piece by piece is what the whole decodes to."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from tests.workers.test_tokenizer import TRICKY, smollm
from workers.detokenizer import Detokenizer
from workers.tokenizer import Tokenizer
from workers.tokenizer_sources import TokenizerSource


def sentencepiece() -> Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "▁a": 257, "b": 258, "é": 259}
    backend = Backend(BPE(vocab=vocab, merges=[("▁", "a")] if "a" in vocab else [], byte_fallback=True))
    return Tokenizer(TokenizerSource(backend, byte_level=False, max_token_chars=6, strip_leading_space=True))


def pieces(tokenizer: Tokenizer, ids: list[int], **how: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **how)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=40), st.booleans())
def test_pieces_of_any_ids_make_decode(ids: list[int], skip: bool):
    whole = "".join(pieces(smollm(), ids, skip_special_tokens=skip))
    assert whole == smollm().decode(ids, skip_special_tokens=skip)
    assert whole == smollm()._backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet=st.characters(exclude_categories=["Cs", "Cn", "Co", "Cc"]), max_size=30), st.sampled_from(TRICKY)
)
# SmolLM2 has no tokens for some bytes: a few control characters, and F1 and F2, which start U+40000 and up.
def test_pieces_of_text_are_the_text_in_whole_characters(text: str, tricky: str):
    ids = smollm().encode(text + tricky)
    parts = pieces(smollm(), ids, skip_special_tokens=False)
    assert "".join(parts) == smollm().decode(ids, skip_special_tokens=False) == text + tricky
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 259), max_size=30))
def test_pieces_of_sentencepiece_ids_make_decode(ids: list[int]):
    tokenizer = sentencepiece()
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_sentencepiece_spaces_and_bytes():
    assert sentencepiece().decode([257, 257, 258, 0xF0, 0x9F, 0x98, 0x80, 259]) == "a ab😀é"


def test_ids_past_the_vocabulary_say_nothing():
    assert smollm().decode([60000, *smollm().encode("hi")]) == "hi"
