"""/v1/chat/completions: messages in, a message or calls of tools out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from fastapi import FastAPI, Request
from starlette.responses import Response

from router.answer import TextOptions
from router.http.answers import read_json, wants_timeline
from router.limits import check_num_logprobs
from router.openai.chat_wire import ChatShape
from router.openai.generation import Job, respond
from router.openai.logprobs import LogprobsWanted
from router.openai.messages import ChatMessage, template_messages
from router.openai.schema import Body
from router.openai.tool_syntax import ToolSyntax
from router.openai.tools import ToolUse, read_tools
from router.text import TextService
from workers.chat_template import Chat
from workers.errors import InvalidRequestError
from workers.request import SamplingParams


def add_chat_routes(app: FastAPI, text: TextService, of_model: ToolSyntax | None) -> None:
    """`of_model`: how it writes calls of tools."""

    async def chat_completions(request: Request) -> Response:
        body = ChatBody.parse(await read_json(request))
        request_id = request.state.request_id
        use = body.tool_use()
        syntax = use.syntax(of_model)
        shape = ChatShape(request_id, text.model_name(body.model), syntax, use.parallel)
        options = with_marks(body.options(), syntax)
        params = with_calls(body.sampling_params(), use, syntax)
        chat = await text.prepared(body.chat(use), params, request_id, options)
        job = Job(
            [chat],
            shape,
            body.usage_wanted,
            body.n or 1,
            wanted=body.wanted(),
            show_timeline=wants_timeline(request),
        )
        return respond(text, job, bool(body.stream))

    # Past FastAPI: there is nothing that it could read for us.
    app.add_route("/v1/chat/completions", chat_completions, methods=["POST"])


class ChatBody(Body):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    # OpenAI has it for /completions only.
    best_of: Literal[1] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    # Of the chat template; vLLM's.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def wanted(self) -> LogprobsWanted:
        check_num_logprobs("top_logprobs", self.top_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs: true; set it, or leave top_logprobs out", param="top_logprobs"
            )
        return LogprobsWanted((self.top_logprobs or 0) if self.logprobs else None, self.prompt_logprobs)

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def tool_use(self) -> ToolUse:
        return read_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    def chat(self, use: ToolUse) -> Chat:
        goes_on = bool(self.continue_final_message)
        begins = not goes_on if self.add_generation_prompt is None else self.add_generation_prompt
        if goes_on and begins:
            raise InvalidRequestError(
                "continue_final_message does not go with add_generation_prompt: true; leave out either",
                param="continue_final_message",
            )
        return Chat(template_messages(self.messages), use.tools, begins, goes_on, self.chat_template_kwargs or {})


def with_calls(params: SamplingParams, use: ToolUse, syntax: ToolSyntax | None) -> SamplingParams:
    """Held to calls of tools, where they must be, or must be right. `syntax`: how they are written."""
    if use.tools and params.grammar:
        raise InvalidRequestError(
            'tools do not go with what the whole answer must match; leave out either, or set tool_choice: "none"',
            param="tools",
        )
    grammar = use.grammar(syntax)
    return replace(params, grammar=grammar) if grammar else params


def with_marks(options: TextOptions, syntax: ToolSyntax | None) -> TextOptions:
    """Shown with the special tokens by which calls are known."""
    return replace(options, skip_special_tokens=False) if syntax is not None and syntax.special else options
