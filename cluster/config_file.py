"""A config file's text: its values, and in which line each of them is."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from workers.errors import ConfigError

DEFAULT = "local"
# Keys from the root on, and the places of a list's items.
Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """`source`: what errors call it."""

    source: str
    data: dict[str, Any]
    lines: Mapping[Place, int] = field(default_factory=dict)

    def at(self, place: Place) -> str:
        """`file:line` of the key at `place`, or of the innermost group above it that the file has."""
        for end in range(len(place), 0, -1):
            if place[:end] in self.lines:
                return f"{self.source}:{self.lines[place[:end]]}"
        return self.source


def packaged_configs() -> dict[str, str]:
    """The text of each config that comes with kvferry, by name."""
    folder = resources.files("cluster").joinpath("configs")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8") for file in files}


def read_config_file(path: str | Path | None) -> ConfigFile:
    """`path`: a YAML file's, or the name of a packaged config; None: the default. Raises ConfigError."""
    name, packaged = str(path or DEFAULT), packaged_configs()
    if name in packaged and not Path(name).is_file():
        return parse_yaml(packaged[name], f"{name}.yaml")
    try:
        text = Path(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{name}: no such file; give the path of a config, none for the default, or one of {', '.join(packaged)}"
        ) from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{name}: cannot be read: {exc.strerror if isinstance(exc, OSError) else exc}") from None
    return parse_yaml(text, name)


def parse_yaml(text: str, source: str) -> ConfigFile:
    """Raises ConfigError: also for a key that is given twice, of which YAML would take the last."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        lines = dict(_lines(root, (), source, set())) if root else {}
        data = loader.construct_document(root) if root else None
    except (yaml.YAMLError, ValueError) as exc:
        raise ConfigError(f"{source}{_problem(exc)}") from None
    except RecursionError:
        raise ConfigError(f"{source}: not valid YAML: it is nested too deeply") from None
    if data is not None and not isinstance(data, dict):
        raise ConfigError(f"{source}: must be keys with values (`name: kvferry`), not {kind(data)}")
    return ConfigFile(source, data or {}, lines)


def _lines(node: yaml.Node, place: Place, source: str, seen: set[int]) -> Iterator[tuple[Place, int]]:
    """The line of everything below `node`; what is there by several names (YAML's anchors) has the first one's."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield (*place, i), item.start_mark.line + 1
            yield from _lines(item, (*place, i), source, seen)
    elif isinstance(node, yaml.MappingNode):
        at: dict[Hashable, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in at and name != "<<":
                dotted = ".".join(map(str, (*place, name)))
                raise ConfigError(
                    f"{source}:{line}: {dotted}: is given twice, first in line {at[name]}; keep one", param=dotted
                )
            at[name] = line
            yield (*place, name), line
            yield from _lines(value, (*place, name), source, seen)


def _problem(exc: yaml.YAMLError | ValueError) -> str:
    if isinstance(exc, yaml.MarkedYAMLError) and exc.problem_mark:
        return f":{exc.problem_mark.line + 1}:{exc.problem_mark.column + 1}: not valid YAML: {exc.problem}"
    return f": not valid YAML: {' '.join(str(exc).split())}"


def kind(value: Any) -> str:
    names: dict[type, str] = {dict: "a mapping", list: "a list", str: "text"}
    return names.get(type(value), type(value).__name__)
