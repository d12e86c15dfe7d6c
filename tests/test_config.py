"""config.json means to qinfer what it means to transformers, and what is wrong in it is named."""

import copy
import json

import pytest
import transformers

from qinfer.config import ACTIVATIONS, ARCHITECTURES, ModelConfig, read_json
from qinfer.errors import CheckpointError, QInferError, UnsupportedModelError
from tests.tiny_models import SHAPES

FAMILIES = {
    "LlamaForCausalLM": "Llama",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen2",
    "Qwen3ForCausalLM": "Qwen3",
    "GPT2LMHeadModel": "GPT2",
}
ROTARY = [name for name in FAMILIES if name != "GPT2LMHeadModel"]
REQUIRED = {
    "vocab_size": 1000,
    "hidden_size": 4096,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def raw(architecture="LlamaForCausalLM", **changes):
    return {"architectures": [architecture]} | REQUIRED | changes


def parse(architecture="LlamaForCausalLM", **changes):
    return ModelConfig.from_dict(raw(architecture, **changes))


def transformers_config(architecture, fields):
    return getattr(transformers, FAMILIES[architecture] + "Config").from_dict(copy.deepcopy(fields))


def windows_of(theirs):
    """The window of each layer, as the attention modules of transformers take it."""
    window = getattr(theirs, "sliding_window", None)
    if theirs.model_type == "mistral":
        return (window,) * theirs.num_hidden_layers
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * theirs.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def ids_of(value):
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def assert_same_meaning(ours, theirs):
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.num_hidden_layers == theirs.num_hidden_layers
    assert ours.num_attention_heads == theirs.num_attention_heads
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == ids_of(theirs.eos_token_id)
    assert ours.layer_windows == windows_of(theirs)
    heads = theirs.num_attention_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // heads)
    if theirs.model_type == "gpt2":
        assert ours.intermediate_size == (theirs.n_inner or 4 * theirs.n_embd)
        assert ours.norm_eps == theirs.layer_norm_epsilon
        assert ours.hidden_act == theirs.activation_function
        assert ours.num_key_value_heads == heads
        assert ours.rope is None
        return
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.hidden_act == theirs.hidden_act
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    scaling = dict(theirs.rope_parameters)
    assert ours.rope.theta == scaling.pop("rope_theta")
    assert ours.rope.kind == scaling.pop("rope_type")
    assert dict(ours.rope.parameters) == scaling


@pytest.mark.parametrize("name", SHAPES)
def test_saved_config_means_the_same(name, tmp_path):
    family, fields = SHAPES[name]
    architecture = next(a for a, f in FAMILIES.items() if f == family)
    theirs = transformers_config(architecture, fields | {"architectures": [architecture]})
    theirs.save_pretrained(tmp_path)
    ours = ModelConfig.from_dict(read_json(tmp_path / "config.json"))
    assert ours.architecture == architecture
    assert_same_meaning(ours, theirs)


@pytest.mark.parametrize("architecture", ROTARY)
def test_absent_keys_mean_what_they_mean_to_transformers(architecture):
    assert_same_meaning(parse(architecture), transformers_config(architecture, REQUIRED))


def test_absent_keys_of_gpt2_mean_what_they_mean_to_transformers():
    ours = ModelConfig.from_dict({"architectures": ["GPT2LMHeadModel"], "vocab_size": 50257})
    assert_same_meaning(ours, transformers.GPT2Config())


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_null_key_value_heads_are_as_many_as_heads(architecture):
    fields = {"num_key_value_heads": None, "num_attention_heads": 16}
    theirs = transformers_config(architecture, REQUIRED | fields)
    assert_same_meaning(parse(architecture, **fields), theirs)


def test_qwen3_default_head_dim_needs_no_divisible_hidden_size():
    assert parse("Qwen3ForCausalLM", hidden_size=1000).head_dim == 128


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize(
    "fields",
    [
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 7},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
        {"sliding_window": 8, "max_window_layers": 0},
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ],
)
def test_windows_of_qwen(architecture, fields):
    theirs = transformers_config(architecture, REQUIRED | fields)
    assert parse(architecture, **fields).layer_windows == windows_of(theirs)


def test_some_layer_has_a_window_where_it_is_asked_for():
    config = parse(
        "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=8, max_window_layers=2
    )
    assert config.layer_windows == (None, None, 8)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, (4096,) * 3), ({"sliding_window": None}, (None,) * 3), ({"sliding_window": 9}, (9,) * 3)],
)
def test_windows_of_mistral(fields, expected):
    assert parse("MistralForCausalLM", **fields).layer_windows == expected


