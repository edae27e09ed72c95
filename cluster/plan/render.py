"""A plan as tables or as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.plan.floors import Floor
from cluster.plan.plan import Plan
from cluster.plan.sizes import shown


def plan_object(plan: Plan) -> dict[str, Any]:
    """Bytes, seconds and counts."""
    shape, element_bytes = plan.served.shape, plan.served.kv_element_bytes
    return {
        "model": {
            "name": shape.name,
            "num_params": shape.num_params,
            "num_active_params": shape.num_active_params,
            "weights_bytes": plan.served.weights_bytes,
            "max_position_embeddings": shape.max_position_embeddings,
        },
        "kv": {
            "bytes_per_token_per_layer": shape.kv_bytes_per_layer(element_bytes),
            "bytes_per_token": plan.served.kv_bytes,
            "bytes_per_token_if_mha": shape.num_layers * shape.mha_kv_elements * element_bytes,
        },
        "card": asdict(plan.card) if plan.card else None,
        "memory": {**asdict(plan.memory), "kv_bytes": plan.memory.kv_bytes} if plan.memory else None,
        "largest_batch": [{"request_bytes": size, "requests": count} for size, count in plan.batches.items()],
        "ttft_floor": [{"prompt_tokens": length, **_floor(floor)} for length, floor in plan.prefill.items()],
        "tpot_floor": [{"batch": batch, **_floor(floor)} for batch, floor in plan.decode.items()],
        "workload": asdict(plan.workload) if plan.split and plan.workload else None,
        "split": asdict(plan.split) if plan.split else None,
    }


def _floor(floor: Floor) -> dict[str, Any]:
    return {"seconds": floor.seconds, "bound": floor.bound, **asdict(floor)}


def show(plan: Plan) -> None:
    console = Console()
    for title, table in _tables(plan):
        # No table's own: it would be as narrow as the table.
        console.print(title, highlight=False)
        console.print(table)


def _tables(plan: Plan) -> Iterator[tuple[str, Table]]:
    if plan.served.kv_bytes:
        yield _model(plan)
    if plan.memory and plan.batches:
        yield _batches(plan)
    if plan.prefill:
        yield _floors(plan)
    if plan.split:
        yield _split(plan)


def _pairs() -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    return table


def _model(plan: Plan) -> tuple[str, Table]:
    served, shape = plan.served, plan.served.shape
    table = _pairs()
    if shape.num_params:
        active = f", {shape.num_active_params / 1e9:.3g} G of them for each token" if shape.experts else ""
        table.add_row("parameters", f"{shape.num_params / 1e9:.4g} G{active}")
        table.add_row("weights", shown(served.weights_bytes))
    table.add_row("KV of a token, one layer", shown(shape.kv_bytes_per_layer(served.kv_element_bytes)))
    table.add_row("KV of a token", shown(served.kv_bytes))
    table.add_row("KV of 4,096 tokens", shown(4096 * served.kv_bytes))
    if shape.mha_kv_elements > shape.attention.kv_elements:
        less = shape.mha_kv_elements / shape.attention.kv_elements
        table.add_row("less than with K and V for every head", f"{less:.3g} x")
    return shape.name, table


def _batches(plan: Plan) -> tuple[str, Table]:
    assert plan.memory is not None
    memory = plan.memory
    title = (
        f"memory: {memory.total_bytes / 1e9:.4g} GB - weights {memory.weights_bytes / 1e9:.4g} - other "
        f"{memory.other_bytes / 1e9:.3g} = {memory.kv_bytes / 1e9:.4g} GB of KV"
    )
    table = Table("KV of a request", "tokens", "requests at once")
    for size, count in plan.batches.items():
        tokens = f"{size / plan.served.kv_bytes:,.0f}" if plan.served.kv_bytes else ""
        table.add_row(f"{size / 1e9:.3g} GB", tokens, f"{count:,}")
    return title, table


def _floors(plan: Plan) -> tuple[str, Table]:
    assert plan.card is not None
    title = f"floors on {plan.card.name}: no engine is faster"
    table = Table("", "ms", "bound by")
    for length, floor in plan.prefill.items():
        table.add_row(f"TTFT, prompt of {length:,} tokens", _ms(floor.seconds), floor.bound)
    for batch, floor in plan.decode.items():
        table.add_row(f"TPOT, batch of {batch}", _ms(floor.seconds), floor.bound)
    return title, table


def _split(plan: Plan) -> tuple[str, Table]:
    assert plan.split is not None
    assert plan.workload is not None
    load, split = plan.workload, plan.split
    title = (
        f"{load.rate:g} requests/s of {load.num_prompt_tokens:,} + {load.num_output_tokens:,} tokens, TTFT "
        f"{_ms(load.ttft_s)} ms, TPOT {_ms(load.tpot_s)} ms"
    )
    table = _pairs()
    table.add_row("prefill : decode workers", f"{split.num_prefill} : {split.num_decode}")
    table.add_row("a prompt, and its mean wait", f"{_ms(split.prefill_s)} + {_ms(split.prefill_wait_s)} ms")
    table.add_row(f"a step of {split.batch}", f"{_ms(split.decode_step_s)} ms")
    table.add_row("KV of a hand-off", shown(split.kv_bytes_per_hand_off))
    table.add_row("network of a prefill worker, to hide it", f"{8 * split.worker_bytes_per_s / 1e9:.3g} Gbit/s")
    table.add_row("network, all hand-offs", f"{8 * split.cluster_bytes_per_s / 1e9:.3g} Gbit/s")
    return title, table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"
