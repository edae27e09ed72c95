"""Who owns which block of a worker, for `kvferry verify`, which holds it against what routers wait for."""

from __future__ import annotations

from collections.abc import Iterator

from protos import worker_pb2 as pb
from workers.config import WorkerConfig
from workers.decode import Decode
from workers.engine.engine import Engine
from workers.request import Request


def audit_worker(config: WorkerConfig, incarnation: str, engine: Engine, decode: Decode) -> pb.AuditWorkerResponse:
    return pb.AuditWorkerResponse(
        name=config.name,
        incarnation=incarnation,
        blocks_total=engine.block_manager.num_blocks,
        free_block_ids=engine.block_manager.free_block_ids,
        cached_block_ids=engine.block_manager.cached_block_ids,
        owners=[_ownership(state, request) for state, request in _owners(engine, decode)],
        settle_s=config.transfer.rpc_timeout_s + config.transfer.lease_s,
        contradiction=_contradiction(engine),
    )


def num_requests(engine: Engine, decode: Decode) -> int:
    """Of others than copies of another worker's KV."""
    copies = set(decode.replicas)
    return sum(request not in copies for _, request in _owners(engine, decode))


def _owners(engine: Engine, decode: Decode) -> Iterator[tuple[str, Request]]:
    scheduler, quarantined = engine.scheduler, set(decode.quarantined)
    yield from (("running", request) for request in scheduler.running)
    yield from (("waiting", request) for request in scheduler.waiting)
    yield from (("waiting_for_kv", request) for request in scheduler.waiting_for_kv.values())
    for request in (*engine.held, *engine.ended_in_step):
        yield "quarantined" if request in quarantined else "held", request


def _ownership(state: str, request: Request) -> pb.Ownership:
    return pb.Ownership(
        request_id=request.request_id,
        router_id=request.router_id,
        state=state,
        block_ids=request.owned_blocks,
    )


def _contradiction(engine: Engine) -> str:
    """What the engine's own books say against each other."""
    try:
        engine.check_integrity()
    except AssertionError as error:
        return str(error)
    return ""
