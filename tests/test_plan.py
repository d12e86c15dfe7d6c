"""What becomes of every tensor is decided from headers, and what cannot be done is said first."""

import math
from types import SimpleNamespace

import pytest
import torch

from qinfer.config import ModelConfig
from qinfer.errors import CheckpointError, QInferError, UnsupportedModelError
from qinfer.models.architectures import TABLE, expected_tensors, linear_shapes, prefix_in
from qinfer.quant.spec import NF4, SCHEMES, Affine, Dense
from qinfer_converters.huggingface import HuggingFaceSource
from qinfer_converters.plan import make_plan, summary
from qinfer_converters.source import SourceTensor
from tests.tiny_models import SHAPES

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
}
LAYER = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
LINEAR = LAYER[2:]
VECTOR_NOTE = "norms and biases stay 16-bit"
EMBEDDING_NOTE = "embeddings stay 16-bit: only the rows used are read"
HEAD_NOTE = "the output head keeps 8 bits"
TIED_NOTE = "the output head keeps 8 bits; it was tied to the 16-bit embedding"
BNB_NOTE = "bitsandbytes checkpoints keep the output head 16-bit"


def fake_source(*, prefix=None, add=(), drop=(), reshape=None, **changes):
    """A source of headers only: sizes cost nothing, and reading would fail."""
    config = LLAMA | changes
    parsed = ModelConfig.from_dict(config)
    default = "transformer." if parsed.architecture == "GPT2LMHeadModel" else "model."
    shapes = {
        spec.name: spec.shape
        for spec in expected_tensors(parsed, default if prefix is None else prefix)
    }
    shapes |= dict(add) | (reshape or {})
    tensors = {
        name: SourceTensor(name, shape, "BF16", 2 * math.prod(shape))
        for name, shape in shapes.items()
        if name not in drop
    }
    return SimpleNamespace(label="src", fingerprint="f", config=config, tensors=tensors)


def gpt2_source(**changes):
    fields = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32} | changes
    return fake_source(architectures=["GPT2LMHeadModel"], model_type="gpt2", **fields)


def by_module(plan):
    assert len({t.module + t.source for t in plan.tensors}) == len(plan.tensors)
    return {t.source if isinstance(t.format, Dense) else t.module: t for t in plan.tensors}


def formats(plan):
    return {name: (tensor.format, tensor.note) for name, tensor in by_module(plan).items()}


def modules(config=LLAMA, names=LINEAR):
    return [f"model.layers.{i}.{n}" for i in range(config["num_hidden_layers"]) for n in names]


def dense_part(dtype="bfloat16"):
    norms = [f"model.layers.{i}.{n}.weight" for i in range(2) for n in LAYER[:2]]
    vectors = {n: (Dense(dtype), VECTOR_NOTE) for n in [*norms, "model.norm.weight"]}
    return vectors | {"model.embed_tokens.weight": (Dense(dtype), EMBEDDING_NOTE)}


@pytest.mark.parametrize(
    ("scheme", "group", "linear"),
    [
        ("int4", None, Affine(4, 32)),
        ("int4", 32, Affine(4, 32)),
        ("int8", None, Affine(8, None)),
        ("int8", 32, Affine(8, 32)),
        ("nf4", None, NF4("bfloat16")),
    ],
)
def test_formats_and_notes_of_llama(scheme, group, linear):
    plan = make_plan(fake_source(), scheme, group)
    head = {"lm_head": (Affine(8, None), HEAD_NOTE)}
    if scheme == "nf4":
        head = {"lm_head.weight": (Dense("bfloat16"), BNB_NOTE)}
    expected = dense_part() | dict.fromkeys(modules(), (linear, None)) | head
    assert formats(plan) == expected
    assert plan.group_size == (32 if scheme == "int4" else group)
    assert plan.scheme == scheme


def test_bf16_keeps_everything_without_notes():
    plan = make_plan(fake_source(torch_dtype="float16"), "bf16")
    assert {t.format for t in plan.tensors} == {Dense("bfloat16")}
    assert {t.note for t in plan.tensors} == {None}
    assert [t.source for t in plan.tensors] == list(fake_source().tensors)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")],
)
def test_sixteen_bit_parts_take_the_dtype_of_the_source(dtype, stored):
    plan = make_plan(fake_source(torch_dtype=dtype), "int4")
    assert plan.config["dtype"] == stored
    tensors = by_module(plan)
    layout = tensors["model.layers.0.mlp.up_proj"].outputs
    assert layout["model.layers.0.mlp.up_proj.weight_scale"][0] == getattr(torch, stored)
    assert tensors["model.norm.weight"].outputs["model.norm.weight"][0] == getattr(torch, stored)
    assert make_plan(fake_source(torch_dtype=dtype), "nf4").config["dtype"] == stored


