"""How long steps take here: a step is a launch with its decodes, and so much more for every prompt token."""

from __future__ import annotations

import asyncio

from workers.engine.engine import Engine
from workers.request import TokenOutput

# What one step counts for in the averages.
_WEIGHT = 0.1


class Pace:
    def __init__(self) -> None:
        # Of all steps together.
        self.steps_s = 0.0
        # Averages, 0 before there was such a step: without prompt tokens, and of what each of these adds.
        self.decode_step_s = 0.0
        self.prompt_token_s = 0.0

    async def timed_step(self, engine: Engine) -> list[TokenOutput]:
        num_steps, num_prompt_tokens = engine.num_steps, engine.num_prompt_tokens_computed
        began_s = _now()
        outputs = await engine.step()
        if engine.num_steps > num_steps:
            step_s = _now() - began_s
            self.steps_s += step_s
            self._add(engine.num_prompt_tokens_computed - num_prompt_tokens, step_s)
        return outputs

    def _add(self, num_prompt_tokens: int, step_s: float) -> None:
        if not num_prompt_tokens:
            self.decode_step_s = _averaged(self.decode_step_s, step_s)
        else:
            added_s = max(0.0, step_s - self.decode_step_s)
            self.prompt_token_s = _averaged(self.prompt_token_s, added_s / num_prompt_tokens)


def _averaged(average: float, new: float) -> float:
    return average + _WEIGHT * (new - average) if average else new


def _now() -> float:
    return asyncio.get_running_loop().time()
