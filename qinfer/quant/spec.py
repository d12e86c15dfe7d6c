"""The weight formats as data: what each scheme does to a linear layer, the head, and the rest."""

from __future__ import annotations

from dataclasses import dataclass

GROUP_SIZES = (128, 64, 32)
SMALL_MODEL_PARAMETERS = 3_000_000_000


@dataclass(frozen=True, slots=True)
class Affine:
    """Symmetric integers with a scale per group along the input axis: `w ≈ q · s`.

    Attributes:
        bits: 4 or 8.
        group_size: Weights that share a scale; None is one scale per output channel.
    """

    bits: int
    group_size: int | None

    def __str__(self) -> str:
        return f"int{self.bits} " + (f"g{self.group_size}" if self.group_size else "per channel")


@dataclass(frozen=True, slots=True)
class NF4:
    """4-bit NormalFloat in blocks of the flattened weight: QLoRA, arXiv 2305.14314.

    Attributes:
        dtype: Of the dense weight that it stands for, `bfloat16` or `float16`.
        block_size: Weights that share an absolute maximum.
    """

    dtype: str
    block_size: int = 64

    def __str__(self) -> str:
        return f"nf4 blocks of {self.block_size}"


@dataclass(frozen=True, slots=True)
class Dense:
    """Not quantized.

    Attributes:
        dtype: `bfloat16` or `float16`.
    """

    dtype: str

    def __str__(self) -> str:
        return self.dtype


Format = Affine | NF4 | Dense


@dataclass(frozen=True, slots=True)
class Scheme:
    """What `--scheme` names.

    Attributes:
        bits: Of a linear layer's weights.
        quant_method: The name in `quantization_config`, None where there is none.
        quantizes_head: Whether the output head becomes an int8 tensor of its own.
        groups: Whether `--group-size` applies.
    """

    bits: int
    quant_method: str | None
    quantizes_head: bool
    groups: bool


SCHEMES = {
    "int8": Scheme(8, "compressed-tensors", quantizes_head=True, groups=True),
    "int4": Scheme(4, "compressed-tensors", quantizes_head=True, groups=True),
    "nf4": Scheme(4, "bitsandbytes", quantizes_head=False, groups=False),
    "bf16": Scheme(16, None, quantizes_head=False, groups=False),
}


def default_group_size(parameters: int) -> int:
    """The int4 group size for a model of this many parameters, where the user gave none."""
    return 32 if parameters < SMALL_MODEL_PARAMETERS else 64
