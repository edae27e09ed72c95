"""API keys: who asks, and how much of everything they may have."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from router.rate_limit import Bucket
from workers.errors import (
    AuthenticationError,
    ConfigError,
    InvalidRequestError,
    OverloadedError,
    PermissionDeniedError,
)
from workers.request import Terms
from workers.strict import Strict

logger = logging.getLogger(__name__)


class KeyConfig(Strict):
    """One key, of which only the hash is kept: keys are random, so nobody finds them by guessing."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: str = Field(min_length=1, max_length=64)
    requests_per_minute: int | None = Field(default=None, ge=1)
    # Of prompts and answers together.
    tokens_per_minute: int | None = Field(default=None, ge=1)
    # The most urgent priority that it may ask for: the lowest number.
    max_priority: int = 0
    # May look at what is every tenant's (`kvferry verify`).
    admin: bool = False


class KeyFile(Strict):
    keys: tuple[KeyConfig, ...]


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever uses one key."""

    key: KeyConfig
    requests: Bucket | None
    tokens: Bucket | None
    # Set where a prompt of a job is answered: how urgent that is.
    job_priority: int | None = None

    def terms(self, asked: Terms) -> Terms:
        """Of a job's prompt those of the job, whatever it asks for.

        Raises InvalidRequestError when it asks to go before those that it may not go before.
        """
        if self.job_priority is not None:
            return Terms(self.key.tenant, self.job_priority, job=True)
        if asked.priority < self.key.max_priority:
            raise InvalidRequestError(
                f"priority is {asked.priority}; your API key allows {self.key.max_priority} and above (lower goes "
                "first)",
                param="priority",
            )
        return replace(asked, tenant=self.key.tenant)

    def take_request(self) -> None:
        """Raises OverloadedError when it has had all of its requests."""
        _take(self.requests, 1, "requests")

    def take_prompt(self, num_tokens: int) -> None:
        """Raises OverloadedError when it has had all of its tokens."""
        _take(self.tokens, num_tokens, "tokens")

    def spend(self, num_tokens: int) -> None:
        """Tokens of an answer, which count once they are there; below 0: of a prompt that was refused after all."""
        if self.tokens is not None:
            self.tokens.spend(num_tokens)

    def rate_headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's x-ratelimit-*."""
        headers: list[tuple[str, str]] = []
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                headers += [
                    (f"x-ratelimit-limit-{name}", str(bucket.per_minute)),
                    (f"x-ratelimit-remaining-{name}", str(max(0, int(bucket.left)))),
                    (f"x-ratelimit-reset-{name}", f"{bucket.full_in_s:.3f}s"),
                ]
        return [(name.encode(), value.encode()) for name, value in headers]


# Whose call the running task answers; None: no keys are asked for. A variable of the context, so that whatever serves a
# call, by whichever of the routes, is charged to its key.
CALLER: ContextVar[Caller | None] = ContextVar("CALLER", default=None)


def require_admin() -> None:
    """Raises PermissionDeniedError when the running task's call may not see what is every tenant's."""
    caller = CALLER.get()
    if caller is not None and not caller.key.admin:
        raise PermissionDeniedError(
            "this shows every tenant's requests, and your API key is its tenant's alone; use one with `admin: true` "
            "(`kvferry keys new --admin`)"
        )


class KeyRing:
    """The keys of one file, which is read again when it has changed."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError."""
        self._path = Path(path)
        self._seen = self._stamp()
        self._callers = self._read()

    def caller(self, authorization: str) -> Caller:
        """Of an Authorization header; raises AuthenticationError."""
        self._read_again()
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise AuthenticationError("no API key; send `Authorization: Bearer KEY`", code="invalid_api_key")
        digest, found = digest_of(key.strip()), None
        for sha256, caller in self._callers.items():
            # All of them, so that the time taken tells nothing.
            if hmac.compare_digest(sha256, digest):
                found = caller
        if found is None:
            raise AuthenticationError("wrong API key; ask for one (`kvferry keys new`)", code="invalid_api_key")
        return found

    def of_tenant(self, tenant: str) -> Caller | None:
        """The one among its keys that may have the most tokens; None: it has no key any more."""
        self._read_again()
        its = [caller for caller in self._callers.values() if caller.key.tenant == tenant]
        return max(its, key=lambda caller: caller.key.tokens_per_minute or math.inf, default=None)

    def _read_again(self) -> None:
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._callers = self._read(self._callers)
        except ConfigError as error:
            logger.error("%s; the keys stay as they were", error.message)
        else:
            logger.info("%s: %d API keys", self._path, len(self._callers))

    def _stamp(self) -> tuple[int, int, int] | None:
        """Changes with the file; None: it is not there."""
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self, known: dict[str, Caller] | None = None) -> dict[str, Caller]:
        """By hash. A key whose entry has not changed keeps what it has spent."""
        known = known or {}
        callers = {}
        for key in read_keys(self._path):
            caller = known.get(key.sha256)
            callers[key.sha256] = caller if caller and caller.key == key else _caller(key)
        return callers


def read_keys(path: Path) -> tuple[KeyConfig, ...]:
    """Raises ConfigError."""
    try:
        return KeyFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8"))).keys
    except OSError as error:
        reason = str(error.strerror)
    except (yaml.YAMLError, UnicodeDecodeError):
        reason = "not valid YAML"
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        reason = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
    raise ConfigError(
        f"router.api_keys: {path}: {reason}; write `keys:` and below it the lines of `kvferry keys new`",
        param="router.api_keys",
    )


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _caller(key: KeyConfig) -> Caller:
    requests, tokens = (Bucket(limit) if limit else None for limit in (key.requests_per_minute, key.tokens_per_minute))
    return Caller(key, requests, tokens)


def _take(bucket: Bucket | None, amount: int, what: str) -> None:
    if bucket is None:
        return
    if wait_s := bucket.wait_s(amount):
        raise OverloadedError(
            f"your API key's {bucket.per_minute} {what} a minute are used up; retry in {wait_s:.1f} s",
            code="rate_limit_exceeded",
            retry_after_s=wait_s,
        )
    bucket.spend(amount)
