"""Pods may do what Pod Security's `restricted` allows and no more; network policies open what is served and no more."""

from __future__ import annotations

from typing import Any

import pytest

from tests.k8s.manifests import BUILDS, CLUSTERS, Manifest, Pods, config_of, of_kind, pods_of, ray_spec, selects, the
from workers.tls import MEMBER_SUFFIX

RESTRICTED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
# What Ray, KubeRay and Prometheus are reached by, beside the config's own ports.
DASHBOARD, METRICS, DNS, API_SERVER = 8265, 8080, 53, {443, 6443}


def all_pods() -> list[Any]:
    return [pytest.param(pods, id=f"{build}:{pods.owner}") for build in BUILDS for pods in pods_of(build)]


@pytest.mark.parametrize("pods", all_pods())
def test_pods_are_restricted(pods: Pods):
    spec = pods.spec
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] != 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for one in (*spec["containers"], *spec.get("initContainers", [])):
        assert one["securityContext"] == RESTRICTED
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert not [volume for volume in spec.get("volumes", []) if "hostPath" in volume]


@pytest.mark.parametrize("pods", all_pods())
def test_only_the_pod_of_the_autoscaler_has_a_token_of_the_api_server(pods: Pods):
    assert pods.spec["automountServiceAccountToken"] is (pods.owner == "RayCluster/kvferry/head")


