"""Deciding what becomes of every tensor, from headers alone, before any weight is read.

A plan names each output tensor with dtype and shape, says why a tensor is not quantized as asked,
adds up sizes, and holds the `config.json` to write. Carrying it out is `qinfer_converters.convert`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from qinfer.checkpoint.safetensors import layout_bytes
from qinfer.config import ModelConfig
from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer.models.architectures import TABLE, TensorSpec, expected_tensors, prefix_in
from qinfer.quant import nf4
from qinfer.quant.kv import KVFormat
from qinfer.quant.spec import (
    GROUP_SIZES,
    NF4,
    SCHEMES,
    Affine,
    Dense,
    Format,
    Scheme,
    default_group_size,
)
from qinfer_converters.source import Source

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
_NOT_WEIGHTS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F8_E4M3", "F8_E5M2")
MAX_SHARD_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One source tensor and what is written for it.

    Attributes:
        source: Name in the source.
        module: Name in the output without `.weight`; differs from the source's for a head that
            was tied to the embedding.
        shape: (N, K) of a matrix as a linear layer computes with it, else the tensor's own.
        format: What it becomes.
        transposed: The source stores [K, N].
        outputs: Tensors to write.
        note: Why it does not become what the scheme asks for, if so.
    """

    source: str
    module: str
    shape: tuple[int, ...]
    format: Format
    transposed: bool
    outputs: Layout
    note: str | None = None

    @property
    def label(self) -> str:
        """Its name for people."""
        return self.source if isinstance(self.format, Dense) else self.module

    @property
    def nbytes(self) -> int:
        """Size on disk."""
        return layout_bytes(self.outputs)

    @property
    def parameters(self) -> int:
        """Weights in it."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a conversion.

    Attributes:
        scheme: A key of `SCHEMES`.
        group_size: As asked for or chosen; None where the scheme has none.
        tensors: In the order they are written.
        shards: The same, cut into files.
        config: The `config.json` to write.
        dropped: Source tensors that the architecture does not use.
        kv_format: Default of the key-value cache, to be recorded; None records nothing.
        notes: Lines for the user about the model as a whole.
    """

    scheme: str
    group_size: int | None
    tensors: list[TensorPlan]
    shards: list[list[TensorPlan]]
    config: dict[str, Any]
    dropped: list[str]
    kv_format: KVFormat | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Size of the weights to be written."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def parameters(self) -> int:
        """Weights of the source model; a tied head counts once."""
        return sum({t.source: t.parameters for t in self.tensors}.values())

    @property
    def bits_per_weight(self) -> float:
        """Of the quantized tensors, scales included; of all tensors where none is quantized."""
        quantized = [t for t in self.tensors if not isinstance(t.format, Dense)] or self.tensors
        return 8 * sum(t.nbytes for t in quantized) / sum(t.parameters for t in quantized)

    def shard_names(self) -> list[str]:
        """File names, as Hugging Face numbers them."""
        count = len(self.shards)
        if count == 1:
            return ["model.safetensors"]
        return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def make_plan(
    source: Source,
    scheme_name: str,
    group_size: int | None = None,
    *,
    kv_format: KVFormat | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Plan:
    """Plan a conversion.

    Args:
        source: The opened source.
        scheme_name: A key of `SCHEMES`.
        group_size: Weights that share a scale; None takes the default and lets single tensors
            fall back to a smaller size or to int8.
        kv_format: Default of the key-value cache; None leaves it open.
        max_shard_bytes: Size after which a new file is begun.

    Raises:
        CheckpointError: Tensors missing, of other shapes than the configuration implies, or a
            group size that was asked for does not divide a row.
        QInferError: The format of the key-value cache does not fit the model.
        UnsupportedModelError: The architecture is not covered.
    """
    config = ModelConfig.from_dict(source.config, origin=f"{source.label}: config.json")
    if kv_format is not None:
        kv_format.check(config.head_dim)
    specs, dropped = _match(source, config)
    scheme = SCHEMES[scheme_name]
    parameters = sum(math.prod(s.shape) for s in specs)
    chooser = _Chooser(config, scheme_name, scheme, group_size, parameters)
    tensors = [chooser.plan(spec) for spec in specs]
    if scheme.quantizes_head and config.tie_word_embeddings:
        tensors.append(chooser.head_of(specs[0]))
    return Plan(
        scheme=scheme_name,
        group_size=chooser.group_size,
        tensors=tensors,
        shards=_cut(tensors, max_shard_bytes),
        config=_output_config(source.config, scheme, chooser.dtype, tensors),
        dropped=dropped,
        kv_format=kv_format,
        notes=_notes(config, scheme),
    )


def _match(source: Source, config: ModelConfig) -> tuple[list[TensorSpec], list[str]]:
    """Check that the source has every tensor of the model; find those it has too many."""
    arch = TABLE[config.architecture]
    specs = list(expected_tensors(config, prefix_in(source.tensors, arch)))
    for spec in specs:
        found = source.tensors.get(spec.name)
        if found is None:
            raise CheckpointError(
                f"{source.label} has no tensor {spec.name}",
                hint="Weights are missing, or config.json is of another model; download it again.",
            )
        if found.shape != spec.shape:
            raise CheckpointError(
                f"{spec.name} has shape {list(found.shape)}, config.json implies "
                f"{list(spec.shape)}",
                hint="Weights and config.json do not belong together; download the model again.",
            )
        if found.kind in _NOT_WEIGHTS:
            raise UnsupportedModelError(
                f"{spec.name} is stored as {found.kind}, which is not a 16-bit or fp32 weight",
                hint="Convert the original model: rounding twice loses quality.",
            )
    known = {spec.name for spec in specs}
    if config.tie_word_embeddings:
        known.add(f"{arch.head}.weight")
    extra = [n for n in source.tensors if n not in known and not n.endswith(arch.unused)]
    return specs, extra


class _Chooser:
    """Chooses a tensor's format and lays out what is written for it."""

    def __init__(
        self,
        config: ModelConfig,
        scheme_name: str,
        scheme: Scheme,
        group_size: int | None,
        parameters: int,
    ) -> None:
        self.config = config
        self.scheme_name = scheme_name
        self.scheme = scheme
        if group_size is not None and not scheme.groups:
            raise CheckpointError(
                f"--group-size has no meaning for --scheme {scheme_name}",
                hint="It applies to int4 and int8.",
            )
        self.asked = group_size
        default = default_group_size(parameters) if scheme_name == "int4" else None
        self.group_size = group_size or default
        half = config.dtype == "float16" and scheme_name != "bf16"
        self.dtype = "float16" if half else "bfloat16"

    def plan(self, spec: TensorSpec) -> TensorPlan:
        transposed = TABLE[self.config.architecture].transposed and spec.role == "linear"
        shape = spec.shape[::-1] if transposed else spec.shape
        fmt, note = self._format(spec, shape)
        outputs = self._outputs(spec.name, spec.module, spec.shape, shape, fmt)
        return TensorPlan(spec.name, spec.module, shape, fmt, transposed, outputs, note)

    def head_of(self, embedding: TensorSpec) -> TensorPlan:
        """An int8 head of its own for a model whose head is tied to its embedding."""
        module, fmt = TABLE[self.config.architecture].head, Affine(8, None)
        shape = embedding.shape
        outputs = self._outputs(embedding.name, module, shape, shape, fmt)
        note = "the output head keeps 8 bits; it was tied to the 16-bit embedding"
        return TensorPlan(embedding.name, module, shape, fmt, False, outputs, note)

    def _format(self, spec: TensorSpec, shape: tuple[int, ...]) -> tuple[Format, str | None]:
        dense = Dense(self.dtype)
        if self.scheme.bits == 16:
            return dense, None
        if spec.role == "vector":
            return dense, "norms and biases stay 16-bit"
        if spec.role == "embedding":
            return dense, "embeddings stay 16-bit: only the rows used are read"
        if spec.role == "head":
            if self.scheme.quantizes_head:
                return Affine(8, None), "the output head keeps 8 bits"
            return dense, "bitsandbytes checkpoints keep the output head 16-bit"
        if self.scheme_name == "nf4":
            return NF4(self.dtype), None
        return self._affine(spec.name, shape[1])

    def _affine(self, name: str, columns: int) -> tuple[Format, str | None]:
        bits, wanted = self.scheme.bits, self.group_size
        if wanted is None or columns % wanted == 0:
            return Affine(bits, wanted), None
        fits = [g for g in GROUP_SIZES if columns % g == 0]
        if self.asked is not None:
            raise CheckpointError(
                f"--group-size {wanted} does not divide the {columns} columns of {name}",
                hint=f"Sizes that fit: {', '.join(map(str, fits))}."
                if fits
                else "None of 32, 64 and 128 fits; leave --group-size out, and such tensors become "
                "int8 per channel.",
            )
        smaller = [g for g in fits if g < wanted]
        if smaller:
            return Affine(bits, smaller[0]), f"{wanted} does not divide its {columns} columns"
        return Affine(8, None), f"not even groups of 32 divide its {columns} columns"

    def _outputs(
        self,
        name: str,
        module: str,
        stored: tuple[int, ...],
        shape: tuple[int, ...],
        fmt: Format,
    ) -> Layout:
        dtype = getattr(torch, self.dtype)
        if isinstance(fmt, Dense):
            return {name: (dtype, stored)}
        n, k = shape
        if isinstance(fmt, Affine):
            groups = k // fmt.group_size if fmt.group_size else 1
            return {
                f"{module}.weight_packed": (torch.int32, (n, -(-k * fmt.bits // 32))),
                f"{module}.weight_scale": (dtype, (n, groups)),
                f"{module}.weight_shape": (torch.int64, (2,)),
            }
        weight = f"{module}.weight"
        state = nf4.state_tensor((n, k), fmt.dtype, fmt.block_size)
        return {
            weight: (torch.uint8, (-(-n * k // 2), 1)),
            f"{weight}.absmax": (torch.float32, (-(-n * k // fmt.block_size),)),
            f"{weight}.quant_map": (torch.float32, (16,)),
            f"{weight}.{nf4.STATE_SUFFIX}": (torch.uint8, (len(state),)),
        }


def _cut(tensors: list[TensorPlan], max_bytes: int) -> list[list[TensorPlan]]:
    shards: list[list[TensorPlan]] = [[]]
    filled = 0
    for tensor in tensors:
        if filled and filled + tensor.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    return shards


def _notes(config: ModelConfig, scheme: Scheme) -> list[str]:
    if scheme.quant_method == "compressed-tensors" and TABLE[config.architecture].transposed:
        return [
            f"{config.architecture} at {scheme.bits} bits runs in qinfer only: transformers "
            "cannot load a quantized Conv1D; --scheme nf4 and bf16 open there"
        ]
    return []


def _output_config(
    source: Mapping[str, Any], scheme: Scheme, dtype: str, tensors: list[TensorPlan]
) -> dict[str, Any]:
    config = dict(source)
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    if scheme.quantizes_head:
        config["tie_word_embeddings"] = False
    if scheme.quant_method == "compressed-tensors":
        config["quantization_config"] = _compressed_tensors_config(tensors)
    elif scheme.quant_method == "bitsandbytes":
        config["quantization_config"] = _bitsandbytes_config(dtype)
    return config


def _compressed_tensors_config(tensors: list[TensorPlan]) -> dict[str, Any]:
    """The most common format takes every `Linear`; before it, modules of others are named."""
    modules: dict[Affine, list[str]] = {}
    for tensor in tensors:
        if isinstance(tensor.format, Affine):
            modules.setdefault(tensor.format, []).append(tensor.module)
    *others, most = sorted(modules, key=lambda fmt: len(modules[fmt]))
    targets = {fmt: sorted(modules[fmt]) for fmt in others} | {most: ["Linear"]}
    groups = {
        f"group_{i}": {
            "targets": names,
            "weights": {
                "num_bits": fmt.bits,
                "type": "int",
                "symmetric": True,
                "strategy": "group" if fmt.group_size else "channel",
                "group_size": fmt.group_size,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
        for i, (fmt, names) in enumerate(targets.items())
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": groups,
    }


def _bitsandbytes_config(dtype: str) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["lm_head"],
    }


def summary(plan: Plan, source: Source) -> Iterator[str]:
    """The plan in lines for people: formats with sizes, exceptions with reasons, totals."""
    by_format: dict[str, list[TensorPlan]] = {}
    for tensor in plan.tensors:
        by_format.setdefault(str(tensor.format), []).append(tensor)
    for name, tensors in by_format.items():
        size = sum(t.nbytes for t in tensors)
        yield f"{name:>16}: {len(tensors):5,} tensors, {size / 1e6:10,.1f} MB"
    reasons: dict[tuple[str, str], list[str]] = {}
    for tensor in plan.tensors:
        if tensor.note is not None:
            reasons.setdefault((str(tensor.format), tensor.note), []).append(tensor.label)
    for (name, reason), names in reasons.items():
        yield f"{name} because {reason}:"
        yield from (f"  {n}" for n in _collapsed(names))
    if plan.dropped:
        yield "left out because the architecture does not use them:"
        yield from (f"  {n}" for n in _collapsed(plan.dropped))
    yield from plan.notes
    if plan.kv_format is not None:
        k, v = plan.kv_format.k_bits, plan.kv_format.v_bits
        yield f"KV cache: keys {k} bits, values {v} bits"
    before = sum(t.nbytes for t in source.tensors.values())
    yield (
        f"{plan.parameters / 1e6:,.1f} M parameters, {before / 1e6:,.1f} MB "
        f"({2 * plan.parameters / 1e6:,.1f} MB at 16 bits) → "
        f"{plan.nbytes / 1e6:,.1f} MB in {len(plan.shards)} file(s), "
        f"{plan.bits_per_weight:.2f} bits per quantized weight, "
        f"{8 * plan.nbytes / plan.parameters:.2f} bits per parameter"
    )


def _collapsed(names: list[str]) -> Iterator[str]:
    """One line for names that differ in the layer's number only: `layers.[0-29].norm.weight`."""
    layers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = re.search(r"\.(\d+)\.", name)
        if match is None:
            yield name
        else:
            ends = name[: match.start(1)], name[match.end(1) :]
            layers.setdefault(ends, []).append(int(match[1]))
    for (head, tail), numbers in layers.items():
        runs: list[list[int]] = []
        for n in sorted(numbers):
            if runs and n == runs[-1][1] + 1:
                runs[-1][1] = n
            else:
                runs.append([n, n])
        text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
        yield f"{head}[{text}]{tail}"
