"""Perplexity, divergence and agreement are what plain arithmetic says; `qinfer eval` shows them."""

import json
import math
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from qinfer import quality
from qinfer.cache.paged import CacheLayout, PagedCache
from qinfer.engine import evaluation
from qinfer.engine.evaluation import Comparison, Subject, compare, perplexity
from qinfer.errors import NumericsError, PromptError, QInferError
from qinfer.generation import LanguageModel
from qinfer.ops.paged import Batch
from qinfer.quant.kv import KVFormat
from tests import tiny_models
from tests.test_cli import assert_one_error, edit, run
from tests.tiny_models import build, write_tokenizer

IDS = [(7 * i * i + 3 * i) % 250 for i in range(140)]
WINDOWS = [IDS[:100], IDS[100:]]
VOCAB = 264  # of the tokenizer; the models' has 320


def open_model(directory, bits=None, **options):
    kv_format = None if bits is None else KVFormat(*bits)
    return LanguageModel(directory, device="cpu", kv_format=kv_format, max_sequences=1, **options)


@pytest.fixture(scope="module")
def llama(tiny_model):
    return open_model(tiny_model("llama"))


def subject(model, k=16, v=16):
    formats = (KVFormat(k, v),) * model.config.num_hidden_layers
    return Subject(model.engine.decoder, formats, VOCAB)


