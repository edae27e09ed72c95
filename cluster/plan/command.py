"""The command itself: options in, a plan out, as tables, as JSON or as a config file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cluster.plan.cards import CARDS, Card, card_of
from cluster.plan.floors import Served
from cluster.plan.plan import KV_BYTES, WEIGHT_BYTES, Memory, Plan, make_plan
from cluster.plan.shape import ModelShape, read_shape, shape_of
from cluster.plan.sizes import Size
from cluster.plan.sizing import Efficiency, Workload
from workers.errors import ConfigError

_SIZE = Size()
_COUNT = click.IntRange(min=1)
# As a config has them.
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_PART = click.FloatRange(0, 1, min_open=True)


@dataclass(frozen=True)
class _Options:
    """As click gives them; None: not given."""

    model: str | None
    layers: int | None
    kv_heads: int | None
    head_dim: int | None
    params: float | None
    card: str | None
    memory: float | None
    bandwidth: float | None
    flops: float | None
    cards_per_worker: int
    weights: str
    weights_bytes: float | None
    other: float | None
    kv_cache_dtype: str
    request_kv: tuple[float, ...]
    tokens: tuple[int, ...]
    prompt: int
    output: int
    rate: float
    ttft_ms: float
    tpot_ms: float
    compute: float
    bandwidth_used: float


@click.command()
@click.argument("model", required=False)
@click.option("--layers", type=_COUNT, help="Of a model that is no file, with --kv-heads, --head-dim and --params.")
@click.option("--kv-heads", type=_COUNT)
@click.option("--head-dim", type=_COUNT)
@click.option("--params", type=float, help="Such as 70e9.")
@click.option("--card", help=f"One of {', '.join(CARDS)}.")
@click.option("--memory", type=_SIZE, help="Of a card, if not --card's: 80GB.")
@click.option("--bandwidth", type=_SIZE, help="Of its memory, a second: 3350GB.")
@click.option("--flops", type=float, help="16-bit operations a second: 989e12.")
@click.option("--cards-per-worker", type=_COUNT, default=1, show_default=True, help="Its tensor_parallel_size.")
@click.option("--weights", type=click.Choice(list(WEIGHT_BYTES)), default="bf16", show_default=True)
@click.option("--weights-bytes", type=_SIZE, help="If you know better. A .gguf file's are its size.")
@click.option("--other", type=_SIZE, help="Memory of a card for neither weights nor KV. Default: a tenth.")
@click.option("--kv-cache-dtype", type=click.Choice(list(KV_BYTES)), default="bf16", show_default=True)
@click.option("--request-kv", type=_SIZE, multiple=True, help="How many requests of so much KV fit? Repeatable.")
@click.option("--tokens", type=_COUNT, multiple=True, help="How many requests of so many tokens fit? Repeatable.")
@click.option("--prompt", type=_COUNT, default=2048, show_default=True, help="Mean tokens of the workload's prompts.")
@click.option("--output", type=_COUNT, default=256, show_default=True, help="And of its answers.")
@click.option("--rate", type=click.FloatRange(min=0), default=0.0, help="Requests a second. 0: no workload.")
@click.option("--ttft-ms", type=float, default=1000.0, show_default=True, help="Promised, on average.")
@click.option("--tpot-ms", type=float, default=50.0, show_default=True)
@click.option("--compute", type=_PART, default=0.5, show_default=True, help="Part of the FLOP/s that prefill reaches.")
@click.option("--bandwidth-used", type=_PART, default=0.7, show_default=True, help="Part of the bytes/s in decode.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--config", "config_file", type=click.Path(), help="Write a config file for the workload.")
def plan(as_json: bool, config_file: str | None, **given: Any) -> None:
    """KV bytes, largest batch, floors of TTFT and TPOT, and the P:D ratio for a model, a card and a workload.

    MODEL is a config.json, a folder with one, a .gguf file, or what `model:` of a config may be.
    """
    from cluster.plan import render

    options = _Options(**given)
    made = _plan(options)
    if config_file:
        Path(config_file).write_text(_config(options, made), "utf-8")
    if as_json:
        click.echo(json.dumps(render.plan_object(made), indent=2))
    else:
        render.show(made)


def _plan(options: _Options) -> Plan:
    served = _served(options)
    one = _card(options)
    card = one * options.cards_per_worker if one else None
    workload = Workload(options.prompt, options.output, options.rate, options.ttft_ms / 1000, options.tpot_ms / 1000)
    tokens = options.tokens or tuple(sorted({1024, 4096, options.prompt + options.output}))
    sizes = options.request_kv or tuple(count * served.kv_bytes for count in tokens if served.kv_bytes)
    knows_rates = card is not None and card.flops > 0 and card.bandwidth_bytes > 0
    if options.rate and not knows_rates:
        raise ConfigError("--rate needs a card's speed; give --card, or --memory, --bandwidth and --flops")
    return make_plan(
        served,
        card if knows_rates else None,
        _memory(options, card, served),
        sizes,
        workload if served.shape.num_params else None,
        Efficiency(options.compute, options.bandwidth_used),
    )


def _served(options: _Options) -> Served:
    shape = _shape(options)
    weights = options.weights_bytes
    if weights is None:
        weights = shape.file_bytes or shape.num_params * WEIGHT_BYTES[options.weights]
    return Served(shape, weights, KV_BYTES[options.kv_cache_dtype])


def _shape(options: _Options) -> ModelShape:
    dims = (options.layers, options.kv_heads, options.head_dim)
    if options.model is not None:
        if any(dims):
            raise ConfigError("give a MODEL, or --layers, --kv-heads and --head-dim; not both")
        return read_shape(_path(options.model))
    if None in dims:
        if any(dims) or not options.request_kv:
            raise ConfigError("give a MODEL, or --layers, --kv-heads and --head-dim, all three")
        return shape_of(0, 0, 0, 0)  # Only memory is asked for.
    layers, kv_heads, head_dim = (int(dim or 0) for dim in dims)
    return shape_of(layers, kv_heads, head_dim, int(options.params or 0))


def _path(model: str) -> Path:
    path = Path(model).expanduser()
    if path.exists():
        return path
    from workers.models.resolve import resolve_model

    return resolve_model(model)


def _card(options: _Options) -> Card | None:
    if options.card is not None:
        found = card_of(options.card)
        return Card(
            found.name,
            options.memory or found.memory_bytes,
            options.bandwidth or found.bandwidth_bytes,
            options.flops or found.flops,
        )
    if options.memory is None:
        return None
    return Card("a card", options.memory, options.bandwidth or 0.0, options.flops or 0.0)


def _memory(options: _Options, card: Card | None, served: Served) -> Memory | None:
    if card is None:
        return None
    other = card.memory_bytes / 10 if options.other is None else options.other * options.cards_per_worker
    return Memory(card.memory_bytes, served.weights_bytes, other)


def _config(options: _Options, made: Plan) -> str:
    """What `kvferry up` takes."""
    if made.split is None or options.model is None:
        raise ConfigError("--config needs a MODEL, a card and --rate")
    import yaml

    if options.weights not in _DTYPES or options.kv_cache_dtype not in _DTYPES:
        raise ConfigError("--config: workers on GPUs serve weights and KV in bf16 or fp32")
    role = {"device": "cuda", "tensor_parallel_size": options.cards_per_worker}
    settings: dict[str, Any] = {
        "model": options.model,
        "dtype": _DTYPES[options.weights],
        "kv_cache_dtype": _DTYPES[options.kv_cache_dtype],
        "prefill": {"replicas": made.split.num_prefill, **role},
        "decode": {"replicas": made.split.num_decode, **role, "max_num_seqs": made.split.batch},
        "router": {"slo": {"ttft_ms": options.ttft_ms, "tpot_ms": options.tpot_ms}},
    }
    return str(yaml.safe_dump(settings, sort_keys=False))
