"""`python -m tests.workers.faulty_process ROLE STEP`: a worker with the fake model, to be killed at a step."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from tests.factories import make_worker
from workers.fault_config import Kill
from workers.rpc import GrpcNetwork


async def main(role: str, step: str) -> None:
    network: Any = GrpcNetwork()
    fault = Kill.model_validate({"fault": "kill", "at": step})
    print(await make_worker(network, name="doomed", role=role, faults=(fault,)).start(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
