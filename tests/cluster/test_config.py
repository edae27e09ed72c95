from __future__ import annotations

import re

import pytest
import yaml

from cluster.config import ClusterConfig, load_config, parse_config, router_replicas, worker_configs
from cluster.cores import deal_cores
from workers.config import EngineConfig, SpeculativeConfig
from workers.errors import ConfigError


def parsed(text: str) -> ClusterConfig:
    return parse_config(text, "c.yaml")


def replicas(config: ClusterConfig) -> tuple[int, int, int]:
    return config.prefill.replicas, config.decode.replicas, config.colocated.replicas


def test_packaged_file_names_every_key_with_its_default():
    config = load_config(None)
    assert config == ClusterConfig()
    from importlib import resources

    data = yaml.safe_load((resources.files("cluster") / "configs/local.yaml").read_text())
    assert data.keys() == ClusterConfig.model_fields.keys()
    for group in ("router", "jobs", "transfer"):
        assert data[group].keys() == type(getattr(config, group)).model_fields.keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (1, 1, 0)),
        ("decode: {replicas: 2}", (1, 2, 0)),
        ("prefill: {max_num_seqs: 4}", (1, 1, 0)),
        ("colocated: {replicas: 2}", (0, 0, 2)),
        ("colocated: {replicas: 1}\nprefill: {replicas: 1}", (1, 1, 1)),
        ("colocated: {replicas: 1}\nprefill: {replicas: 0}\ndecode: {replicas: 0}", (0, 0, 1)),
    ],
)
def test_replicas(text, expected):
    assert replicas(parsed(text)) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prefil: {replicas: 2}", "prefil: unknown key; did you mean prefill?"),
        ("router: {http_prt: 3}", "router.http_prt: unknown key; did you mean router.http_port?"),
        ("http_port: 3", "http_port: unknown key; did you mean router.http_port?"),
        ("lease_s: 3", "lease_s: unknown key; did you mean transfer.lease_s?"),
        ("xyzzy: 1", "xyzzy: unknown key; known keys here: "),
        ("max_num_seqs: many", "max_num_seqs: must be a whole number, not 'many'"),
        ("block_size: 0", "block_size: must be at least 1, not 0"),
        ("router: {http_port: 70000}", "router.http_port: must be at most 65535, not 70000"),
        ("transfer: {lease_s: -1}", "transfer.lease_s: must be more than 0.0, not -1"),
        ("device: tpu", "device: must be 'cpu' or 'cuda', not 'tpu'"),
        ("cpu_affinity: [0, x]", "cpu_affinity.1: must be a whole number, not 'x'"),
        ("decode: 3", "decode: must be keys with values, as in `{replicas: 1}`, not 3"),
        ("name: ../x", "name: use 1 to 40 letters"),
        ("max_num_seqs: 1000", "max_num_batched_tokens (512) must be at least max_num_seqs (1000)"),
        ("prefill: {max_num_seqs: 1000}", "prefill: max_num_batched_tokens (512) must be at least"),
        ("prefill: {replicas: 0}", "0 prefill, 1 decode and 0 colocated workers can serve nothing: set "),
        ("router: {http_port: 9, grpc_port: 9}", "router.http_port and router.grpc_port are both 9"),
        (
            "speculative_config: {num_tokens: 3}",
            "speculative_config.num_tokens: unknown key; known keys here: method, ",
        ),
        ("speculative_config: {method: eagle}", "speculative_config.method: must be 'ngram', not 'eagle'"),
        ("speculative_config: {num_speculative_tokens: 0}", "speculative_config.num_speculative_tokens: must be at le"),
        (
            "speculative_config: {prompt_lookup_min: 5}",
            "speculative_config: prompt_lookup_min (5) must be at most prompt_lookup_max (4); change one",
        ),
    ],
)
def test_errors_are_one_line_with_file_key_and_mend(text, complaint):
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    assert str(caught.value).startswith(f"c.yaml:1: {complaint}")
    assert "\n" not in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_workers_take_the_clusters_settings_and_their_roles():
    config = parsed("dtype: bfloat16\nmax_num_seqs: 8\ndecode: {replicas: 2, max_num_seqs: 16}\ntransfer: {credits: 2}")
    workers = worker_configs(config, cores=[0, 1, 2])
    assert [(worker.name, worker.role, worker.max_num_seqs) for worker in workers] == [
        ("prefill-0", "prefill", 8),
        ("decode-0", "decode", 16),
        ("decode-1", "decode", 16),
    ]
    assert all(worker.dtype == "bfloat16" and worker.transfer.credits == 2 for worker in workers)
    assert [worker.cpu_affinity for worker in workers] == [(0,), (1,), (2,)]