def test_a_tied_head_becomes_a_tensor_of_its_own_last():
    plan = make_plan(fake_source(tie_word_embeddings=True), "int4")
    head = plan.tensors[-1]
    assert (head.source, head.module) == ("model.embed_tokens.weight", "lm_head")
    assert (head.format, head.note) == (Affine(8, None), TIED_NOTE)
    assert head.outputs == {
        "lm_head.weight_packed": (torch.int32, (100, 16)),
        "lm_head.weight_scale": (torch.bfloat16, (100, 1)),
        "lm_head.weight_shape": (torch.int64, (2,)),
    }
    assert plan.config["tie_word_embeddings"] is False
    untied = make_plan(fake_source(), "int4")
    assert plan.parameters == untied.parameters - 100 * 64


@pytest.mark.parametrize("scheme", ["nf4", "bf16"])
def test_a_tied_head_stays_tied_where_it_is_not_quantized(scheme):
    plan = make_plan(fake_source(tie_word_embeddings=True), scheme)
    assert "lm_head" not in {t.module for t in plan.tensors}
    assert plan.config["tie_word_embeddings"] is True


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_duplicate_of_a_tied_head_is_neither_used_nor_reported(scheme):
    source = fake_source(tie_word_embeddings=True, add={"lm_head.weight": (100, 64)})
    plan = make_plan(source, scheme)
    assert plan.dropped == []
    assert "lm_head.weight" not in {t.source for t in plan.tensors}


