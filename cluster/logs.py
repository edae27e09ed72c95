"""The log file of a process: text, or one JSON object a line (telemetry.log_format)."""

from __future__ import annotations

import logging
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from pythonjsonlogger.json import JsonFormatter

from workers.telemetry_config import LogFormat

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# What a router puts behind a request's id to tell its tries apart: Router._numbered.
_TRY = re.compile(r"#[0-9a-f]{1,8}\.[0-9]+$")


def write_all_output_to(log: Path, process: str, log_format: LogFormat) -> None:
    """Python's log and whatever else is printed, by native code too: to one file as text; as JSON, lines of other
    origin go to a file of their own beside it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    as_json = log_format == "json"
    output = _truncated(printed_beside(log) if as_json else log)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    if not as_json:
        logging.basicConfig(level=logging.INFO, format=_TEXT, force=True)
        return
    os.close(_truncated(log))
    handler = logging.FileHandler(log, encoding="utf-8")
    handler.setFormatter(JsonLines(process))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught


def printed_beside(log: Path) -> Path:
    """Where what is no JSON goes."""
    return log.with_name(f"{log.name}.out")


class JsonLines(JsonFormatter):
    """time (ISO 8601, UTC), level, logger, message, process; request_id and try where they are known, exception."""

    def __init__(self, process: str) -> None:
        names = {"levelname": "level", "name": "logger", "exc_info": "exception", "stack_info": "stack"}
        super().__init__(
            ["asctime", "levelname", "name", "message"],
            rename_fields=names | {"asctime": "time"},
            static_fields={"process": process},
        )

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")

    def process_log_record(self, log_data: dict[str, object]) -> dict[str, object]:
        request_id = log_data.get("request_id")
        if isinstance(request_id, str) and (found := _TRY.search(request_id)):
            log_data |= {"request_id": request_id[: found.start()], "try": found[0][1:]}
        return log_data


def _truncated(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)


def _log_uncaught(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("uncaught", exc_info=(kind, error, where))
