"""Settings of one router."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, field_validator

from router.policy import policy_named
from workers.config import PlacementConfig
from workers.errors import ConfigError
from workers.strict import Strict

# How models write calls of tools, by vLLM's names. auto: what the chat template shows.
ToolCallParserName = Literal["auto", "hermes", "llama3_json", "mistral", "pythonic"]


class SloConfig(Strict):
    """What requests that name no SLO are held to; null: nothing."""

    ttft_ms: float | None = Field(default=None, gt=0)
    """Milliseconds to the first token."""
    tpot_ms: float | None = Field(default=None, gt=0)
    """Milliseconds between tokens after it."""


class RouterConfig(PlacementConfig):
    replicas: int = Field(default=1, ge=1, le=64)
    """How many. Each has ports two above those of the one before; they share their jobs (jobs.url)."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0: all of this machine's."""
    http_port: int = Field(default=8000, ge=0, le=65535)
    """Of OpenAI's API. 0: any free one."""
    grpc_port: int = Field(default=8001, ge=0, le=65535)
    """Of the client's API. 0: any free one."""
    policy: str = "prefix_aware"
    """Which worker gets a request: prefix_aware (its KV is cached there, against what waits there), least_loaded,
    power_of_two (the less loaded of two), topology (the same host as the other half's), round_robin, or another's by
    package.module:name."""
    prefix_index_blocks: int = Field(default=1 << 18, ge=1)
    """Blocks whose places are known, at about 200 bytes each."""
    max_num_queued_reqs: int = Field(default=1024, ge=1)
    """Requests that may wait for a prefill worker; of more, the least urgent are answered 429."""
    queue_timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait for a prefill worker."""
    slo: SloConfig = SloConfig()
    """For requests that name none. What is predicted to miss it is answered 429 before any work."""
    api_keys: str | None = None
    """A YAML file of hashed keys (`kvferry keys new`), read again when it changes. null: whoever comes is served."""
    max_body_bytes: int = Field(default=8 << 20, ge=1)
    """A larger body, or message of gRPC, is refused (413)."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """A body that takes longer is refused (408); a head that takes as long is not answered, and a client that reads
    nothing of its answer for so long is gone."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may ask ("*": of all)."""
    heartbeat_s: float = Field(default=0.5, gt=0)
    """Between two looks at a worker; three misses in a row make it unreachable."""
    token_timeout_s: float = Field(default=120.0, gt=0)
    """Longest silence of a worker about a running request."""
    worker_wait_s: float = Field(default=30.0, ge=0)
    """With no worker there that could serve, requests wait for so long after the last one went: a silent one is
    replaced after 10 s, and the new one has to load the model."""
    rpc_timeout_s: float = Field(default=3.0, gt=0)
    """Deadline of one short call to a worker."""
    prefill_timeout_s: float = Field(default=3600.0, gt=0)
    """Longest time of one prefill, if its worker goes on taking steps."""
    short_prefill_tokens: int = Field(default=64, ge=1)
    """A decode worker computes what it lacks of a request itself, without a hand-off, if that is at most so many
    tokens, and max_interference allows it."""
    max_interference: float = Field(default=0.0, ge=0)
    """Steps of its running requests that may be held up for it. It does not hold where a stream goes on from a copy of
    its KV (transfer.resume: replicate). 0.0: nothing else is computed there."""
    max_traces: int = Field(default=1000, ge=0)
    """Ended requests that `kvferry trace` still knows."""
    max_attempts: int = Field(default=4, ge=1, le=20)
    """Tries in a row that may bring a request no token."""
    retry_s: float = Field(default=0.2, gt=0)
    """Longest wait before the second of them; it doubles with each."""
    tool_call_parser: ToolCallParserName = "auto"
    """How the model writes calls of tools. auto: what its chat template shows."""

    @field_validator("policy")
    @classmethod
    def _policy_can_be_used(cls, policy: str) -> str:
        try:
            policy_named(policy)
        except ConfigError as error:
            raise ValueError(error.message) from None
        return policy

    @field_validator("api_keys")
    @classmethod
    def _path_from_here(cls, path: str | None) -> str | None:
        """The router's process may be in another folder."""
        return path and os.path.abspath(os.path.expanduser(path))


class JobsConfig(Strict):
    url: str | None = None
    """Where jobs are kept. null: a SQLite file in the cluster's folder. sqlite:////path/FILE, or with kvferry[postgres]
    postgresql://user:password@host/name, which several routers share."""
    ttl_s: float = Field(default=604_800.0, gt=0)
    """How long answers, and uploaded files, can be read."""
    max_in_flight: int = Field(default=32, ge=1, le=4096)
    """Prompts of jobs that one router has at work."""
    lease_s: float = Field(default=10.0, gt=0)
    """A router that is silent for so long has lost its prompts to others."""
    max_num_prompts: int = Field(default=50_000, ge=1)
    """Of one job."""
    max_file_bytes: int = Field(default=100 << 20, ge=1)
    """Of one uploaded file."""
    max_tenant_file_bytes: int = Field(default=1 << 30, ge=1)
    """Of all uploaded files of one tenant."""
    max_tenant_job_bytes: int = Field(default=4 << 30, ge=1)
    """Of all prompts and answers of one tenant's jobs, batches included, until they are deleted or their ttl_s is
    over."""
    max_attempts: int = Field(default=10, ge=1)
    """Tries at a prompt of which each ended with its router, or with an error that is not the prompt's."""
