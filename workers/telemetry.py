"""What a worker tells about itself. No correctness depends on it."""

from __future__ import annotations

import os
import platform

from protos import worker_pb2 as pb
from workers.config import WorkerConfig
from workers.decode import Decode
from workers.engine.engine import Engine
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.outgoing import FrameSender


def engine_stats(engine: Engine) -> pb.WorkerStats:
    blocks, scheduler = engine.block_manager, engine.scheduler
    return pb.WorkerStats(
        block_size=blocks.block_size,
        blocks_total=blocks.num_blocks,
        blocks_free=blocks.num_free,
        blocks_cached=blocks.num_cached,
        blocks_reserved=scheduler.num_blocks_reserved,
        blocks_in_use=len(engine.blocks_in_use()),
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_waiting_for_kv=len(scheduler.waiting_for_kv),
        num_queued_tokens=sum(r.num_tokens - r.num_computed_tokens for r in (*scheduler.waiting, *scheduler.running)),
        max_num_batched_tokens=scheduler.config.max_num_batched_tokens,
        max_num_running=engine.max_num_running,
        num_steps=engine.num_steps,
        num_prompt_tokens_computed=engine.num_prompt_tokens_computed,
        num_output_tokens=engine.num_output_tokens,
        num_preemptions=scheduler.num_preemptions,
        num_draft_tokens=engine.num_draft_tokens,
        num_accepted_tokens=engine.num_accepted_tokens,
        num_prefix_queried_tokens=engine.prefix_cache.num_queried_tokens,
        num_prefix_hit_tokens=engine.prefix_cache.num_hit_tokens,
    )


def worker_stats(
    config: WorkerConfig, incarnation: str, layout: KVLayout, engine: Engine, frames: FrameSender, decode: Decode
) -> pb.WorkerStats:
    stats = engine_stats(engine)
    stats.name, stats.role, stats.incarnation = config.name, config.role, incarnation
    stats.node, stats.pid, stats.fingerprint = platform.node(), os.getpid(), layout.fingerprint
    stats.quantization = config.quantization
    stats.kernels.update(engine.executor.runner.kernels)
    stats.hash_block_size = config.hash_block_size if config.enable_prefix_caching else 0
    stats.replicates = config.transfer.resume == "replicate"
    stats.blocks_quarantined = len(engine.blocks_in_use() - engine.blocks_in_use(besides=decode.quarantined))
    # Quarantined blocks are held like those that are being read; the sum counts each once.
    stats.blocks_in_use -= stats.blocks_quarantined
    stats.kv_bytes_sent, stats.kv_bytes_received = frames.num_bytes_sent, decode.num_bytes_received
    stats.num_frames_sent, stats.num_frames_received = frames.num_frames_sent, decode.num_frames_received
    stats.num_frames_overlapped = frames.num_frames_overlapped
    _tell_hand_offs(stats, frames, decode)
    if isinstance(config.cpu_affinity, tuple):
        stats.cpu_affinity.extend(config.cpu_affinity)
    return stats


def _tell_hand_offs(stats: pb.WorkerStats, frames: FrameSender, decode: Decode) -> None:
    counts = decode.counts
    stats.num_hand_offs_started, stats.num_hand_offs_committed = counts.num_started, counts.num_committed
    stats.num_hand_offs_released = counts.num_released
    stats.hand_offs_failed.update(counts.num_failed)
    stats.num_grants = decode.num_grants
    stats.num_grants_expired, stats.num_grants_refused = counts.num_expired, counts.num_refused
    stats.send_failures.update(frames.num_failed)
    stats.receive_failures.update(counts.num_frames_refused)
    stats.transfer_s.CopyFrom(frames.transfer_s.to_proto())
    stats.transfer_unhidden_s.CopyFrom(frames.transfer_unhidden_s.to_proto())
