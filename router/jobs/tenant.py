"""Whose jobs and files a call is about, and for whom a job's prompts are answered."""

from __future__ import annotations

from dataclasses import replace

from router.jobs.records import JOB_PRIORITY, Claim
from router.tenants import CALLER, Caller, KeyConfig, KeyRing

# A key that nobody can have: no text has this hash.
_NO_KEY = "0" * 64


def calling_tenant() -> str:
    """Of the running task's call; empty where no keys are asked for."""
    caller = CALLER.get()
    return caller.key.tenant if caller else ""


def calling_priority() -> int:
    """That of a job which the running task's call submits: behind all that somebody waits for, and its key's bound."""
    caller = CALLER.get()
    return max(JOB_PRIORITY, caller.key.max_priority) if caller else JOB_PRIORITY


def act_for(claim: Claim, keys: KeyRing | None) -> None:
    """The running task answers this prompt from now on, with the tokens of its tenant's key."""
    found = keys.of_tenant(claim.tenant) if keys else None
    if found is None:
        # No tenant has no name to check.
        found = Caller(KeyConfig.model_construct(sha256=_NO_KEY, tenant=claim.tenant), None, None)
    CALLER.set(replace(found, job_priority=claim.priority))