@torch.inference_mode()
def log_probabilities(model, window, formats):
    """Of a window run all at once, fp64 [tokens - 1, VOCAB]."""
    decoder, blocks = model.engine.decoder, -(-len(window) // 32)
    layout = CacheLayout.of(model.config, formats)
    groups = len(layout.reaches)
    cpu = torch.device("cpu")
    cache = PagedCache(layout, [blocks] * groups, 1, half=torch.float16, device=cpu)
    batch = Batch.of([(window, 0)], [[range(blocks)]] * groups, [0], cpu)
    logits = decoder.logits(decoder.forward(batch, cache.layers))
    return logits[:-1, :VOCAB].double().log_softmax(-1)


def plain_comparison(model, formats, reference_formats):
    found = torch.cat([log_probabilities(model, w, formats) for w in WINDOWS])
    expected = torch.cat([log_probabilities(model, w, reference_formats) for w in WINDOWS])
    targets = torch.tensor([token for window in WINDOWS for token in window[1:]])
    kl = torch.nn.functional.kl_div(found, expected, reduction="none", log_target=True).sum(-1)

    def of(log_p):
        return math.exp(torch.nn.functional.nll_loss(log_p, targets))

    return Comparison(
        tokens=138,
        perplexity=of(found),
        reference_perplexity=of(expected),
        kl_mean=float(kl.mean()),
        kl_p99=float(kl.sort().values[136]),  # 137 of 138 are not above it: 99.3%
        kl_max=float(kl.max()),
        top1_agreement=float((found.argmax(-1) == expected.argmax(-1)).double().mean()),
    )


def assert_close(found, expected):
    for field in Comparison.__slots__:
        assert getattr(found, field) == pytest.approx(getattr(expected, field), rel=1e-6), field


class TestNumbers:
    @pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gpt2"])
    def test_perplexity_is_that_of_transformers(self, tiny_model, name):
        model = open_model(tiny_model(name))
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            tiny_model(name), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        losses = []
        for window in WINDOWS:
            with torch.inference_mode():
                logits = reference(torch.tensor([window])).logits[0, :-1, :VOCAB]
            targets = torch.tensor(window[1:])
            losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
        expected = math.exp(torch.cat(losses).mean())
        assert perplexity(subject(model, 32, 32), WINDOWS) == pytest.approx(expected, rel=1e-4)
        assert perplexity(subject(model), WINDOWS) == pytest.approx(expected, rel=1e-2)

    @pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 4), (16, 4)], ids=str)
    @pytest.mark.parametrize("name", ["llama", "mistral"])
    def test_a_comparison_is_that_of_all_logits_at_once(self, tiny_model, name, bits):
        model = open_model(tiny_model(name))
        (found,) = compare([subject(model, *bits)], subject(model), WINDOWS)
        layers = range(model.config.num_hidden_layers)
        formats = [KVFormat(*bits) for _ in layers], [KVFormat() for _ in layers]
        assert_close(found, plain_comparison(model, *formats))
        assert 0 < found.kl_mean < found.kl_p99 <= found.kl_max

    def test_16_bits_against_16_bits_are_the_same(self, llama):
        (found,) = compare([subject(llama)], subject(llama), WINDOWS)
        assert (found.kl_mean, found.kl_p99, found.kl_max) == (0, 0, 0)
        assert found.top1_agreement == 1
        assert found.perplexity == found.reference_perplexity

    def test_few_logits_exist_at_once(self, llama, monkeypatch):
        rows, decoder = [], llama.engine.decoder
        monkeypatch.setattr(
            decoder, "logits", lambda x, f=decoder.logits: (rows.append(len(x)), f(x))[1]
        )
        compare([subject(llama, 4, 4)], subject(llama), WINDOWS)
        assert sum(rows) == 2 * 138
        assert max(rows) <= 64

    def test_steps_are_short_and_change_nothing(self, llama, monkeypatch):
        whole = compare([subject(llama, 4, 4)], subject(llama), WINDOWS)
        done = []
        monkeypatch.setattr(evaluation, "STEP_TOKENS", 17)
        pieces = compare([subject(llama, 4, 4)], subject(llama), WINDOWS, progress=done.append)
        assert pieces == whole
        assert sum(done) == 2 * len(IDS)
        assert max(done) == 17

    @pytest.mark.parametrize(
        ("tensor", "place"),
        [
            ("model.embed_tokens.weight", "the embedding"),
            ("model.layers.1.mlp.down_proj.weight", "layer 1"),
            ("model.norm.weight", "the final norm"),
            ("lm_head.weight", "the output head"),
        ],
    )
    @pytest.mark.parametrize(
        "measure",
        [lambda its: perplexity(its, WINDOWS), lambda its: compare([its], its, WINDOWS)],
        ids=["perplexity", "compare"],
    )
    def test_values_that_are_not_finite_are_an_error_that_names_the_place(
        self, tiny_model, tmp_path, tensor, place, measure
    ):
        shutil.copytree(tiny_model("llama-untied-bias"), tmp_path / "m")
        damage(tmp_path / "m", tensor, lambda x: x.fill_(float("inf")))
        its = subject(open_model(tmp_path / "m"))
        with pytest.raises(NumericsError, match=rf"first in {place} \(KV cache k16v16\)") as caught:
            measure(its)
        assert caught.value.hint


