"""A model's configuration, read from Hugging Face's `config.json` and checked before any weight.

Old and new key names are both accepted (`rope_theta`/`rope_scaling` and `rope_parameters`,
`torch_dtype` and `dtype`), and a missing key means what it means to transformers. What can be
said in the file but not computed here is a named error. Tensor names are not here: see
`qinfer.models.architectures`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qinfer.errors import CheckpointError, QInferError, UnsupportedModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
DTYPES = ("bfloat16", "float16", "float32")
_MAX_LAYERS = 10_000
_MAX_NUMBER = 1e38  # within fp32
_DAMAGED = "The file is damaged; download or convert it again."


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: Base of the frequencies.
        kind: One of `ROPE_TYPES`.
        parameters: What the kind needs, under transformers' names.
    """

    theta: float
    kind: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the decoder needs to know, under Hugging Face's names.

    Attributes:
        rope: None where positions are learned (GPT-2).
        layer_windows: Per layer, the number of tokens attention sees, itself included; None is all.
        qkv_bias: Whether q, k and v projections have biases.
        qk_norm: Whether q and k are RMS-normalized per head before rotary.
        dtype: 16-bit type of the stored model, or `float32`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    rope: RopeConfig | None
    layer_windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, directory: Path) -> ModelConfig:
        """Read a model directory's `config.json`.

        Raises:
            CheckpointError: It is missing, or a key is missing or has an impossible value.
            UnsupportedModelError: The architecture, rope type or activation is not covered.
        """
        path = directory / "config.json"
        return cls.from_dict(read_json(path), origin=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, origin: str = "config.json") -> ModelConfig:
        """Read a parsed `config.json`.

        Args:
            raw: The dictionary.
            origin: Named in errors.

        Raises:
            CheckpointError: A key is missing or has an impossible value.
            UnsupportedModelError: The architecture, rope type or activation is not covered.
        """
        names = raw.get("architectures") or []
        name = str(names[0]) if isinstance(names, list) and names else None
        read = _PARSERS.get(name) if name is not None else None
        if name is None or read is None:
            raise UnsupportedModelError(
                f"{origin}: architecture {name or 'missing'} is not supported",
                hint=f"Supported: {', '.join(_PARSERS)}",
            )
        config = cls(architecture=name, **read(_Fields(raw, origin)))
        config._check(origin)
        return config

    def context_tokens(self, asked: int | None) -> int:
        """Most tokens of a sequence: what is asked for, else all the positions there are.

        Raises:
            QInferError: More is asked for than there are.
        """
        limit = self.max_position_embeddings
        if asked is not None and asked > limit:
            raise QInferError(
                f"--ctx-size {asked:,} is more than the model's {limit:,} positions",
                hint=f"Use {limit} or less.",
            )
        return asked or limit

    def _check(self, origin: str) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"{origin}: {self.num_attention_heads} attention heads cannot share "
                f"{self.num_key_value_heads} key-value heads",
                hint="num_attention_heads must be a multiple of num_key_value_heads.",
            )
        if self.rope is not None and self.head_dim % 2:
            raise CheckpointError(
                f"{origin}: head_dim {self.head_dim} is odd, rotary embedding needs pairs",
                hint="Check head_dim, hidden_size and num_attention_heads.",
            )


