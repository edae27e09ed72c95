"""Two hundred ways to get a config wrong, each with the key that its refusal has to name.

They are made of the packaged ones: a key misspelt, given twice, at the wrong place, of the wrong type or out of range;
settings that contradict each other; and what the machine has not.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from cluster.config_file import packaged_configs
from cluster.config_schema import config_schema

_ANY_PORTS = "router: {http_port: 0, grpc_port: 0}\n"


@dataclass(frozen=True, slots=True)
class BadConfig:
    what: str
    text: str
    # Dotted; the refusal names it.
    key: str


def bad_configs(busy_port: int, folder: str) -> list[BadConfig]:
    """`folder`: an empty one."""
    rng = random.Random(7)
    made = [*_misspelt(rng), *_twice(), *_misplaced(), *_of_other_types(), *_out_of_range(), *_contradictions()]
    return [*made, *_not_here(busy_port, folder)]


def _keys(data: dict[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in data.items():
        yield (*place, key)
        if isinstance(value, dict):
            yield from _keys(value, (*place, key))


def _text(place: tuple[str, ...], value: Any) -> str:
    for key in reversed(place):
        value = {key: value}
    return yaml.safe_dump(value)


def _misspelt(rng: random.Random) -> Iterator[BadConfig]:
    """Each key of the default: a letter left out, doubled, or two of them swapped."""
    data = yaml.safe_load(packaged_configs()["local"])
    for place in _keys(data):
        name = place[-1]
        i = rng.randrange(1, len(name) - 1)
        wrong = rng.choice([name[:i] + name[i + 1 :], name[:i] + name[i] + name[i:], name[:i] + name[i:][::-1]])
        if wrong != name:
            yield BadConfig("misspelt", _text((*place[:-1], wrong), 1), ".".join((*place[:-1], wrong)))


def _twice() -> Iterator[BadConfig]:
    for text in packaged_configs().values():
        first = next(iter(yaml.safe_load(text)))
        yield BadConfig("given twice", f"{text}\n{first}: 1\n", first)
    yield BadConfig("given twice", "router: {http_port: 0, grpc_port: 0, http_port: 1}", "router.http_port")


def _misplaced() -> Iterator[BadConfig]:
    for key in ("http_port", "grpc_port", "transport", "lease_s", "ttft_ms", "replicas", "cors_origins"):
        yield BadConfig("at the wrong place", f"{key}: 1\n{_ANY_PORTS}", key)
    for group in ("router", "transfer", "jobs", "decode"):
        yield BadConfig("at the wrong place", f"{group}: {{model: x}}", f"{group}.model")


def _properties() -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    schema = config_schema()

    def below(group: dict[str, Any], place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        for key, value in group["properties"].items():
            kinds = [one for one in value.get("anyOf", [value]) if one.get("type") != "null"]
            for kind in kinds:
                if "$ref" in kind:
                    yield from below(schema["$defs"][kind["$ref"].rpartition("/")[2]], (*place, key))
            yield (*place, key), kinds[0]

    return below(schema, ())


_WRONG: dict[str, Any] = {
    "integer": "many",
    "number": "soon",
    "boolean": "maybe",
    "string": [1],
    "array": 3.5,
    "object": 3,
}


def _of_other_types() -> Iterator[BadConfig]:
    for place, kind in _properties():
        # A whole group as a number; else by the schema.
        wrong = 7 if "$ref" in kind else _WRONG[kind.get("type", "string")]
        # Those that take a list, too.
        if place[-1] not in ("served_model_name", "cpu_affinity"):
            yield BadConfig("of another type", _text(place, wrong), ".".join(place))


def _out_of_range() -> Iterator[BadConfig]:
    for place, kind in _properties():
        limits = {"minimum": -1, "exclusiveMinimum": 0, "maximum": 1}
        for limit, beyond in limits.items():
            if limit in kind:
                yield BadConfig("out of range", _text(place, kind[limit] + beyond), ".".join(place))
        if "enum" in kind:
            yield BadConfig("no such choice", _text(place, "best"), ".".join(place))


_CONTRADICTIONS = {
    "prefill: {replicas: 0}": "prefill.replicas",
    "decode: {replicas: 0}": "decode.replicas",
    "{prefill: {replicas: 0}, decode: {replicas: 0}, colocated: {replicas: 0}}": "colocated.replicas",
    "router: {replicas: 2}": "jobs.url",
    "router: {http_port: 9000, grpc_port: 9000}": "router.http_port",
    "{router: {replicas: 2, grpc_port: 8002}, jobs: {url: 'sqlite:////tmp/j'}}": "router.http_port",
    "{router: {replicas: 2, http_port: 65535}, jobs: {url: 'sqlite:////tmp/j'}}": "router.http_port",
    "max_num_seqs: 1000": "max_num_seqs",
    "max_num_batched_tokens: 32": "max_num_batched_tokens",
    "decode: {max_num_seqs: 1000}": "max_num_seqs",
    "prefill: {max_num_batched_tokens: 8}": "max_num_batched_tokens",
    "block_size: 24": "block_size",
    "decode: {block_size: 24}": "block_size",
    "hash_block_size: 32": "hash_block_size",
    "transfer: {checksum: false}": "transfer.checksum",
    "transfer: {checksum: false, transport: auto}": "transfer.checksum",
    "{transfer: {resume: replicate}, enable_prefix_caching: false}": "enable_prefix_caching",
    "{transfer: {resume: replicate}, colocated: {replicas: 1}}": "transfer.resume",
    "{transfer: {resume: replicate}, decode: {quantization: int8}}": "transfer.resume",
    "{quantization: int8, device: cuda}": "quantization",
    "{quantization: int8, tensor_parallel_size: 3}": "quantization",
    "{device: cuda, prefill: {quantization: int4}}": "quantization",
    "speculative_config: {prompt_lookup_min: 5}": "prompt_lookup_min",
    "faults: [{fault: kill, at: commit, worker: decode-7}]": "faults",
    "faults: [{fault: kill, at: commit}]": "faults",
    "faults: [{fault: explode}]": "faults.0",
    "faults: [{fault: kill}]": "faults.0.at",
    "faults: [{fault: drop_frame, propability: 1}]": "faults.0.propability",
    "transfer: {transport: nccl}": "transfer.transport",
    "prefill: {device: cuda}": "prefill.device",
    "decode: {device: cuda}": "decode.device",
    "name: ../evil": "name",
    "router: {policy: best}": "router.policy",
    "router: {policy: 'no.such:policy'}": "router.policy",
}


def _contradictions() -> Iterator[BadConfig]:
    for text, key in _CONTRADICTIONS.items():
        yield BadConfig("contradicts itself", text, key)


def _not_here(busy_port: int, folder: str) -> Iterator[BadConfig]:
    missing: dict[str, tuple[dict[str, Any], str]] = {
        "a port in use": ({"router": {"http_port": busy_port, "grpc_port": 0}}, "router.http_port"),
        "the other port in use": ({"router": {"http_port": 0, "grpc_port": busy_port}}, "router.grpc_port"),
        "somebody else's address": ({"router": {"host": "192.0.2.7", "http_port": 7}}, "router.http_port"),
        "no keys": ({"router": {"api_keys": f"{folder}/no.yaml"}}, "router.api_keys"),
        "no model": ({"model": f"{folder}/no.gguf"}, "model"),
        "an empty folder as model": ({"model": folder}, "model"),
        "a package that is not installed": ({"model": "package:no_such_model"}, "model"),
        "a package without a model": ({"model": "package:yaml"}, "model"),
        "no database": ({"jobs": {"url": "nowhere"}}, "jobs.url"),
        "an unknown database": ({"jobs": {"url": "mysql://host/jobs"}}, "jobs.url"),
        "jobs in memory": ({"jobs": {"url": "sqlite://"}}, "jobs.url"),
        "no Ray": ({"address": "127.0.0.1:9"}, "address"),
        "no core": ({"cpu_affinity": [4000]}, "cpu_affinity"),
        "no core of a role": ({"decode": {"cpu_affinity": [4000]}}, "cpu_affinity"),
        "longer than the model": ({"max_model_len": 9000}, "max_model_len"),
        "heads that cannot be dealt": ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        "a pool too small": ({"kv_cache_memory_bytes": 1 << 20}, "kv_cache_memory_bytes"),
        "too few blocks": ({"decode": {"num_gpu_blocks_override": 3}}, "num_gpu_blocks_override"),
        "a pool too large": ({"kv_cache_memory_bytes": 1 << 48}, "kv_cache_memory_bytes"),
        "too many workers": ({"decode": {"replicas": 1024}, "kv_cache_memory_bytes": 1 << 33}, "kv_cache_memory_bytes"),
    }
    for what, (data, key) in missing.items():
        ports = {"http_port": 0, "grpc_port": 0, **data.get("router", {})}
        yield BadConfig(what, json.dumps({**data, "router": ports}), key)
