"""Every build renders, and an API server with the operators' CRDs would take each of its manifests."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.k8s.manifests import BUILDS, Manifest, rendered
from tests.k8s.schemas import problem_of

# Below these anything may stand: names, quantities and settings that are not the schema's.
_OPEN = ("labels", "annotations", "matchLabels", "nodeSelector", "limits", "requests", "rayStartParams")
# And below these, unless they have such a field.
_CLOSED = {"resources": {"limits", "requests"}, "selector": {"matchLabels", "matchExpressions"}}


@pytest.mark.parametrize("build", BUILDS)
def test_every_manifest_is_valid(build):
    problems = {f"{m['kind']}/{m['metadata']['name']}": problem_of(m) for m in rendered(build)}
    assert {name: problem for name, problem in problems.items() if problem} == {}


def fields(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of all fields whose names are a schema's."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            if key not in _OPEN and (key not in _CLOSED or _CLOSED[key] & inner.keys()):
                yield from fields(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from fields(inner, (*path, i))


def misspelt(manifest: Manifest, path: tuple[str | int, ...]) -> Manifest:
    damaged = copy.deepcopy(manifest)
    inner: Any = damaged
    for part in path[:-1]:
        inner = inner[part]
    inner[f"{path[-1]}x"] = inner.pop(path[-1])
    return damaged


def test_a_misspelt_field_is_refused():
    manifests = {m["kind"]: m for build in BUILDS for m in rendered(build)}
    taken = []
    for kind, manifest in manifests.items():
        paths = [path for path in fields(manifest) if path[0] == "spec"]
        # Each name once at each depth: the same field of another container is the same field.
        chosen = {tuple(part for part in path if isinstance(part, str)): path for path in paths}
        taken += [f"{kind} {'.'.join(map(str, p))}" for p in chosen.values() if not problem_of(misspelt(manifest, p))]
    assert taken == []
