"""`python -m cluster.bench.compare.checkpoint FILE.gguf FOLDER`: a Hugging Face folder, for who reads no GGUF."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from workers.errors import KVFerryError


def hf_folder(gguf: Path, folder: Path) -> Path:
    """Made once, by a process of its own: it takes a gigabyte. Raises KVFerryError."""
    if not (folder / "config.json").exists():
        command = [sys.executable, "-m", "cluster.bench.compare.checkpoint", str(gguf), str(folder)]
        made = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        if made.returncode:
            reason = (made.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise KVFerryError(f"no Hugging Face folder of {gguf}: {reason}; or give one with --hf-model")
    return folder


def write(gguf: Path, folder: Path) -> None:
    """In float32: who serves in another dtype casts it. Whole, or not there."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    quantized = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=name, dtype=torch.float32, quantization_config=quantized
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    draft = folder.with_name(f"{folder.name}.draft")
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    draft.rename(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
