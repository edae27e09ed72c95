"""Whose jobs and files a call is about, and for whom a job's prompts are answered."""

from __future__ import annotations

from dataclasses import replace

from router.tenants import CALLER, Caller, KeyConfig, KeyRing

# A key that nobody can have: no text has this hash.
_NO_KEY = "0" * 64


def calling_tenant() -> str:
    """Of the running task's call; empty where no keys are asked for."""
    caller = CALLER.get()
    return caller.key.tenant if caller else ""


def act_for(tenant: str, keys: KeyRing | None) -> None:
    """The running task answers for this tenant from now on, with the tokens of its key. How urgent its calls may be
    does not matter: jobs go last in any case."""
    key = KeyConfig(sha256=_NO_KEY, tenant=tenant) if tenant else None
    found = keys.of_tenant(tenant) if keys else None
    if found is not None:
        CALLER.set(replace(found, key=found.key.model_copy(update={"max_priority": 0})))
    else:
        CALLER.set(Caller(key, None, None) if key else None)
