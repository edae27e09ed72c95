"""What would keep a cluster from starting, found before anything is started: by `kvferry config check`, and by
`kvferry up` before all else. Neither torch nor ray here, unless it is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from cluster.caveats import Finding, caveats
from cluster.config import ClusterConfig, router_replicas
from cluster.gpus import gpu_share
from cluster.memory import Memory, gpu_memory, host_memory
from cluster.otlp import require_otel
from cluster.ports import refuse_busy_ports, require_listener
from cluster.ray_tls import require_of_joined_ray
from cluster.worker_configs import worker_configs
from workers.config import WorkerConfig
from workers.engine.sizes import Footprint, footprint
from workers.errors import ConfigError
from workers.models.architecture import ArchitectureConfig, read_architecture
from workers.models.shard import require_divisible
from workers.models.stored import Stored, require_quantisable, stored_tensors
from workers.security_config import SecurityConfig
from workers.tls import membership

# Of each process beside weights and KV: what it has loaded.
_WORKER_BYTES, _ROUTER_BYTES = 400 << 20, 250 << 20
# They load torch, and open the GPU.
_BY_TORCH = ("nccl", "gloo")
# Ray takes the address of one that runs here.
_RUNNING_RAY = "auto"
# Ray's protocol for a process that is on none of its nodes.
_RAY_CLIENT = "ray://"


@dataclass(slots=True)
class Report:
    # With any of these it cannot start.
    problems: list[Finding] = field(default_factory=list)
    # It can, but its user may not expect this.
    caveats: list[Finding] = field(default_factory=list)
    # None: it is not on this machine.
    model: Path | None = None
    # Of each worker whose memory is known.
    footprints: dict[str, Footprint] = field(default_factory=dict)

    def require_none(self) -> None:
        """Raise ConfigError for the first problem."""
        for problem in self.problems:
            raise ConfigError(problem.message, param=problem.key or None)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """A ConfigError inside is a problem, and no more is asked inside."""
        try:
            yield
        except ConfigError as error:
            key = error.param or ""
            message = error.message if key.rpartition(".")[2] in error.message else f"{key}: {error.message}"
            self.add(self.problems, Finding(key, message))

    @staticmethod
    def add(findings: list[Finding], found: Finding) -> None:
        """Several workers may have one problem."""
        if found not in findings:
            findings.append(found)


def examine(config: ClusterConfig, find_model: Callable[[str], Path | None], with_torch: bool) -> Report:
    """`find_model`: the files of a model, None: they are not here; raises ConfigError. `with_torch`: whether transports
    that need torch are tried out too, in this process."""
    report = Report()
    with report.noting():
        if config.jobs.url is not None:
            from router.jobs.database import check_url

            check_url(config.jobs.url)
    with report.noting():
        if config.telemetry.otlp_endpoint is not None:
            require_otel()
    with report.noting():
        workers = worker_configs(config)
        report.caveats += caveats(config)
        if config.address is None:
            if with_torch or config.transfer.transport not in _BY_TORCH:
                _look_at_transports(config, workers, report)
            _look_here(config, workers, find_model, report)
        else:
            _look_at_ray(config.address, config.security, report)
    return report


def _look_here(
    config: ClusterConfig, workers: Sequence[WorkerConfig], find_model: Callable[[str], Path | None], report: Report
) -> None:
    _look_at_doors(config, report)
    with report.noting():
        report.model = find_model(config.model)
        if report.model is None:
            report.caveats.append(Finding("model", f"model: {config.model} is not here: `up` downloads it first"))
        else:
            _look_at_model(report.model, workers, report)
    _look_at_memory(workers, config.router.replicas, report)


def _look_at_ray(address: str, security: SecurityConfig, report: Report) -> None:
    """Other nodes may have what this one has not."""
    with report.noting():
        require_of_joined_ray(security)
    with report.noting():
        if address != _RUNNING_RAY:
            require_listener(address.removeprefix(_RAY_CLIENT))
    report.caveats.append(
        Finding(
            "address", f"address: what the nodes of the Ray at {address} have (model, memory, ports) is not looked at"
        )
    )


def _look_at_doors(config: ClusterConfig, report: Report) -> None:
    for replica in router_replicas(config):
        with report.noting():
            refuse_busy_ports(replica.cluster.router)
    with report.noting():
        membership(config.security, config.name)
    with report.noting():
        if config.router.api_keys is not None:
            from router.tenants import read_keys

            read_keys(Path(config.router.api_keys))


def _look_at_transports(config: ClusterConfig, workers: Sequence[WorkerConfig], report: Report) -> None:
    from workers.kv_transfer.available import open_transports
    from workers.rpc import GrpcNetwork

    for device in dict.fromkeys(worker.device for worker in workers):
        with report.noting():
            open_transports(config.transfer, device, GrpcNetwork(), "check")


def _look_at_model(path: Path, workers: Sequence[WorkerConfig], report: Report) -> None:
    with report.noting():
        architecture, stored = read_architecture(path), stored_tensors(path)
        for worker in workers:
            with report.noting():
                report.footprints[worker.name] = _footprint(worker, path, architecture, stored)
        from workers.tokenizer import load_tokenizer

        load_tokenizer(path)


def _footprint(
    worker: WorkerConfig, path: Path, architecture: ArchitectureConfig, stored: Sequence[Stored]
) -> Footprint:
    require_divisible(architecture, worker.tensor_parallel_size)
    require_quantisable(worker.quantization, stored, path)
    return footprint(worker, architecture, stored)


def _look_at_memory(workers: Sequence[WorkerConfig], num_routers: int, report: Report) -> None:
    """That of this host for workers on CPUs and all processes, that of each GPU for what it is dealt."""
    on_cpu = [worker for worker in workers if worker.device == "cpu" and worker.name in report.footprints]
    weights = {_kept(worker): report.footprints[worker.name].weight_bytes for worker in on_cpu}
    on_host = sum(weights.values()) + sum(report.footprints[worker.name].kv_bytes for worker in on_cpu)
    ranks = sum(worker.tensor_parallel_size for worker in workers)
    _compare("this host", on_host + ranks * _WORKER_BYTES + num_routers * _ROUTER_BYTES, host_memory(), report)
    if on_gpus := [worker for worker in workers if worker.device == "cuda"]:
        _look_at_gpus(on_gpus, report)


def _kept(worker: WorkerConfig) -> tuple[str, ...]:
    """Workers with equal ones keep their weights together, where they can (workers/models/shared_weights.py)."""
    kept = (worker.dtype, worker.quantization)
    return kept if worker.tensor_parallel_size == 1 and _has_own_kernels() else (*kept, worker.name)


def _has_own_kernels() -> bool:
    """Others keep weights in an order that no other process can read."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return "avx512f" in flags and find_spec("workers.layers._kernels") is not None


def _look_at_gpus(workers: Sequence[WorkerConfig], report: Report) -> None:
    gpus = gpu_memory()
    for worker in workers:
        with report.noting():
            share = gpu_share(worker, workers, len(gpus), "this machine has")
            if worker.name in report.footprints:
                each = report.footprints[worker.name].num_bytes // worker.tensor_parallel_size
                # Which one it gets is not known yet.
                largest = max(gpus, key=lambda gpu: gpu.total)
                _compare(f"a GPU, for {worker.role} workers", round(each / min(share, 1)), largest, report)


def _compare(where: str, needed: int, memory: Memory, report: Report) -> None:
    """Pages of a pool are taken when they are first used: what does not fit would be found out in the middle."""
    mend = "lower kv_cache_memory_bytes or replicas, or take fewer bits (quantization)"
    says = f"weights and KV need {_gb(needed)} of {where}, which has"
    if needed > memory.total:
        found = Finding("kv_cache_memory_bytes", f"{says} {_gb(memory.total)}: {mend}")
        report.add(report.problems, found)
    elif needed > memory.available:
        found = Finding("kv_cache_memory_bytes", f"{says} {_gb(memory.available)} left by others: end some, or {mend}")
        report.add(report.caveats, found)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
