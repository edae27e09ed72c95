"""The packaged SmolLM2 in fewer bits stays the model that it is."""

from __future__ import annotations

import pytest
import torch

from cluster.bench.quantization import Subject, compare
from tests.prompts import MODEL, token_ids
from workers.config import Quantization
from workers.models.resolve import resolve_model

TEXT = token_ids(
    "The Danube rises in the Black Forest of Germany and flows for some 2,850 kilometres through ten countries "
    "before it reaches the Black Sea. It passes four capitals: Vienna, Bratislava, Budapest and Belgrade. Once a "
    "frontier of the Roman Empire, it is today the second longest river in Europe, after the Volga in Russia."
)


@pytest.fixture(scope="module")
def exact() -> list[torch.Tensor]:
    torch.set_num_threads(1)
    with torch.inference_mode():
        return list(Subject(resolve_model(MODEL), "none", torch.float32, len(TEXT)).read(TEXT))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "most_kl", "least_same"),
    [
        ("none", 0.02, 0.95),
        ("native", 0.03, 0.93),
        ("int8", 0.04, 0.92),
        ("int8_dynamic", 0.06, 0.88),
        ("int4", 0.06, 0.9),
    ],
)
def test_distributions_stay_near_those_in_fp32(
    exact: list[torch.Tensor], quantization: Quantization, most_kl: float, least_same: float
) -> None:
    with torch.inference_mode():
        figures = compare(Subject(resolve_model(MODEL), quantization, torch.bfloat16, len(TEXT)), TEXT, exact)
    assert figures.kl < most_kl
    assert figures.same_likeliest > least_same
