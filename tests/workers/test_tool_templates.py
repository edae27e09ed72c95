"""Chat templates that know tools are rendered as transformers renders them; others get the tools in words."""

from __future__ import annotations

from typing import Any

import pytest

from workers.chat_template import Chat, ChatTemplate
from workers.errors import InvalidRequestError

# After the manner of Qwen's.
HERMES = """{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}{{- '<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}{%- set function = call.function %}
{{- '\\n<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}{{- function.arguments | tojson }}
{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' }}
{{- message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
PLAIN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a <city> & its surroundings.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {}}},
]
USER = {"role": "user", "content": "Rain in Zürich?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1]}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    USER,
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "yes"},
]


def theirs(messages: list[dict[str, Any]], **how: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered = render_jinja_template(conversations=[messages], chat_template=HERMES, **how)[0]
    return str(rendered[0])


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("messages", [[USER], TALK, TALK[:3]])
def test_a_template_with_tools_is_rendered_as_transformers_does(messages: Any, tools: Any):
    template = ChatTemplate(HERMES, {})
    assert template.render(Chat(messages, tools or ())) == theirs(messages, tools=tools, add_generation_prompt=True)
    thought = template.render(Chat([USER], variables={"enable_thinking": False}))
    assert thought == theirs([USER], add_generation_prompt=True, enable_thinking=False)
    assert thought.endswith("</think>\n\n")


def test_a_message_that_is_continued_ends_where_transformers_ends_it():
    messages = [USER, {"role": "assistant", "content": "It is"}]
    mine = ChatTemplate(HERMES, {}).render(Chat(messages, add_generation_prompt=False, continue_final_message=True))
    assert mine == theirs(messages, continue_final_message=True)
    assert mine.endswith("It is")
    silent = ChatTemplate("{{ messages[0]['content'] }}", {})
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        silent.render(Chat(messages, add_generation_prompt=False, continue_final_message=True))


def test_a_template_without_tools_has_them_and_their_calls_in_words():
    shown = ChatTemplate(PLAIN, {}).render(Chat(TALK, TOOLS))
    system, question, call, answer = shown.split("\n[")
    assert system.startswith("[system]Be kind.\n\nYou may call functions")
    assert '"description": "Of a <city> & its surroundings."' in system
    assert question == "user]Rain in Zürich?"
    said = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": [1]}}\n</tool_call>'
    assert call == f"assistant]I look.\n{said}\n{said}"
    assert answer == "tool]yes\n"
    # What the template is given is never what the client gave.
    assert TALK[2]["content"] == "I look."


def test_what_a_template_is_given_anyway_cannot_be_given_by_the_client():
    template = ChatTemplate(PLAIN, {"bos_token": "<s>"})
    for name in ("messages", "tools", "add_generation_prompt", "bos_token"):
        with pytest.raises(InvalidRequestError, match=f"chat_template_kwargs has {name}") as caught:
            template.render(Chat([USER], variables={name: 1}))
        assert caught.value.param == "chat_template_kwargs"
