"""What a model directory is, from its configuration, its record and the headers of its weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qinfer.cache.tables import blocks_for
from qinfer.checkpoint.record import read_record
from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.config import ModelConfig, read_json
from qinfer.errors import CheckpointError
from qinfer.generation import check_quantization
from qinfer.models.architectures import TABLE, TensorSpec, expected_tensors, prefix_in
from qinfer.quant.kv import BLOCK_TOKENS, KVFormat
from qinfer.quant.spec import NF4, Affine, Dense, Format
from qinfer.quant.weights import AffineWeight, DenseWeight, NF4Weight, Weight, load_weight

_COMPARED_BITS = (16, 8, 4)


@dataclass(frozen=True, slots=True)
class KVSize:
    """What the key-value cache of one sequence takes.

    Attributes:
        kv_format: Of all layers.
        bytes_per_token: In all layers, scales included, while the token is in every window.
        context_bytes: Of a whole context, in blocks of 32 tokens; of a layer with a window, only
            those of the window.
        open_bytes: Beside that, of the last block, which is kept in 16 bits.
    """

    kv_format: KVFormat
    bytes_per_token: float
    context_bytes: int
    open_bytes: int

    @classmethod
    def of(cls, config: ModelConfig, kv_format: KVFormat, context_tokens: int) -> KVSize:
        """Work it out for a context."""
        heads = config.num_key_value_heads, config.head_dim
        block, opened = kv_format.block_bytes(*heads), kv_format.open_bytes(*heads)
        seen = (min(window or context_tokens, context_tokens) for window in config.layer_windows)
        return cls(
            kv_format=kv_format,
            bytes_per_token=config.num_hidden_layers * block / BLOCK_TOKENS,
            context_bytes=sum(block * blocks_for(tokens) for tokens in seen),
            open_bytes=config.num_hidden_layers * opened,
        )


@dataclass(frozen=True, slots=True)
class WeightsSummary:
    """How weights are stored.

    Attributes:
        format: Of most of the linear layers' weights.
        matrices: Format → how many matrices have it.
        bits_per_weight: Of the quantized matrices, scales included; of all tensors if none is.
        sizes: Bytes on disk: `linear`, `head`, `embedding`, `norms` (and biases), `unused`.
    """

    format: Format
    matrices: dict[str, int]
    bits_per_weight: float
    sizes: dict[str, int]

    @property
    def scheme(self) -> str:
        """The format as `--scheme` calls it."""
        if isinstance(self.format, Affine):
            return f"int{self.format.bits}"
        if isinstance(self.format, NF4):
            return "nf4"
        return self.format.dtype.replace("bfloat", "bf").replace("float", "fp")

    @property
    def group_size(self) -> int | None:
        """Weights that share a scale; None where a row does, or where there is none."""
        if isinstance(self.format, Affine):
            return self.format.group_size
        return self.format.block_size if isinstance(self.format, NF4) else None


@dataclass(frozen=True, slots=True)
class Inspection:
    """A model directory.

    Attributes:
        directory: The directory.
        config: Its configuration.
        record: What `qinfer convert` wrote about it; empty if it did not.
        parameters: Weights of the model; a head that was tied to the embedding counts once.
        weights: How they are stored.
        context_tokens: Of the sequence that `kv` and `kv_sizes` are about.
        kv: The key-value cache as asked for, or by default.
        kv_sizes: The same at 16, 8 and 4 bits, as far as they fit the model.
    """

    directory: Path
    config: ModelConfig
    record: dict[str, Any]
    parameters: int
    weights: WeightsSummary
    context_tokens: int
    kv: KVSize
    kv_sizes: list[KVSize]


def inspect(
    directory: Path, *, kv_format: KVFormat | None = None, context_tokens: int | None = None
) -> Inspection:
    """Look at a model directory; of the weights, only headers are read.

    Args:
        directory: A Hugging Face directory.
        kv_format: Of the cache; None is the directory's default.
        context_tokens: Length of a sequence; None is the model's context.

    Raises:
        CheckpointError: Something is missing, damaged or does not fit together.
        QInferError: The cache does not fit the model.
        UnsupportedModelError: Architecture or weight format is not covered.
    """
    raw = read_json(directory / "config.json")
    config = ModelConfig.from_dict(raw, origin=str(directory / "config.json"))
    check_quantization(raw, directory)
    context = config.context_tokens(context_tokens)
    kv_format = kv_format or KVFormat.stored(directory)
    kv_format.check(config.head_dim)
    checkpoint, record = Checkpoint(directory), read_record(directory) or {}
    specs = list(
        expected_tensors(config, prefix_in(checkpoint.tensors, TABLE[config.architecture]))
    )
    recorded = record.get("parameters")
    return Inspection(
        directory=directory,
        config=config,
        record=record,
        parameters=recorded if type(recorded) is int else sum(map(_weights_of, specs)),
        weights=_summary(checkpoint, config, specs),
        context_tokens=context,
        kv=KVSize.of(config, kv_format, context),
        kv_sizes=[
            KVSize.of(config, KVFormat(bits, bits), context)
            for bits in _COMPARED_BITS
            if bits > 4 or config.head_dim % 2 == 0
        ],
    )


def _summary(
    checkpoint: Checkpoint, config: ModelConfig, specs: Sequence[TensorSpec]
) -> WeightsSummary:
    formats = dict(_formats(checkpoint, config, specs))
    linear: Counter[Format] = Counter()
    for spec, its in formats.items():
        linear[its] += _weights_of(spec) if spec.role == "linear" else 0
    by_frequency = [its for its, _ in linear.most_common()]
    by_kind, by_module = _sizes(checkpoint, specs)
    quantized = [spec for spec, its in formats.items() if not isinstance(its, Dense)]
    stored = sum(by_module[spec.module] for spec in quantized) or sum(by_kind.values())
    counts = Counter(formats.values())
    return WeightsSummary(
        format=by_frequency[0],
        matrices={str(its): counts[its] for its in by_frequency},
        bits_per_weight=8 * stored / sum(map(_weights_of, quantized or specs)),
        sizes=by_kind,
    )


def _weights_of(spec: TensorSpec) -> int:
    return math.prod(spec.shape)


def _formats(
    checkpoint: Checkpoint, config: ModelConfig, specs: Sequence[TensorSpec]
) -> Iterator[tuple[TensorSpec, Format]]:
    """Each matrix with its format; vectors are only checked."""
    transposes = TABLE[config.architecture].transposed
    for spec in specs:
        if spec.role in ("linear", "head"):
            transposed = transposes and spec.role == "linear"
            n, k = spec.shape[::-1] if transposed else spec.shape
            yield spec, _format(load_weight(checkpoint, spec.module, (n, k), transposed=transposed))
            continue
        info = checkpoint[spec.name]
        if info.shape != spec.shape:
            raise CheckpointError(
                f"{spec.name} has shape {list(info.shape)}, config.json implies {list(spec.shape)}",
                hint="Weights and config.json do not belong together; download the model again.",
            )
        if spec.role == "embedding":
            yield spec, Dense(_name_of(info.torch_dtype))


def _format(weight: Weight) -> Format:
    if isinstance(weight, AffineWeight):
        groups = weight.scale.shape[1]
        return Affine(weight.bits, weight.columns // groups if groups > 1 else None)
    if isinstance(weight, NF4Weight):
        return NF4("bfloat16", weight.block_size)
    return Dense(_name_of(weight.data.dtype if isinstance(weight, DenseWeight) else None))


def _name_of(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(
    checkpoint: Checkpoint, specs: Sequence[TensorSpec]
) -> tuple[dict[str, int], Counter[str]]:
    """Bytes on disk by kind, and of each matrix by its module."""
    kinds = {spec.module: spec.role for spec in specs if spec.role != "vector"}
    vectors = {spec.name for spec in specs if spec.role == "vector"}
    by_kind = dict.fromkeys(("linear", "head", "embedding", "norms", "unused"), 0)
    by_module: Counter[str] = Counter()
    for name, info in checkpoint.tensors.items():
        module = name
        while module and module not in kinds:
            module = module.rpartition(".")[0]
        kind = "norms" if name in vectors else kinds.get(module, "unused")
        by_kind[kind] += info.nbytes
        if kind != "norms":
            by_module[module] += info.nbytes
    return by_kind, by_module
