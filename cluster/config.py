"""The config file: ClusterConfig, read with errors of one line. worker_configs.py deals it out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from cluster.config_errors import complaint, first_problem, refuse_unknown_keys
from cluster.config_file import ConfigFile, parse_yaml, read_config_file
from cluster.gpus import no_hand_off
from cluster.placement import misplaced
from router.config import JobsConfig, RouterConfig
from workers.config import (
    Device,
    EngineConfig,
    KVCacheDType,
    PlacementConfig,
    Quantization,
    Role,
    TransferConfig,
    WorkerConfig,
)
from workers.errors import ConfigError
from workers.fault_config import Fault
from workers.security_config import SecurityConfig
from workers.strict import Strict
from workers.telemetry_config import TelemetryConfig

_LAST_PORT = 65535
_ROLES: tuple[Role, ...] = get_args(Role)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")


class RoleConfig(PlacementConfig):
    """How many workers of a role, and what they have other than the rest. null: as the whole cluster."""

    replicas: int = Field(default=0, ge=0, le=1024)
    """How many. Where nothing is said, one prefill and one decode worker; where only colocated ones are asked for, no
    others."""
    device: Device | None = None
    quantization: Quantization | None = None
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
        return self.model_dump(exclude={"replicas", *PlacementConfig.model_fields}, exclude_none=True)


class ScalingConfig(Strict):
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """A worker that is to leave, to be started anew or to change its role gets no new requests, and what it has may end
    within so long. What is left then goes on at others."""


class ClusterConfig(EngineConfig):
    """All of kvferry's settings. Its defaults are those of configs/local.yaml."""

    name: str = "kvferry"
    """Of the cluster, for the other commands (`--name`), and of its folder under ~/.kvferry."""
    address: str | None = None
    """Ray's address to join, host:port, or auto: of the one that runs here. null: a private Ray that lives and dies
    with the cluster."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """`kvferry up` gives up when a process has not loaded and opened its port within so long."""
    router: RouterConfig = RouterConfig()
    """What stands between clients and workers."""
    transfer: TransferConfig = TransferConfig()
    """How KV goes from one worker to another."""
    jobs: JobsConfig = JobsConfig()
    """Durable jobs and uploaded files."""
    security: SecurityConfig = SecurityConfig()
    """Who may speak to whom, and how."""
    prefill: RoleConfig = RoleConfig(replicas=1)
    """Workers that turn prompts into KV."""
    decode: RoleConfig = RoleConfig(replicas=1)
    """Workers that turn KV into tokens."""
    colocated: RoleConfig = RoleConfig()
    """Workers that do both, without a hand-off. A file that sets only these has no others."""
    scaling: ScalingConfig = ScalingConfig()
    """How workers come, go and change while requests are under way."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What processes tell of themselves: logs, metrics and traces."""
    faults: tuple[Fault, ...] = ()
    """Injected, to test what is built on a cluster: `kvferry up --allow-faults`."""

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
    def _a_copy_needs_another_worker(self) -> ClusterConfig:
        num_workers = sum(self.role(role).replicas for role in _ROLES)
        if self.transfer.resume == "replicate" and num_workers == 1:
            raise ValueError(
                "transfer.resume: replicate needs another worker to keep copies; set colocated.replicas to at least 2, "
                "or transfer.resume: recompute"
            )
        return self

    @model_validator(mode="after")
    def _a_copy_is_of_one_kind_of_weights(self) -> ClusterConfig:
        if self.transfer.resume == "replicate" and (unequal := self.unequal_roles):
            raise ValueError(
                f"transfer.resume: replicate keeps KV of prompts and answers as one, and {unequal}; give both one "
                "quantization, or set transfer.resume: recompute"
            )
        return self

    @model_validator(mode="after")
    def _hand_offs_are_between_devices_of_a_kind(self) -> ClusterConfig:
        prefill, decode = (self.role(role).device or self.device for role in ("prefill", "decode"))
        hands_off = self.prefill.replicas and self.decode.replicas
        if hands_off and (problem := no_hand_off(prefill, decode, self.transfer.transport)):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _kv_is_as_safe_as_all_else(self) -> ClusterConfig:
        if problem := self.security.plain_transport(self.transfer.transport):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _two_servers_need_two_ports(self) -> ClusterConfig:
        if self.router.http_port == self.router.grpc_port != 0:
            raise ValueError(f"router.http_port and router.grpc_port are both {self.router.http_port}: choose two")
        routers = [replica.cluster.router for replica in router_replicas(self)]
        ports = [port for router in routers for port in (router.http_port, router.grpc_port) if port]
        if len(set(ports)) < len(ports) or any(port > _LAST_PORT for port in ports):
            raise ValueError(
                f"router.http_port and router.grpc_port: {len(routers)} routers would have the ports {ports}: choose "
                "others, or 0 for any"
            )
        return self

    @model_validator(mode="after")
    def _several_routers_share_their_jobs(self) -> ClusterConfig:
        if self.router.replicas > 1 and self.jobs.url is None:
            raise ValueError(
                f"router.replicas: {self.router.replicas} routers have to share their jobs: set jobs.url, to "
                "postgresql://user@host/name or, as all are on one host, sqlite:////path/jobs.sqlite"
            )
        return self

    @model_validator(mode="after")
    def _only_a_joined_ray_has_places(self) -> ClusterConfig:
        kinds: dict[str, PlacementConfig] = {"router": self.router, **{role: self.role(role) for role in _ROLES}}
        if self.address is None and (problem := misplaced(kinds)):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _every_role_is_possible(self) -> ClusterConfig:
        for role in _ROLES:
            try:
                WorkerConfig(**self.worker_settings(role))
            except ValidationError as exc:
                raise ValueError(f"{role}: {complaint(exc.errors(include_url=False)[0])}") from None
        return self

    @model_validator(mode="after")
    def _faults_happen_to_somebody(self) -> ClusterConfig:
        for fault in self.faults:
            if fault.worker and fault.worker not in (names := self.worker_roles()):
                raise ValueError(f"faults: there is no worker {fault.worker!r}; there are {', '.join(names)}")
        return self

    def worker_settings(self, role: Role) -> dict[str, Any]:
        """What every worker of a role has."""
        shared = self.model_dump(include=set(EngineConfig.model_fields))
        shares = ("transfer", "security", "telemetry", "faults")
        own: dict[str, Any] = {"role": role, **{key: getattr(self, key) for key in shares}}
        if role == "decode" and self.prefill.replicas:
            own["prefill_quantization"] = self.prefill.quantization or self.quantization
        return {**shared, **self.role(role).overrides(), **own}

    @property
    def unequal_roles(self) -> str:
        """How the weights of prompts differ from those of answers; empty: they do not."""
        kinds = [self.role(role).quantization or self.quantization for role in ("prefill", "decode")]
        if kinds[0] == kinds[1] or not (self.prefill.replicas and self.decode.replicas):
            return ""
        return f"prefill computes with quantization {kinds[0]} and decode with {kinds[1]}"

    def worker_roles(self) -> dict[str, Role]:
        """Every worker's name."""
        return {f"{role}-{i}": role for role in _ROLES for i in range(self.role(role).replicas)}

    def role(self, role: Role) -> RoleConfig:
        config: RoleConfig = getattr(self, role)
        return config


