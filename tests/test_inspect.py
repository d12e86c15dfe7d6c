"""`qinfer inspect` says what is in a directory, and its sizes add up."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from qinfer.config import ModelConfig, read_json
from qinfer.errors import QInferError
from qinfer.inspection import inspect
from qinfer.quant.kv import KVFormat
from tests import tiny_models
from tests.test_cli import assert_one_error, edit, run
from tests.tiny_models import SHAPES, build

LINEAR = 3 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96)  # of the tiny Llama


def report(*arguments):
    return json.loads(run("inspect", *arguments, "--json").stdout)


@pytest.fixture(scope="module")
def converted(tiny_model, tmp_path_factory):
    """`converted(scheme, name)`: directories that tests share."""
    root = tmp_path_factory.mktemp("converted")

    def get(scheme, name="llama", *options):
        out = root / f"{name}-{scheme}{''.join(options)}"
        if not out.exists():
            run("convert", tiny_model(name), out, "--scheme", scheme, "-q", *options)
        return out

    return get


class TestWeights:
    @pytest.mark.parametrize("name", SHAPES)
    def test_sizes_add_up_to_all_tensors(self, tiny_model, name):
        found = inspect(tiny_model(name, dtype="bfloat16"))
        tensors = load_file(tiny_model(name, dtype="bfloat16") / "model.safetensors").values()
        assert sum(found.weights.sizes.values()) == sum(t.nbytes for t in tensors)
        assert found.parameters == sum(t.numel() for t in tensors)
        assert found.weights.sizes["unused"] == 0
        assert (found.weights.scheme, found.weights.group_size) == ("bf16", None)
        assert found.weights.bits_per_weight == 16

    @pytest.mark.parametrize(
        ("scheme", "group", "linear_bytes"),
        [
            ("int4", 32, LINEAR // 2 + LINEAR // 32 * 2),
            ("int8", None, LINEAR + 2 * 3 * (64 + 2 * 32 + 64 + 2 * 96 + 64)),
            ("bf16", None, 2 * LINEAR),
        ],
    )
    def test_sizes_of_a_scheme(self, converted, scheme, group, linear_bytes):
        found = inspect(converted(scheme)).weights
        assert (found.scheme, found.group_size) == (scheme, group)
        shapes = 0 if scheme == "bf16" else 16 * (3 * 7)  # two int64 each
        assert found.sizes["linear"] == linear_bytes + shapes
        assert found.sizes["embedding"] == 2 * 320 * 64
        head = 0 if scheme == "bf16" else 320 * 64 + 2 * 320 + 16
        assert found.sizes["head"] == head
        assert found.sizes["norms"] == 2 * 7 * 64

    @pytest.mark.parametrize("scheme", ["int4", "int8", "nf4", "bf16"])
    @pytest.mark.parametrize("name", ["llama", "gpt2"])
    def test_agrees_with_what_the_conversion_recorded(self, converted, scheme, name):
        directory = converted(scheme, name)
        found, record = inspect(directory), read_json(directory / "qinfer.json")
        assert found.weights.scheme == record["scheme"]
        assert round(found.weights.bits_per_weight, 3) == record["bits_per_weight"]
        assert found.record["source"] == record["source"]
        names = list(record["tensors"].values())
        assert found.weights.matrices == {name: names.count(name) for name in names}
        total = (directory / "model.safetensors").stat().st_size
        assert 0 < total - sum(found.weights.sizes.values()) < 20_000  # the header

    def test_a_head_that_was_tied_counts_once(self, converted, tiny_model):
        assert inspect(converted("int4")).parameters == inspect(tiny_model("llama")).parameters


class TestCache:
    @pytest.mark.parametrize("tokens", [32, 256])
    def test_16_bits_take_what_arithmetic_says(self, tiny_model, tokens):
        found = inspect(tiny_model("llama"), context_tokens=tokens).kv
        assert found.context_bytes == 2 * 3 * 2 * 16 * tokens * 2  # sides, layers, heads, dim, …
        assert found.bytes_per_token == 2 * 3 * 2 * 16 * 2
        assert found.open_bytes == 0

    @pytest.mark.parametrize(
        ("bits", "scales"),
        [((8, 8), 2 * 2 * 32), ((4, 4), 4 * 16 + 4 * 32), ((8, 4), 192)],
        ids=str,
    )
    def test_compact_formats_take_scales_as_well(self, tiny_model, bits, scales):
        found = inspect(tiny_model("llama"), kv_format=KVFormat(*bits), context_tokens=64).kv
        elements = 32 * 16 * sum(bits) // 8
        assert found.context_bytes == 2 * 3 * 2 * (elements + scales)  # blocks, layers, heads
        assert found.open_bytes == 3 * 2 * 2 * 32 * 16 * 2

    def test_blocks_are_whole(self, tiny_model):
        one, block = (inspect(tiny_model("llama"), context_tokens=n).kv for n in (1, 32))
        assert one == block

    def test_layers_with_a_window_hold_only_that(self, tiny_model):
        found = inspect(tiny_model("qwen2-window"), context_tokens=256)
        config = ModelConfig.from_dict(read_json(found.directory / "config.json"))
        assert config.layer_windows == (None, 16, 16)
        block = KVFormat().block_bytes(2, 16)
        assert found.kv.context_bytes == (256 // 32 + 1 + 1) * block

    def test_all_widths_are_side_by_side(self, tiny_model):
        found = inspect(tiny_model("llama"))
        assert [its.kv_format for its in found.kv_sizes] == [KVFormat(n, n) for n in (16, 8, 4)]
        assert found.context_tokens == 256


class TestCommand:
    def test_json(self, converted):
        directory = converted("int8", "llama", "--k-bits", "8", "--v-bits", "4")
        found = report(directory)
        assert found["model"] == str(directory)
        assert found["source"] == read_json(directory / "qinfer.json")["source"]
        assert found["architecture"] == "LlamaForCausalLM"
        sizes = ("layers", "attention_heads", "kv_heads", "head_dim")
        assert [found[name] for name in sizes] == [3, 4, 2, 16]
        assert (found["vocab_size"], found["max_position_embeddings"]) == (320, 256)
        assert (found["scheme"], found["group_size"]) == ("int8", None)
        assert found["weights_bytes"]["total"] == sum(
            size for kind, size in found["weights_bytes"].items() if kind != "total"
        )
        assert [found["kv_cache"][side] for side in ("k_bits", "v_bits")] == [8, 4]
        assert list(found["kv_cache_at"]) == ["16", "8", "4"]

    def test_options(self, converted):
        found = report(converted("int8"), "--kv-bits", 4, "--ctx-size", 64)
        assert found["ctx_size"] == 64
        assert found["kv_cache"] == found["kv_cache_at"]["4"]
        assert (
            report(converted("int8"))["kv_cache"] == report(converted("int8"))["kv_cache_at"]["16"]
        )

    def test_for_people_with_units(self, tiny_model):
        result = run("inspect", tiny_model("qwen2-window"))
        for part in (
            "Qwen2ForCausalLM",
            "(not converted by qinfer)",
            "4 heads on 2 key-value heads of 16; a window of 16 tokens in 2 layers",
            "KV cache of 256 tokens",
            "384 B",
            "0.1 M",
            "norms and biases",
        ):
            assert part in result.stdout
        assert result.stderr == ""

    def test_more_than_the_context_is_one_error(self, tiny_model):
        result = run("inspect", tiny_model("llama"), "--ctx-size", 300, code=1)
        assert_one_error(result, "--ctx-size 300 is more than the model's 256")

    def test_an_odd_head_at_4_bits_is_one_error(self, monkeypatch, tmp_path):
        family, fields = SHAPES["gpt2"]
        monkeypatch.setitem(tiny_models.SHAPES, "odd", (family, {**fields, "n_embd": 60}))
        model = build(tmp_path / "odd", "odd")
        assert_one_error(run("inspect", model, "--kv-bits", 4, code=1), "even head_dim", "8")
        assert list(report(model)["kv_cache_at"]) == ["16", "8"]


def drop(directory, name):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})


class TestBroken:
    @pytest.mark.parametrize(
        ("damage", "pattern"),
        [
            (lambda d: (d / "config.json").unlink(), "has no config.json"),
            (lambda d: (d / "model.safetensors").unlink(), "safetensors"),
            (lambda d: (d / "model.safetensors").write_bytes(b"abc"), "not a complete"),
            (lambda d: drop(d, "model.norm.weight"), "no tensor model.norm.weight"),
            (lambda d: drop(d, "model.layers.1.mlp.up_proj.weight"), "no tensor .*up_proj"),
            (lambda d: edit(d / "config.json", intermediate_size=64), "config.json implies"),
            (lambda d: edit(d / "config.json", vocab_size=99), r"\[320, 64\].*\[99, 64\]"),
            (
                lambda d: edit(d / "config.json", quantization_config={"quant_method": "gptq"}),
                "gptq",
            ),
            (lambda d: (d / "qinfer.json").write_text('{"kv_cache": {"k_bits": 5}}'), "kv_cache"),
            (lambda d: (d / "qinfer.json").write_text("{"), "not valid JSON"),
        ],
    )
    def test_is_one_error(self, tiny_model, tmp_path, damage, pattern):
        shutil.copytree(tiny_model("llama"), tmp_path / "m")
        damage(tmp_path / "m")
        assert_one_error(run("inspect", tmp_path / "m", code=1), pattern)

    def test_a_context_is_checked_by_the_library_too(self, tiny_model):
        with pytest.raises(QInferError):
            inspect(tiny_model("llama"), context_tokens=300)
