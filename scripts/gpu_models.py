"""Write a synthetic checkpoint of a real shape as `qinfer convert` stores it, without converting.

For measurements of speed and memory, where only shapes and formats matter and there is no time to
quantize billions of weights:

    python scripts/gpu_models.py /dev/shm/llama-8b-int4 --shape 8b --scheme int4

Names, dtypes, shapes and `config.json` come from the converter's own plan. Codes are random bytes,
drawn once and used again for every tensor from another place on; scales are constant, so that each
projection keeps the size of what it is given. `qinfer.json` is left out: nothing was converted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
import zlib
from argparse import Namespace
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from make_model import PRESETS, nbytes, tensor_specs, write_configs, write_json, write_tokenizer
from torch import Tensor

from qinfer.checkpoint.safetensors import INDEX_NAME, ShardWriter
from qinfer.config import read_json
from qinfer.quant import nf4
from qinfer.quant.spec import NF4, SCHEMES, Affine
from qinfer_converters.plan import Plan, TensorPlan, make_plan
from qinfer_converters.source import SourceTensor

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "intermediate_size": 192,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
    },
    "1.1b": {  # TinyLlama's, with a longer context
        "hidden_size": 2048,
        "layers": 22,
        "heads": 32,
        "kv_heads": 4,
        "intermediate_size": 5632,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
    },
    "8b": PRESETS["8b"] | {"max_position_embeddings": 32768},  # Llama 3 8B's
}
_RUN_BYTES = 32 << 20  # written at a time
_SLACK_BYTES = 1 << 20  # by so much the places differ at which tensors begin in the random bytes
_WRITERS = 8  # threads: what takes long is the system's copying


@dataclass(frozen=True)
class ShapeSource:
    """What the converter plans from; see `qinfer_converters.source.Source`. It has no weights."""

    config: dict[str, Any]
    tensors: Mapping[str, SourceTensor]
    label: str = "synthetic"
    fingerprint: str = ""
    generation_config: dict[str, Any] = field(default_factory=dict)
    files: Mapping[str, Path | bytes] = field(default_factory=dict)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """There is nothing to read."""
        raise NotImplementedError


def options(out: Path, shape: str) -> Namespace:
    """The options of `make_model.py` for a shape."""
    its = SHAPES[shape]
    head_dim = its["hidden_size"] // its["heads"]
    return Namespace(out=out, tie=False, dtype="bfloat16", head_dim=head_dim, **its)


class Noise:
    """Random bytes, drawn once.

    Attributes:
        nbytes: That are written at a time.
    """

    def __init__(self, largest_bytes: int, *, seed: int = 0) -> None:
        """`largest_bytes` is the size of the largest tensor."""
        self.nbytes = min(_RUN_BYTES, -(-largest_bytes // 64) * 64)
        self._draw = torch.Generator().manual_seed(seed)
        self._found: dict[object, Tensor] = {}

    def codes(self, bits: int) -> Tensor:
        """uint8; of 8 bits without the code of -128, which symmetric quantization never gives."""
        if bits not in self._found:
            size = (self.nbytes + _SLACK_BYTES,)
            self._found[bits] = torch.randint(
                int(bits == 8), 256, size, dtype=torch.uint8, generator=self._draw
            )
        return self._found[bits]

    def weights(self, dtype: torch.dtype, columns: int) -> Tensor:
        """Bytes of weights of deviation 1/sqrt(columns), uint8."""
        key = dtype, columns
        if key not in self._found:
            count = (self.nbytes + _SLACK_BYTES) // dtype.itemsize
            drawn = torch.randn(count, generator=self._draw)
            self._found[key] = (drawn * columns**-0.5).to(dtype).view(torch.uint8)
        return self._found[key]


def contents(tensor: TensorPlan, noise: Noise) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield for each output (name, tensor, whether it stands for any number of bytes)."""
    fmt, columns = tensor.format, tensor.shape[-1]
    for name, (dtype, shape) in tensor.outputs.items():
        kind = name.rpartition(".")[2]
        if kind in ("weight_scale", "absmax"):
            size = columns**-0.5 / _deviation(fmt)
            yield name, torch.full(shape, size, dtype=dtype), False
        elif kind == "weight_shape":
            yield name, torch.tensor(tensor.shape), False
        elif kind == "quant_map":
            yield name, torch.tensor(nf4.CODE), False
        elif name.endswith(nf4.STATE_SUFFIX):
            n, k = tensor.shape
            yield name, nf4.state_tensor((n, k), fmt.dtype, fmt.block_size), False
        elif isinstance(fmt, Affine | NF4):
            yield name, noise.codes(fmt.bits if isinstance(fmt, Affine) else 4), True
        elif len(shape) == 1:
            yield name, torch.ones(shape, dtype=dtype), False  # of a norm
        else:
            yield name, noise.weights(dtype, columns), True