@dataclass(frozen=True, slots=True)
class RouterReplica:
    """One router of a cluster, whose ports are its own."""

    name: str
    cluster: ClusterConfig

    def at_ports(self, http_port: int, grpc_port: int) -> RouterReplica:
        ports = {"http_port": http_port, "grpc_port": grpc_port}
        router = self.cluster.router.model_copy(update=ports)
        return RouterReplica(self.name, self.cluster.model_copy(update={"router": router}))

    def at_urls(self, urls: Iterable[str]) -> RouterReplica:
        """At the ports of its HTTP and its gRPC endpoint."""
        http_port, grpc_port = (int(url.rpartition(":")[2]) for url in urls)
        return self.at_ports(http_port, grpc_port)


def router_replicas(cluster: ClusterConfig) -> list[RouterReplica]:
    """Each one's ports are two above those of the one before; 0 stays any."""
    router = cluster.router
    return [
        RouterReplica(f"router-{i}", cluster).at_ports(
            *(port + 2 * i if port else 0 for port in (router.http_port, router.grpc_port))
        )
        for i in range(router.replicas)
    ]


def load_config(path: str | Path | None, allow_faults: bool = False) -> ClusterConfig:
    """The config in a YAML file, or a packaged one by its name; None: the packaged local.yaml.

    Raises ConfigError: file and line, key, what is wrong, mend.
    """
    file = read_config_file(path)
    config = checked(file)
    if config.faults and not allow_faults:
        raise ConfigError(
            f"{file.at(('faults',))}: faults: they damage frames and kill workers, for tests; start with "
            "`kvferry up --allow-faults`, or take them out",
            param="faults",
        )
    return config


def parse_config(text: str, source: str) -> ClusterConfig:
    """As load_config, of a file's text."""
    return checked(parse_yaml(text, source))


def checked(file: ConfigFile) -> ClusterConfig:
    """Raises ConfigError."""
    refuse_unknown_keys(file, ClusterConfig)
    try:
        return ClusterConfig.model_validate(file.data)
    except ValidationError as exc:
        raise first_problem(exc, file, ClusterConfig) from None
