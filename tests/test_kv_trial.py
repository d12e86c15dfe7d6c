"""A conversion records the KV cache asked for, and says when it does not suit the model."""

import json
import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from qinfer import quality
from qinfer.config import read_json
from qinfer.engine.evaluation import Comparison
from qinfer.errors import QInferError
from qinfer.generation import LanguageModel
from qinfer.quant.kv import KVFormat
from qinfer_converters import convert as streaming
from tests import tiny_models
from tests.test_cli import assert_one_error, run
from tests.tiny_models import SHAPES, build

FIGURES = r"KL \d\.\d{4} nats, the same token most likely in \d+\.\d% of \d+ places"


def scaled(directory, out, name, factor):
    """A copy whose tensors with this in their names are scaled."""
    shutil.copytree(directory, out)
    path = out / "model.safetensors"
    tensors = load_file(path)
    for n in tensors:
        if name in n:
            tensors[n] *= factor
    save_file(tensors, path, metadata={"format": "pt"})
    return out


@pytest.fixture
def sensitive(tiny_model, tmp_path):
    """Its keys are so large that their error decides what is attended to."""
    return scaled(tiny_model("llama"), tmp_path / "sensitive", "k_proj", 30)


@pytest.fixture
def robust(tiny_model, tmp_path):
    """It makes little of what attention yields."""
    return scaled(tiny_model("llama"), tmp_path / "robust", "o_proj", 0.05)


class TestRecord:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            (["--kv-bits", "8"], (8, 8)),
            (["--kv-bits", "16"], (16, 16)),
            (["--kv-bits", "8", "--v-bits", "4"], (8, 4)),
            (["--k-bits", "8", "--v-bits", "4"], (8, 4)),
            (["--v-bits", "4"], (16, 4)),
        ],
        ids=str,
    )
    def test_holds_what_was_asked_for(self, robust, tmp_path, options, expected):
        run("convert", robust, tmp_path / "m", "-q", *options)
        record = read_json(tmp_path / "m" / "qinfer.json")
        assert record["kv_cache"] == {"k_bits": expected[0], "v_bits": expected[1]}
        assert KVFormat.stored(tmp_path / "m") == KVFormat(*expected)
        assert LanguageModel(tmp_path / "m", device="cpu").kv_format == KVFormat(*expected)

    def test_holds_nothing_if_nothing_was(self, robust, tmp_path):
        run("convert", robust, tmp_path / "m", "-q")
        assert "kv_cache" not in read_json(tmp_path / "m" / "qinfer.json")

    def test_is_that_of_the_call_that_finishes(self, robust, tmp_path, monkeypatch):
        """Shards do not depend on it, so an interrupted conversion goes on with another."""
        publish = streaming._publish
        monkeypatch.setattr(streaming, "_publish", interrupt)
        run("convert", robust, tmp_path / "m", "-q", "--kv-bits", 4, code=130)
        assert not (tmp_path / "m").exists()
        monkeypatch.setattr(streaming, "_publish", publish)
        written = []
        monkeypatch.setattr(streaming, "_write_shard", lambda *a: written.append(a))
        run("convert", robust, tmp_path / "m", "-q", "--kv-bits", 8)
        assert KVFormat.stored(tmp_path / "m") == KVFormat(8, 8)
        assert written == []

    def test_a_dry_run_shows_it(self, robust, tmp_path):
        arguments = ("convert", robust, tmp_path / "m", "--dry-run", "--k-bits", 8, "--v-bits", 4)
        assert "KV cache: keys 8 bits, values 4 bits" in run(*arguments).stdout.splitlines()
        assert "KV cache" not in run("convert", robust, tmp_path / "m", "--dry-run").stdout
        assert not (tmp_path / "m").exists()

    def test_a_format_that_does_not_fit_is_an_error_before_anything_is_written(
        self, monkeypatch, tmp_path
    ):
        family, fields = SHAPES["gpt2"]
        monkeypatch.setitem(tiny_models.SHAPES, "odd", (family, {**fields, "n_embd": 60}))
        model = build(tmp_path / "odd", "odd")
        result = run("convert", model, tmp_path / "m", "--kv-bits", 4, code=1)
        assert_one_error(result, "even head_dim, this model's is 15", "--kv-bits 8")
        assert [p.name for p in tmp_path.iterdir()] == ["odd"]

    def test_32_bits_are_no_choice(self, robust, tmp_path):
        run("convert", robust, tmp_path / "m", "--kv-bits", 32, code=2)


def interrupt(*_):
    raise KeyboardInterrupt


class TestTrial:
    @pytest.mark.parametrize(
        ("options", "hint"),
        [
            (["--kv-bits", "4"], "--k-bits 8 --v-bits 4, or --kv-bits 8;"),
            (["--k-bits", "8", "--v-bits", "4"], "with --kv-bits 8;"),
            (["--kv-bits", "8"], "with --kv-bits 16;"),
        ],
        ids=str,
    )
    def test_warns_of_a_cache_that_hurts(self, sensitive, tmp_path, options, hint):
        result = run("convert", sensitive, tmp_path / "m", "-q", *options)
        match = re.fullmatch(rf"Warning: with .*: {FIGURES}\nHint: ([^\n]+)\n", result.stderr)
        assert match, result.stderr
        assert hint in match[1]
        assert result.stdout == ""
        LanguageModel(tmp_path / "m", device="cpu")  # it is there, and whole

    def test_says_in_a_line_what_another_costs(self, robust, tmp_path):
        result = run("convert", robust, tmp_path / "m", "--kv-bits", 4)
        assert re.fullmatch(
            rf"KV cache with keys at 4 bits and values at 4 against 16 bits: {FIGURES}",
            result.stderr.splitlines()[-1],
        )
        assert "Warning" not in result.stderr
        assert run("convert", robust, tmp_path / "q", "--kv-bits", 4, "-q").stderr == ""

    @pytest.mark.parametrize("options", [[], ["--kv-bits", "16"]], ids=str)
    def test_16_bits_need_none(self, sensitive, tmp_path, options, monkeypatch):
        monkeypatch.setattr(quality, "try_kv_format", interrupt)
        run("convert", sensitive, tmp_path / "m", *options)

    def test_one_that_fails_is_a_warning(self, robust, tmp_path, monkeypatch):
        def fail(*_, **__):
            raise QInferError("no memory", hint="Buy some.")

        monkeypatch.setattr(quality, "try_kv_format", fail)
        result = run("convert", robust, tmp_path / "m", "--kv-bits", 4, "-q")
        assert (
            result.stderr
            == "Warning: the KV cache could not be tried: no memory\nHint: Buy some.\n"
        )
        assert (tmp_path / "m" / "qinfer.json").is_file()

    def test_is_what_eval_says(self, sensitive, tmp_path):
        found = quality.try_kv_format(sensitive, KVFormat(4, 4))
        evaluated = run("eval", sensitive, "--tokens", 512, "--kv-bits", 4, "--json").stdout
        assert json.loads(evaluated)["against_16_bit_kv"]["kl_mean_nats"] == found.kl_mean

    @pytest.mark.parametrize(
        ("kl", "top1", "expected"),
        [(0.05, 0.9, False), (0.051, 0.9, True), (0.05, 0.89, True), (0.0, 1.0, False)],
    )
    def test_limits(self, kl, top1, expected):
        found = Comparison(511, 20.0, 20.0, kl, 1.0, 2.0, top1)
        assert quality.hurts(found) is expected
