"""Where a cluster's routers answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Of all routers, with commas between."""

    http: str
    grpc: str

    @classmethod
    def of(cls, routers: Sequence[tuple[str, str]]) -> Self:
        """Each router's HTTP and gRPC endpoint."""
        return cls(*(",".join(one[at] for one in routers) for at in range(2)))
