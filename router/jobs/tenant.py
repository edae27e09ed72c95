"""Whose jobs and files a call is about, and for whom a job's prompts are answered."""

from __future__ import annotations

from router.tenants import CALLER, Caller, KeyConfig

# A key that nobody can have: no text has this hash.
_NO_KEY = "0" * 64


def calling_tenant() -> str:
    """Of the running task's call; empty where no keys are asked for."""
    caller = CALLER.get()
    return caller.key.tenant if caller else ""


def act_for(tenant: str) -> None:
    """The running task answers for this tenant from now on. Limits were its submitter's affair."""
    CALLER.set(Caller(KeyConfig(sha256=_NO_KEY, tenant=tenant), None, None) if tenant else None)
