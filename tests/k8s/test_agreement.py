"""What several manifests say of one thing: ports, places, selectors, threads, volumes and times."""

from __future__ import annotations

from typing import Any

import pytest
from ray.autoscaler._private.kuberay import autoscaling_config

from cluster.placement import actor_options
from tests.k8s.manifests import (
    BUILDS,
    CLUSTERS,
    Manifest,
    config_of,
    groups,
    of_kind,
    pods_of,
    ray_spec,
    rendered,
    selects,
    the,
)
from workers.config import PlacementConfig


def container(group: Manifest) -> Manifest:
    return dict(group["template"]["spec"]["containers"][0])


@pytest.mark.parametrize("build", CLUSTERS)
def test_the_service_leads_to_the_ports_of_the_config(build):
    config = config_of(build)
    service = the(build, "Service", "kvferry")["spec"]
    ports = {port["name"]: port["containerPort"] for port in container(groups(build)["router"])["ports"]}
    assert ports == {"http": config.router.http_port, "grpc": config.router.grpc_port}
    assert {port["port"]: ports[port["targetPort"]] for port in service["ports"]} == {
        config.router.http_port: config.router.http_port,
        config.router.grpc_port: config.router.grpc_port,
    }
    assert config.router.host == "0.0.0.0"
    assert [pods.owner for pods in pods_of(build) if selects({"matchLabels": service["selector"]}, pods.labels)] == [
        "RayCluster/kvferry/router"
    ]


def node_types(build: str) -> dict[str, Any]:
    """What Ray's own autoscaler makes of the RayCluster."""
    spec = ray_spec(build)
    made: dict[str, Any] = autoscaling_config._generate_available_node_types_from_ray_cr_spec(spec)
    return made


@pytest.mark.parametrize("build", BUILDS)
def test_each_process_has_a_pod_that_ray_gives_it(build):
    config = config_of(build)
    types = {name: kind["resources"] for name, kind in node_types(build).items()}
    kinds: dict[str, tuple[int, PlacementConfig]] = {
        "router": (config.router.replicas, config.router),
        "prefill": (config.prefill.replicas, config.prefill),
        "decode": (config.decode.replicas, config.decode),
    }
    for name, (replicas, placement) in kinds.items():
        asked = actor_options(placement, 0)
        wanted = {**asked["resources"], **({"GPU": asked["num_gpus"]} if asked["num_gpus"] else {})}
        fitting = [kind for kind, has in types.items() if all(has.get(key, 0) == n for key, n in wanted.items())]
        # The only pods where it can be, and one fits into each.
        expected = "headgroup" if (build, name) == ("batch", "router") else name
        assert fitting == [expected]
        if expected != "headgroup":
            assert groups(build)[name]["minReplicas"] == replicas <= groups(build)[name]["maxReplicas"]
    assert all(has["CPU"] == 0 for has in types.values())


@pytest.mark.parametrize("build", BUILDS)
def test_the_launcher_joins_the_ray_of_the_manifests(build):
    address = config_of(build).address
    if build == "batch":
        assert address == "auto"
        return
    cluster = the(build, "RayCluster", "kvferry")["metadata"]
    client = next(p for p in container(ray_spec(build)["headGroupSpec"])["ports"] if p["name"] == "client")
    # KubeRay names the head's Service so.
    host = f"{cluster['name']}-head-svc.{cluster['namespace']}.svc.cluster.local"
    assert address == f"ray://{host}:{client['containerPort']}"
    launcher = the(build, "Deployment", "kvferry-launcher")["spec"]["template"]["spec"]
    (waiting,) = launcher["initContainers"]
    assert f"/dev/tcp/{host}/{client['containerPort']})" in waiting["command"][-1]
    token = next(
        env for env in launcher["containers"][0]["env"]
        if env["name"] == "RAY_AUTH_TOKEN"
    )  # fmt: skip
    # And the Secret of its token.
    assert token["valueFrom"]["secretKeyRef"] == {"name": cluster["name"], "key": "auth_token"}


@pytest.mark.parametrize("build", BUILDS)
def test_a_worker_has_the_threads_that_its_pod_has_cores(build):
    config = config_of(build)
    for role in ("prefill", "decode"):
        limits = container(groups(build)[role])["resources"]["limits"]
        assert str(config.num_threads) == limits["cpu"]
    assert config.cpu_affinity == "none"


