"""`kvferry verify`: the blocks of every worker held against the requests that every router waits for.

A worker's own books must add up at any moment. Between workers and routers messages are under way, so what does not add
up there is a leak only if it stays for longer than deadlines and leases take to end what nobody asks for any more.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from protos import router_pb2 as pb
from protos import worker_pb2

_LOOK_S = 0.5
# Beyond that: for what it sets off.
_MARGIN_S = 2.0

Audits = Sequence[pb.AuditRouterResponse]


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """What does not add up: on which worker (or router), about which request (empty: none in particular)."""

    where: str
    request_id: str
    what: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.where, self.request_id, self.what)))


@dataclass(frozen=True, slots=True)
class Report:
    """`audits`: the last look, of each router."""

    audits: Audits
    findings: list[Finding] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.findings

    def workers(self) -> list[worker_pb2.AuditWorkerResponse]:
        """Every worker once, though several routers have it."""
        found = {worker.address: worker.audit for audit in self.audits for worker in audit.workers if not worker.error}
        return list(found.values())


def verify(
    look: Callable[[], Audits], say: Callable[[str], None] = lambda line: None, margin_s: float = _MARGIN_S
) -> Report:
    """Look until everything adds up, or something has not for too long."""
    began_s = time.monotonic()
    audits = look()
    suspects = _by_place(unaccounted(audits))
    while suspects and not any(wrong_books(audits)):
        wait_s = _settle_s(audits) + margin_s
        if time.monotonic() - began_s >= wait_s:
            break
        say(f"{len(suspects)} things do not add up yet: looking for {wait_s:g} s whether they end")
        time.sleep(_LOOK_S)
        audits = look()
        # One that goes from running to waiting is the same one.
        suspects = {place: now for place, now in _by_place(unaccounted(audits)).items() if place in suspects}
    return Report(audits, sorted({*suspects.values(), *wrong_books(audits)}))


def wrong_books(audits: Audits) -> Iterator[Finding]:
    """What a worker tells about its blocks that cannot be true."""
    for worker in _workers(audits):
        audit = worker.audit
        if audit.contradiction:
            yield Finding(audit.name, "", f"its books contradict themselves: {audit.contradiction}")
        owned = {block for owner in audit.owners for block in owner.block_ids}
        places = Counter((*audit.free_block_ids, *audit.cached_block_ids, *owned))
        if twice := sorted(block for block, count in places.items() if count > 1):
            yield Finding(audit.name, "", f"blocks {twice} are free, cached or owned at once")
        if lost := sorted(set(range(audit.blocks_total)) - set(places)):
            yield Finding(audit.name, "", f"blocks {lost} are neither free nor cached nor owned")
        if foreign := sorted(set(places) - set(range(audit.blocks_total))):
            yield Finding(audit.name, "", f"blocks {foreign} are not of its pool of {audit.blocks_total}")


def unaccounted(audits: Audits) -> Iterator[Finding]:
    """Blocks that no router waits for, requests that no worker has, and workers that do not answer."""
    attempts = {(audit.incarnation, one.request_id): one for audit in audits for one in audit.attempts}
    at_work = set()
    for worker in _workers(audits):
        if worker.error:
            yield Finding(worker.address, "", "does not answer, so its blocks are not accounted for")
        for owner in worker.audit.owners:
            key = (owner.router_id, owner.request_id)
            at_work.add(key)
            attempt = attempts.get(key)
            if attempt is None or worker.address not in (attempt.prefill_address, attempt.decode_address):
                yield Finding(worker.audit.name, owner.request_id, f"{owner.state}, and no router waits for it here")
    for router_id, request_id in attempts.keys() - at_work:
        yield Finding(f"router {router_id[:8]}", request_id, "waits for it, and no worker has it")


def _by_place(findings: Iterator[Finding]) -> dict[tuple[str, str], Finding]:
    return {(finding.where, finding.request_id): finding for finding in findings}


def _workers(audits: Audits) -> Iterator[pb.WorkerAudit]:
    return iter({worker.address: worker for audit in audits for worker in audit.workers}.values())


def _settle_s(audits: Audits) -> float:
    return max((worker.audit.settle_s for worker in _workers(audits)), default=0.0)
