"""docs/kubernetes.md names what there is."""

from __future__ import annotations

import re

from tests.k8s.manifests import K8S, rendered
from tests.k8s.operator_rules import broken_rules

TEXT = (K8S.parent / "docs" / "kubernetes.md").read_text()
# Made by the operator and by cert-manager.
MADE = {"kvferry", "kvferry-launcher-tls", "kvferry-tls", "kvferry-client-tls"}


def secrets_in(value: object) -> set[str]:
    if isinstance(value, list):
        return {name for inner in value for name in secrets_in(inner)}
    if not isinstance(value, dict):
        return set()
    found = {name for inner in value.values() for name in secrets_in(inner)}
    if reference := value.get("secretKeyRef"):
        found.add(str(reference["name"]))
    if isinstance(mounted := value.get("secret"), dict):
        found.add(str(mounted.get("secretName") or mounted["name"]))
    return found


def test_its_paths_are_there():
    paths = set(re.findall(r"(?<![\w/])((?:k8s|tests|cluster)/[\w./-]*\w)", TEXT))
    assert len(paths) > 10
    assert [path for path in sorted(paths) if not (K8S.parent / path).exists()] == []


def test_it_makes_every_secret_that_pods_need():
    needed = secrets_in([m for m in rendered("overlays/secure") if "spec" in m]) - MADE
    assert needed == set(re.findall(r"create secret generic (\S+)", TEXT))


def test_it_asks_for_the_gates_that_the_operator_wants():
    rules = [rule for m in rendered("overlays/secure") if m["kind"] == "RayCluster" for rule in broken_rules(m)]
    wanted = {rule.rpartition(" ")[2] for rule in rules}
    assert wanted == set(re.findall(r"featureGates: \[\{name: (\w+)", TEXT))