@pytest.mark.parametrize(
    ("architecture", "fields", "qkv", "o", "mlp"),
    [
        ("LlamaForCausalLM", {}, False, False, False),
        ("LlamaForCausalLM", {"attention_bias": True}, True, True, False),
        ("LlamaForCausalLM", {"mlp_bias": True}, False, False, True),
        ("MistralForCausalLM", {}, False, False, False),
        ("Qwen2ForCausalLM", {}, True, False, False),
        ("Qwen3ForCausalLM", {}, False, False, False),
        ("Qwen3ForCausalLM", {"attention_bias": True}, True, True, False),
    ],
)
def test_biases(architecture, fields, qkv, o, mlp):
    config = parse(architecture, **fields)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (qkv, o, mlp)
    assert config.qk_norm is (architecture == "Qwen3ForCausalLM")


@pytest.mark.parametrize("architecture", ROTARY)
@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3, YARN], ids=str)
def test_old_and_new_rope_keys_give_the_same_config(architecture, scaling):
    old = parse(architecture, rope_theta=5e5, rope_scaling=scaling)
    named = dict(scaling or {})
    if named:
        named["type"] = named.pop("rope_type")
    oldest = parse(architecture, rope_theta=5e5, rope_scaling=named or None)
    new = parse(architecture, rope_parameters={"rope_theta": 5e5, **(scaling or {})})
    assert old == new == oldest
    assert new.rope.theta == 5e5
    assert new.rope.kind == (scaling or {"rope_type": "default"})["rope_type"]


def test_theta_within_rope_parameters_wins():
    assert parse(rope_theta=2.0, rope_parameters={"rope_theta": 3.0}).rope.theta == 3.0


@pytest.mark.parametrize("value", ["bfloat16", "float16", "float32", "torch.float16"])
def test_old_and_new_dtype_keys_give_the_same_config(value):
    assert parse(torch_dtype=value) == parse(dtype=value)
    assert parse(dtype=value).dtype == value.removeprefix("torch.")
    assert parse(dtype=value, torch_dtype="float32").dtype == value.removeprefix("torch.")


def test_dtype_defaults_to_float32():
    assert parse().dtype == "float32"


@pytest.mark.parametrize(
    ("value", "expected"), [(None, ()), (7, (7,)), ([7, 8], (7, 8)), (-1, ()), ([], ())]
)
def test_eos_token_ids(value, expected):
    assert parse(eos_token_id=value).eos_token_ids == expected


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_activation_is_known_to_transformers(act):
    assert parse(hidden_act=act).hidden_act == act
    assert transformers.activations.ACT2FN[act] is not None


def assert_refused(error, kind, text, hint=None):
    assert type(error) is kind
    assert "\n" not in str(error)
    assert text in str(error)
    if hint is not None:
        assert hint in error.hint


@pytest.mark.parametrize(
    "names", [["PhiForCausalLM"], [], None, "LlamaForCausalLM", [None], ["LlamaModel"], {"a": 1}]
)
def test_unknown_architecture_lists_the_supported_ones(names):
    with pytest.raises(QInferError) as caught:
        ModelConfig.from_dict({"architectures": names} | REQUIRED, origin="here")
    assert_refused(caught.value, UnsupportedModelError, "here: architecture ")
    assert all(name in caught.value.hint for name in ARCHITECTURES)


@pytest.mark.parametrize(
    ("changes", "text", "hint"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope type 'dynamic'", "llama3"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'", "yarn"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary", None),
        ({"hidden_act": "mish"}, "hidden_act 'mish'", "silu"),
        ({"hidden_act": ["silu"]}, "hidden_act ['silu']", "silu"),
        ({"dtype": "float64"}, "dtype 'float64'", "bfloat16"),
        ({"torch_dtype": "int8"}, "dtype 'int8'", "bfloat16"),
    ],
)
def test_unsupported_values_are_named(changes, text, hint):
    with pytest.raises(QInferError) as caught:
        parse(**changes)
    assert_refused(caught.value, UnsupportedModelError, text, hint)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "'chunked"),
        ({"layer_types": [["full_attention"]] * 3}, "layer type"),
    ],
)
def test_unsupported_layer_types_are_named(changes, text):
    with pytest.raises(QInferError) as caught:
        parse("Qwen2ForCausalLM", use_sliding_window=True, **changes)
    assert_refused(caught.value, UnsupportedModelError, text, "sliding_attention")


def test_a_wrong_number_of_layer_types_is_named():
    with pytest.raises(CheckpointError, match="layer_types must be a list of 3 entries"):
        parse("Qwen2ForCausalLM", use_sliding_window=True, layer_types=["full_attention"])