def asked_by(probe: Manifest) -> str:
    """The path. A router with TLS is asked by its own pod, which has a certificate."""
    if "httpGet" in probe:
        assert probe["httpGet"]["port"] == "http"
        return str(probe["httpGet"]["path"])
    *command, url = probe["exec"]["command"]
    assert command == ["python", "-m", "cluster.probe"]
    scheme, path = "https://127.0.0.1:8000", url.rpartition("/")[2]
    assert url == f"{scheme}/{path}"
    return f"/{path}"


@pytest.mark.parametrize("build", CLUSTERS)
def test_a_router_with_tls_is_probed_by_who_has_a_certificate(build):
    router = container(groups(build)["router"])
    folder = config_of(build).security.tls
    for name in ("startup", "liveness", "readiness"):
        assert ("exec" in router[f"{name}Probe"]) is (folder is not None)
    environment = {one["name"]: one.get("value") for one in router["env"]}
    assert environment.get("KVFERRY_TLS") == folder


@pytest.mark.parametrize("build", CLUSTERS)
def test_probes_have_patience_for_a_start_and_for_a_replacement(build):
    router = container(groups(build)["router"])
    start, live, ready = (router[f"{name}Probe"] for name in ("startup", "liveness", "readiness"))
    assert [asked_by(probe) for probe in (start, live, ready)] == ["/health", "/health", "/ready"]
    assert start["periodSeconds"] * start["failureThreshold"] > config_of(build).start_timeout_s
    # The launcher ends a silent router after 10 s, orphans end after 60 s, and the next has to load.
    assert live["periodSeconds"] * live["failureThreshold"] > 60 + 20


@pytest.mark.parametrize("build", CLUSTERS)
def test_a_router_may_drain_for_less_than_its_grace(build):
    router = groups(build)["router"]
    command = container(router)["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["kvferry", "wait-idle"]
    options = dict(zip(command[2::2], command[3::2], strict=True))
    assert options["--target"] == f"127.0.0.1:{config_of(build).router.grpc_port}"
    assert float(options["--settle-s"]) < float(options["--timeout-s"])
    assert float(options["--timeout-s"]) + 15 <= router["template"]["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("build", BUILDS)
def test_what_pods_mount_is_there(build):
    claims = {m["metadata"]["name"] for m in of_kind(build, "PersistentVolumeClaim")}
    configs = {m["metadata"]["name"] for m in of_kind(build, "ConfigMap")}
    for pods in pods_of(build):
        volumes = {volume["name"]: volume for volume in pods.spec.get("volumes", [])}
        for volume in volumes.values():
            if claim := volume.get("persistentVolumeClaim"):
                assert claim["claimName"] in claims
            if config := volume.get("configMap"):
                assert config["name"] in configs
        templates = [
            claim["metadata"]["name"]
            for m in of_kind(build, "StatefulSet") if pods.owner == f"StatefulSet/{m['metadata']['name']}"
            for claim in m["spec"]["volumeClaimTemplates"]
        ]  # fmt: skip
        for one in pods.spec["containers"]:
            assert {mount["name"] for mount in one["volumeMounts"]} <= volumes.keys() | set(templates)


@pytest.mark.parametrize("build", CLUSTERS)
def test_jobs_are_where_a_volume_or_a_database_is(build):
    url = str(config_of(build).jobs.url)
    router = container(groups(build)["router"])
    if url.startswith("sqlite:////"):
        folder = url.removeprefix("sqlite:///").rpartition("/")[0]
        assert folder in {mount["mountPath"] for mount in router["volumeMounts"]}
    else:
        database = the(build, "Service", "kvferry-postgres")["spec"]["ports"][0]["port"]
        assert url == f"postgresql://kvferry@kvferry-postgres:{database}/kvferry"
        assert "PGPASSWORD" in {env["name"] for env in router["env"]}


@pytest.mark.parametrize("build", BUILDS)
def test_every_selector_selects_pods_and_everything_is_in_one_namespace(build):
    labels = [pods.labels for pods in pods_of(build)]
    for manifest in rendered(build):
        selector = manifest.get("spec", {}).get("podSelector") or manifest.get("spec", {}).get("selector")
        if manifest["kind"] in ("NetworkPolicy", "PodMonitor", "PodDisruptionBudget", "Service", "Deployment"):
            wanted = {"matchLabels": selector} if manifest["kind"] == "Service" else selector
            assert any(selects(wanted, each) for each in labels), manifest["metadata"]["name"]
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] == "kvferry"