def _deviation(fmt: Affine | NF4) -> float:
    """Of what evenly spread codes stand for, at a scale of one."""
    if isinstance(fmt, NF4):
        return statistics.pstdev(nf4.CODE)
    return math.sqrt((4**fmt.bits - 1) / 12)


def runs(
    name: str, source: Tensor, dtype: torch.dtype, shape: tuple[int, ...], run_bytes: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, rows) of a tensor made of random bytes, uint8 [run_bytes + slack]."""
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    step = max(1, run_bytes // row_bytes)
    first = zlib.crc32(name.encode()) % _SLACK_BYTES // 64 * 64
    for start in range(0, shape[0], step):
        count = min(step, shape[0] - start)
        data = source[first : first + count * row_bytes]
        yield start, data.view(dtype).view(count, *shape[1:])


def write_shard(path: Path, tensors: list[TensorPlan], noise: Noise) -> None:
    """Write one file of weights."""
    declared = {name: what for tensor in tensors for name, what in tensor.outputs.items()}
    writer = ShardWriter(path, declared)
    try:
        for tensor in tensors:
            for name, content, repeats in contents(tensor, noise):
                if not repeats:
                    writer.write(name, 0, content)
                    continue
                for start, rows in runs(name, content, *declared[name], noise.nbytes):
                    writer.write(name, start, rows)
    finally:
        writer.abandon()  # closes it; that it outlasts a crash does not matter here


def write(out: Path, shape: str, scheme: str) -> Plan:
    """Write the directory of a model; returns what it consists of."""
    args = options(out, shape)
    out.mkdir(parents=True, exist_ok=True)
    write_configs(args)
    write_tokenizer(args)
    tensors = {
        s.name: SourceTensor(s.name, s.shape, "BF16", nbytes(s, args.dtype))
        for s in tensor_specs(args)
    }
    plan = make_plan(ShapeSource(read_json(out / "config.json"), tensors), scheme)
    write_json(out / "config.json", plan.config)
    noise = Noise(max(t.nbytes for t in plan.tensors))
    for tensor in plan.tensors:
        for _ in contents(tensor, noise):  # draws what there is to draw, before there are threads
            pass
    names = plan.shard_names()
    with ThreadPoolExecutor(min(_WRITERS, os.cpu_count() or 1)) as pool:
        paths = [out / name for name in names]
        list(pool.map(write_shard, paths, plan.shards, [noise] * len(names)))
    if len(names) > 1:
        shards = zip(names, plan.shards, strict=True)
        weight_map = {o: name for name, shard in shards for t in shard for o in t.outputs}
        metadata = {"total_size": plan.nbytes}
        (out / INDEX_NAME).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return plan


def main() -> None:
    """Write a model and say what it is."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory, new or empty")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--scheme", choices=SCHEMES, default="int4")
    args = parser.parse_args()
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        parser.error(f"{args.out} exists and is not an empty directory")
    start = time.perf_counter()
    plan = write(args.out, args.shape, args.scheme)
    seconds = time.perf_counter() - start
    print(f"{args.out}: {plan.nbytes / 1e9:.2f} GB {args.scheme}, written in {seconds:.1f} s")


if __name__ == "__main__":
    main()
