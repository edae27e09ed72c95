"""Faults that a config may inject, to test what is built on a cluster: workers/faults.py makes them happen."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workers.strict import Strict


class _Fault(Strict):
    worker: str = ""
    """The only worker at which it happens, by name; empty: at every one."""


class _Repeated(_Fault):
    probability: float = Field(default=1.0, ge=0, le=1)
    """How likely it is each time."""
    skip: int = Field(default=0, ge=0)
    """The first so many times it does not happen."""
    count: int | None = Field(default=None, ge=1)
    """It happens no more than so many times. null: no limit."""


class FrameFault(_Repeated):
    """To a KV frame that arrives. Reordered: the next one overtakes it."""

    fault: Literal["drop_frame", "delay_frame", "duplicate_frame", "reorder_frame", "truncate_frame", "corrupt_frame"]
    """What happens to it."""
    delay_s: float = Field(default=0.5, ge=0)
    """Of frames that are late."""


class RefuseReserve(_Repeated):
    """No room is granted, though there is some."""

    fault: Literal["refuse_reserve"]
    """What happens."""


class Kill(_Fault):
    """The worker's process ends, as by kill -9, when it gets to `at` for the time after the first `skip`.

    Each process counts for itself: so does the one that replaces it, after as many of its own.
    """

    fault: Literal["kill"]
    """What happens."""
    at: Literal["reserve", "prefill", "frame", "token_1", "commit", "committed", "output"]
    """Room granted, prompt come, frame come, token 1 computed, hand-off's end come, done; tokens about to leave."""
    skip: int = Field(default=0, ge=0)
    """The first so many times it does not happen."""


class PauseHeartbeat(_Fault):
    """The worker answers neither heartbeats of routers nor renewals of leases for a while, and works on."""

    fault: Literal["pause_heartbeat"]
    """What happens."""
    after_s: float = Field(default=0.0, ge=0)
    """After the worker's start."""
    for_s: float = Field(gt=0)
    """How long."""


Fault = Annotated[FrameFault | RefuseReserve | Kill | PauseHeartbeat, Field(discriminator="fault")]
