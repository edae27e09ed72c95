"""Hugging Face transformers on the same weights in fp32: what every token is compared with."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GgufConfig

from tests.exact import Logits


class TransformersOracle:
    def __init__(self, gguf: Path, eos_token_ids: Iterable[int]) -> None:
        for name in ("gguf", "transformers"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        ).eval()
        self._eos_token_ids = sorted(eos_token_ids)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], num_last: int) -> Logits:
        """One pass over everything, without a cache."""
        rows: Logits = self._model(torch.tensor([token_ids]), logits_to_keep=num_last).logits[0].double().numpy()
        return rows

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """transformers' own loop, one prompt at a time, with its KV cache; EOS included."""
        ids = torch.tensor([prompt])
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=self._eos_token_ids,
            pad_token_id=self._eos_token_ids[0],
        )
        answer: list[int] = output[0, len(prompt) :].tolist()
        return answer
