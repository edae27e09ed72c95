"""What KubeRay's operator asks of a resource that its schema cannot say: an invalid one is accepted, and gets no pods.

By the operator's validation of v1.7.0, with the feature gates that a caller says are on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.k8s.manifests import Manifest

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = {"RayCluster": 53, "RayJob": 47, "RayService": 47}
_MIXED = ("num-cpus", "num-gpus", "memory", "resources")
_FT_ANNOTATIONS = ("ray.io/ft-enabled", "ray.io/external-storage-namespace")
_GATES = {
    "networkPolicy": "RayClusterNetworkPolicy",
    "tlsOptions": "RayClusterMTLS",
    "historyServerOptions": "RayClusterHistoryServer",
}


def broken_rules(manifest: Manifest, gates: frozenset[str] = frozenset()) -> list[str]:
    """Of a RayCluster or a RayJob."""
    kind, spec, name = manifest["kind"], manifest["spec"], manifest["metadata"]["name"]
    found = []
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME[kind]:
        found.append("name")
    if kind == "RayJob":
        found += _of_job(spec)
    cluster = spec if kind == "RayCluster" else spec.get("rayClusterSpec")
    if cluster is not None:
        found += [*_of_auth(cluster, kind), *_of_gates(cluster, gates), *_of_groups(cluster)]
        found += [*_of_autoscaler(cluster), *_of_fault_tolerance(cluster, manifest)]
    return found


def _of_job(spec: Manifest) -> Iterator[str]:
    if ("rayClusterSpec" in spec) == ("clusterSelector" in spec):
        yield "one of rayClusterSpec and clusterSelector"
    needs_shutdown = spec.get("ttlSecondsAfterFinished", 0) > 0 or spec.get("suspend")
    if needs_shutdown and not spec.get("shutdownAfterJobFinishes"):
        yield "shutdownAfterJobFinishes"
    if spec.get("submissionMode") == "SidecarMode" and "submitterPodTemplate" in spec:
        yield "no submitter of its own in SidecarMode"


def _of_auth(spec: Manifest, kind: str) -> Iterator[str]:
    auth = spec.get("authOptions", {})
    if auth.get("mode") == "token" and _version(spec) < (2, 52):
        yield "rayVersion of token authentication"
    if auth.get("enableK8sTokenAuth") and (
        auth.get("mode") != "token" or _version(spec) < (2, 55) or "secretName" in auth or kind != "RayCluster"
    ):
        yield "enableK8sTokenAuth"


def _of_gates(spec: Manifest, gates: frozenset[str]) -> Iterator[str]:
    for field, gate in _GATES.items():
        if field in spec and gate not in gates:
            yield f"{field} needs the feature gate {gate}"
    if _ft(spec).get("backend") == "rocksdb" and "GCSFaultToleranceEmbeddedStorage" not in gates:
        yield "rocksdb needs the feature gate GCSFaultToleranceEmbeddedStorage"


def _of_groups(spec: Manifest) -> Iterator[str]:
    names = [group["groupName"] for group in _workers(spec)]
    if len(set(names)) < len(names):
        yield "group names are unique"
    for group in _all_groups(spec):
        start = group.get("rayStartParams", {})
        if "labels" in start:
            yield "rayStartParams.labels"
        if group.get("resources") and any(key in start for key in _MIXED):
            yield "rayStartParams and resources"
        if not group["template"]["spec"].get("containers"):
            yield "at least one container"
    for group in _workers(spec):
        least, most = group.get("minReplicas", 0), group.get("maxReplicas", 1 << 31)
        if least < 0 or most < least:
            yield "minReplicas <= maxReplicas"


def _of_autoscaler(spec: Manifest) -> Iterator[str]:
    on = bool(spec.get("enableInTreeAutoscaling"))
    v2 = on and spec.get("autoscalerOptions", {}).get("version") == "v2"
    by_variable = any(env["name"] == "RAY_enable_autoscaler_v2" for env in _head_environment(spec))
    if by_variable and (v2 or not on):
        yield "RAY_enable_autoscaler_v2"
    if v2 and any(_pod(group).get("restartPolicy", "Never") != "Never" for group in _all_groups(spec)):
        yield "restartPolicy"
    for group in _workers(spec):
        if not v2 and ("idleTimeoutSeconds" in group or group.get("priority")):
            yield "idleTimeoutSeconds and priority need autoscaler v2"
        if group.get("priority") and _version(spec) < (2, 56):
            yield "rayVersion of priority"
        if on and group.get("suspend"):
            yield "suspend"


def _of_fault_tolerance(spec: Manifest, manifest: Manifest) -> Iterator[str]:
    options = _ft(spec)
    variables = {env["name"] for env in _head_environment(spec)}
    start = spec["headGroupSpec"].get("rayStartParams", {})
    annotations = manifest["metadata"].get("annotations", {})
    if not options:
        if "RAY_REDIS_ADDRESS" in variables:
            yield "RAY_REDIS_ADDRESS without fault tolerance"
        return
    if any(name in annotations for name in _FT_ANNOTATIONS):
        yield "annotations of fault tolerance"
    if variables & {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD"} or "redis-password" in start:
        yield "Redis of the head's own"
    rocksdb = options.get("backend") == "rocksdb"
    if ("storage" in options) > rocksdb or (rocksdb and any(key.startswith("redis") for key in options)):
        yield "fields of the other backend"


def _ft(spec: Manifest) -> dict[str, Any]:
    return dict(spec.get("gcsFaultToleranceOptions", {}))


def _version(spec: Manifest) -> tuple[int, ...]:
    """(0,) where none is said."""
    return tuple(int(part) for part in str(spec.get("rayVersion", "0")).split("."))


def _workers(spec: Manifest) -> list[Manifest]:
    return list(spec.get("workerGroupSpecs", []))


def _all_groups(spec: Manifest) -> list[Manifest]:
    return [spec["headGroupSpec"], *_workers(spec)]


def _pod(group: Manifest) -> Manifest:
    return dict(group["template"]["spec"])


def _head_environment(spec: Manifest) -> list[Manifest]:
    return [env for container in _pod(spec["headGroupSpec"])["containers"] for env in container.get("env", [])]
