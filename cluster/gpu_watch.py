"""Lets a worker tell of its GPUs, which are asked beside its event loop, and rarely."""

from __future__ import annotations

import asyncio
import logging

from workers.nvml import Gpus
from workers.worker import Worker

logger = logging.getLogger(__name__)

PERIOD_S = 5.0


async def watch_gpus(worker: Worker, period_s: float = PERIOD_S) -> None:
    """Until cancelled."""
    gpus = Gpus()
    while True:
        try:
            worker.gpus = await asyncio.to_thread(gpus.read)
        except Exception:  # Figures of a GPU are no reason for a worker to end.
            logger.exception("%s: its GPUs cannot be read", worker.config.name)
            return
        await asyncio.sleep(period_s)