def test_every_worker_speculates_alike():
    config = parsed("speculative_config: {num_speculative_tokens: 2}")
    (prefill, decode) = worker_configs(config, cores=[0, 1])
    want = SpeculativeConfig(num_speculative_tokens=2, prompt_lookup_max=4, prompt_lookup_min=2)
    assert prefill.speculative_config == decode.speculative_config == want


def test_one_prefill_and_one_decode_worker_share_two_cores():
    prefill, decode = worker_configs(ClusterConfig(), cores=[0, 1])
    assert (prefill.cpu_affinity, prefill.num_threads) == ((0,), 1)
    assert (decode.cpu_affinity, decode.num_threads) == ((1,), 1)


def test_only_workers_that_ask_for_auto_are_dealt_cores():
    config = parsed(
        "prefill: {cpu_affinity: none}\ndecode: {cpu_affinity: [3]}\ncolocated: {replicas: 1, num_threads: 7}"
    )
    workers = worker_configs(config, cores=[0, 1, 2, 3])
    assert [(worker.cpu_affinity, worker.num_threads) for worker in workers] == [
        ("none", None),
        ((3,), 1),
        ((0, 1, 2, 3), 7),
    ]


@pytest.mark.parametrize("chosen", ["[]", "[7]"])
def test_cores_that_are_not_there_are_refused(chosen):
    with pytest.raises(
        ConfigError, match=r"cpu_affinity of decode-0: .* must be some of this machine's cores \[0, 1\]"
    ):
        worker_configs(parsed(f"decode: {{cpu_affinity: {chosen}}}"), cores=[0, 1])


@pytest.mark.parametrize("num_cores", range(1, 9))
@pytest.mark.parametrize("num_workers", range(1, 9))
def test_dealt_cores_are_disjoint_contiguous_and_even(num_cores, num_workers):
    shares = deal_cores(range(num_cores), num_workers)
    assert len(shares) == num_workers
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    if num_workers <= num_cores:
        assert [core for share in shares for core in share] == list(range(num_cores))
    else:
        assert all(sizes)
        assert {core for share in shares for core in share} == set(range(num_cores))


def test_cluster_config_has_every_engine_key():
    assert EngineConfig.model_fields.keys() <= ClusterConfig.model_fields.keys()


def test_faults_are_refused_unless_a_flag_allows_them(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("faults: [{fault: drop_frame, probability: 0.1, worker: decode-0}, {fault: kill, at: commit}]\n")
    with pytest.raises(ConfigError, match="--allow-faults"):
        load_config(path)
    prefill, decode = worker_configs(load_config(path, allow_faults=True), cores=[0])
    assert prefill.faults == decode.faults
    assert [fault.fault for fault in decode.faults] == ["drop_frame", "kill"]


@pytest.mark.parametrize(
    ("faults", "complaint"),
    [
        (
            "[{fault: kill, at: commit, worker: decode-7}]",
            "there is no worker 'decode-7'; there are prefill-0, decode-0",
        ),
        ("[{fault: explode}]", "faults.0: explode is none of 'drop_frame'"),
        ("[{fault: kill, at: lunch}]", "faults.0.at: must be 'reserve'"),
        (
            "[{fault: drop_frame, propability: 1}]",
            "faults.0.propability: unknown key; did you mean faults.0.probability?",
        ),
        ("[{}]", "faults.0: needs the key 'fault'"),
        ("[{fault: pause_heartbeat}]", "faults.0.for_s: must be given"),
        ("everything", "faults"),
    ],
)
def test_what_is_no_fault_is_refused_with_its_place(faults, complaint):
    with pytest.raises(ConfigError, match=re.escape(complaint)) as caught:
        parse_config(f"faults: {faults}\n", "c.yaml")
    assert "\n" not in str(caught.value)


def test_several_routers_have_ports_of_their_own_and_share_their_jobs():
    config = parsed("router: {replicas: 3, grpc_port: 0}\njobs: {url: 'sqlite:////tmp/jobs.sqlite'}")
    replicas = router_replicas(config)
    assert [replica.name for replica in replicas] == ["router-0", "router-1", "router-2"]
    ports = [(one.cluster.router.http_port, one.cluster.router.grpc_port) for one in replicas]
    assert ports == [(8000, 0), (8002, 0), (8004, 0)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("router: {replicas: 2}", "2 routers have to share their jobs: set jobs.url"),
        ("router: {replicas: 2, grpc_port: 8002}\njobs: {url: 'sqlite:////x'}", "ports [8000, 8002, 8002, 8004]"),
        ("router: {replicas: 2, http_port: 65534}\njobs: {url: 'sqlite:////x'}", "choose others"),
    ],
)
def test_routers_that_cannot_stand_side_by_side_are_refused(text, complaint):
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    assert complaint in str(caught.value)
