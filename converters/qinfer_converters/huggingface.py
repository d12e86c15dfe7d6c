"""A Hugging Face directory of 16-bit or fp32 safetensors as a source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from qinfer.checkpoint.safetensors import Checkpoint, read_rows
from qinfer.config import read_json
from qinfer.errors import UnsupportedModelError
from qinfer_converters.source import SourceTensor

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class HuggingFaceSource:
    """A local directory; see `qinfer_converters.source.Source` for the attributes."""

    def __init__(self, directory: Path, label: str | None = None) -> None:
        """Read the configuration and the headers of the weights.

        Args:
            directory: Holds `config.json` and safetensors files.
            label: What to call it; the path if None.

        Raises:
            CheckpointError: Files are missing or damaged.
            UnsupportedModelError: The weights are quantized already.
        """
        self.label = label or str(directory)
        self.config: dict[str, Any] = read_json(directory / "config.json")
        declared = self.config.get("quantization_config")
        if declared:
            method = declared.get("quant_method") if isinstance(declared, dict) else declared
            raise UnsupportedModelError(
                f"{self.label} is quantized already ({method or 'in an unnamed way'})",
                hint="Convert the original 16-bit model: rounding twice loses quality.",
            )
        path = directory / "generation_config.json"
        self.generation_config: dict[str, Any] = read_json(path) if path.exists() else {}
        self._checkpoint = Checkpoint(directory)
        self.tensors: Mapping[str, SourceTensor] = {
            t.name: SourceTensor(t.name, t.shape, t.dtype, t.nbytes)
            for t in self._checkpoint.tensors.values()
        }
        self.files: Mapping[str, Path | bytes] = {
            name: directory / name for name in TOKENIZER_FILES if (directory / name).is_file()
        }
        self.fingerprint = self._fingerprint()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows `start:stop` of a tensor, in its stored dtype."""
        return read_rows(self._checkpoint[name], start, stop)

    def _fingerprint(self) -> str:
        paths = {info.path for info in self._checkpoint.tensors.values()}
        stats = {p.name: (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(paths)}
        text = json.dumps([self.config, stats, sorted(self.tensors)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