@pytest.mark.parametrize(
    "changes",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"reorder_and_upcast_attn": True},
        {"scale_attn_weights": False},
        {"activation_function": "swish"},
    ],
    ids=lambda c: next(iter(c)),
)
def test_gpt2_variants_are_refused_by_name(changes):
    with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
        ModelConfig.from_dict({"architectures": ["GPT2LMHeadModel"], "vocab_size": 9} | changes)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key):
    fields = raw()
    del fields[key]
    with pytest.raises(QInferError) as caught:
        ModelConfig.from_dict(fields, origin="x/config.json")
    assert_refused(caught.value, CheckpointError, f"x/config.json: {key} must be", "incomplete")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in REQUIRED for value in ("8", 8.0, True, 0, -1, 2**31, [8])),
        ("num_key_value_heads", "2"),
        ("head_dim", 0),
        ("head_dim", "64"),
        ("max_position_embeddings", False),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", True),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", 10**400),
        ("rms_norm_eps", None),
        ("tie_word_embeddings", 1),
        ("tie_word_embeddings", "true"),
        ("attention_bias", 0),
        ("eos_token_id", "2"),
        ("eos_token_id", [2, "3"]),
        ("eos_token_id", True),
        ("bos_token_id", 1.5),
        ("rope_theta", "10000"),
        ("rope_theta", 0),
        ("rope_theta", False),
        ("rope_scaling", "linear"),
        ("rope_scaling", [1]),
        ("rope_parameters", 8),
    ],
)
def test_a_wrong_type_is_named(key, value):
    with pytest.raises(QInferError) as caught:
        parse(**{key: value})
    assert_refused(caught.value, CheckpointError, f"{key} must be", "damaged")


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        *(({k: v for k, v in LLAMA3.items() if k != key}, key) for key in list(LLAMA3)[1:4]),
        *((LLAMA3 | {key: None}, key) for key in list(LLAMA3)[1:4]),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "yarn"}, "factor"),
        (YARN | {"factor": None}, "factor"),
        (YARN | {"factor": True}, "factor"),
        (YARN | {"factor": "4"}, "factor"),
        (YARN | {"factor": 0}, "factor"),
        (YARN | {"beta_fast": "32"}, "beta_fast"),
        (YARN | {"rope_theta": None}, "rope_theta"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
    ids=str,
)
def test_a_wrong_rope_parameter_is_named(scaling, key):
    with pytest.raises(QInferError) as caught:
        parse(rope_parameters=scaling)
    assert_refused(caught.value, CheckpointError, f"rope: {key} must be a", "damaged")


@pytest.mark.parametrize(
    ("changes", "text", "hint"),
    [
        ({"num_attention_heads": 32, "num_key_value_heads": 5}, "32 attention heads", "multiple"),
        ({"num_key_value_heads": 64}, "64 key-value heads", "multiple"),
        ({"head_dim": 33}, "head_dim 33 is odd", "head_dim"),
        ({"hidden_size": 32 * 3}, "head_dim 3 is odd", "hidden_size"),
        ({"hidden_size": 1000}, "hidden_size must be a multiple", None),
    ],
)
def test_impossible_heads_are_named(changes, text, hint):
    with pytest.raises(QInferError) as caught:
        parse(**changes)
    assert_refused(caught.value, CheckpointError, text, hint)


def test_gpt2_heads_must_divide_its_width():
    with pytest.raises(CheckpointError, match="n_embd must be a multiple of n_head = 5"):
        ModelConfig.from_dict({"architectures": ["GPT2LMHeadModel"], "vocab_size": 9, "n_head": 5})


def test_gpt2_needs_no_even_heads():
    fields = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 9, "n_embd": 9, "n_head": 3}
    assert ModelConfig.from_dict(fields).head_dim == 3


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"{", "is not valid JSON"),
        (b"not json", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[]", "must hold a JSON object"),
        (b"null", "must hold a JSON object"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ("{}".encode("utf-16"), "not UTF-8"),
    ],
    ids=lambda v: v[:12],
)
def test_a_damaged_file_is_named(content, text, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(QInferError) as caught:
        read_json(path)
    assert_refused(caught.value, CheckpointError, text, "damaged")
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(QInferError) as caught:
        read_json(tmp_path / "config.json")
    assert_refused(caught.value, CheckpointError, f"{tmp_path} has no config.json", "convert")


def test_a_directory_in_place_of_the_file_is_named(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_json(tmp_path / "config.json")


def test_a_config_may_hold_any_unicode(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"name": "模型"}, ensure_ascii=False), encoding="utf-8")
    assert read_json(path) == {"name": "模型"}
