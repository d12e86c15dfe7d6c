"""Gather what a machine with a GPU lacks to run `gpu_check.sh`, into `.gpu-check/`.

    python scripts/gpu_pack.py
    python scripts/gpu_pack.py --model

For a machine with Python 3.12 on x86-64 Linux, a CUDA build of torch with Triton, transformers and
what those need, but without a network. `.gpu-check/base` gets wheels of the few packages that it
may not have in the versions of `constraints.txt`, bitsandbytes with the library for CUDA 13 only,
and the commit. With `--model` the demo model is added, in parts: one fits beside the sources into
what may be sent at once, the rest goes with `base`. It prints what goes with each sending, and
fails where that is too much. This runs where `pip install .` was done, and needs the network.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from fetch_demo_model import fetch

ROOT = Path(__file__).resolve().parents[1]
PACK = ROOT / ".gpu-check"
PACKAGES = (
    "click",
    "execnet",
    "gguf",
    "iniconfig",
    "Jinja2",
    "packaging",
    "pluggy",
    "Pygments",
    "pytest",
    "pytest-xdist",
)
"""Beside bitsandbytes; none of them is compiled, and what they need is there with transformers."""

CUDA_LIBRARY = "libbitsandbytes_cuda130.so"
MIB = 1 << 20
SPARE_BYTES = 2 * MIB  # for what packing for the way adds


def pinned(names: tuple[str, ...], constraints: str) -> list[str]:
    """Requirements of these packages in the versions of a constraints file."""
    lines = dict(line.split("==") for line in constraints.split())
    return [f"{name}=={lines[name]}" for name in names]


def download(target: Path) -> None:
    """Fetch wheels for the other machine's Python."""
    constraints = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    options = ["--no-deps", "--only-binary=:all:", "--implementation=cp", "--python-version=3.12"]
    platforms = ["--platform=manylinux_2_28_x86_64", "--platform=manylinux2014_x86_64"]
    where = ["-d", str(target)]
    subprocess.run(
        [*command, *options, *platforms, *where, *pinned(PACKAGES, constraints)], check=True
    )


def copy_bitsandbytes(target: Path) -> None:
    """Copy the installed package without libraries that serve other devices."""
    package = metadata.distribution("bitsandbytes")
    for file in package.files or ():
        other = file.suffix in (".so", ".pyc") and file.name != CUDA_LIBRARY
        if other or ".." in file.parts or file.name == "RECORD":
            continue
        to = target / file
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(package.locate_file(file)), to)
    if not list(target.rglob(CUDA_LIBRARY)):
        raise SystemExit(f"Error: the bitsandbytes that is installed here has no {CUDA_LIBRARY}.")


def commit() -> str:
    """Of the sources, with a word if they have been changed since."""
    run = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()


def split_model(model: Path, first_bytes: int) -> None:
    """Write the model as two parts and its digest, from which `gpu_check.sh` joins it again."""
    data = memoryview(model.read_bytes())
    for i, part in enumerate((data[:first_bytes], data[first_bytes:]), start=1):
        directory = PACK / f"model-{i}"
        directory.mkdir()
        (directory / f"part-{i}").write_bytes(part)
    digest = hashlib.sha256(data).hexdigest()
    (PACK / "base" / "MODEL").write_text(f"{digest}  {model.name}\n")


def size_bytes(directory: Path) -> int:
    """Of all files below."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def tree_bytes() -> int:
    """Of the files that travel with a checkout: tracked ones and new ones that are not ignored."""
    run = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    names = subprocess.run(run, check=True, capture_output=True, text=True).stdout.split("\0")
    return sum((ROOT / n).stat().st_size for n in names if n and (ROOT / n).is_file())


def sendings(limit_bytes: int) -> list[tuple[list[str], int]]:
    """What goes together, and its size.

    Raises:
        SystemExit: One is too large.
    """
    parts = sorted(path.name for path in PACK.glob("model-*"))
    groups = [[parts[0]], ["base", *parts[1:]]] if parts else [["base"]]
    tree = tree_bytes()
    found = [(names, tree + sum(size_bytes(PACK / n) for n in names)) for names in groups]
    for names, size in found:
        if size > limit_bytes:
            raise SystemExit(
                f"Error: {' and '.join(names)} with the sources take {size / MIB:.1f} MiB, and "
                f"{limit_bytes / MIB:.0f} MiB may be sent at once."
            )
    return found


def main() -> None:
    """Gather, and say how much it is."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", action="store_true", help="bring the demo model along, 94 MiB")
    parser.add_argument("--limit-mib", type=int, default=64, help="that may be sent at once")
    args = parser.parse_args()
    limit_bytes = args.limit_mib * MIB
    shutil.rmtree(PACK, ignore_errors=True)
    base = PACK / "base"
    (base / "wheels").mkdir(parents=True)
    download(base / "wheels")
    copy_bitsandbytes(base / "site")
    (base / "COMMIT").write_text(commit() + "\n")
    if args.model:
        split_model(fetch(), limit_bytes - tree_bytes() - SPARE_BYTES)
    for directory in sorted(path for path in PACK.iterdir() if path.is_dir()):
        print(f"{directory.relative_to(ROOT)}: {size_bytes(directory) / MIB:.1f} MiB")
    for i, (names, size) in enumerate(sendings(limit_bytes), start=1):
        folders = " ".join(f".gpu-check/{name}" for name in names)
        print(f"sending {i}: {folders}, {size / MIB:.1f} MiB with the sources")


if __name__ == "__main__":
    main()
