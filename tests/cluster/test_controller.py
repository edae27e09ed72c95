"""The controller's decisions, over processes that do as the test says, on a clock that the test turns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cluster.controller import Controller, Health
from workers.errors import KVFerryError


class Stage:
    """Two processes; begun ones answer at once unless the test says otherwise."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.states = {"prefill-0": Health.ANSWERS, "decode-0": Health.ANSWERS}
        self.begun: list[tuple[float, str]] = []
        self.ended: list[str] = []
        self.said: list[str] = []
        self.broken = False
        self.when_begun = Health.ANSWERS
        self.controller = Controller(self, self.said.append, 60.0, lambda: self.now_s)

    def health(self) -> Mapping[str, Health]:
        return dict(self.states)

    def begin(self, name: str) -> None:
        if self.broken:
            raise KVFerryError("no room")
        self.begun.append((self.now_s, name))
        self.states[name] = self.when_begun

    def end(self, name: str) -> None:
        self.ended.append(name)
        self.states.pop(name, None)

    def log(self, name: str) -> Path:
        return Path(f"{name}.log")

    def until(self, end_s: float) -> None:
        while self.now_s < end_s:
            self.now_s += 0.25
            self.controller.look()


def test_nothing_is_touched_while_all_answer():
    stage = Stage()
    stage.until(100)
    assert (stage.begun, stage.ended, stage.said) == ([], [], [])


def test_what_died_is_ended_and_begun_anew_alone_at_once():
    stage = Stage()
    stage.until(5)
    stage.states["decode-0"] = Health.DEAD
    stage.until(6)
    assert stage.ended == ["decode-0"]
    assert stage.begun == [(5.25, "decode-0")]
    assert stage.said == ["decode-0 died: it is started anew now; see decode-0.log"]
    stage.until(50)
    assert len(stage.begun) == 1


def test_what_dies_again_and_again_before_it_answers_waits_longer_each_time_but_never_for_ever():
    stage = Stage()
    stage.when_begun = Health.STARTING
    while len(stage.begun) < 12:
        stage.states["decode-0"] = Health.DEAD
        before = len(stage.begun)
        while len(stage.begun) == before:
            stage.until(stage.now_s + 0.25)
    pauses = [later - earlier for (earlier, _), (later, _) in zip(stage.begun, stage.begun[1:], strict=False)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 2
    assert pauses[-1] == pauses[-2] <= 31


def test_what_has_answered_is_begun_at_once_however_often_it_dies():
    stage = Stage()
    for _ in range(6):
        stage.until(stage.now_s + 0.5)
        stage.states["decode-0"] = Health.DEAD
    stage.until(stage.now_s + 1)
    assert len(stage.begun) == 6
    assert all("now" in line for line in stage.said)


def test_what_dies_before_it_has_answered_waits_longer_though_its_starts_take_long():
    stage = Stage()
    stage.when_begun = Health.STARTING
    for _ in range(4):
        stage.until(stage.now_s + 30)
        stage.states["decode-0"] = Health.DEAD
        stage.until(stage.now_s + 10)
    assert [line.split(" anew ")[1].split(";")[0] for line in stage.said] == ["now", "in 0.5 s", "in 1 s", "in 2 s"]


def test_one_that_is_silent_is_left_alone_for_a_while_and_then_replaced():
    stage = Stage()
    stage.until(10)
    stage.states["decode-0"] = Health.SILENT
    stage.until(19)
    stage.states["decode-0"] = Health.ANSWERS
    stage.until(20)
    assert not stage.ended
    stage.states["decode-0"] = Health.SILENT
    stage.until(29)
    assert not stage.ended
    stage.until(31)
    assert stage.ended == ["decode-0"]
    assert [name for _, name in stage.begun] == ["decode-0"]
    assert "silent" in stage.said[0]


def test_one_that_takes_long_to_start_is_not_silent():
    stage = Stage()
    stage.states["decode-0"] = Health.STARTING
    stage.until(50)
    stage.states["decode-0"] = Health.SILENT
    stage.until(51)
    assert not stage.ended


def test_one_that_hangs_in_its_start_is_ended_and_begun_again():
    stage = Stage()
    stage.states["decode-0"] = Health.STARTING
    stage.until(59)
    assert not stage.ended
    stage.until(61)
    assert (stage.ended, [name for _, name in stage.begun]) == (["decode-0"], ["decode-0"])
    assert stage.said == ["decode-0 has not started within 60 s: it is started anew now; see decode-0.log"]


def test_one_that_cannot_be_begun_is_tried_again():
    stage = Stage()
    stage.broken = True
    stage.states["decode-0"] = Health.DEAD
    stage.until(5)
    assert not stage.begun
    stage.broken = False
    stage.until(20)
    assert [name for _, name in stage.begun] == ["decode-0"]
