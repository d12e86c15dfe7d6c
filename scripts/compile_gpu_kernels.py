"""Compile the GPU kernels, without a GPU, and say what they need of one.

    python scripts/compile_gpu_kernels.py
    python scripts/compile_gpu_kernels.py --cc 8.6 --json

Registers and memory are what ptxas decided, as cuobjdump reads them from its result; both come with
Triton. Says nothing of speed. Nothing is written outside of the cache directory.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qinfer.ops import cuda
from qinfer.ops.cuda.compilation import Compilation

CAPABILITIES = ("8.0", "8.6", "8.9", "9.0")
_VECTOR_LOAD = re.compile(
    r"\bld\.global\S*\.(?:v4\.[bufs]32|v2\.[bufs]64|v8\.[bufs]16)\b"
    r"|\bcp\.async\.c[ag]\.shared\.global\b.*, (?:16|0x10)\b"
    r"|\bcp\.async\.bulk\.tensor\b"
)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a kernel needs of a device.

    Attributes:
        name: Of the compilation.
        capability: Compute capability, as "8.6".
        registers: Of a thread.
        stack_bytes: Of a thread, in memory: registers that did not fit lie there.
        local_bytes: Of a thread, in memory, beside the stack.
        shared_bytes: Of a program.
        threads: Of a program.
        vector_loads: Instructions that load 128 bits of global memory a thread, or more.
        barriers: Instructions where the threads of a program wait for one another.
        compile_s: Seconds it took.
    """

    name: str
    capability: str
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    threads: int
    vector_loads: int
    barriers: int
    compile_s: float


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--cc", nargs="+", default=CAPABILITIES, metavar="X.Y", help="compute capabilities"
    )
    parser.add_argument(
        "--one-per-kernel", action="store_true", help="the first case of each kernel alone"
    )
    parser.add_argument("--cache-dir", type=Path, help="keep compiled kernels here", default=None)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a list of objects")
    form.add_argument("--markdown", action="store_true", help="the table of docs/gpu.md")
    given = parser.parse_args()
    for capability in given.cc:
        if not re.fullmatch(r"\d+\.\d", capability):
            parser.error(f"--cc: {capability!r} is not a compute capability such as 8.6")

    with tempfile.TemporaryDirectory() as temporary:
        _isolate(given.cache_dir or Path(temporary))
        usages = [
            measure(compilation, capability)
            for compilation in compilations(one_per_kernel=given.one_per_kernel)
            for capability in given.cc
        ]
    if given.json:
        print(json.dumps([asdict(usage) for usage in usages], indent=1))
    elif given.markdown:
        print("\n".join(markdown(usages, given.cc)))
    else:
        print("\n".join(table(usages)))


def _isolate(directory: Path) -> None:
    """Set what Triton reads when it is imported: compile, and write only here."""
    if "triton" in sys.modules:
        raise RuntimeError("Triton was imported before its environment was set")
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_HOME"] = str(directory)
    os.environ["TRITON_CACHE_DIR"] = str(directory / "cache")


def compilations(*, one_per_kernel: bool = False) -> list[Compilation]:
    """Of all modules of kernels, by name; all cases, or the first one of each kernel.

    Raises:
        ValueError: Two have the same name.
    """
    found: dict[str, Compilation] = {}
    for info in pkgutil.iter_modules(cuda.__path__):
        module = importlib.import_module(f"{cuda.__name__}.{info.name}")
        for compilation in getattr(module, "compilations", list)():
            if compilation.name in found:
                raise ValueError(f"two compilations are called {compilation.name!r}")
            found[compilation.name] = compilation
    cases = [found[name] for name in sorted(found)]
    first = {case.kernel.__name__: case for case in reversed(cases)}
    return [c for c in cases if first[c.kernel.__name__] is c] if one_per_kernel else cases


def measure(compilation: Compilation, capability: str) -> Usage:
    """Compile for a compute capability such as "8.6", and read the result."""
    start = time.perf_counter()
    compiled = _compile(compilation, int(capability.replace(".", "")))
    seconds = time.perf_counter() - start
    usage = _resource_usage(compiled.asm["cubin"])
    return Usage(
        name=compilation.name,
        capability=capability,
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        local_bytes=usage["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        threads=32 * compilation.num_warps,
        vector_loads=len(_VECTOR_LOAD.findall(compiled.asm["ptx"])),
        barriers=len(re.findall(r"\bbar\.sync\b", compiled.asm["ptx"])),
        compile_s=round(seconds, 2),
    )


def _compile(compilation: Compilation, capability: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    places = {name: i for i, name in enumerate(compilation.kernel.arg_names)}
    source = ASTSource(
        compilation.kernel,
        compilation.signature,
        constexprs=compilation.constants,
        attrs={(places[name],): [["tt.divisibility", 16]] for name in compilation.aligned},
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": compilation.num_warps, "num_stages": compilation.num_stages},
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL and more of the one function in a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "kernel.cubin")
        path.write_bytes(cubin)
        text = subprocess.run(
            [tool, "-res-usage", path], check=True, capture_output=True, text=True
        ).stdout
    lines = re.findall(r"^\s*REG:.*$", text, re.MULTILINE)
    if len(lines) != 1:
        raise RuntimeError(f"cuobjdump names {len(lines)} functions, not one:\n{text}")
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", lines[0])}


def table(usages: Iterable[Usage]) -> list[str]:
    """One line per kernel and capability."""
    lines = [
        f"{'kernel':40} {'cc':>4} {'threads':>7} {'registers':>9} {'stack':>5} {'local':>5} "
        f"{'shared':>7} {'128-bit':>7} {'s':>5}"
    ]
    for u in usages:
        lines.append(
            f"{u.name:40} {u.capability:>4} {u.threads:7} {u.registers:9} {u.stack_bytes:5} "
            f"{u.local_bytes:5} {u.shared_bytes:7} {u.vector_loads:7} {u.compile_s:5.2f}"
        )
    return lines


def markdown(usages: Sequence[Usage], capabilities: Sequence[str]) -> list[str]:
    """One line per kernel: registers, shared memory from 0.1 KB on, bytes spilled if there are."""
    cells = {(u.name, u.capability): u for u in usages}
    lines = [
        f"| kernel | threads | {' | '.join(capabilities)} |",
        f"|---|---|{'---|' * len(capabilities)}",
    ]
    for name in dict.fromkeys(u.name for u in usages):
        row = [cells[name, capability] for capability in capabilities]
        lines.append(f"| {name} | {row[0].threads} | {' | '.join(_cell(u) for u in row)} |")
    return lines


def _cell(usage: Usage) -> str:
    kilobytes, spilled = usage.shared_bytes / 1024, usage.stack_bytes + usage.local_bytes
    cell = str(usage.registers)
    if kilobytes >= 0.1:
        cell += f", {kilobytes:.1f} KB"
    return f"{cell}, {spilled} B spilled" if spilled else cell


if __name__ == "__main__":
    main()