def test_layouts():
    q, down = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"
    int4 = by_module(make_plan(fake_source(), "int4"))
    assert int4[down].outputs == {
        f"{down}.weight_packed": (torch.int32, (64, 12)),
        f"{down}.weight_scale": (torch.bfloat16, (64, 3)),
        f"{down}.weight_shape": (torch.int64, (2,)),
    }
    int8 = by_module(make_plan(fake_source(), "int8"))
    assert int8[down].outputs == {
        f"{down}.weight_packed": (torch.int32, (64, 24)),
        f"{down}.weight_scale": (torch.bfloat16, (64, 1)),
        f"{down}.weight_shape": (torch.int64, (2,)),
    }
    nf4 = by_module(make_plan(fake_source(), "nf4"))
    state = nf4[q].outputs.pop(f"{q}.weight.quant_state.bitsandbytes__nf4")
    assert state[0] == torch.uint8
    assert nf4[q].outputs == {
        f"{q}.weight": (torch.uint8, (64 * 64 // 2, 1)),
        f"{q}.weight.absmax": (torch.float32, (64,)),
        f"{q}.weight.quant_map": (torch.float32, (16,)),
    }


def test_gpt2_is_planned_as_its_linear_layers_compute():
    plan = make_plan(gpt2_source(), "int4")
    tensors = by_module(plan)
    fused = tensors["transformer.h.1.attn.c_attn"]
    assert fused.transposed
    assert fused.shape == (192, 64)
    assert fused.outputs["transformer.h.1.attn.c_attn.weight_packed"][1] == (192, 8)
    assert tensors["transformer.h.0.mlp.c_proj"].shape == (64, 256)
    for name in ("transformer.wte.weight", "transformer.wpe.weight"):
        assert (tensors[name].format, tensors[name].note) == (Dense("bfloat16"), EMBEDDING_NOTE)
    bias = tensors["transformer.h.0.attn.c_attn.bias"]
    assert (bias.format, bias.note) == (Dense("bfloat16"), VECTOR_NOTE)
    assert tensors["lm_head"].source == "transformer.wte.weight"
    assert len(plan.notes) == 1
    assert "runs in qinfer only" in plan.notes[0]
    dense = by_module(make_plan(gpt2_source(), "bf16"))["transformer.h.1.attn.c_attn.weight"]
    assert dense.outputs == {"transformer.h.1.attn.c_attn.weight": (torch.bfloat16, (64, 192))}


@pytest.mark.parametrize("scheme", ["nf4", "bf16"])
def test_gpt2_has_no_note_where_it_opens_in_transformers(scheme):
    assert make_plan(gpt2_source(), scheme).notes == []


def test_qwen_biases_and_norms_stay_dense():
    qwen2 = fake_source(architectures=["Qwen2ForCausalLM"])
    bias = by_module(make_plan(qwen2, "nf4"))["model.layers.0.self_attn.k_proj.bias"]
    assert (bias.format, bias.note) == (Dense("bfloat16"), VECTOR_NOTE)
    qwen3 = fake_source(architectures=["Qwen3ForCausalLM"], head_dim=32)
    norm = by_module(make_plan(qwen3, "int4"))["model.layers.0.self_attn.q_norm.weight"]
    assert (norm.format, norm.shape) == (Dense("bfloat16"), (32,))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_tensor_of_a_real_checkpoint_is_planned_once(name, scheme, tiny_model):
    source = HuggingFaceSource(tiny_model(name))
    plan = make_plan(source, scheme)
    assert plan.dropped == []
    own = [t for t in plan.tensors if t.note != TIED_NOTE]
    assert sorted(t.source for t in own) == sorted(source.tensors)
    written = [output for t in plan.tensors for output in t.outputs]
    assert len(written) == len(set(written))
    per_block = len(linear_shapes(ModelConfig.from_dict(source.config)))
    linear = [t for t in plan.tensors if len(t.shape) == 2 and t.note is None]
    expected = (
        per_block * 3
        if scheme != "bf16"
        else per_block * 3
        + len(
            [
                n
                for n in source.tensors
                if n.split(".")[-2] in ("embed_tokens", "wte", "wpe", "lm_head")
            ]
        )
    )
    assert len(linear) == expected


@pytest.mark.parametrize(
    ("parameters", "group"), [("below", 32), ("from", 64)], ids=["below 3 B", "3 B"]
)
def test_default_group_size_follows_the_number_of_parameters(parameters, group):
    # The largest vocabulary below the limit, or one row more.
    fixed = make_plan(fake_source(tie_word_embeddings=True), "int4").parameters - 100 * 64
    rows = (3_000_000_000 - fixed - 1) // 64
    source = fake_source(vocab_size=rows + (parameters == "from"), tie_word_embeddings=True)
    plan = make_plan(source, "int4")
    assert (plan.parameters >= 3_000_000_000) is (parameters == "from")
    assert plan.group_size == group
    q_proj = by_module(plan)["model.layers.0.self_attn.q_proj"]
    assert (q_proj.format, q_proj.note) == (Affine(4, group), None)


def test_a_large_model_falls_back_to_smaller_groups_then_to_int8():
    source = fake_source(vocab_size=50_000_000, intermediate_size=96)
    down = by_module(make_plan(source, "int4"))["model.layers.0.mlp.down_proj"]
    assert (down.format, down.note) == (Affine(4, 32), "64 does not divide its 96 columns")
    source = fake_source(vocab_size=50_000_000, intermediate_size=80)
    down = by_module(make_plan(source, "int4"))["model.layers.0.mlp.down_proj"]
    assert down.format == Affine(8, None)
    assert down.note == "not even groups of 32 divide its 80 columns"


def test_a_small_model_falls_back_to_int8():
    plan = make_plan(fake_source(intermediate_size=80), "int4")
    tensors = formats(plan)
    assert tensors["model.layers.1.mlp.down_proj"] == (
        Affine(8, None),
        "not even groups of 32 divide its 80 columns",
    )
    assert tensors["model.layers.1.mlp.up_proj"] == (Affine(4, 32), None)


@pytest.mark.parametrize(
    ("size", "columns", "hint"),
    [
        (64, 96, "Sizes that fit: 32."),
        (128, 192, "Sizes that fit: 64, 32."),
        (32, 80, "None of 32, 64 and 128 fits"),
    ],
)
@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_a_group_size_that_does_not_fit_names_tensor_and_sizes(scheme, size, columns, hint):
    source = fake_source(hidden_size=128, intermediate_size=columns)
    with pytest.raises(QInferError) as caught:
        make_plan(source, scheme, size)
    assert type(caught.value) is CheckpointError
    assert str(caught.value) == (
        f"--group-size {size} does not divide the {columns} columns of "
        "model.layers.0.mlp.down_proj.weight"
    )
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("scheme", ["nf4", "bf16"])
def test_a_group_size_where_there_are_no_groups_is_refused(scheme):
    with pytest.raises(CheckpointError, match=f"no meaning for --scheme {scheme}") as caught:
        make_plan(fake_source(), scheme, 64)
    assert "int4 and int8" in caught.value.hint


def shard_bytes(plan):
    return [sum(t.nbytes for t in shard) for shard in plan.shards]


@pytest.mark.parametrize("limit", [1, 3000, 6000, 20_000, 10**9])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_shards_are_cut_in_order_and_as_late_as_the_limit_allows(scheme, limit):
    plan = make_plan(fake_source(), scheme, max_shard_bytes=limit)
    assert [t for shard in plan.shards for t in shard] == plan.tensors
    for i, shard in enumerate(plan.shards):
        size = shard_bytes(plan)[i]
        assert size <= limit or len(shard) == 1
        if i + 1 < len(plan.shards):
            assert size + plan.shards[i + 1][0].nbytes > limit
    assert sum(shard_bytes(plan)) == plan.nbytes


def test_shard_names():
    assert make_plan(fake_source(), "int4").shard_names() == ["model.safetensors"]
    plan = make_plan(fake_source(), "int4", max_shard_bytes=30_000)
    count = len(plan.shards)
    assert count > 1
    assert plan.shard_names()[0] == f"model-00001-of-{count:05d}.safetensors"
    assert plan.shard_names()[-1] == f"model-{count:05d}-of-{count:05d}.safetensors"


# Weights of LLAMA: q and o 64 · 64, k and v 32 · 64, gate, up and down 96 · 64, in two layers.
BLOCK_WEIGHTS = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64)
HEAD_WEIGHTS = 100 * 64
VECTORS = 5 * 64


@pytest.mark.parametrize(
    ("scheme", "group", "nbytes"),
    [
        # half a byte and 2 bytes a group of 32, then 16 bytes of weight_shape in 14 layers
        ("int4", None, BLOCK_WEIGHTS // 2 + BLOCK_WEIGHTS // 32 * 2 + 14 * 16),
        ("int8", 32, BLOCK_WEIGHTS + BLOCK_WEIGHTS // 32 * 2 + 14 * 16),
        # a scale for each of 2 · (64 + 32 + 32 + 64 + 96 + 96 + 64) rows
        ("int8", None, BLOCK_WEIGHTS + 2 * 448 * 2 + 14 * 16),
    ],
)
def test_bits_per_weight_of_integers(scheme, group, nbytes):
    plan = make_plan(fake_source(), scheme, group)
    head = HEAD_WEIGHTS + 100 * 2 + 16
    quantized = BLOCK_WEIGHTS + HEAD_WEIGHTS
    assert plan.bits_per_weight == pytest.approx(8 * (nbytes + head) / quantized)
    assert plan.nbytes == nbytes + head + 2 * (HEAD_WEIGHTS + VECTORS)
    assert plan.parameters == BLOCK_WEIGHTS + 2 * HEAD_WEIGHTS + VECTORS


def test_bits_per_weight_of_nf4():
    plan = make_plan(fake_source(), "nf4")
    shapes = {(64, 64): 4, (32, 64): 4, (96, 64): 4, (64, 96): 2}
    text = '{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [%d, %d]}'
    nbytes = BLOCK_WEIGHTS // 2 + BLOCK_WEIGHTS // 64 * 4 + 14 * 16 * 4
    nbytes += sum(count * len(text % shape) for shape, count in shapes.items())
    assert plan.bits_per_weight == pytest.approx(8 * nbytes / BLOCK_WEIGHTS)


def test_bits_per_weight_of_bf16():
    assert make_plan(fake_source(), "bf16").bits_per_weight == 16


def weights_config(bits, group):
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if group else "channel",
        "group_size": group,
        "dynamic": False,
    }


def test_quantization_config_of_one_format_besides_the_head():
    config = make_plan(fake_source(), "int4").config
    activations = {"input_activations": None, "output_activations": None}
    assert config["quantization_config"] == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {
            "group_0": {"targets": ["lm_head"], "weights": weights_config(8, None), **activations},
            "group_1": {"targets": ["Linear"], "weights": weights_config(4, 32), **activations},
        },
    }


def test_quantization_config_of_one_format_names_no_module():
    groups = make_plan(fake_source(), "int8").config["quantization_config"]["config_groups"]
    assert [(g["targets"], g["weights"]) for g in groups.values()] == [
        (["Linear"], weights_config(8, None))
    ]


def test_quantization_config_names_the_modules_of_rarer_formats():
    source = fake_source(vocab_size=50_000_000, intermediate_size=96)
    groups = make_plan(source, "int4").config["quantization_config"]["config_groups"]
    assert [(g["targets"], g["weights"]) for g in groups.values()] == [
        (["lm_head"], weights_config(8, None)),
        (
            ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"],
            weights_config(4, 32),
        ),
        (["Linear"], weights_config(4, 64)),
    ]


@pytest.mark.parametrize(("dtype", "stored"), [("float16", "float16"), ("float32", "bfloat16")])
def test_quantization_config_of_nf4(dtype, stored):
    assert make_plan(fake_source(torch_dtype=dtype), "nf4").config["quantization_config"] == {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": stored,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["lm_head"],
    }


def test_the_rest_of_the_config_is_kept():
    source = fake_source(custom={"a": 1})
    config = make_plan(source, "bf16").config
    assert "quantization_config" not in config
    assert "torch_dtype" not in config
    assert config["custom"] == {"a": 1}
    assert source.config["torch_dtype"] == "bfloat16"  # the source's own is left alone
    assert ModelConfig.from_dict(config) == ModelConfig.from_dict(source.config)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"]
)
def test_a_missing_tensor_is_named(name):
    with pytest.raises(QInferError) as caught:
        make_plan(fake_source(drop=[name]), "int4")
    assert type(caught.value) is CheckpointError
    assert str(caught.value) == f"src has no tensor {name}"
    assert "missing" in caught.value.hint


