"""What a rollout does to workers, over processes that do as the test says, on a clock that the test turns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from cluster.config import ClusterConfig, parse_config
from cluster.controller import Controller, Health
from cluster.rollout import Rollout
from cluster.roster import Roster
from cluster.worker_configs import worker_configs
from workers.config import WorkerConfig
from workers.errors import ConfigError, KVFerryError

TEXT = "prefill: {replicas: 2}\ndecode: {replicas: 2}\nscaling: {drain_timeout_s: 10}\n"


class Stage:
    """Whoever is begun answers two looks later. Routers know a look after they were told."""

    def __init__(self, config: ClusterConfig) -> None:
        self.now_s = 0.0
        workers = worker_configs(config, cores=[0, 1])
        self.configs = {worker.name: worker for worker in workers}
        self.states = dict.fromkeys(self.configs, Health.ANSWERS)
        self.loads = dict.fromkeys(self.configs, 0)
        self.told: tuple[set[str], set[str]] = set(), set()
        self.history: list[str] = []
        self.said: list[str] = []
        self.refuses_roles = False
        self.routers_answer = True
        # They never answer once they are begun anew.
        self.stuck: set[str] = set()
        self._ages: dict[str, int] = {}
        self.roster = Roster(config, workers)
        self.controller = Controller(self, self.said.append, 60.0, lambda: self.now_s)
        self.rollout = Rollout(self.controller, self.roster, self, self.said.append, lambda: self.now_s)

    def health(self) -> Mapping[str, Health]:
        for name in self._ages:
            self._ages[name] += 1
            if self._ages[name] > 2 and name not in self.stuck and self.states.get(name) is Health.STARTING:
                self.states[name] = Health.ANSWERS
        return dict(self.states)

    def begin(self, name: str) -> None:
        self.history.append(f"begin {name}")
        self.configs[name] = self.roster.workers[name]
        self.states[name], self._ages[name], self.loads[name] = Health.STARTING, 0, 0

    def end(self, name: str) -> None:
        self.history.append(f"end {name}")
        self.states.pop(name, None)

    def log(self, name: str) -> Path:
        return Path(f"{name}.log")

    def config(self, name: str) -> WorkerConfig:
        return self.configs[name]

    def tell(self, draining: Collection[str], without: Collection[str]) -> bool:
        now = set(draining), set(without)
        known, self.told = self.told == now, now
        return known and self.routers_answer

    def num_requests(self, name: str) -> int:
        return self.loads[name]

    def become(self, config: WorkerConfig) -> None:
        if self.refuses_roles:
            raise KVFerryError("no answer")
        self.history.append(f"{config.name} is {config.role}")
        self.configs[config.name] = config

    def serving(self) -> set[str]:
        """Who gets new requests."""
        answer = {name for name, health in self.states.items() if health is Health.ANSWERS}
        return answer - self.told[0] - self.told[1]

    def look(self) -> None:
        self.now_s += 0.5
        self.controller.look()
        self.rollout.look()

    def until_settled(self, most_looks: int = 200) -> None:
        for _ in range(most_looks):
            self.look()
            for role in ("prefill", "decode"):
                there = {name for name in self.serving() if self.configs[name].role == role}
                assert there, f"no {role} worker serves: {self.history}"
            if self.rollout.settled:
                return
        raise AssertionError(f"{self.rollout.under_way} {self.history} {self.said}")


@pytest.fixture
def stage() -> Stage:
    return Stage(parse_config(TEXT, "c.yaml"))


def test_nothing_happens_while_all_is_as_it_should_be(stage):
    for _ in range(50):
        stage.look()
    assert (stage.history, stage.said) == ([], [])
    assert stage.rollout.settled


def test_more_workers_start_at_once_and_get_names_that_nobody_has(stage):
    stage.roster.scale({"prefill": 4})
    stage.until_settled()
    assert stage.history == ["begin prefill-2", "begin prefill-3"]
    assert stage.roster.replicas() == {"prefill": 4, "decode": 2, "colocated": 0}


def test_those_that_are_too_many_get_no_new_requests_and_end_what_they_have(stage):
    stage.loads["decode-1"] = 3
    stage.roster.scale({"decode": 1})
    for _ in range(10):
        stage.look()
    assert stage.told == ({"decode-1"}, set())
    assert stage.history == []
    stage.loads["decode-1"] = 0
    stage.until_settled()
    assert stage.history == ["end decode-1"]
    assert "decode-1 has left" in stage.said


def test_routers_know_that_a_worker_is_gone_before_it_is(stage):
    """Its streams go on elsewhere then, and not because a connection broke."""
    stage.loads["decode-1"] = 1
    stage.roster.scale({"decode": 1})
    while stage.told != (set(), {"decode-1"}):
        stage.look()
    assert 10 <= stage.now_s <= 12
    assert "decode-1 still has 1 requests: they go on at others" in stage.said
    stage.routers_answer = False
    for _ in range(10):
        stage.look()
    assert stage.history == []
    stage.routers_answer = True
    stage.until_settled()
    assert stage.history == ["end decode-1"]


def test_a_restart_is_of_one_worker_at_a_time_while_all_others_serve(stage):
    assert stage.roster.restart([]) == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    most_away = 0
    while not stage.rollout.settled:
        stage.look()
        most_away = max(most_away, 4 - len(stage.serving()))
    assert most_away == 1
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert stage.history == [f"{what} {name}" for name in names for what in ("end", "begin")]


def test_what_was_started_anew_can_be_again(stage):
    for time in (1, 2, 3):
        assert stage.roster.restart(["decode-0"]) == ["decode-0"]
        assert stage.roster.num_restarts["decode-0"] == time
        stage.until_settled()
    assert stage.history == ["end decode-0", "begin decode-0"] * 3


def test_a_restart_stops_where_one_does_not_come_back(stage):
    stage.stuck.add("decode-0")
    stage.roster.restart(["decode"])
    while "begin decode-0" not in stage.history:
        stage.look()
    for _ in range(40):
        stage.look()
    assert "end decode-1" not in stage.history
    assert stage.rollout.under_way == {"decode-0": "it is started anew"}


def test_a_role_changes_without_a_new_start_once_the_worker_has_drained(stage):
    stage.loads["prefill-1"] = 2
    stage.roster.flip("prefill-1", "decode")
    for _ in range(8):
        stage.look()
    assert stage.told == ({"prefill-1"}, set())
    stage.loads["prefill-1"] = 0
    stage.until_settled()
    assert stage.history == ["prefill-1 is decode"]
    assert stage.told == (set(), set())
    stage.roster.flip("prefill-1", "prefill")
    stage.until_settled()
    assert stage.history[1:] == ["prefill-1 is prefill"]


def test_a_role_that_is_not_taken_up_is_asked_for_again(stage):
    stage.refuses_roles = True
    stage.roster.flip("prefill-1", "decode")
    for _ in range(20):
        stage.look()
    assert not stage.rollout.settled
    stage.refuses_roles = False
    stage.until_settled()
    assert stage.configs["prefill-1"].role == "decode"


def test_one_that_dies_while_it_drains_is_begun_as_what_it_is_wanted_for(stage):
    stage.loads["prefill-1"] = 2
    stage.roster.flip("prefill-1", "decode")
    for _ in range(4):
        stage.look()
    stage.states["prefill-1"] = Health.DEAD
    stage.until_settled()
    assert stage.history == ["end prefill-1", "begin prefill-1"]
    assert stage.configs["prefill-1"].role == "decode"


def test_one_that_dies_while_it_leaves_does_not_come_back(stage):
    stage.loads["decode-1"] = 3
    stage.roster.scale({"decode": 1})
    for _ in range(4):
        stage.look()
    stage.states["decode-1"] = Health.DEAD
    stage.until_settled()
    assert set(stage.history) == {"end decode-1"}


def test_one_that_is_wanted_again_before_it_has_left_stays(stage):
    stage.loads["decode-1"] = 3
    stage.roster.scale({"decode": 1})
    for _ in range(4):
        stage.look()
    stage.roster.scale({"decode": 2})
    stage.until_settled()
    assert stage.history == []
    assert stage.told == (set(), set())


def test_a_worker_leaves_only_when_those_that_stay_in_its_role_are_there(stage):
    stage.states["decode-0"] = Health.SILENT
    stage.look()
    stage.roster.scale({"decode": 1})
    for _ in range(6):
        stage.look()
    assert "end decode-1" not in stage.history
    stage.states["decode-0"] = Health.ANSWERS
    stage.until_settled()
    assert stage.history == ["end decode-1"]


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda roster: roster.scale({"decode": 0}), "2 prefill, 0 decode and 0 colocated workers can serve nothing"),
        (
            lambda roster: roster.scale({"decoder": 1}),
            "there is no role 'decoder'; there are prefill, decode, colocated",
        ),
        (lambda roster: roster.scale({"prefill": 9999}), "prefill.replicas must be at most 1024"),
        (lambda roster: roster.flip("decode-7", "prefill"), "there is no worker 'decode-7'; there are prefill-0"),
        (lambda roster: roster.flip("decode-1", "both"), "there is no role 'both'"),
        (lambda roster: roster.restart(["decode", "x"]), "there is no worker 'x'"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_has_changed(stage, ask, says):
    before = dict(stage.roster.workers), stage.roster.config, stage.roster.num_restarts.copy()
    with pytest.raises(ConfigError, match=says):
        ask(stage.roster)
    assert (stage.roster.workers, stage.roster.config, stage.roster.num_restarts) == before


def test_the_last_of_a_role_is_not_flipped(stage):
    stage.roster.flip("prefill-1", "decode")
    with pytest.raises(ConfigError, match="0 prefill, 4 decode"):
        stage.roster.flip("prefill-0", "decode")


def test_roles_of_other_weights_are_not_changed_without_loading():
    config = parse_config("prefill: {replicas: 2, quantization: int8}\ndecode: {replicas: 2}\n", "c.yaml")
    roster = Roster(config, worker_configs(config, cores=[0, 1]))
    with pytest.raises(ConfigError, match="prefill-1 has quantization: int8, and decode workers have none"):
        roster.flip("prefill-1", "decode")


def test_a_new_worker_shares_the_cores_that_are_there():
    config = parse_config("{}", "c.yaml")
    roster = Roster(config, worker_configs(config))
    before = dict(roster.workers)
    roster.scale({"decode": 2})
    assert {name: roster.workers[name] for name in before} == before
    assert roster.workers["decode-1"].cpu_affinity
    assert roster.workers["decode-1"].num_threads == len(roster.workers["decode-1"].cpu_affinity)
