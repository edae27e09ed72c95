"""The config file: ClusterConfig, read with errors of one line, and dealt out to workers."""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from router.config import RouterConfig
from workers.config import Device, EngineConfig, KVCacheDType, Role, Strict, TransferConfig, WorkerConfig
from workers.errors import ConfigError

_ROLES: tuple[Role, ...] = get_args(Role)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")


class RoleConfig(Strict):
    """How many workers of a role, and what they have other than the rest. None: as the whole cluster."""

    replicas: int = Field(default=0, ge=0, le=1024)
    device: Device | None = None
    tensor_parallel_size: int | None = Field(default=None, ge=1, le=64)
    cpu_affinity: Literal["auto", "none"] | tuple[int, ...] | None = None
    num_threads: int | None = Field(default=None, ge=1)
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    num_gpu_blocks_override: int | None = Field(default=None, ge=1)
    block_size: int | None = Field(default=None, ge=1, le=256)
    kv_cache_dtype: KVCacheDType | None = None
    max_num_seqs: int | None = Field(default=None, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)

    def overrides(self) -> dict[str, Any]:
        return self.model_dump(exclude={"replicas"}, exclude_none=True)


class ClusterConfig(EngineConfig):
    """All of kvferry's settings. Its defaults are those of configs/local.yaml."""

    name: str = "kvferry"
    # Ray's address to join. None: a private Ray that lives and dies with the cluster.
    address: str | None = None
    router: RouterConfig = RouterConfig()
    transfer: TransferConfig = TransferConfig()
    prefill: RoleConfig = RoleConfig(replicas=1)
    decode: RoleConfig = RoleConfig(replicas=1)
    colocated: RoleConfig = RoleConfig()

    @field_validator("name")
    @classmethod
    def _name_can_be_a_folder(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("use 1 to 40 letters, digits, - and _, the first a letter or digit")
        return name

    @model_validator(mode="before")
    @classmethod
    def _only_colocated_if_that_is_all_that_is_asked(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        roles = {role: data.get(role) for role in _ROLES}
        named = {role: dict(value) for role, value in roles.items() if isinstance(value, dict)}
        alone = "colocated" in named and named["colocated"].get("replicas", 0) != 0
        for role in ("prefill", "decode"):
            if role in named:
                named[role].setdefault("replicas", 1)
            elif role not in data and alone and not {"prefill", "decode"} & data.keys():
                named[role] = {"replicas": 0}
        return {**data, **named}

    @model_validator(mode="after")
    def _some_worker_can_start_and_some_can_finish(self) -> ClusterConfig:
        if not self.colocated.replicas and not (self.prefill.replicas and self.decode.replicas):
            raise ValueError(
                f"{self.prefill.replicas} prefill, {self.decode.replicas} decode and 0 colocated workers can serve "
                "nothing: set prefill.replicas and decode.replicas, or colocated.replicas, to at least 1"
            )
        return self

    @model_validator(mode="after")
    def _two_servers_need_two_ports(self) -> ClusterConfig:
        if self.router.http_port == self.router.grpc_port != 0:
            raise ValueError(f"router.http_port and router.grpc_port are both {self.router.http_port}: choose two")
        return self

    @model_validator(mode="after")
    def _every_role_is_possible(self) -> ClusterConfig:
        for role in _ROLES:
            try:
                WorkerConfig(**self._settings(role))
            except ValidationError as exc:
                raise ValueError(f"{role}: {_complaint(exc.errors(include_url=False)[0])}") from None
        return self

    def _settings(self, role: Role) -> dict[str, Any]:
        """What every worker of a role has."""
        shared = self.model_dump(include=set(EngineConfig.model_fields))
        return {**shared, **self.role(role).overrides(), "role": role, "transfer": self.transfer}

    def role(self, role: Role) -> RoleConfig:
        config: RoleConfig = getattr(self, role)
        return config


def load_config(path: str | Path | None) -> ClusterConfig:
    """The config in a YAML file; None: the packaged local.yaml. Raises ConfigError: file, key, what is wrong, mend."""
    if path is None:
        text = resources.files("cluster").joinpath("configs/local.yaml").read_text(encoding="utf-8")
        return parse_config(text, "local.yaml")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a config, or none for the default") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror if isinstance(exc, OSError) else exc}") from None
    return parse_config(text, str(path))


def parse_config(text: str, source: str) -> ClusterConfig:
    data = _mapping(text, source)
    _refuse_unknown_keys(data, ClusterConfig, source, ())
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as exc:
        raise _first_problem(exc, source) from None


def worker_configs(cluster: ClusterConfig, cores: Sequence[int] | None = None) -> list[WorkerConfig]:
    """One config a worker, prefill first, with this machine's cores dealt out among those that ask for `auto`."""
    drafts = [
        WorkerConfig(**{**cluster._settings(role), "name": f"{role}-{i}"})
        for role in _ROLES
        for i in range(cluster.role(role).replicas)
    ]
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    if cluster.address is None:
        _refuse_missing_cores(drafts, cores)
    shares = iter(deal_cores(cores, sum(draft.cpu_affinity == "auto" for draft in drafts)))
    return [_pinned(draft, next(shares) if draft.cpu_affinity == "auto" else draft.cpu_affinity) for draft in drafts]


def _refuse_missing_cores(workers: Sequence[WorkerConfig], cores: Sequence[int]) -> None:
    for worker in workers:
        chosen = worker.cpu_affinity
        if isinstance(chosen, tuple) and not (chosen and set(chosen) <= set(cores)):
            raise ConfigError(
                f"cpu_affinity of {worker.name}: {list(chosen)} must be some of this machine's cores {list(cores)}; "
                "or leave it at auto",
                param="cpu_affinity",
            )


def _pinned(worker: WorkerConfig, affinity: tuple[int, ...] | Literal["none"]) -> WorkerConfig:
    num_threads = worker.num_threads or (None if affinity == "none" else len(affinity))
    return worker.model_copy(update={"cpu_affinity": affinity, "num_threads": num_threads})


def deal_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Disjoint contiguous shares whose sizes differ by one at most; too few cores: one each, in turn."""
    if num_workers > len(cores):
        return [(cores[i % len(cores)],) for i in range(num_workers)]
    bounds = [i * len(cores) // num_workers for i in range(num_workers + 1)] if num_workers else [0]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(bounds)]


def _mapping(text: str, source: str) -> dict[str, Any]:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ConfigError(f"{source}: not valid YAML: {_yaml_problem(exc)}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: must be keys with values (`name: kvferry`), not {_kind(data)}")
    return data


def _refuse_unknown_keys(data: dict[str, Any], model: type[BaseModel], source: str, place: tuple[str, ...]) -> None:
    for key, value in data.items():
        if key not in model.model_fields:
            dotted = ".".join((*place, str(key)))
            raise ConfigError(f"{source}: {dotted}: unknown key; {_nearest(str(key), model, place)}", param=dotted)
        inner = _group(model.model_fields[key])
        if inner and isinstance(value, dict):
            _refuse_unknown_keys(value, inner, source, (*place, key))


def _nearest(key: str, model: type[BaseModel], place: tuple[str, ...]) -> str:
    """The nearest key of the same group, else the nearest of any group."""
    here = difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0.7)
    if here:
        return f"did you mean {'.'.join((*place, here[0]))}?"
    known = _dotted_keys(ClusterConfig, ())
    last_parts = {dotted.rsplit(".", 1)[-1]: dotted for dotted in reversed(known)}
    # Within a group, what is meant lies farther only if it is very like.
    anywhere = difflib.get_close_matches(key, last_parts, n=1, cutoff=0.75 if place else 0.5)
    if anywhere:
        return f"did you mean {last_parts[anywhere[0]]}?"
    return f"known keys here: {', '.join(model.model_fields)}"


def _group(field: FieldInfo) -> type[BaseModel] | None:
    """The keys below a key, also where null may stand for all of them."""
    kinds = get_args(field.annotation) or (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _dotted_keys(model: type[BaseModel], place: tuple[str, ...]) -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(".".join((*place, name)))
        if inner := _group(field):
            keys += _dotted_keys(inner, (*place, name))
    return keys


def _yaml_problem(exc: yaml.YAMLError) -> str:
    if isinstance(exc, yaml.MarkedYAMLError) and exc.problem_mark:
        return f"line {exc.problem_mark.line + 1}, column {exc.problem_mark.column + 1}: {exc.problem}"
    return " ".join(str(exc).split())


def _first_problem(exc: ValidationError, source: str) -> ConfigError:
    """One line of pydantic's first error; the branches of a union are not part of a key's place."""
    errors = exc.errors(include_url=False)
    error = max((e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]), key=lambda e: len(e["loc"]))
    known = {part for dotted in _dotted_keys(ClusterConfig, ()) for part in dotted.split(".")}
    dotted = ".".join(str(part) for part in error["loc"] if isinstance(part, int) or part in known)
    got = f", not {_shown(error['input'])}" if dotted else ""
    return ConfigError(": ".join(filter(None, (source, dotted, _complaint(error) + got))), param=dotted or None)


# What pydantic calls an error, and what a reader of the file wants to hear.
_COMPLAINTS = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "model_type": "must be keys with values, as in `{{replicas: 1}}`",
    "string_type": "must be text",
    "tuple_type": "must be a list",
}


def _complaint(error: ErrorDetails) -> str:
    known = _COMPLAINTS.get(error["type"])
    return known.format(**error.get("ctx", {})) if known else error["msg"].removeprefix("Value error, ")


def _shown(value: Any) -> str:
    return _kind(value) if isinstance(value, (dict, list, tuple)) else repr(value)


def _kind(value: Any) -> str:
    names: dict[type, str] = {dict: "a mapping", list: "a list", str: "text"}
    return names.get(type(value), type(value).__name__)
