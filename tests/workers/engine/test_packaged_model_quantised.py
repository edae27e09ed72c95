"""The packaged SmolLM2 in fewer bits stays the model that it is."""

from __future__ import annotations

import pytest
import torch

from cluster.bench.quantization import Subject, compare
from tests.prompts import MODEL, token_ids
from workers.config import Quantization
from workers.models.resolve import resolve_model

# Of several kinds: one sentence's luck decides nothing.
TEXT = token_ids(
    "The Danube rises in the Black Forest of Germany and flows for some 2,850 kilometres through ten countries "
    "before it reaches the Black Sea. It passes four capitals: Vienna, Bratislava, Budapest and Belgrade. Once a "
    "frontier of the Roman Empire, it is today the second longest river in Europe, after the Volga in Russia.\n\n"
    "To bake bread, mix flour, water, salt and yeast, and knead the dough until it is smooth. Let it rest under a "
    "cloth in a warm place until it has doubled, which takes an hour or two. Shape a loaf, let it rise again "
    "while the oven heats, cut its top with a sharp knife and bake it until it sounds hollow when you knock on "
    "its bottom. Wait until it is cool before you cut it, however hard that may be.\n\n"
    "A train leaves the city at eight in the morning and travels at 60 miles per hour. A second train leaves the "
    "same station an hour later and follows it at 80 miles per hour. When the second one starts, the first is 60 "
    "miles ahead, and it loses 20 miles of that in every hour. So the second train needs three hours to catch up, "
    "and both are then 240 miles from the city.\n\n"
    "In the spring the old gardener came back to the house by the lake. Nobody had cut the hedges, and the path "
    "to the water was gone. He put down his bag, took off his coat and looked for the shears where he had left "
    "them. By noon the boy from next door stood at the gate and asked whether he could help. They worked until it "
    "was dark, and hardly spoke a word, and when the boy went home he had a rose in his hand for his mother.\n\n"
    "Light travels at about 300,000 kilometres per second, so that it needs a little more than eight minutes from "
    "the Sun to the Earth. Plants use it to turn water and carbon dioxide into sugar and oxygen. This is called "
    "photosynthesis, and nearly all life depends on it: animals eat plants, or other animals that have eaten "
    "plants. Even coal and oil are what is left of forests and seas that lived in sunlight millions of years ago.\n\n"
    "Dear Ms. Brown, thank you for your letter of the third of May. I am sorry that the lamp you ordered arrived "
    "broken. We have sent you another one today, and you should have it within a week. Please keep the first one "
    "for a few days, so that our driver can take it with him. If there is anything else that we can do for you, "
    "do not hesitate to call me. Yours sincerely, John Miller."
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
        ("none", 0.005, 0.95),
        ("native", 0.01, 0.93),
        ("int8", 0.02, 0.92),
        ("int8_dynamic", 0.02, 0.92),
        ("int4", 0.02, 0.92),
    ],
)
def test_distributions_stay_near_those_in_fp32(
    exact: list[torch.Tensor], quantization: Quantization, most_kl: float, least_same: float
) -> None:
    with torch.inference_mode():
        figures = compare(Subject(resolve_model(MODEL), quantization, torch.bfloat16, len(TEXT)), TEXT, exact)
    assert figures.kl < most_kl
    assert figures.same_likeliest > least_same
