"""Whether a manifest is one, by the schemas of Kubernetes and of the operators whose resources it uses."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.k8s.manifests import Manifest

SHARED = Path(__file__).parents[3] / "shared" / "data"
KUBERNETES = "1.37"
# Kinds that are not Kubernetes' own, by their API.
_SCHEMAS = {
    ("ray.io/v1", "RayCluster"): "kuberay/raycluster",
    ("ray.io/v1", "RayJob"): "kuberay/rayjob",
    ("monitoring.coreos.com/v1", "PodMonitor"): "k8s-crds/podmonitor",
    ("cert-manager.io/v1", "Certificate"): "k8s-crds/certificate",
    ("cert-manager.io/v1", "Issuer"): "k8s-crds/issuer",
}


def is_custom(manifest: Manifest) -> bool:
    return "." in manifest["apiVersion"].partition("/")[0] and not manifest["apiVersion"].startswith(
        ("networking.k8s.io/", "policy/")
    )


def problem_of(manifest: Manifest) -> str:
    """Empty: none. Skips the test where the schema is not at hand."""
    if not manifest.get("metadata", {}).get("name"):
        return "metadata.name is missing"
    if not is_custom(manifest):
        try:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as exc:
            return str(exc)
        return ""
    schema = _SCHEMAS.get((manifest["apiVersion"], manifest["kind"]))
    if schema is None:
        return f"{manifest['apiVersion']} {manifest['kind']} is no kind that has a schema"
    if "spec" not in manifest:
        return "spec is missing"
    error = jsonschema.exceptions.best_match(_validator(schema).iter_errors(_without_nulls(manifest)))
    return "" if error is None else f"{error.json_path}: {error.message[:300]}"


@functools.cache
def _validator(schema: str) -> Any:
    path = SHARED / f"{schema}.schema.json"
    if not path.exists():
        pytest.skip(f"needs the schema {path}")
    return jsonschema.Draft202012Validator(json.loads(path.read_text()))


def _without_nulls(value: Any) -> Any:
    """The API server drops them before it validates."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