def damage(directory, name, change):
    """Change tensors whose name ends like this."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    names = [n for n in tensors if n.endswith(name)]
    assert names
    for n in names:
        tensors[n] = change(tensors[n])
    save_file(tensors, path, metadata={"format": "pt"})


class TestWindows:
    def test_are_as_long_as_the_context_and_hold_the_first_tokens(self, tiny_model):
        model = open_model(tiny_model("llama"), context_tokens=10)
        text = "abcdefghijklmnopqrstuvwxyz"
        ids = model.tokenizer.encode(text)
        windows = quality.windows_of(model, text, tokens=25)
        assert windows == [ids[:10], ids[10:20], ids[20:25]]

    def test_one_token_that_is_left_over_is_left_out(self, tiny_model):
        model = open_model(tiny_model("llama"), context_tokens=10)
        assert list(map(len, quality.windows_of(model, "x" * 21, tokens=99))) == [10, 10]

    def test_each_begins_with_the_bos_token(self, tiny_model, tmp_path):
        shutil.copytree(tiny_model("llama"), tmp_path / "m")
        write_tokenizer(tmp_path / "m", bos=True)
        model = open_model(tmp_path / "m", context_tokens=10)
        x = model.tokenizer.encode("x")[-1]
        windows = quality.windows_of(model, "x" * 12, tokens=99)
        assert windows == [[256, *[x] * 9], [256, *[x] * 3]]

    @pytest.mark.parametrize(("text", "tokens"), [("", 99), ("x", 99), ("xxx", 1)])
    def test_too_short_a_text_is_an_error(self, llama, text, tokens):
        with pytest.raises(PromptError, match="book is too short") as caught:
            quality.windows_of(llama, text, tokens=tokens, origin="book")
        assert caught.value.hint

    def test_one_block_shows_nothing_of_a_kv_cache(self, tiny_model):
        model = open_model(tiny_model("llama"), (4, 4))
        with pytest.raises(PromptError, match="windows of 33 tokens show nothing"):
            quality.against_16_bit_kv(model, [IDS[:33]])
        assert quality.against_16_bit_kv(model, [IDS[:34]]).kl_max > 0

    def test_the_built_in_text_is_long_and_varied(self, llama):
        text = quality.probe_text()
        assert 6_000 <= len(text.encode()) <= 8_000
        for part in ("def ", "| ", '"', "1. ", "é", "ß", "ó"):
            assert part in text
        assert len(quality.windows_of(llama, text, tokens=10_000)) > 4


class TestPerLayer:
    def test_only_that_layer_differs(self, tiny_model):
        model = open_model(tiny_model("qwen2-window"), (8, 4))
        found = quality.layer_by_layer(model, WINDOWS)
        half, low = KVFormat(), KVFormat(8, 4)
        for layer, its in enumerate(found):
            formats = [low if i == layer else half for i in range(3)]
            assert_close(its, plain_comparison(model, formats, [half] * 3))
        assert len({its.kl_mean for its in found}) == 3
        assert all(its.kl_mean > 0 for its in found)


class TestAgainst:
    def test_another_model(self, tiny_model, tmp_path):
        run("convert", tiny_model("llama"), tmp_path / "int8", "--scheme", "int8", "-q")
        model, other = open_model(tmp_path / "int8"), open_model(tiny_model("llama"))
        found = quality.against(model, other, WINDOWS)
        formats = [KVFormat()] * 3
        expected = torch.cat([log_probabilities(other, w, formats) for w in WINDOWS])
        log_p = torch.cat([log_probabilities(model, w, formats) for w in WINDOWS])
        kl = (expected.exp() * (expected - log_p)).sum(-1)
        assert found.kl_mean == pytest.approx(float(kl.mean()), rel=1e-6)
        assert found.reference_perplexity == pytest.approx(perplexity(subject(other), WINDOWS))
        assert found.perplexity == pytest.approx(perplexity(subject(model), WINDOWS))

    def test_other_tokens_are_an_error(self, tiny_model, tmp_path):
        shutil.copytree(tiny_model("llama"), tmp_path / "m")
        path = tmp_path / "m" / "tokenizer.json"
        data = json.loads(path.read_text())
        data["model"]["vocab"]["unused"] = 264
        path.write_text(json.dumps(data))
        with pytest.raises(QInferError, match="different tokenizers") as caught:
            quality.against(open_model(tmp_path / "m"), open_model(tiny_model("llama")), WINDOWS)
        assert caught.value.hint


TEXT = "The cat sat on the mat, and then the other cat came in and sat on the first. " * 6
KEYS = {
    "model",
    "kv_cache",
    "text",
    "tokens",
    "windows",
    "window_tokens",
    "perplexity",
    "against_16_bit_kv",
    "against",
    "layers",
}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def run_json(*arguments, **options):
    return json.loads(run("eval", *arguments, "--json", **options).stdout)


class TestCommand:
    def test_perplexity_alone_at_16_bits(self, tiny_model, text):
        model = tiny_model("llama")
        report = run_json(model, "--text", text)
        assert report.keys() == KEYS
        assert report["kv_cache"] == {"k_bits": 16, "v_bits": 16}
        opened = open_model(model)
        windows = quality.windows_of(opened, TEXT, tokens=4096)
        assert report["perplexity"] == quality.perplexity_of(opened, windows)
        assert (report["tokens"], report["windows"]) == (sum(map(len, windows)), len(windows))
        assert report["window_tokens"] == 256  # all that the model allows
        assert report["text"] == str(text)
        assert [report[k] for k in ("against_16_bit_kv", "against", "layers")] == [None] * 3

    def test_a_compact_cache_is_compared_with_16_bits(self, tiny_model, text):
        report = run_json(tiny_model("llama"), "--text", text, "--k-bits", 8, "--v-bits", 4)
        opened = open_model(tiny_model("llama"), (8, 4))
        windows = quality.windows_of(opened, TEXT, tokens=4096)
        expected = quality.against_16_bit_kv(opened, windows)
        assert report["perplexity"] == expected.perplexity
        assert report["against_16_bit_kv"] == {
            "perplexity": expected.perplexity,
            "reference_perplexity": expected.reference_perplexity,
            "kl_mean_nats": expected.kl_mean,
            "kl_p99_nats": expected.kl_p99,
            "kl_max_nats": expected.kl_max,
            "top1_agreement": expected.top1_agreement,
        }

    def test_the_models_own_cache_is_the_default(self, tiny_model, text, tmp_path):
        shutil.copytree(tiny_model("llama"), tmp_path / "m")
        edit(tmp_path / "m" / "qinfer.json", kv_cache={"k_bits": 8, "v_bits": 8})
        report = run_json(tmp_path / "m", "--text", text)
        assert report["kv_cache"] == {"k_bits": 8, "v_bits": 8}
        assert report["against_16_bit_kv"]["kl_mean_nats"] > 0
        assert run_json(tmp_path / "m", "--text", text, "--kv-bits", 16)["layers"] is None

    def test_against_itself_nothing_differs(self, tiny_model, text):
        model = tiny_model("llama")
        its = run_json(model, "--text", text, "--against", model)["against"]
        assert its["model"] == str(model)
        assert (its["kl_max_nats"], its["top1_agreement"]) == (0, 1)
        both = run_json(model, "--text", text, "--against", model, "--kv-bits", 4)
        assert both["against"] == {"model": str(model), **both["against_16_bit_kv"]}

    def test_tokens_and_windows_are_as_asked(self, tiny_model, text):
        report = run_json(tiny_model("llama"), "--text", text, "--tokens", 100, "--ctx-size", 40)
        assert (report["tokens"], report["windows"], report["window_tokens"]) == (100, 3, 40)

    def test_the_built_in_text_and_stdin(self, tiny_model):
        model = tiny_model("llama")
        assert run_json(model, "--tokens", 60)["text"] == "the built-in text"
        report = run_json(model, "--text", "-", input=TEXT)
        assert report["text"] == "-"
        assert report["tokens"] > 200

    def test_a_table_for_people(self, tiny_model, text):
        result = run("eval", tiny_model("llama"), "--text", text, "--kv-bits", 4, "--per-layer")
        lines = result.stdout.splitlines()
        heads = [i for i, line in enumerate(lines) if line.startswith(("against", "layer"))]
        assert [line.split()[0] for line in lines[: heads[0] - 1]] == [
            "model",
            "KV",
            "text",
            "perplexity",
        ]
        assert [line.split()[0] for line in lines[heads[1] + 1 :]] == ["0", "1", "2"]
        assert len({len(line) for line in lines[heads[1] :]}) == 1
        assert result.stderr == ""  # a bar is for terminals

    def test_layers_in_json(self, tiny_model, text):
        report = run_json(tiny_model("llama"), "--text", text, "--kv-bits", 4, "--per-layer")
        assert [its["layer"] for its in report["layers"]] == [0, 1, 2]
        opened = open_model(tiny_model("llama"), (4, 4))
        expected = quality.layer_by_layer(opened, quality.windows_of(opened, TEXT, tokens=512))
        found = [its["kl_mean_nats"] for its in report["layers"]]
        assert found == [its.kl_mean for its in expected]

    def test_a_long_file_is_read_as_far_as_needed(self, tiny_model, text):
        text.write_bytes(b"\xef\xbb\xbf" + "é".encode() * 100_000 + b"\xff")
        report = run_json(tiny_model("llama"), "--text", text, "--tokens", 101)
        assert report["tokens"] == 101

    @pytest.mark.parametrize(
        ("content", "pattern"),
        [
            (None, "text.txt cannot be read: No such file"),
            (b"", "text.txt is too short: 0 token"),
            (b"x", "text.txt is too short: 1 token"),
            (b"abc\xff\xfe", "text.txt is not UTF-8 text: byte 3"),
            (b"abc\xc3", "text.txt is not UTF-8 text: byte 3"),
            (b"abc\0def", "text.txt is not text"),
            (b"too short for 4 bits", "windows of 20 tokens show nothing"),
        ],
    )
    def test_a_text_that_will_not_do_is_one_error(self, tiny_model, text, content, pattern):
        text.unlink()
        if content is not None:
            text.write_bytes(content)
        result = run("eval", tiny_model("llama"), "--text", text, "--kv-bits", 4, code=1)
        assert_one_error(result, pattern)

    def test_a_directory_is_no_text(self, tiny_model, tmp_path):
        result = run("eval", tiny_model("llama"), "--text", tmp_path, code=1)
        assert_one_error(result, "cannot be read: Is a directory")

    def test_more_than_the_models_context_is_one_error(self, tiny_model):
        result = run("eval", tiny_model("llama"), "--ctx-size", 257, code=1)
        assert_one_error(result, "--ctx-size 257 is more than the model's 256")

    def test_another_model_with_less_context_is_one_error(self, tiny_model, tmp_path, text):
        shutil.copytree(tiny_model("llama"), tmp_path / "m")
        edit(tmp_path / "m" / "config.json", max_position_embeddings=128)
        result = run(
            "eval", tiny_model("llama"), "--text", text, "--against", tmp_path / "m", code=1
        )
        assert_one_error(result, "more than the model's 128 positions")

    def test_an_odd_head_at_4_bits_is_one_error(self, monkeypatch, tmp_path):
        family, fields = tiny_models.SHAPES["gpt2"]
        monkeypatch.setitem(tiny_models.SHAPES, "odd", (family, {**fields, "n_embd": 60}))
        model = build(tmp_path / "odd", "odd")
        result = run("eval", model, "--kv-bits", 4, code=1)
        assert_one_error(result, "needs an even head_dim, this model's is 15", "--kv-bits 8")

    def test_a_missing_model_is_one_error(self, tmp_path, tiny_model):
        assert_one_error(run("eval", tmp_path / "none", code=1), "does not exist")
        result = run("eval", tiny_model("llama"), "--against", tmp_path / "none", code=1)
        assert_one_error(result, "does not exist")

    def test_values_that_are_not_finite_are_one_error(self, tiny_model, tmp_path, text):
        shutil.copytree(tiny_model("llama"), tmp_path / "m")
        damage(tmp_path / "m", "layers.1.mlp.up_proj.weight", lambda x: x.fill_(float("nan")))
        assert_one_error(run("eval", tmp_path / "m", "--text", text, code=1), "first in layer 1")

    def test_layers_need_a_compact_cache(self, tiny_model):
        assert "--kv-bits 4" in run("eval", tiny_model("llama"), "--per-layer", code=2).stderr
