"""Pairs: which decode worker cannot take which prefill worker's KV, and why: weights, layout, transport or checksum.

Known by both incarnations, so that whoever takes one's place is asked anew. Weights are compared here; all else shows
when the two connect, which prefill workers are asked to do as soon as both are there, and at a hand-off at the latest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

from router.worker_handle import WorkerHandle
from workers.errors import KVFerryError, LayoutMismatchError

logger = logging.getLogger(__name__)

# Pairs that are connected before there is KV; of more, the rest shows at hand-offs.
_MOST_ASKED = 32


class Pairs:
    def __init__(self, workers: Sequence[WorkerHandle]) -> None:
        self._workers = workers
        # By the incarnations of both, of pairs that were asked: why not; empty: nothing is known against it.
        self._known: dict[tuple[str, str], str] = {}

    def why_not(self, prefill: WorkerHandle, decode: WorkerHandle) -> str:
        """Empty: KV can go from one to the other, as far as is known."""
        reason = self._known.get(self.key(prefill, decode))
        if prefill.stats.fingerprint != decode.stats.fingerprint:
            reason = (
                f"{decode.name} computes with other weights or kernels than {prefill.name}; start both from one "
                "config, on processors and with builds of kvferry that compute alike (see `kvferry status`)"
            )
        return f"from {prefill.name} to {decode.name}: {reason}" if reason else ""

    @staticmethod
    def key(prefill: WorkerHandle, decode: WorkerHandle) -> tuple[str, str]:
        """Who they are now."""
        return prefill.stats.incarnation, decode.stats.incarnation

    def refuse(self, prefill: WorkerHandle, decode: WorkerHandle, error: LayoutMismatchError) -> None:
        """The two were found not to fit."""
        self._known[self.key(prefill, decode)] = error.message
        logger.warning("no KV goes from %s to %s: %s", prefill.name, decode.name, error.message)

    async def ask(self) -> None:
        """Let those that came connect, each pair once. Whoever is not reached in time is found out at a hand-off."""
        present = {worker.stats.incarnation for worker in self._workers}
        self._known = {pair: reason for pair, reason in self._known.items() if present.issuperset(pair)}
        unknown = islice(self._unknown(), max(0, _MOST_ASKED - len(self._known)))
        await asyncio.gather(*(self._ask(*pair) for pair in list(unknown)))

    def _unknown(self) -> Iterator[tuple[WorkerHandle, WorkerHandle]]:
        """Every worker's first pair before any worker's second."""
        prefills, decodes = ([w for w in self._workers if w.role == r and w.reachable] for r in ("prefill", "decode"))
        for first in range(len(decodes)):
            for prefill, decode in zip(prefills, islice(cycle(decodes), first, None), strict=False):
                pair = self.key(prefill, decode)
                if pair not in self._known and not self.why_not(prefill, decode):
                    yield prefill, decode

    async def _ask(self, prefill: WorkerHandle, decode: WorkerHandle) -> None:
        pair = self.key(prefill, decode)
        self._known.setdefault(pair, "")
        try:
            await prefill.connect(decode)
        except LayoutMismatchError as error:
            if pair == self.key(prefill, decode):
                self.refuse(prefill, decode, error)
        except KVFerryError as error:
            logger.info("%s has not connected to %s: %s", prefill.name, decode.name, error.message)
