"""Prompts of a job: from a sequence, or from a JSONL file with a prompt and its options on each line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from cluster.records import Options, Prompt, build_request
from protos import router_pb2 as pb
from workers.errors import InvalidRequestError

# What a line's prompt may be called.
_PROMPT, _MESSAGES = "prompt", "messages"


def job_requests(prompts: Iterable[Prompt] | str | Path, options: Options) -> list[pb.GenerateRequest]:
    """One for each prompt; a string is the path of a file. Raises InvalidRequestError that names the prompt or line at
    fault, before anything is sent."""
    if not isinstance(prompts, (str, Path)):
        return [_request(f"prompt {at}", prompt, options) for at, prompt in enumerate(prompts)]
    path = Path(prompts)
    return [_request(where, prompt, cast(Options, {**options, **own})) for where, prompt, own in _lines(path)]


def _request(where: str, prompt: Prompt, options: Options) -> pb.GenerateRequest:
    for name in ("request_id", "timeout_s"):
        if options.get(name):
            raise InvalidRequestError(f"{where}: {name} is not for jobs; leave it out", param=name)
    try:
        return build_request(prompt, options)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where}: {error.message}", param=error.param) from None


def _lines(path: Path) -> Iterator[tuple[str, Prompt, dict[str, Any]]]:
    """Each line's place, prompt and options; empty lines are none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise InvalidRequestError(f"{path}: {reason}; give a file with one JSON object a line") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield (f"{path}:{number}", *_parsed(f"{path}:{number}", line))


def _parsed(where: str, line: str) -> tuple[Prompt, dict[str, Any]]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequestError(f"{where}: not valid JSON: {exc}") from None
    if not isinstance(fields, dict) or (_PROMPT in fields) == (_MESSAGES in fields):
        raise InvalidRequestError(
            f'{where}: must be {{"prompt": ...}} or {{"messages": [...]}}, with options beside it if need be'
        )
    prompt = fields.pop(_PROMPT, None) or fields.pop(_MESSAGES, None)
    if not isinstance(prompt, (str, list)):
        raise InvalidRequestError(f"{where}: the prompt must be text, token ids or messages, and not empty")
    # JSON has no numbers as keys.
    if isinstance(bias := fields.get("logit_bias"), dict):
        fields["logit_bias"] = {int(key) if key.isdigit() else key: value for key, value in bias.items()}
    return prompt, fields
