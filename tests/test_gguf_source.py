"""GGUF models as a source: weights, configuration and errors against transformers and gguf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer_converters.gguf.rope import llama3_factors
from qinfer_converters.gguf.source import GGUFSource
from tests.gguf_files import (
    Type,
    as_f32,
    from_state_dict,
    llama_keys,
    llama_tensors,
    pair_up_rotary,
    tiny_vocabulary,
    write,
)

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden / heads
    "vocab_size": 259,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
QWEN2 = {"hidden_size": 128, "head_dim": 32}  # transformers derives qwen2's head size
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 259}
MODELS: dict[str, tuple[str, MODEL_ARCH, dict[str, Any]]] = {
    "llama": ("llama", MODEL_ARCH.LLAMA, BASE | {"tie_word_embeddings": True}),
    "llama-bias": (
        "llama",
        MODEL_ARCH.LLAMA,
        BASE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "mistral": ("mistral", MODEL_ARCH.LLAMA, BASE | {"sliding_window": 16}),
    "qwen2": ("qwen2", MODEL_ARCH.QWEN2, BASE | QWEN2 | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", MODEL_ARCH.QWEN3, BASE | {"tie_word_embeddings": False}),
    "gpt2": ("gpt2", MODEL_ARCH.GPT2, GPT2 | {"bos_token_id": 0, "eos_token_id": 1}),
}
ARCH_NAMES = {MODEL_ARCH.LLAMA: "llama", MODEL_ARCH.QWEN2: "qwen2", MODEL_ARCH.QWEN3: "qwen3"}


def reference(name: str) -> Any:
    """A random transformers model; norms and biases are random too, so that none can be lost."""
    model_type, _, options = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model.eval()


def keys_of(name: str) -> dict[str, Any]:
    _, arch, options = MODELS[name]
    if arch == MODEL_ARCH.GPT2:
        return {
            "general.architecture": "gpt2",
            "gpt2.block_count": options["n_layer"],
            "gpt2.context_length": options["n_positions"],
            "gpt2.embedding_length": options["n_embd"],
            "gpt2.feed_forward_length": 4 * options["n_embd"],
            "gpt2.attention.head_count": options["n_head"],
            "gpt2.attention.layer_norm_epsilon": 1e-5,
            **tiny_vocabulary(),
        }
    changes = {
        "block_count": options["num_hidden_layers"],
        "context_length": options["max_position_embeddings"],
        "embedding_length": options["hidden_size"],
        "feed_forward_length": options["intermediate_size"],
        "attention.head_count": options["num_attention_heads"],
        "attention.head_count_kv": options["num_key_value_heads"],
        "attention.key_length": options["head_dim"],
        "attention.value_length": options["head_dim"],
        "attention.layer_norm_rms_epsilon": options["rms_norm_eps"],
        "attention.sliding_window": options.get("sliding_window"),
        "rope.freq_base": options["rope_theta"],
        "rope.dimension_count": options["head_dim"],
    }
    return llama_keys(ARCH_NAMES[arch], **changes)


def write_reference(path: Path, name: str, model: Any) -> Path:
    _, arch, options = MODELS[name]
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    heads = (options.get("num_attention_heads", 4), options.get("num_key_value_heads", 4))
    return write(path, keys_of(name), as_f32(from_state_dict(arch, state, 2, heads)))


@pytest.mark.parametrize("name", MODELS)
def test_a_written_model_comes_back_as_the_same_transformers_model(
    tmp_path: Path, name: str
) -> None:
    model = reference(name)
    source = GGUFSource(write_reference(tmp_path / "m.gguf", name, model), label="the label")
    assert source.label == "the label"
    state = {key: source.read(key, 0, found.shape[0]) for key, found in source.tensors.items()}
    expected = dict(model.state_dict())
    if source.config["tie_word_embeddings"]:
        del expected["lm_head.weight"]
    assert state.keys() == expected.keys()
    for key, values in state.items():
        assert source.tensors[key].shape == tuple(values.shape)
        assert source.tensors[key].kind == "F32"
        assert source.tensors[key].nbytes == values.nbytes
        assert values.equal(expected[key]), key

    config = dict(source.config)
    model_type = config.pop("model_type")
    assert model_type == MODELS[name][0]
    rebuilt = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **config), dtype=torch.float32
    ).eval()
    assert type(rebuilt).__name__ == config["architectures"][0] == type(model).__name__
    missing, unexpected = rebuilt.load_state_dict(state, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if config["tie_word_embeddings"] else [])
    rebuilt.tie_weights()
    ids = torch.arange(40).reshape(1, 40) * 5 % 259
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(ids).logits, model(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama-bias", "gpt2"])
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_range_of_rows_is_a_slice_of_the_whole(
    tmp_path: Path, name: str, data: st.DataObject
) -> None:
    path = tmp_path / "m.gguf"
    if not path.exists():
        write_reference(path, name, reference(name))
    source = GGUFSource(path)
    key = data.draw(st.sampled_from(sorted(source.tensors)))
    rows = source.tensors[key].shape[0]
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    part = source.read(key, start, stop)
    assert part.equal(source.read(key, 0, rows)[start:stop])
    assert part.is_contiguous()
    assert part.untyped_storage().nbytes() == part.nbytes  # owns exactly its own memory


def test_transposed_tensors_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reference("gpt2")
    source = GGUFSource(write_reference(tmp_path / "m.gguf", "gpt2", model))
    monkeypatch.setattr("qinfer_converters.gguf.source._TRANSPOSE_BYTES", 64 * 4 * 7)
    key = "transformer.h.1.mlp.c_fc.weight"
    assert source.read(key, 3, 50).equal(model.state_dict()[key][3:50])


def test_rows_out_of_range_are_a_bug_of_the_caller(tmp_path: Path) -> None:
    source = GGUFSource(write(tmp_path / "m.gguf", llama_keys(), as_f32(llama_tensors())))
    with pytest.raises(IndexError):
        source.read("model.embed_tokens.weight", 0, 260)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ2_0"])
def test_types_are_dequantized(tmp_path: Path, kind: str) -> None:
    tensors = llama_tensors()
    stored = {
        name: Type[kind] if values.ndim == 2 else Type.F32 for name, values in tensors.items()
    }
    listed = [(name, values, stored[name]) for name, values in tensors.items()]
    source = GGUFSource(write(tmp_path / "m.gguf", llama_keys(), listed))
    found = source.tensors["model.layers.0.mlp.down_proj.weight"]
    block, size = GGML_QUANT_SIZES[Type[kind]]
    assert (found.kind, found.nbytes) == (kind, 256 * 512 // block * size)
    weight = tensors["blk.0.ffn_down.weight"]
    expected = torch.from_numpy(dequantize(quantize(weight, Type[kind]), Type[kind]))
    values = source.read(found.name, 7, 99)
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert values.dtype == dtype
    assert values.float().equal(expected[7:99])
    assert source.read("model.norm.weight", 0, 256).dtype == torch.float32


def test_k_quants_have_their_published_meaning(tmp_path: Path) -> None:
    one = np.float16(1).tobytes()
    # Q4_K: d, dmin, 12 bytes of 6-bit scales and minimums, 128 of nibbles; w = d·s·q - dmin·m.
    # First four groups: scale 3, minimum 2; last four: scale 5 and minimum 1.
    q4 = one + one + bytes([3] * 4 + [2] * 4 + [0x15] * 4) + bytes([0x71] * 128)
    # Q6_K: 128 low nibbles, 64 high pairs, 16 int8 scales, d; w = d·s·(q - 32).
    q6 = bytes([0x21] * 128) + bytes([0b11_10_01_00] * 64) + bytes([2] * 8 + [255] * 8) + one
    tensors = llama_tensors()
    stored = as_f32(tensors)
    for name, block, kind in (
        ("blk.0.ffn_up.weight", q4, Type.Q4_K),
        ("blk.0.attn_v.weight", q6, Type.Q6_K),
    ):
        rows = np.frombuffer(block * tensors[name].shape[0], np.uint8)
        place = next(index for index, entry in enumerate(stored) if entry[0] == name)
        stored[place] = (name, rows.reshape(tensors[name].shape[0], -1).copy(), kind)
    source = GGUFSource(write(tmp_path / "m.gguf", llama_keys(), stored))
    up = source.read("model.layers.0.mlp.up_proj.weight", 511, 512)[0]
    groups = [
        3 * 1 - 2,
        3 * 7 - 2,
        3 * 1 - 2,
        3 * 7 - 2,
        5 * 1 - 1,
        5 * 7 - 1,
        5 * 1 - 1,
        5 * 7 - 1,
    ]
    assert up.reshape(8, 32).tolist() == [[float(value)] * 32 for value in groups]
    value = source.read("model.layers.0.self_attn.v_proj.weight", 5, 6)[0]
    codes = [1, 1 + 16, 2 + 32, 2 + 48]
    expected = [2.0 * (code - 32) for code in codes] + [-1.0 * (code - 32) for code in codes]
    assert value.reshape(8, 32).tolist() == [[number] * 32 for number in expected]


def test_quantized_queries_are_reordered_after_dequantizing(tmp_path: Path) -> None:
    tensors = llama_tensors()
    original = tensors["blk.0.attn_q.weight"]
    tensors["blk.0.attn_q.weight"] = pair_up_rotary(original, 4)
    listed = [
        (name, values, Type.Q8_0 if "attn_q" in name else Type.F32)
        for name, values in tensors.items()
    ]
    source = GGUFSource(write(tmp_path / "m.gguf", llama_keys(), listed))
    expected = torch.from_numpy(dequantize(quantize(original, Type.Q8_0), Type.Q8_0))
    assert source.read("model.layers.0.self_attn.q_proj.weight", 33, 200).equal(expected[33:200])


def build(path: Path, keys: dict[str, Any], **more: np.ndarray[Any, Any]) -> GGUFSource:
    tensors = llama_tensors() | {name.replace("__", "."): values for name, values in more.items()}
    return GGUFSource(write(path / "m.gguf", keys, as_f32(tensors)))


def test_config_and_generation_config(tmp_path: Path) -> None:
    keys = llama_keys() | {
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 6,
        "tokenizer.ggml.padding_token_id": 7,
    }
    source = build(tmp_path, keys)
    assert source.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": 259,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 7,
        "torch_dtype": "bfloat16",
    }
    assert source.generation_config == {
        "bos_token_id": 0,
        "eos_token_id": [1, 5, 6],
        "pad_token_id": 7,
    }


def test_control_tokens_that_end_a_turn_stop_generation_without_a_key(tmp_path: Path) -> None:
    keys = llama_keys()
    keys["tokenizer.ggml.tokens"][20:22] = ["<|eot_id|>", "<|im_end|>"]
    keys["tokenizer.ggml.token_type"][20] = 3  # the other one is an ordinary token
    keys["tokenizer.ggml.padding_token_id"] = 2**32 - 1  # how some files say none
    source = build(tmp_path, keys)
    assert source.generation_config == {"bos_token_id": 0, "eos_token_id": [1, 20]}


LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = {
    "llama 3.2": (500000.0, 8192, LLAMA3),
    "llama 3.1": (500000.0, 8192, LLAMA3 | {"factor": 8.0}),
    "other context": (500000.0, 4096, LLAMA3 | {"factor": 16.0}),
    "other frequencies": (1e6, 8192, LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 20.0}),
}


def hf_llama3_factors(theta: float, scaling: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Factors from transformers' own frequencies."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    options = BASE | {"hidden_size": 256, "head_dim": 64}
    del options["rope_theta"]
    config = AutoConfig.for_model(
        "llama", **options, rope_parameters=scaling | {"rope_theta": theta, "rope_type": "llama3"}
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** (-np.arange(0, 64, 2) / 64)
    return np.asarray(plain / frequencies.double().numpy(), np.float32)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("stated", [False, True])
def test_llama3_scaling_is_found_from_its_factors(tmp_path: Path, name: str, stated: bool) -> None:
    theta, context, parameters = SCALINGS[name]
    scaling = parameters | {"original_max_position_embeddings": context}
    factors = hf_llama3_factors(theta, scaling)
    assert 1.0 == factors[0] < factors[-1]
    keys = llama_keys(rope__freq_base=theta)
    if stated:
        keys["llama.rope.scaling.original_context_length"] = context
    source = build(tmp_path, keys, rope_freqs__weight=factors)
    found = source.config["rope_scaling"]
    assert found["rope_type"] == "llama3"
    np.testing.assert_allclose(hf_llama3_factors(theta, found), factors, rtol=1e-3)
    np.testing.assert_allclose(llama3_factors(64, theta, found), factors, rtol=1e-3)
    if name.startswith("llama"):
        assert found == {"rope_type": "llama3"} | scaling


def test_factors_of_one_are_no_scaling(tmp_path: Path) -> None:
    source = build(tmp_path, llama_keys(), rope_freqs__weight=np.ones(32, np.float32))
    assert source.config["rope_scaling"] is None


def test_other_factors_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 32, dtype=np.float32) ** 1.5
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        build(tmp_path, llama_keys(), rope_freqs__weight=factors)
    with pytest.raises(CheckpointError, match="impossible values"):
        build(tmp_path, llama_keys(), rope_freqs__weight=np.full(32, np.nan, np.float32))
    with pytest.raises(CheckpointError, match="shape"):
        build(tmp_path, llama_keys(), rope_freqs__weight=np.ones(31, np.float32))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}, "linear"),
        ({"rope.scaling.factor": 2.5}, "linear"),
        ({"rope.scale_linear": 2.5}, "linear"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, None),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
            },
            "yarn",
        ),
    ],
)
def test_stated_rope_scaling(tmp_path: Path, changes: dict[str, Any], expected: str | None) -> None:
    source = build(tmp_path, llama_keys(**changes))
    linear = {"rope_type": "linear", "factor": 2.5}
    assert source.config["rope_scaling"] == {None: None, "linear": linear, "yarn": YARN}[expected]


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"expert_count": 8}, "expert_count = 8"),
    "longrope": ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "is longrope"),
    "yarn factor": ({"rope.scaling.type": "yarn"}, "factor is None"),
    "partial rotary": ({"rope.dimension_count": 32}, "dimension_count is 32"),
    "value size": ({"attention.value_length": 32}, "value_length is 32"),
    "soft cap": ({"attn_logit_softcapping": 50.0}, "softcapping = 50"),
    "per block": ({"attention.head_count_kv": [2, 1]}, "differs between blocks"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_variants_are_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, message = UNSUPPORTED[case]
    with pytest.raises(UnsupportedModelError, match=message):
        build(tmp_path, llama_keys(**changes))


def test_other_architectures_are_refused_with_a_list(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="architecture gemma3") as caught:
        build(tmp_path, llama_keys("gemma3"))
    assert "llama, qwen2, qwen3, gpt2" in str(caught.value.hint)


def test_tensor_types_without_a_meaning_are_refused(tmp_path: Path) -> None:
    stored = [entry for entry in as_f32(llama_tensors()) if entry[0] != "output_norm.weight"]
    stored.append(("output_norm.weight", np.zeros(292, np.uint8), Type.Q8_K))
    with pytest.raises(UnsupportedModelError, match=r"output_norm\.weight is stored as Q8_K"):
        GGUFSource(write(tmp_path / "m.gguf", llama_keys(), stored))


REQUIRED = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_keys_are_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"key llama.{key} is missing"):
        build(tmp_path, llama_keys(**{key: None}))


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "zero blocks": ({"block_count": 0}, "expected a positive integer"),
    "many blocks": ({"block_count": 10**9}, "more than there are tensors"),
    "kv heads": ({"attention.head_count_kv": 3}, "do not fit together"),
    "odd heads": ({"attention.key_length": 7}, "do not fit together"),
    "string": ({"embedding_length": "256"}, "holds a str, expected an integer"),
    "base": ({"rope.freq_base": 0.0}, "freq_base is 0.0"),
    "epsilon": ({"attention.layer_norm_rms_epsilon": float("nan")}, "is nan"),
    "width": ({"embedding_length": 512}, "has the shape"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_keys_are_named(tmp_path: Path, case: str) -> None:
    changes, message = IMPOSSIBLE[case]
    with pytest.raises(CheckpointError, match=message):
        build(tmp_path, llama_keys(**changes))


def test_unknown_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    vector = np.ones(256, np.float32)
    for name in ("blk.0.attn_q_norm.weight", "blk.1.attn_norm.weight", "extra", "blk.00.attn_q"):
        with pytest.raises(CheckpointError, match=f"cannot place tensor {name}"):
            build(tmp_path, llama_keys(), **{name: vector})
    tensors = llama_tensors()
    del tensors["blk.0.ffn_up.weight"]
    with pytest.raises(CheckpointError, match=r"missing tensor blk\.0\.ffn_up\.weight"):
        GGUFSource(write(tmp_path / "m.gguf", llama_keys(), as_f32(tensors)))
    with pytest.raises(CheckpointError, match=r"shape \[255\], expected \[256\]"):
        build(tmp_path, llama_keys(), output_norm__weight=vector[:255])


def test_biases_on_some_projections_only_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="only some of attn_q"):
        build(tmp_path, llama_keys(), blk__0__attn_q__bias=np.ones(256, np.float32))