@pytest.mark.parametrize("shape", [(96, 63), (64, 96), (96 * 64,), (96, 64, 1), ()], ids=str)
def test_a_wrong_shape_is_named(shape):
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(QInferError) as caught:
        make_plan(fake_source(reshape={name: shape}), "int4")
    assert type(caught.value) is CheckpointError
    assert str(caught.value) == f"{name} has shape {list(shape)}, config.json implies [96, 64]"


def test_an_unknown_architecture_is_refused():
    source = fake_source()
    source.config = source.config | {"architectures": ["LlamaModel"]}
    with pytest.raises(UnsupportedModelError, match=r"src: config.json: architecture LlamaModel"):
        make_plan(source, "int4")


def test_extra_tensors_are_reported_as_dropped():
    add = {
        "model.layers.0.self_attn.q_proj.bias": (64,),
        "model.layers.2.mlp.up_proj.weight": (96, 64),
        "vision.weight": (3,),
        "model.layers.0.self_attn.rotary_emb.inv_freq": (8,),
    }
    source = fake_source(add=add)
    plan = make_plan(source, "int4")
    assert plan.dropped == list(add)[:3]
    lines = list(summary(plan, source))
    start = lines.index("left out because the architecture does not use them:")
    assert lines[start + 1 : start + 4] == [
        "  vision.weight",
        "  model.layers.[0].self_attn.q_proj.bias",
        "  model.layers.[2].mlp.up_proj.weight",
    ]


