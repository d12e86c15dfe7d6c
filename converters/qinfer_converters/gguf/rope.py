"""The rotary scaling of a GGUF file as Hugging Face's `rope_scaling`.

GGUF states linear and YaRN scaling as keys, but Llama 3.1's as the finished factors by which the
wavelengths are multiplied, so its parameters have to be found again.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qinfer.errors import UnsupportedModelError
from qinfer_converters.gguf.layout import ROPE_FACTORS
from qinfer_converters.gguf.metadata import Metadata

_TOLERANCE = 1e-3
_USUAL_CONTEXT = 8192
_Factors = NDArray[np.float64]


def rope_scaling(
    metadata: Metadata, arch: str, head_dim: int, theta: float, factors: _Factors | None
) -> dict[str, Any] | None:
    """Build the `rope_scaling` entry of `config.json`.

    Args:
        metadata: The file's key-value pairs.
        arch: The file's architecture, the first part of its keys.
        head_dim: Size of a head, all of which is rotated.
        theta: The rotary base.
        factors: `[head_dim / 2]`, the file's wavelength factors, if it has some.

    Returns:
        The entry, or `None` without scaling.

    Raises:
        UnsupportedModelError: The scaling is of a kind that is not known here.
    """
    declared = _declared(metadata, arch)
    if factors is None:
        return declared
    if declared is not None:
        raise UnsupportedModelError(
            f"{metadata.path}: both {arch}.rope.scaling keys and the tensor {ROPE_FACTORS}"
        )
    if np.allclose(factors, 1.0, rtol=0, atol=_TOLERANCE):
        return None
    hint = metadata.integer(f"{arch}.rope.scaling.original_context_length")
    return _find_llama3(metadata, head_dim, theta, factors, hint or _USUAL_CONTEXT)


def _declared(metadata: Metadata, arch: str) -> dict[str, Any] | None:
    """The scaling that the keys state."""
    prefix = f"{arch}.rope.scaling"
    factor = metadata.number(f"{prefix}.factor") or metadata.number(f"{arch}.rope.scale_linear")
    kind = metadata.string(f"{prefix}.type") or ("linear" if factor else "none")
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{metadata.path}: key {prefix}.type is {kind}, supported are none, linear and yarn"
        )
    if not factor or not math.isfinite(factor) or factor < 1:
        raise UnsupportedModelError(
            f"{metadata.path}: key {prefix}.factor is {factor}, expected a number of at least 1"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(str(np.float32(factor)))}
    if kind == "linear":
        return scaling
    for key, plain in (("attn_factor", 1), ("yarn_attn_factor", 1), ("yarn_ext_factor", 1)):
        if (metadata.number(f"{prefix}.{key}") or plain) != plain:
            raise UnsupportedModelError(f"{metadata.path}: key {prefix}.{key} is not supported")
    original = metadata.integer(f"{prefix}.original_context_length")
    if original:
        scaling["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        beta = metadata.number(f"{prefix}.yarn_{name}")
        if beta is not None:
            scaling[name] = beta
    return scaling


def llama3_factors(head_dim: int, theta: float, scaling: dict[str, Any]) -> _Factors:
    """The wavelength factors of Llama 3.1's scaling, `[head_dim / 2]`.

    Short wavelengths stay, long ones are multiplied by `factor`, and between them the frequency
    is interpolated linearly in the number of turns within the original context.
    """
    turns = scaling["original_max_position_embeddings"] / _wavelengths(head_dim, theta)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    factors: _Factors = 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
    return factors


def _wavelengths(head_dim: int, theta: float) -> _Factors:
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    wavelengths: _Factors = 2.0 * math.pi * theta**exponents
    return wavelengths


def _find_llama3(
    metadata: Metadata, head_dim: int, theta: float, factors: _Factors, context: int
) -> dict[str, Any]:
    """Parameters that reproduce the factors; Llama's own ones are tried first."""
    largest = float(factors.max())
    rounded = float(round(largest)) if abs(largest - round(largest)) < _TOLERANCE else largest
    candidates = [_llama3(rounded, 1.0, 4.0, context), _llama3(rounded, 1.0, 4.0, _USUAL_CONTEXT)]
    fitted = _fit(head_dim, theta, factors, rounded)
    candidates += [fitted] if fitted else []
    for scaling in candidates:
        error = np.abs(llama3_factors(head_dim, theta, scaling) / factors - 1.0)
        if error.max() <= _TOLERANCE:
            return scaling
    raise UnsupportedModelError(
        f"{metadata.path}: tensor {ROPE_FACTORS} is not the rotary scaling of Llama 3.1",
        hint="Convert the model from its safetensors files instead.",
    )


def _llama3(factor: float, low: float, high: float, context: int) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _fit(head_dim: int, theta: float, factors: _Factors, largest: float) -> dict[str, Any] | None:
    """Least squares over the interpolated factors, with `low_freq_factor` set to 1.

    Only the quotients of the context and the two frequency factors matter, so one is free.
    """
    between = (factors > 1.0 + _TOLERANCE) & (factors < largest * (1.0 - _TOLERANCE))
    if between.sum() < 2:
        return None
    smooth = (1.0 / factors[between] - 1.0 / largest) / (1.0 - 1.0 / largest)
    frequency = 1.0 / _wavelengths(head_dim, theta)[between]
    slope, offset = np.polyfit(frequency, smooth, 1)  # (context · f - 1) / (high - 1)
    if slope <= 0 or offset >= 0:
        return None
    high = 1.0 - 1.0 / float(offset)
    return _llama3(largest, 1.0, round(high, 3), round(float(slope) * (high - 1.0)))
