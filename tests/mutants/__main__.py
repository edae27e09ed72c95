"""make mutants: switch off one defence after the other in a copy of the tree, and see its tests go red.

`python -m tests.mutants WORDS ...` does so with those that have any of these words in their names. Exit code 1 when a
defence can be off without its tests noticing, or with tests that only hang, or is not where the table says.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]
FOLDERS = ("cluster", "router", "workers", "protos", "tests")
# Of one test.
TIMEOUT_S = 60
PASSED, FAILED = 0, 1
# By either method of pytest-timeout.
_HUNG = re.compile(r"^E +Failed: Timeout|^\++ Timeout \++$", re.MULTILINE)
# A mutant must do wrong, not fail to be Python.
_BROKEN = re.compile(r"^E +(NameError|SyntaxError|ImportError|ModuleNotFoundError)", re.MULTILINE)


def main(words: Sequence[str]) -> int:
    mutants = [mutant for mutant in MUTANTS if not words or any(some in mutant.name for some in words)]
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        code, report = run_tests(tree, sorted({test for mutant in mutants for test in mutant.tests}))
        if code != PASSED:
            print(report, "the tests must pass before a defence is switched off", sep="\n")
            return 1
        faults = print_table(tree, mutants)
    for fault in faults:
        print(fault)
    print(f"{len(mutants)} defences, {len(faults)} tests that do not notice when one is off")
    return 1 if faults else 0


def copy_tree(to: Path) -> Path:
    for name in FOLDERS:
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", to)
    return to


def print_table(tree: Path, mutants: Iterable[Mutant]) -> list[str]:
    """All that is wrong, a line each."""
    table = Table(
        *(Column(name, overflow="fold") for name in ("defence", "scenario", "caught by", "seconds", "result"))
    )
    faults = []
    for mutant in mutants:
        began = time.monotonic()
        found = faults_of(tree, mutant)
        faults += found
        caught_by = "\n".join(test.partition("::")[2] for test in mutant.tests)
        seconds = f"{time.monotonic() - began:.1f}"
        result = outcome_of(mutant, found)
        print(f"{result}: {mutant.name} ({seconds} s)", file=sys.stderr)
        table.add_row(mutant.name, mutant.scenario, caught_by, seconds, result)
    Console(width=None if sys.stdout.isatty() else 180).print(table)
    return faults


def outcome_of(mutant: Mutant, faults: list[str]) -> str:
    if not faults:
        return "hung, as expected" if mutant.hangs else "red"
    return "HUNG" if all(" hung " in fault for fault in faults) else "GREEN"


def faults_of(tree: Path, mutant: Mutant) -> list[str]:
    """A line for each of its tests that does not go red as it should."""
    file = tree / mutant.file
    source = file.read_text(encoding="utf-8")
    if source.count(mutant.snippet) != 1:
        return [f"{mutant.name}: its snippet is in {mutant.file} {source.count(mutant.snippet)} times, not once"]
    file.write_text(source.replace(mutant.snippet, mutant.replacement), encoding="utf-8")
    try:
        faults = [(test, fault_of(*run_tests(tree, [test]), mutant.hangs)) for test in mutant.tests]
    finally:
        file.write_text(source, encoding="utf-8")
    return [f"{mutant.name}: {test} {fault}" for test, fault in faults if fault]


def fault_of(code: int, report: str, hangs: bool = False) -> str:
    """What is wrong with a run that should have failed, or hung where it `hangs`; empty when it did."""
    if code == PASSED:
        return "passes"
    if code != FAILED:
        return f"does not run: pytest's exit code is {code}"
    if broken := _BROKEN.search(report):
        return f"breaks with {broken[1]} instead of failing"
    hung = bool(_HUNG.search(report))
    if hung and not hangs:
        return "hung instead of failing"
    return "fails at once, and is said to hang" if hangs and not hung else ""


def run_tests(tree: Path, tests: Iterable[str]) -> tuple[int, str]:
    """pytest's exit code and what it printed."""
    # No bytecode: a file changed twice within a second would be taken for its old self.
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