def test_masks_of_old_gpt2_checkpoints_are_not_worth_a_word():
    add = {f"transformer.h.{i}.attn.bias": (1, 1, 32, 32) for i in range(2)}
    add |= {"transformer.h.0.attn.masked_bias": ()}
    assert make_plan(gpt2_source(add=add), "int4").dropped == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_names_without_prefix_are_kept_as_they_are(scheme):
    plan = make_plan(gpt2_source(prefix=""), scheme)
    assert {t.source for t in plan.tensors} == set(gpt2_source(prefix="").tensors)
    assert "wte.weight" in by_module(plan)
    written = {name for t in plan.tensors for name in t.outputs}
    assert not any(name.startswith("transformer.") for name in written)
    assert prefix_in(written, TABLE["GPT2LMHeadModel"]) == ""


def test_summary_says_sizes_exceptions_and_totals():
    source = fake_source(intermediate_size=80)
    lines = list(summary(make_plan(source, "int4"), source))
    assert lines[0].split() == ["bfloat16:", "6", "tensors,", "0.0", "MB"]
    assert [line.split(":")[0].strip() for line in lines[:3]] == [
        "bfloat16",
        "int4 g32",
        "int8 per channel",
    ]
    at = lines.index("int8 per channel because not even groups of 32 divide its 80 columns:")
    assert lines[at + 1] == "  model.layers.[0-1].mlp.down_proj"
    assert f"int8 per channel because {HEAD_NOTE}:" in lines
    assert lines[-1].startswith(
        "0.1 M parameters, 0.1 MB (0.1 MB at 16 bits) → 0.1 MB in 1 file(s), "
    )
