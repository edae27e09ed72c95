"""Whole models with weights in fewer bits, against the same weights in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from tests.checkpoints import TinyLlama, dequantised, write_folder, write_gguf, write_tensors
from tests.workers.models.paged import Paged, prompt
from workers.config import Quantization
from workers.layers.linear import make_linear

# By whichever kernel this processor has for it.
DENSE, FOUR, EIGHT = (
    make_linear(torch.zeros(64, 64, dtype=torch.bfloat16), quantization=mode).name for mode in ("none", "int4", "int8")
)
KINDS = {
    GGMLQuantizationType.Q4_0: {FOUR: 9},
    GGMLQuantizationType.Q4_1: {FOUR: 9},
    GGMLQuantizationType.Q8_0: {EIGHT: 9},
    GGMLQuantizationType.F16: {DENSE: 9},
}


def kl(exact: torch.Tensor, got: torch.Tensor) -> float:
    """In nats."""
    p, q = exact.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def last_logits(model: Paged, ids: list[int]) -> torch.Tensor:
    return torch.stack([logits for _, logits in model.chunked(ids, 7)])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_checkpoints_own_bits_give_what_they_stand_for(kind, tied, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    tiny, ids = TinyLlama(tied=tied), prompt(70)
    file = write_gguf(tmp_path / "tiny.gguf", kind, tiny)
    folder = write_folder(tmp_path / "folder", tiny)
    write_tensors(folder, dequantised(kind, tiny))
    exact = last_logits(Paged(folder), ids)
    native = Paged(file, torch.bfloat16, quantization="native")
    dense = Paged(folder, torch.bfloat16)
    assert native.model.kernels == KINDS[kind]
    # About what bf16 loses anyway.
    assert kl(exact, last_logits(native, ids)) < 3 * kl(exact, last_logits(dense, ids)) + 1e-4


@pytest.mark.parametrize(("quantization", "most"), [("int8", 2e-3), ("int8_dynamic", 4e-3)])
def test_eight_bits_stay_near_the_model(quantization: Quantization, most: float, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder, ids = write_folder(tmp_path / "folder"), prompt(70)
    small = Paged(folder, torch.bfloat16, quantization=quantization)
    assert kl(last_logits(Paged(folder), ids), last_logits(small, ids)) < most


def test_four_bits_lose_no_more_than_ggufs_own(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder, theirs, ids = write_folder(tmp_path / "exact"), write_folder(tmp_path / "theirs"), prompt(70)
    write_tensors(theirs, dequantised(GGMLQuantizationType.Q4_1, TinyLlama()))
    exact = last_logits(Paged(folder), ids)
    ours = last_logits(Paged(folder, torch.bfloat16, quantization="int4"), ids)
    assert kl(exact, ours) < 1.1 * kl(exact, last_logits(Paged(theirs), ids))


def test_a_format_that_no_kernel_takes_is_dense(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.Q5_0)
    assert Paged(file, torch.bfloat16, quantization="native").model.kernels == {DENSE: 9}
