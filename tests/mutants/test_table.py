"""The table of defences does not rot, and what judges a run of it is right; `make mutants` does the runs."""

from __future__ import annotations

import ast
import functools
from dataclasses import replace

import pytest

from tests.mutants.__main__ import ROOT, fault_of, faults_of, outcome_of
from tests.mutants.mutant import Mutant
from tests.mutants.scenarios import SCENARIOS
from tests.mutants.table import MUTANTS


@functools.cache
def source_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@functools.cache
def functions_in(file: str) -> set[str]:
    return {node.name for node in ast.parse(source_of(file)).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_defence_is_where_the_table_says_and_its_tests_exist(mutant):
    source = source_of(mutant.file)
    assert source.count(mutant.snippet) == 1
    if mutant.file.endswith(".py"):
        ast.parse(source.replace(mutant.snippet, mutant.replacement))
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in functions_in(file)


def test_every_scenario_has_a_row_and_every_row_a_known_scenario_or_none():
    defended = {mutant.scenario for mutant in MUTANTS} - {"", "-"}
    assert defended == set(SCENARIOS)


def test_names_are_told_apart():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize(
    ("body", "fault"),
    [("assert twice(2) == 4", ""), ("twice(no_such_name)", "breaks with NameError instead of failing")],
)
def test_a_defence_counts_as_tested_when_its_test_fails_without_it_and_not_when_it_breaks(tmp_path, body, fault):
    (tmp_path / "code.py").write_text("def twice(n):\n    return n * 2\n")
    (tmp_path / "test_it.py").write_text(f"from code import twice\n\ndef test_it():\n    {body}\n")
    found = faults_of(tmp_path, Mutant("doubling", "", "code.py", "n * 2", "n", ("test_it.py::test_it",)))
    assert found == ([f"doubling: test_it.py::test_it {fault}"] if fault else [])
    assert "n * 2" in (tmp_path / "code.py").read_text()


def test_a_run_that_passes_or_has_no_tests_is_no_proof():
    assert fault_of(0, "1 passed") == "passes"
    assert fault_of(4, "not found") == "does not run: pytest's exit code is 4"


@pytest.mark.parametrize("method", ["signal", "thread"])
def test_a_test_that_only_hangs_is_no_proof_unless_its_row_says_so(tmp_path, monkeypatch, method):
    monkeypatch.setattr("tests.mutants.__main__.TIMEOUT_S", 1)
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\ntimeout_method = '{method}'\n")
    (tmp_path / "code.py").write_text("PAUSE_S = 0\n")
    test = "import time\nfrom code import PAUSE_S\n\ndef test_it():\n    time.sleep(PAUSE_S)\n"
    (tmp_path / "test_it.py").write_text(test)
    mutant = Mutant("haste", "", "code.py", "= 0", "= 60", ("test_it.py::test_it",))
    found = faults_of(tmp_path, mutant)
    assert found == ["haste: test_it.py::test_it hung instead of failing"]
    assert outcome_of(mutant, found) == "HUNG"
    expected = replace(mutant, hangs=True)
    assert faults_of(tmp_path, expected) == []
    assert outcome_of(expected, []) == "hung, as expected"


def test_what_fails_at_once_is_not_said_to_hang():
    assert fault_of(1, "E   AssertionError", hangs=True) == "fails at once, and is said to hang"
    assert fault_of(1, "E   AssertionError: a timeout") == ""


def test_a_snippet_that_is_gone_is_a_fault(tmp_path):
    (tmp_path / "code.py").write_text("x = 1\n")
    mutant = Mutant("gone", "", "code.py", "y = 1", "y = 2", ())
    assert faults_of(tmp_path, mutant) == ["gone: its snippet is in code.py 0 times, not once"]
