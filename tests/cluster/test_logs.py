"""Logs as JSON: one object a line, whatever is written."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cluster.logs import JsonLines, printed_beside

WRITES = """
import logging, os, sys, warnings
from pathlib import Path
from cluster.actors import WorkerProcess
from workers.config import WorkerConfig
from workers.telemetry_config import TelemetryConfig
telemetry = TelemetryConfig(log_format=sys.argv[2])
WorkerProcess(WorkerConfig(name="decode-7", cpu_affinity="none", telemetry=telemetry), Path(sys.argv[1]), None)
logger = logging.getLogger("some.where")
logger.warning("%s: try %d", "id#0123abcd.12", 1, extra={"request_id": "id#0123abcd.12"})
logger.info('two\\nlines, "quoted", \\x00 and \\u00e9')
logger.info("%s", object)
print("printed by Python")
os.system("echo printed natively")
warnings.warn("beware")
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("a step failed")
raise RuntimeError("nobody catches this")
"""


def written(log: Path, log_format: str) -> None:
    done = subprocess.run([sys.executable, "-c", WRITES, str(log), log_format], capture_output=True, text=True)
    assert done.returncode == 1


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def test_every_line_is_an_object_and_what_is_printed_lies_beside(tmp_path):
    log = tmp_path / "logs" / "decode-7.log"
    written(log, "json")
    lines = lines_of(log)
    for line in lines:
        assert {"time", "level", "logger", "message", "process"} <= line.keys()
        assert line["process"] == "decode-7"
        age = datetime.now(UTC) - datetime.fromisoformat(line["time"])
        assert 0 <= age.total_seconds() < 60
    first, second, _, warning, step, uncaught = lines
    assert (first["level"], first["logger"], first["request_id"], first["try"]) == (
        "WARNING",
        "some.where",
        "id",
        "0123abcd.12",
    )
    assert second["message"] == 'two\nlines, "quoted", \x00 and \xe9'
    assert "beware" in warning["message"]
    assert "ZeroDivisionError" in step["exception"]
    assert (uncaught["level"], "nobody catches this" in uncaught["exception"]) == ("CRITICAL", True)
    assert sorted(printed_beside(log).read_text().splitlines()) == ["printed by Python", "printed natively"]


def test_as_text_all_of_it_is_in_one_file(tmp_path):
    log = tmp_path / "decode-7.log"
    written(log, "text")
    text = log.read_text()
    for part in ("some.where", "printed by Python", "printed natively", "beware", "nobody catches this"):
        assert part in text
    assert not printed_beside(log).exists()


@pytest.mark.parametrize(
    ("request_id", "shown", "number"),
    [
        ("r", "r", None),
        ("r#0a1b2c3d.4", "r", "0a1b2c3d.4"),
        ("r#1", "r#1", None),
        ("a#0a1b2c3d.4#0a1b2c3d.5", "a#0a1b2c3d.4", "0a1b2c3d.5"),
    ],
)
def test_a_try_is_told_apart_from_its_request(request_id, shown, number):
    record = logging.makeLogRecord({"msg": "m", "levelname": "INFO", "name": "n", "request_id": request_id})
    line = json.loads(JsonLines("p").format(record))
    assert (line["request_id"], line.get("try")) == (shown, number)
