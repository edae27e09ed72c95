"""Tools in words, for chat templates that know none: in the form that Hermes models have made common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_ASKED = """You may call functions to answer. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>
For each call write its name and arguments as JSON within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


def spell_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with the tools in the system's."""
    asked = _ASKED.format(tools="\n".join(map(_json, tools)))
    first, *rest = [dict(message) for message in messages]
    if first["role"] != "system":
        return [{"role": "system", "content": asked}, first, *rest]
    return [first | {"content": f"{first['content']}\n\n{asked}"}, *rest]


def spell_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message, with its calls in its content."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    spelled = [
        f"<tool_call>\n{_json({'name': call['name'], 'arguments': call['arguments']})}\n</tool_call>" for call in calls
    ]
    content = "\n".join([text for text in (message["content"],) if text or not calls] + spelled)
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