class _Fields:
    """Typed access to a configuration dictionary, with errors that name the key."""

    def __init__(self, raw: Mapping[str, Any], origin: str) -> None:
        self.raw = raw
        self.origin = origin

    def error(self, key: str, expected: str) -> CheckpointError:
        found = json.dumps(self.raw.get(key), default=str)
        found = found if len(found) <= 80 else f"{found[:80]}…"
        return CheckpointError(
            f"{self.origin}: {key} must be {expected}, found {found}",
            hint="The file is incomplete or damaged; download it again.",
        )

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < 2**31:
            raise self.error(key, f"an integer of {minimum} or more")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, "a number")
        if not 0 < value <= _MAX_NUMBER:
            raise self.error(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def choice(self, key: str, options: tuple[str, ...], default: str) -> str:
        value = self.raw.get(key)
        value = default if value is None else value
        if value not in options:
            raise UnsupportedModelError(
                f"{self.origin}: {key} {value!r} is not supported",
                hint=f"Supported: {', '.join(options)}",
            )
        return str(value)

    def token_ids(self, key: str, default: int | None = None) -> tuple[int, ...]:
        value = self.raw.get(key, default)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            raise self.error(key, "a token id or a list of them")
        return tuple(v for v in values if v >= 0)

    def layers(self, key: str, default: int | None = None) -> int:
        count = self.integer(key, default)
        if count > _MAX_LAYERS:
            raise self.error(key, f"at most {_MAX_LAYERS:,}")
        return count

    def dtype(self) -> str:
        value = self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32"
        value = str(value).removeprefix("torch.")
        if value not in DTYPES:
            raise UnsupportedModelError(
                f"{self.origin}: dtype {value!r} is not supported",
                hint=f"Supported: {', '.join(DTYPES)}",
            )
        return value


def _common(f: _Fields, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
    bos = f.token_ids("bos_token_id", bos_id)
    return {
        "vocab_size": f.integer("vocab_size"),
        "dtype": f.dtype(),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": f.token_ids("eos_token_id", eos_id),
    }


def _rotary_decoder(
    f: _Fields,
    *,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    bos_id: int | None = None,
    eos_id: int | None = None,
) -> dict[str, Any]:
    """The fields that Llama and its descendants share; the arguments are what absent keys mean."""
    heads = f.integer("num_attention_heads")
    hidden = f.integer("hidden_size")
    if "num_key_value_heads" in f.raw or kv_heads is None:  # null is as many as heads
        kv_heads = f.integer("num_key_value_heads", heads)
    if f.raw.get("head_dim") is not None:
        head_dim = f.integer("head_dim")
    if head_dim is None and hidden % heads:
        raise f.error("hidden_size", f"a multiple of num_attention_heads = {heads}")
    layers = f.layers("num_hidden_layers")
    return _common(f, bos_id, eos_id) | {
        "hidden_size": hidden,
        "intermediate_size": f.integer("intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "norm_eps": f.number("rms_norm_eps", 1e-6),
        "hidden_act": f.choice("hidden_act", ACTIVATIONS, "silu"),
        "tie_word_embeddings": f.flag("tie_word_embeddings", False),
        "rope": _rope(f),
        "layer_windows": (None,) * layers,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
    }


def _llama(f: _Fields) -> dict[str, Any]:
    attention_bias = f.flag("attention_bias", False)
    return _rotary_decoder(f, bos_id=1, eos_id=2) | {
        "max_position_embeddings": f.integer("max_position_embeddings", 2048),
        "qkv_bias": attention_bias,
        "o_bias": attention_bias,
        "mlp_bias": f.flag("mlp_bias", False),
    }


def _mistral(f: _Fields) -> dict[str, Any]:
    fields = _rotary_decoder(f, kv_heads=8, bos_id=1, eos_id=2)
    window: int | None = 4096  # transformers' default where the key is absent; null is none
    if "sliding_window" in f.raw:
        window = None if f.raw["sliding_window"] is None else f.integer("sliding_window")
    return fields | {
        "max_position_embeddings": f.integer("max_position_embeddings", 4096 * 32),
        "layer_windows": (window,) * fields["num_hidden_layers"],
    }


def _qwen2(f: _Fields) -> dict[str, Any]:
    fields = _rotary_decoder(f, kv_heads=32)
    return fields | {
        "max_position_embeddings": f.integer("max_position_embeddings", 32768),
        "layer_windows": _qwen_windows(f, fields["num_hidden_layers"]),
        "qkv_bias": True,
    }


def _qwen3(f: _Fields) -> dict[str, Any]:
    fields = _rotary_decoder(f, head_dim=128, kv_heads=32)
    attention_bias = f.flag("attention_bias", False)
    return fields | {
        "max_position_embeddings": f.integer("max_position_embeddings", 32768),
        "layer_windows": _qwen_windows(f, fields["num_hidden_layers"]),
        "qkv_bias": attention_bias,
        "o_bias": attention_bias,
        "qk_norm": True,
    }


def _qwen_windows(f: _Fields, layers: int) -> tuple[int | None, ...]:
    if not f.flag("use_sliding_window", False) or f.raw.get("sliding_window", 4096) is None:
        return (None,) * layers
    window = f.integer("sliding_window", 4096)
    kinds = f.raw.get("layer_types")
    if kinds is None:
        first = f.integer("max_window_layers", 28, minimum=0)
        return tuple(window if i >= first else None for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise f.error("layer_types", f"a list of {layers} entries")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"{f.origin}: layer type {kind!r} is not supported",
                hint="Supported: full_attention, sliding_attention",
            )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _gpt2(f: _Fields) -> dict[str, Any]:
    heads, hidden = f.integer("n_head", 12), f.integer("n_embd", 768)
    if hidden % heads:
        raise f.error("n_embd", f"a multiple of n_head = {heads}")
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"):
        if f.flag(key, False):
            raise UnsupportedModelError(
                f"{f.origin}: {key} is not supported", hint="Plain GPT-2 attention is."
            )
    if not f.flag("scale_attn_weights", True):
        raise UnsupportedModelError(
            f"{f.origin}: scale_attn_weights false is not supported",
            hint="Plain GPT-2 attention is.",
        )
    layers = f.layers("n_layer", 12)
    return _common(f, 50256, 50256) | {
        "hidden_size": hidden,
        "intermediate_size": f.integer("n_inner", 4 * hidden),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": f.integer("n_positions", 1024),
        "norm_eps": f.number("layer_norm_epsilon", 1e-5),
        "hidden_act": f.choice("activation_function", ACTIVATIONS, "gelu_new"),
        "tie_word_embeddings": f.flag("tie_word_embeddings", True),
        "rope": None,
        "layer_windows": (None,) * layers,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "qk_norm": False,
    }


_PARSERS: dict[str, Callable[[_Fields], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "GPT2LMHeadModel": _gpt2,
}
ARCHITECTURES = tuple(_PARSERS)

_ROPE_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def _rope(f: _Fields) -> RopeConfig:
    """Join the old keys (`rope_theta`, `rope_scaling`) and the new one (`rope_parameters`)."""
    parameters: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = f.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise f.error(key, "an object")
        parameters |= value or {}
    kind = str(parameters.pop("rope_type", None) or parameters.pop("type", None) or "default")
    parameters.pop("type", None)
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{f.origin}: rope type {kind!r} is not supported",
            hint=f"Supported: {', '.join(ROPE_TYPES)}",
        )
    theta = f.raw.get("rope_theta")
    defaults = {"rope_theta": 10000.0 if theta is None else theta}
    scaling = _Fields(defaults | parameters, f"{f.origin} rope")
    for key in _ROPE_REQUIRED[kind]:
        if parameters.get(key) is None or isinstance(parameters[key], bool):
            raise scaling.error(key, "a number")
    for key, value in parameters.items():
        if value is not None and not isinstance(value, bool):
            scaling.number(key, 1.0)
    partial = parameters.get("partial_rotary_factor") or f.raw.get("partial_rotary_factor")
    if partial is not None and partial != 1.0:
        raise UnsupportedModelError(
            f"{f.origin}: partial rotary embedding is not supported",
            hint="Only models that rotate whole heads are.",
        )
    parameters.pop("rope_theta", None)
    base = scaling.number("rope_theta", 10000.0)
    if kind == "yarn" and base <= 1:
        raise scaling.error("rope_theta", "more than 1")
    return RopeConfig(theta=base, kind=kind, parameters=parameters)


def token_ids(raw: Mapping[str, Any], key: str, *, origin: str) -> tuple[int, ...]:
    """Read a token id, or a list of them, from a parsed file; empty where the key is absent.

    Raises:
        CheckpointError: Something else is there.
    """
    return _Fields(raw, origin).token_ids(key)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: The file is missing, empty or not a JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}",
            hint="Name a Hugging Face model directory; qinfer convert SOURCE OUT writes one.",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise CheckpointError(f"{path} cannot be read: {reason}", hint=_DAMAGED) from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = "is empty" if not text.strip() else f"is not valid JSON: {error}"
        raise CheckpointError(f"{path} {what}", hint=_DAMAGED) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object", hint=_DAMAGED)
    return value
