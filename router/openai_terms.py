"""The terms that an HTTP body asks for, beside OpenAI's parameters."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from workers.request import Slo, Terms


class SloBody(BaseModel):
    """In milliseconds."""

    model_config = ConfigDict(strict=True, frozen=True)

    ttft_ms: float | None = None
    tpot_ms: float | None = None


def terms_of(priority: int | None, slo: SloBody | None) -> Terms:
    return Terms(priority=priority or 0, slo=Slo(slo.ttft_ms, slo.tpot_ms) if slo else None)
