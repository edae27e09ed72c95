"""What the command line and the demo show: status as one JSON object or a table, and where requests' time went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from cluster.client import Completion
from cluster.verify import Report
from protos import router_pb2, worker_pb2
from router.ui.state import worker_state

_BLOCKS = ("blocks_total", "blocks_free", "blocks_cached", "blocks_reserved", "blocks_in_use", "blocks_quarantined")
_SUMS = (*_BLOCKS, "num_running", "num_waiting")
# Of pairs of workers, in words.
_MOST_SHOWN = 4
_ANSWERS = ("ready", "draining")


def of_all_routers(answers: Sequence[router_pb2.GetStatusResponse]) -> router_pb2.GetStatusResponse:
    """As one answer: the workers are the same ones for all."""
    whole = router_pb2.GetStatusResponse()
    whole.CopyFrom(answers[0])
    whole.http_endpoint = ",".join(answer.http_endpoint for answer in answers)
    whole.grpc_endpoint = ",".join(answer.grpc_endpoint for answer in answers)
    whole.ready = any(answer.ready for answer in answers)
    for answer in answers[1:]:
        whole.routers.extend(answer.routers)
    return whole


def status_object(status: router_pb2.GetStatusResponse) -> dict[str, Any]:
    """`kvferry status --json`."""
    workers = [_worker_object(worker) for worker in status.workers]
    reachable = [worker for worker in workers if worker["state"] in _ANSWERS]
    return {
        "name": status.name,
        "ready": status.ready,
        "endpoints": {"http": status.http_endpoint, "grpc": status.grpc_endpoint},
        "served_model_names": list(status.served_model_names),
        "routers": [
            {
                "name": router.name,
                "incarnation": router.incarnation,
                "pid": router.pid,
                "num_queued": router.num_queued,
                "num_running": router.num_running,
                "policy": router.policy,
                "num_indexed_blocks": router.num_indexed_blocks,
                "start_s": _seconds(router.start_phases),
            }
            for router in status.routers
        ],
        "workers": workers,
        "start_s": _seconds(status.start_phases),
        # Of those that answer: the others' numbers are old.
        "totals": {
            "num_workers": len(workers),
            "num_queued": sum(router.num_queued for router in status.routers),
            **{key: sum(worker[key] for worker in reachable) for key in _SUMS},
        },
    }


def _worker_object(worker: router_pb2.WorkerStatus) -> dict[str, Any]:
    stats = worker.stats
    return {
        "name": stats.name,
        "role": stats.role,
        "state": worker_state(worker),
        "refused": worker.refused,
        "unfit": list(worker.unfit),
        "address": worker.address,
        "pid": stats.pid,
        "node": stats.node,
        "incarnation": stats.incarnation,
        "cpu_affinity": list(stats.cpu_affinity),
        "quantization": stats.quantization,
        "kernels": dict(stats.kernels),
        **{key: getattr(stats, key) for key in _SUMS},
        "num_waiting_for_kv": stats.num_waiting_for_kv,
        "start_s": _seconds(stats.start_phases),
        "peers": [
            {
                "incarnation": peer.incarnation,
                "transport": peer.transport,
                "address": peer.address,
                "checksum": peer.checksum,
                "why": peer.why,
            }
            for peer in stats.peers
        ],
    }


def status_title(status: router_pb2.GetStatusResponse) -> str:
    ready = "ready" if status.ready else "not ready"
    models = ", ".join(status.served_model_names)
    place = f"{status.name} is {ready}: {models} at {status.http_endpoint}, gRPC {status.grpc_endpoint}"
    ways = (f"{one.name} routes by {one.policy}, {one.num_indexed_blocks} blocks known" for one in status.routers)
    return "\n".join((place, *ways, *_start_lines(status), *_pair_lines(status)))


def _pair_lines(status: router_pb2.GetStatusResponse) -> Iterator[str]:
    """Who gets no requests, which pairs cannot exchange KV, and why KV goes by no better transport, each once."""
    for worker in status.workers:
        if worker.refused:
            yield worker.refused
        else:
            yield from (f"no KV goes {reason}" for reason in worker.unfit[:_MOST_SHOWN])
    names = _names(status)
    found: dict[str, list[str]] = {}
    for worker in status.workers:
        for peer in worker.stats.peers:
            if peer.why:
                pair = f"{worker.stats.name} to {names.get(peer.incarnation) or peer.address}"
                found.setdefault(f"{peer.transport}, {peer.why}", []).append(pair)
    yield from (f"KV goes by {way}: from {', '.join(pairs[:_MOST_SHOWN])}" for way, pairs in found.items())


def _start_lines(status: router_pb2.GetStatusResponse) -> Iterator[str]:
    """How the cluster, the slowest of its workers and its routers started."""
    if status.start_phases:
        yield f"started in {_phases(status.start_phases)}"
    workers = [worker.stats for worker in status.workers if worker.stats.start_phases]
    slowest = max(workers, key=lambda stats: sum(phase.seconds for phase in stats.start_phases), default=None)
    for one in (*([slowest] if slowest else ()), *status.routers):
        if one.start_phases:
            yield f"  {one.name} in {_phases(one.start_phases)}"


def _phases(phases: Sequence[worker_pb2.StartPhase]) -> str:
    parts = ", ".join(f"{phase.name} {phase.seconds:.1f}" for phase in phases)
    return f"{sum(phase.seconds for phase in phases):.1f} s: {parts}"


def _seconds(phases: Sequence[worker_pb2.StartPhase]) -> dict[str, float]:
    return {phase.name: round(phase.seconds, 3) for phase in phases}


def status_table(status: router_pb2.GetStatusResponse) -> Table:
    table = _table(
        "worker", "state", "pid", "cores", "weights", "running", "waiting", "free", "cached", "taken", "KV by"
    )
    names = _names(status)
    for worker in status.workers:
        stats = worker.stats
        cells = (
            stats.pid,
            ",".join(map(str, stats.cpu_affinity)) or "any",
            _weights(stats),
            stats.num_running,
            stats.num_waiting + stats.num_waiting_for_kv,
            stats.blocks_free,
            stats.blocks_cached,
            stats.blocks_in_use + stats.blocks_reserved + stats.blocks_quarantined,
            _ways(stats.peers, names),
        )
        table.add_row(stats.name or worker.address, _state(worker), *map(str, cells))
    return table


def _state(worker: router_pb2.WorkerStatus) -> str:
    """With its role where its name says another: it was flipped."""
    name, role = worker.stats.name, worker.stats.role
    return worker_state(worker) if name.startswith(role) else f"{worker_state(worker)} as {role}"


def _weights(stats: worker_pb2.WorkerStats) -> str:
    """How they are kept, and the kernels that multiply with them."""
    kernels = " + ".join(sorted(stats.kernels))
    return f"{stats.quantization}: {kernels}" if stats.quantization != "none" else kernels or "none"


def audit_object(report: Report) -> dict[str, Any]:
    """`kvferry verify --json`."""
    return {
        "clean": report.clean,
        "findings": [asdict(finding) for finding in report.findings],
        "routers": [{"incarnation": audit.incarnation, "num_attempts": len(audit.attempts)} for audit in report.audits],
        "workers": [_audited_object(worker) for worker in report.workers()],
    }


def _audited_object(audit: worker_pb2.AuditWorkerResponse) -> dict[str, Any]:
    return {
        "name": audit.name,
        "incarnation": audit.incarnation,
        "blocks_total": audit.blocks_total,
        "blocks_free": len(audit.free_block_ids),
        "blocks_cached": len(audit.cached_block_ids),
        "blocks_owned": len({block for owner in audit.owners for block in owner.block_ids}),
        "num_owners": len(audit.owners),
    }


def audit_table(report: Report) -> Table:
    table = _table("worker", "blocks", "free", "cached", "owned", "by requests")
    for audit in report.workers():
        one = _audited_object(audit)
        keys = ("blocks_total", "blocks_free", "blocks_cached", "blocks_owned", "num_owners")
        table.add_row(audit.name, *(str(one[key]) for key in keys))
    return table


def audit_verdict(report: Report) -> str:
    if not report.clean:
        return "\n".join((f"{len(report.findings)} things do not add up:", *map(str, report.findings)))
    num_requests = sum(len(audit.attempts) for audit in report.audits)
    return f"clean: every block has one owner or none, and every owner is one of {num_requests} requests under way"


def _names(status: router_pb2.GetStatusResponse) -> dict[str, str]:
    """Of the workers, by their incarnations."""
    return {worker.stats.incarnation: worker.stats.name for worker in status.workers}


def _way(peer: worker_pb2.PeerStats) -> str:
    return peer.transport if peer.checksum else f"{peer.transport} without checksum"


def _ways(peers: Sequence[worker_pb2.PeerStats], names: Mapping[str, str]) -> str:
    """How KV goes to the peers: grpc, or where they differ: shm to decode-0 decode-2, grpc to decode-1."""
    found: dict[str, list[str]] = {}
    for peer in peers:
        found.setdefault(_way(peer), []).append(names.get(peer.incarnation) or peer.address)
    if len(found) <= 1:
        return next(iter(found), "-")
    return ", ".join(f"{way} to {' '.join(sorted(to))}" for way, to in found.items())


def timeline_table(completions: Mapping[str, Completion]) -> Table:
    """Where each request's time went, by its label."""
    table = _table("request", "prompt", "output", "queued", "prefill", "transfer", "unhidden", "decode", "TTFT", "TPOT")
    table.caption = "tokens and milliseconds; unhidden: the transfer's part after token 1"
    for label, completion in completions.items():
        times = completion.timeline
        seconds = (
            times.queued_s + times.prefill_queued_s,
            times.prefill_s,
            times.transfer_s,
            times.transfer_unhidden_s,
            times.decode_queued_s + times.decode_s,
            completion.ttft_s,
            completion.tpot_s,
        )
        usage = completion.usage
        counts = (usage.num_prompt_tokens, usage.num_completion_tokens)
        table.add_row(label, *map(str, counts), *(f"{1000 * duration_s:.1f}" for duration_s in seconds))
    return table


def work_table(workers: Sequence[worker_pb2.WorkerStats]) -> Table:
    """What each worker did since it started."""
    table = _table("worker", "prompt", "output", "KV sent", "KV received", "largest batch", "blocks free")
    table.caption = "tokens and MB"
    for stats in workers:
        table.add_row(
            stats.name,
            str(stats.num_prompt_tokens_computed),
            str(stats.num_output_tokens),
            f"{stats.kv_bytes_sent / 1e6:.1f}",
            f"{stats.kv_bytes_received / 1e6:.1f}",
            str(stats.max_num_running),
            f"{stats.blocks_free + stats.blocks_cached}/{stats.blocks_total}",
        )
    return table


def _table(first: str, *rest: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", caption_justify="left")
    table.add_column(first, no_wrap=True)
    for name in rest:
        table.add_column(name, justify="right")
    return table
