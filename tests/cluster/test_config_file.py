"""Where an error is: file, line and the key's full path, whatever the file looks like."""

from __future__ import annotations

import pytest

from cluster.config import load_config, parse_config
from cluster.config_file import packaged_configs, parse_yaml
from workers.errors import ConfigError

_FILE = """\
name: c
router:
  http_port: 8000

  slo:
    ttft_ms: 500
jobs: {url: null, ttl_s: 60}
faults:
  - {fault: kill, at: commit}
  - fault: drop_frame
    probability: 0.5
"""


def refusal(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "c.yaml")
    assert "\n" not in caught.value.message
    return caught.value


def test_the_file_itself_is_a_config() -> None:
    assert len(parse_config(_FILE, "c.yaml").faults) == 2


@pytest.mark.parametrize(
    ("right", "wrong", "says", "param"),
    [
        ("http_port: 8000", "http_port: x", "c.yaml:3: router.http_port: must be a whole number", "router.http_port"),
        ("ttft_ms: 500", "ttft_ms: 0", "c.yaml:6: router.slo.ttft_ms: must be more than 0", "router.slo.ttft_ms"),
        ("ttft_ms: 500", "ttftms: 9", "c.yaml:6: router.slo.ttftms: unknown key; did you", "router.slo.ttftms"),
        ("ttl_s: 60", "ttl: 60", "c.yaml:7: jobs.ttl: unknown key; did you mean jobs.ttl_s?", "jobs.ttl"),
        ("at: commit", "att: commit", "c.yaml:9: faults.0.att: unknown key; did you mean faults.0.at?", "faults.0.att"),
        ("y: 0.5", "y: 1.5", "c.yaml:11: faults.1.probability: must be at most 1", "faults.1.probability"),
        # What is not in the file is wrong where the group is that lacks it.
        (", at: commit", "", "c.yaml:9: faults.0.at: must be given", "faults.0.at"),
        # Of settings that contradict each other, the one that stands in the file.
        ("http_port: 8000", "grpc_port: 8000", "c.yaml:3: router.http_port and router.grpc_port", "router.grpc_port"),
        ("name: c", "max_num_seqs: 999", "c.yaml:1: max_num_batched_tokens (512) must be at", "max_num_seqs"),
    ],
)
def test_an_error_tells_line_and_key(right: str, wrong: str, says: str, param: str) -> None:
    assert _FILE.count(right) == 1
    error = refusal(_FILE.replace(right, wrong))
    assert error.message.startswith(says)
    assert error.param == param


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: a\nblock_size: 32\nname: b\n", "c.yaml:3: name: is given twice, first in line 1; keep one"),
        ("router:\n  host: a\n  host: a\n", "c.yaml:3: router.host: is given twice, first in line 2; keep one"),
        ("a: [", "c.yaml:1:5: not valid YAML: "),
        ("name: c\n  x: 1\n", "c.yaml:2:4: not valid YAML: "),
        ("name: \x07", "c.yaml: not valid YAML: "),
        ("name: 2001-99-99", "c.yaml: not valid YAML: "),
        ("name: " + "[" * 5000, "c.yaml: not valid YAML: it is nested too deeply"),
        ("- 1", "c.yaml: must be keys with values (`name: kvferry`), not a list"),
        ("1: 2", "c.yaml:1: 1: unknown key; "),
        ("{[a]: 2}", "c.yaml:1:2: not valid YAML: "),
        ("router: &a\n  slo: *a\n", "c.yaml:2: router.slo.slo: unknown key"),
    ],
)
def test_what_is_no_config_is_refused_with_its_place(text: str, says: str) -> None:
    assert refusal(text).message.startswith(says)


def test_many_names_of_one_value_do_not_take_for_ever() -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60))]
    assert len(parse_yaml("\n".join(lines), "c.yaml").lines) < 400


def test_packaged_configs_are_found_by_name_unless_a_file_has_it(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("local") == load_config(None)
    (tmp_path / "local").write_text("name: mine")
    assert load_config("local").name == "mine"
    with pytest.raises(ConfigError, match=f"locale: no such file; .*{', '.join(packaged_configs())}"):
        load_config("locale")
