"""New API keys."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from router.tenants import KeyConfig, digest_of
from workers.errors import InvalidRequestError


def new_key(entry: Mapping[str, Any]) -> tuple[str, str]:
    """A key of 256 random bits, and its line in the file of keys. Raises InvalidRequestError."""
    key = f"kvf-{secrets.token_urlsafe(32)}"
    try:
        config = KeyConfig(sha256=digest_of(key), **entry)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise InvalidRequestError(f"{problem['loc'][0]}: {problem['msg']}") from None
    # JSON is YAML on one line.
    return key, f"  - {json.dumps(config.model_dump(exclude_defaults=True))}"