@pytest.mark.parametrize("pods", all_pods())
def test_memory_is_bounded_and_rays_folders_can_be_written(pods: Pods):
    for one in pods.spec["containers"]:
        assert {"cpu", "memory"} <= one["resources"]["limits"].keys()
        if one["image"].startswith("kvferry:"):
            mounted = {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
            volumes = {volume["name"]: volume for volume in pods.spec["volumes"]}
            assert volumes[mounted["/tmp"]]["emptyDir"] == volumes[mounted["/home/kvferry"]]["emptyDir"] == {}


@pytest.mark.parametrize("build", CLUSTERS)
def test_the_autoscaler_beside_the_head_is_restricted_too(build):
    options = ray_spec(build)["autoscalerOptions"]
    assert options["version"] == "v2"
    assert options["securityContext"] == RESTRICTED
    (namespace,) = of_kind(build, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def ports_into(component: str) -> set[int | str]:
    """TCP ports of such a pod that policies open to others than kvferry's pods; `all` where one opens any."""
    labels = {"app.kubernetes.io/name": "kvferry", "app.kubernetes.io/component": component}
    opened: set[int | str] = set()
    for policy in of_kind("overlays/secure", "NetworkPolicy"):
        if selects(policy["spec"]["podSelector"], labels):
            for rule in policy["spec"].get("ingress", []):
                if not is_among_us(rule["from"]):
                    opened |= {port["port"] for port in rule.get("ports", [{"port": "all"}])}
    return opened


def is_among_us(peers: list[Manifest]) -> bool:
    return peers == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kvferry"}}}]


def test_policies_open_the_routers_ports_and_what_operators_ask():
    router = config_of("overlays/secure").router
    assert ports_into("router") == {router.http_port, router.grpc_port, METRICS}
    assert ports_into("head") == {DASHBOARD, router.http_port, METRICS}
    for component in ("prefill", "decode", "launcher", "redis", "postgres"):
        assert ports_into(component) <= {router.http_port, METRICS}


def test_what_no_policy_opens_is_closed():
    denies = the("overlays/secure", "NetworkPolicy", "kvferry-deny-all")["spec"]
    assert denies["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & denies.keys()
    for pods in pods_of("overlays/secure"):
        assert selects(denies["podSelector"], pods.labels), pods.owner


def test_only_the_head_may_leave_for_the_api_server():
    leaving = {}
    for policy in of_kind("overlays/secure", "NetworkPolicy"):
        for rule in policy["spec"].get("egress", []):
            if "to" not in rule:
                leaving[policy["metadata"]["name"]] = {port["port"] for port in rule["ports"]}
            elif not is_among_us(rule["to"]):
                assert {port["port"] for port in rule["ports"]} == {DNS}
    assert leaving == {"kvferry-head": API_SERVER}


def test_keys_are_asked_for_and_no_secret_is_written_down():
    config = config_of("overlays/secure")
    (router,) = (pods.spec["containers"][0] for pods in pods_of("overlays/secure") if pods.owner.endswith("/router"))
    mounts = [mount["mountPath"] for mount in router["volumeMounts"]]
    assert any(str(config.router.api_keys).startswith(f"{path}/") for path in mounts)
    assert not of_kind("overlays/secure", "Secret")
    for pods in pods_of("overlays/secure"):
        for env in pods.spec["containers"][0]["env"]:
            if any(word in env["name"] for word in ("PASSWORD", "TOKEN", "API_KEY")):
                assert "secretKeyRef" in env["valueFrom"], env


def test_budgets_are_of_the_kind_that_works_for_pods_without_a_scale():
    budgets = of_kind("overlays/secure", "PodDisruptionBudget")
    assert budgets
    assert all(isinstance(budget["spec"]["minAvailable"], int) for budget in budgets)
    assert not [budget for budget in budgets if "maxUnavailable" in budget["spec"]]


def test_the_launcher_shows_a_certificate_of_the_authority_that_ray_trusts():
    cluster = the("overlays/secure", "RayCluster", "kvferry")
    assert cluster["spec"]["tlsOptions"] == {"enabled": True}
    certificate = the("overlays/secure", "Certificate", "kvferry-launcher")["spec"]
    assert certificate["issuerRef"]["name"] == f"ray-ca-issuer-{cluster['metadata']['name']}"
    spec = the("overlays/secure", "Deployment", "kvferry-launcher")["spec"]["template"]["spec"]
    volumes = {v["name"]: v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v}
    (launcher,) = spec["containers"]
    mounts = {m["mountPath"]: volumes[m["name"]] for m in launcher["volumeMounts"] if m["name"] in volumes}
    env = {e["name"]: e.get("value") for e in launcher["env"]}
    assert env["RAY_USE_TLS"] == "1"
    for name, key in (("SERVER_CERT", "tls.crt"), ("SERVER_KEY", "tls.key"), ("CA_CERT", "ca.crt")):
        folder, _, found = str(env[f"RAY_TLS_{name}"]).rpartition("/")
        assert (mounts[folder], found) == (certificate["secretName"], key)


def test_every_process_finds_a_certificate_of_its_cluster_where_the_config_says():
    config = config_of("overlays/secure")
    certificate = the("overlays/secure", "Certificate", "kvferry")["spec"]
    assert [name for name in certificate["dnsNames"] if name.endswith(MEMBER_SUFFIX)] == [config.name + MEMBER_SUFFIX]
    assert {"server auth", "client auth"} <= set(certificate["usages"])
    # By which the pod asks itself, and by which clients come.
    assert "127.0.0.1" in certificate["ipAddresses"]
    assert "kvferry.kvferry.svc.cluster.local" in certificate["dnsNames"]
    mounted = set()
    for pods in pods_of("overlays/secure"):
        secrets = {v["name"]: v["secret"]["secretName"] for v in pods.spec.get("volumes", []) if "secret" in v}
        places = {m["mountPath"]: secrets.get(m["name"]) for m in pods.spec["containers"][0]["volumeMounts"]}
        if places.get(str(config.security.tls)) == certificate["secretName"]:
            mounted.add(pods.owner.rpartition("/")[2])
    assert mounted == {"router", "prefill", "decode", "kvferry-launcher"}


def test_prometheus_shows_a_certificate_of_the_same_authority():
    (endpoint,) = the("overlays/secure", "PodMonitor", "kvferry")["spec"]["podMetricsEndpoints"]
    asked = endpoint["tlsConfig"]
    client = the("overlays/secure", "Certificate", "kvferry-client")["spec"]
    member = the("overlays/secure", "Certificate", "kvferry")["spec"]
    assert client["issuerRef"] == member["issuerRef"]
    assert not [name for name in client["dnsNames"] if name.endswith(MEMBER_SUFFIX)]
    assert endpoint["scheme"] == "https"
    assert asked["serverName"] in member["dnsNames"]
    shown = [asked["ca"]["secret"], asked["cert"]["secret"], asked["keySecret"]]
    assert [(one["name"], one["key"]) for one in shown] == [
        (client["secretName"], name) for name in ("ca.crt", "tls.crt", "tls.key")
    ]
