"""`python -m cluster.bench.compare.transformers_loop FOLDER PORT DTYPE`: what one writes first.

transformers' own generate() behind a queue of one, its tokens streamed as they come.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from cluster.bench.compare.contestant import Command, Contestant

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def contestants(hf_model: Path, precisions: Sequence[str]) -> Iterator[Contestant]:
    for precision in precisions:
        if precision in _DTYPES:
            yield Contestant("transformers", "colocated", precision, partial(_commands, hf_model, _DTYPES[precision]))


def _commands(hf_model: Path, dtype: str, folder: Path, port: int) -> list[Command]:
    module = "cluster.bench.compare.transformers_loop"
    return [Command([sys.executable, "-m", module, str(hf_model), str(port), dtype], {"HF_HUB_OFFLINE": "1"})]


class Tokens:
    """A `streamer` of generate(): each put() but the first, which is the prompt, is a token."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[int | None] = asyncio.Queue()
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self._tell(int(value))
        self._has_prompt = True

    def end(self) -> None:
        self._tell(None)

    def _tell(self, token: int | None) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, token)

    async def __aiter__(self) -> AsyncGenerator[int]:
        while (token := await self._queue.get()) is not None:
            yield token


class Loop:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._busy = threading.Lock()

    def generate(self, prompt: list[int], max_tokens: int, tokens: Tokens) -> None:
        length = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens}
        try:
            with self._busy, torch.inference_mode():
                self._model.generate(torch.tensor([prompt]), do_sample=False, streamer=tokens, **length)
        except BaseException:
            tokens.end()
            raise


async def events(loop: Loop, body: dict[str, Any]) -> AsyncGenerator[str]:
    tokens, count = Tokens(), 0
    computing = asyncio.create_task(asyncio.to_thread(loop.generate, body["prompt"], body["max_tokens"], tokens))
    async for token in tokens:
        count += 1
        yield f"data: {json.dumps({'choices': [{'index': 0, 'text': str(token)}]})}\n\n"
    await computing
    yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': count}})}\n\ndata: [DONE]\n\n"


def serve(folder: str, port: int, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    loop = Loop(AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)))
    app = FastAPI()

    @app.post("/v1/completions")
    async def complete(request: Request) -> StreamingResponse:
        return StreamingResponse(events(loop, await request.json()), media_type="text/event-stream")

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
