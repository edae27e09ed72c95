"""KubeRay's operator would make pods of what k8s/ gives it; each of its rules is seen to bite."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.k8s.manifests import BUILDS, Manifest, rendered, the
from tests.k8s.operator_rules import broken_rules

# What docs/kubernetes.md asks for before this build is applied.
GATES = {"overlays/secure": frozenset({"RayClusterMTLS"})}


@pytest.mark.parametrize("build", BUILDS)
def test_no_rule_is_broken(build):
    rays = [m for m in rendered(build) if m["kind"].startswith("Ray")]
    assert rays
    assert [rule for ray in rays for rule in broken_rules(ray, GATES.get(build, frozenset()))] == []


def test_only_the_secure_build_needs_a_gate():
    (rule,) = broken_rules(the("overlays/secure", "RayCluster", "kvferry"))
    assert rule == "tlsOptions needs the feature gate RayClusterMTLS"


_POD = ("template", "spec")
_HEAD = ("headGroupSpec", *_POD)
_ROUTER = ("workerGroupSpecs", 0)


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        (("rayVersion",), "2.51.0", "rayVersion of token authentication"),
        (("authOptions", "secretName"), "mine", None),
        (("authOptions", "enableK8sTokenAuth"), True, None),
        (("networkPolicy",), {"mode": "DenyAll"}, "networkPolicy needs the feature gate RayClusterNetworkPolicy"),
        (("historyServerOptions",), {}, "historyServerOptions needs the feature gate RayClusterHistoryServer"),
        ((*_HEAD, "restartPolicy"), "Always", "restartPolicy"),
        ((*_ROUTER, *_POD, "restartPolicy"), "OnFailure", "restartPolicy"),
        ((*_ROUTER, *_POD, "restartPolicy"), "Never", None),
        ((*_HEAD, "containers", 0, "env", 0, "name"), "RAY_enable_autoscaler_v2", "RAY_enable_autoscaler_v2"),
        ((*_HEAD, "containers", 0, "env", 0, "name"), "RAY_REDIS_ADDRESS", "RAY_REDIS_ADDRESS without fault tolerance"),
        ((*_HEAD, "containers"), [], "at least one container"),
        ((*_ROUTER, "suspend"), True, "suspend"),
        ((*_ROUTER, "idleTimeoutSeconds"), 60, None),
        (("autoscalerOptions", "version"), "v1", None),
        ((*_ROUTER, "rayStartParams"), {"num-cpus": "0"}, "rayStartParams and resources"),
        ((*_ROUTER, "rayStartParams"), {"labels": "a=b"}, "rayStartParams.labels"),
        ((*_ROUTER, "minReplicas"), 2, "minReplicas <= maxReplicas"),
        ((*_ROUTER, "groupName"), "prefill", "group names are unique"),
        (("gcsFaultToleranceOptions",), {"redisAddress": "redis:6379"}, None),
        (("gcsFaultToleranceOptions",), {"storage": {}}, "fields of the other backend"),
    ],
)
def test_each_rule_of_a_cluster_bites(path, value, rule):
    assert broken_rules(changed(the("base", "RayCluster", "kvferry"), ("spec", *path), value)) == (
        [rule] if rule else []
    )


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        (("metadata", "name"), "a" * 48, "name"),
        (("metadata", "name"), "1kvferry", "name"),
        (("spec", "clusterSelector"), {}, "one of rayClusterSpec and clusterSelector"),
        (("spec", "shutdownAfterJobFinishes"), False, "shutdownAfterJobFinishes"),
        (("spec", "rayClusterSpec", "authOptions", "enableK8sTokenAuth"), True, "enableK8sTokenAuth"),
    ],
)
def test_each_rule_of_a_job_bites(path, value, rule):
    assert broken_rules(changed(the("batch", "RayJob", "kvferry-batch"), path, value)) == [rule]


def changed(manifest: Manifest, path: tuple[str | int, ...], value: Any) -> Manifest:
    copied = copy.deepcopy(manifest)
    inner: Any = copied
    for part in path[:-1]:
        inner = inner.setdefault(part, {}) if isinstance(inner, dict) else inner[part]
    inner[path[-1]] = value
    return copied
