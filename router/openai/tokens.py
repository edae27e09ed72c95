"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, Response

from router.http.answers import read_json
from router.openai.chat import ChatBody
from router.openai.schema import validated
from router.text import Prompt, TextService
from workers.errors import InvalidRequestError


class TokenizeBody(BaseModel):
    """Of a `prompt`; with `messages` it is a chat's body instead, and these are its further fields."""

    model_config = ConfigDict(strict=True, frozen=True)

    model: str | None = None
    prompt: str | None = None
    # None: to a prompt, not to a chat, whose template writes them itself.
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    model: str | None = None
    tokens: list[int]


def add_token_routes(app: FastAPI, text: TextService) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        raw = await read_json(request)
        body = validated(TokenizeBody, raw)
        text.model_name(body.model)
        token_ids = await text.tokenised(_prompt(body, raw), body.add_special_tokens)
        names = [text.tokenizer.token_bytes(one).decode("utf-8", "replace") for one in token_ids]
        return JSONResponse(
            {
                "count": len(token_ids),
                "max_model_len": text.max_model_len,
                "tokens": list(token_ids),
                "token_strs": names if body.return_token_strs else None,
            }
        )

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = validated(DetokenizeBody, await read_json(request))
        text.model_name(body.model)
        text.check_token_ids(body.tokens, "tokens")
        return JSONResponse({"prompt": text.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _prompt(body: TokenizeBody, raw: dict[str, Any]) -> Prompt:
    if body.prompt is not None:
        return body.prompt
    if raw.get("messages") is None:
        raise InvalidRequestError("prompt is missing; give a string, or messages", param="prompt")
    chat = ChatBody.parse(raw)
    return chat.chat(chat.tool_use())
