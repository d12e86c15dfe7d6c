"""The command line: through click's runner, and as the installed program."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from qinfer_cli import generate as generate_module
from qinfer_cli.main import cli
from tests.test_generation import write_tokenizer

QINFER = Path(sys.executable).with_name("qinfer")
GREEDY = ("--temperature", "0", "-n", "8")
JSON_KEYS = {
    "text",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "token_ids",
    "seed",
    "ttft_s",
    "tpot_s",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "peak_memory_bytes",
}
needs_program = pytest.mark.skipif(not QINFER.exists(), reason="qinfer is not installed here")


def run(*arguments, code=0, **options):
    result = CliRunner().invoke(cli, [str(a) for a in arguments], prog_name="qinfer", **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def run_json(*arguments, **options):
    return json.loads(run("generate", *arguments, "--json", "-q", **options).stdout)


def assert_one_error(result, pattern, hint="."):
    """Stderr is a line of error and a line of hint, and stdout is empty."""
    assert result.stdout == ""
    match = re.fullmatch(r"Error: ([^\n]+)\nHint: ([^\n]+)\n", result.stderr)
    assert match, result.stderr
    assert re.search(pattern, match[1]), match[1]
    assert re.search(hint, match[2]), match[2]


def commands(command=cli, path=("qinfer",)):
    yield pytest.param(command, id=" ".join(path))
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def edit(path, **changes):
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(value | changes))


def read_config(directory):
    return json.loads((directory / "config.json").read_text())


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    """A model without chat template whose BOS stands for an empty prompt; not to be changed."""
    path = tmp_path_factory.mktemp("cli") / "model"
    shutil.copytree(tiny_model("llama"), path)
    write_tokenizer(path, bos=True)
    return path


@pytest.fixture(scope="module")
def chat_model(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "chat"
    shutil.copytree(tiny_model("llama"), path)
    write_tokenizer(path, chat=True)
    return path


@pytest.fixture
def directory(model, tmp_path):
    """A copy to damage."""
    path = tmp_path / "model"
    shutil.copytree(model, path)
    return path


class TestHelp:
    @pytest.mark.parametrize("command", list(commands()))
    def test_every_command_and_option_explains_itself(self, command):
        assert command.help
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, parameter.opts

    @pytest.mark.parametrize("flag", ["-h", "--help"])
    @pytest.mark.parametrize("name", [(), *((name,) for name in cli.commands)])
    def test_is_shown_and_lists_every_option(self, name, flag):
        result = run(*name, flag)
        command = cli.commands[name[0]] if name else cli
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert max(parameter.opts, key=len) in result.stdout
        assert result.stderr == ""

    @pytest.mark.parametrize("name", cli.commands)
    def test_has_an_example_of_its_own(self, name):
        assert f"\n  qinfer {name} " in run(name, "--help").stdout

    def test_version(self):
        assert re.fullmatch(r"qinfer, version \d+\.\d+\.\d+\n", run("--version").stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--unknown"],
        ["unknown"],
        ["convert"],
        ["convert", "a"],
        ["convert", "a", "b", "c"],
        ["convert", "a", "b", "--unknown"],
        ["convert", "a", "b", "--scheme", "int3"],
        ["convert", "a", "b", "--group-size", "48"],
        ["generate"],
        ["generate", "m", "hi", "--unknown"],
        ["generate", "m", "hi", "there"],
        ["generate", "m", "hi", "-n", "0"],
        ["generate", "m", "hi", "-n", "many"],
        ["generate", "m", "hi", "--temperature", "-1"],
        ["generate", "m", "hi", "--temperature", "nan"],
        ["generate", "m", "hi", "--temp", "inf"],
        ["generate", "m", "hi", "--top-p", "1.1"],
        ["generate", "m", "hi", "--top-p", "nan"],
        ["generate", "m", "hi", "--min-p", "nan"],
        ["generate", "m", "hi", "--top-k", "-2"],
        ["generate", "m", "hi", "--repetition-penalty", "0"],
        ["generate", "m", "hi", "--no-repeat-ngram-size", "-1"],
        ["generate", "m", "hi", "--seed", "-1"],
        ["generate", "m", "hi", "--seed", str(2**32)],
        ["generate", "m", "hi", "--threads", "0"],
        ["generate", "m", "hi", "--threads", "100000"],
        ["generate", "m", "hi", "--threads", str(2**40)],
        ["generate", "m", "hi", "--ctx-size", "0"],
        ["generate", "m", "hi", "--device", "tpu"],
        ["generate", "m", "hi", "--memory", "6 apples"],
        ["generate", "m", "hi", "--kv-bits", "5"],
        ["generate", "m", "hi", "--context-policy", "forget"],
        ["generate", "m", "hi", "--batch-size", "2"],
        ["generate", "m", "hi", "--ordered"],
        ["generate", "m", "-i", "in.txt", "-o", "out.jsonl", "--batch-size", "0"],
        ["generate", "m", "hi", "--preset", "poet"],
        ["generate", "m", "hi", "--truncate-prompt", "right"],
        ["generate", "m", "hi", "--stop", ""],
        ["generate", "m", "hi", "-p", "hi"],
        ["generate", "m", "hi", "-f", "file"],
        ["generate", "m", "-p", "hi", "-f", "file"],
        ["generate", "m", "-i", "in.txt"],
        ["generate", "m", "-o", "out.jsonl"],
        ["generate", "m", "hi", "-i", "in.txt", "-o", "out.jsonl"],
        ["generate", "m", "-p", "hi", "-i", "in.txt", "-o", "out.jsonl"],
        ["generate", "m"],  # and nothing on stdin
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_before_any_work(arguments, monkeypatch):
    monkeypatch.setattr(generate_module, "load_model", None)
    result = run(*arguments, code=2)
    assert result.stdout == ""
    assert re.match("Usage: ", result.stderr)


class TestPrompt:
    """However a prompt comes in, the model sees the same tokens."""

    PROMPT = "hi the naïve 👍"

    @pytest.fixture
    def expected(self, model):
        return run_json(model, self.PROMPT, *GREEDY)["token_ids"]

    def ids(self, model, *arguments, **options):
        return run_json(model, *arguments, *GREEDY, **options)["token_ids"]

    def test_as_an_option(self, model, expected):
        assert self.ids(model, "-p", self.PROMPT) == expected
        assert self.ids(model, "--prompt", self.PROMPT) == expected
        assert self.ids(model, "-p", self.PROMPT[:-1]) != expected

    @pytest.mark.parametrize("end", ["", "\n", "\r\n"])
    def test_on_stdin(self, model, expected, end):
        data = (self.PROMPT + end).encode()
        assert self.ids(model, "-", input=data) == expected
        assert self.ids(model, input=data) == expected
        assert self.ids(model, "-f", "-", input=data) == expected

    @pytest.mark.parametrize("end", ["", "\n", "\r\n"])
    def test_in_a_file(self, model, expected, end, tmp_path):
        path = tmp_path / "prompt"
        path.write_bytes((self.PROMPT + end).encode())
        assert self.ids(model, "-f", path) == expected
        assert self.ids(model, "--prompt-file", path) == expected

    def test_in_a_file_keeps_all_but_the_last_line_end(self, model, tmp_path):
        path = tmp_path / "prompt"
        path.write_bytes(b"\n one\ntwo \n\n")
        assert self.ids(model, "-f", path) == self.ids(model, "\n one\ntwo \n")

    def test_dash_as_the_value_of_an_option_is_a_prompt(self, model):
        one = run_json(model, "-p", "-", *GREEDY, input="not read")
        assert one["prompt_tokens"] == 2  # with the BOS

    def test_that_looks_like_an_option_follows_two_dashes(self, model):
        result = run("generate", "--json", "-q", "-n", "1", "--", model, "--help")
        data = json.loads(result.stdout)
        assert data["prompt_tokens"] == 1 + len("--help")

    def test_that_is_empty_is_the_bos(self, model):
        assert run_json(model, "", *GREEDY)["prompt_tokens"] == 1
        assert run_json(model, "-", *GREEDY, input="")["prompt_tokens"] == 1

    def test_that_is_empty_without_a_bos_is_an_error(self, directory):
        write_tokenizer(directory)
        assert_one_error(run("generate", directory, "", code=1), "empty.*beginning-of-sequence")

    def test_that_is_not_utf8_is_an_error(self, model, tmp_path):
        path = tmp_path / "prompt"
        path.write_bytes(b"abc\xff")
        bad = "not UTF-8 text: byte 3"
        assert_one_error(
            run("generate", model, "-f", path, code=1), f"{re.escape(str(path))}.*{bad}"
        )
        result = run("generate", model, "-", input=b"abc\xff", code=1)
        assert_one_error(result, f"stdin.*{bad}", "iconv")

    @pytest.mark.parametrize("name", ["missing", ".", "x" * 300])
    def test_file_that_cannot_be_read_is_an_error(self, model, tmp_path, name):
        result = run("generate", model, "-f", tmp_path / name, code=1)
        assert result.stdout == ""
        assert re.fullmatch(r"Error: .* cannot be read: [^\n]+\n", result.stderr)

    def test_too_long_is_an_error_that_says_by_how_much(self, model):
        result = run("generate", model, "x" * 300, code=1)
        assert_one_error(result, "301 tokens, 46 more than the context of 256", "--truncate-prompt")

    def test_too_long_for_the_context_asked_for(self, model):
        result = run("generate", model, "x" * 30, "--ctx-size", "20", code=1)
        assert_one_error(result, "31 tokens, 12 more than the context of 20")

    def test_in_a_chat_template_unless_raw(self, chat_model, model):
        chat = run_json(chat_model, "hi", *GREEDY)
        raw = run_json(chat_model, "hi", "--raw", *GREEDY)
        system = run_json(chat_model, "hi", "--system-prompt", "Be kind.", *GREEDY)
        assert raw["prompt_tokens"] == 2
        assert 2 < chat["prompt_tokens"] < system["prompt_tokens"]

    @pytest.mark.parametrize("raw", [(), ("--raw",)])
    def test_with_a_system_message_that_has_no_place_is_an_error(self, model, chat_model, raw):
        which = chat_model if raw else model
        result = run("generate", which, "hi", "--system-prompt", "Be kind.", *raw, code=1)
        assert_one_error(result, "system prompt has no place")


class TestTruncation:
    def test_keeps_the_end_and_warns(self, model):
        text = "".join(chr(ord("a") + i % 26) for i in range(300))
        arguments = (model, text, "--truncate-prompt", "left", "--ctx-size", "100", *GREEDY)
        result = run("generate", *arguments, "--json")
        data = json.loads(result.stdout)
        assert data["prompt_tokens"] == 92
        assert data["completion_tokens"] == 8
        assert result.stderr == "Warning: cut 209 tokens off the prompt's start.\n"

    def test_is_silent_when_quiet(self, model):
        arguments = (model, "x" * 300, "--truncate-prompt", "left", *GREEDY)
        assert run("generate", *arguments, "-q").stderr == ""

    @pytest.mark.parametrize(("length", "kept"), [(254, 255), (255, 128), (256, 128)])
    def test_only_what_does_not_fit_is_cut(self, model, length, kept):
        options = ("--truncate-prompt", "left", "--temperature", "0", "-n", "250")
        data = run_json(model, "x" * length, *options)
        assert data["prompt_tokens"] == kept


class TestOutput:
    def test_stdout_is_the_text_and_stderr_the_figures(self, model):
        data = run_json(model, "hi", *GREEDY)
        result = run("generate", model, "hi", *GREEDY)
        assert result.stdout == data["text"] + ("" if data["text"].endswith("\n") else "\n")
        assert re.fullmatch(
            r"3 prompt tokens, 8 new \(length\): \d+ ms TTFT, [\d.]+ tok/s prefill, "
            r"[\d.]+ ms TPOT, [\d.]+ tok/s decode, \d+ MB peak, seed \d+\n",
            result.stderr,
        )

    def test_figures_of_one_token_leave_out_what_it_has_not(self, model):
        result = run("generate", model, "hi", "--temperature", "0", "-n", "1")
        assert "TTFT" in result.stderr
        assert "TPOT" not in result.stderr
        assert "decode" not in result.stderr

    def test_quiet_leaves_stderr_empty(self, model):
        loud, quiet = (run("generate", model, "hi", *GREEDY, *q) for q in ((), ("-q",)))
        assert quiet.stderr == ""
        assert quiet.stdout == loud.stdout

    @pytest.mark.parametrize("quiet", [(), ("-q",)])
    def test_json_is_one_object_with_the_documented_keys(self, model, quiet):
        result = run("generate", model, "hi", *GREEDY, "--json", *quiet)
        assert result.stdout.count("\n") == 1
        assert result.stderr == ""
        data = json.loads(result.stdout)
        assert data.keys() == JSON_KEYS
        assert data["finish_reason"] == "length"
        assert data["prompt_tokens"] == 3
        assert data["completion_tokens"] == len(data["token_ids"]) == 8
        assert data["ttft_s"] > 0
        assert data["tpot_s"] > 0
        assert data["prefill_tokens_per_s"] == pytest.approx(3 / data["ttft_s"])
        assert data["decode_tokens_per_s"] == pytest.approx(1 / data["tpot_s"])
        assert data["peak_memory_bytes"] > 2**20

    def test_json_of_one_token_has_null_for_what_it_has_not(self, model):
        data = run_json(model, "hi", "-n", "1")
        assert data.keys() == JSON_KEYS
        assert data["tpot_s"] is data["decode_tokens_per_s"] is None

    def fake(self, *pieces, error=None):
        class Completion(list):
            finish_reason = "error" if error else "stop"
            token_ids = (1,)
            seed = 7
            usage = SimpleNamespace(
                prompt_tokens=1,
                completion_tokens=1,
                ttft_s=1.0,
                tpot_s=None,
                prefill_tokens_per_s=1.0,
                decode_tokens_per_s=None,
            )

        completion = Completion(pieces)
        completion.error = error
        return completion

    @pytest.mark.parametrize(
        ("pieces", "expected"),
        [
            (["a", "b"], "ab\n"),
            (["a\n"], "a\n"),
            ([], "\n"),
            (["\x1b[31mred\x1b[0m"], "\x1b[31mred\x1b[0m\n"),
            (["naïve 👍\0"], "naïve 👍\0\n"),
        ],
    )
    def test_text_is_printed_as_it_is_and_ended_with_a_newline(self, pieces, expected, capsys):
        generate_module._show(self.fake(*pieces), {"as_json": False, "quiet": True})
        assert capsys.readouterr().out == expected

    def test_pieces_are_flushed_one_by_one(self, monkeypatch):
        written = []

        class Raw(io.RawIOBase):
            def writable(self):
                return True

            def write(self, data):
                written.append(bytes(data))
                return len(data)

        with io.TextIOWrapper(io.BufferedWriter(Raw()), encoding="utf-8") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            generate_module._show(self.fake("a", "b"), {"as_json": False, "quiet": True})
            assert written == [b"a", b"b", b"\n"]
            monkeypatch.undo()


class TestSampling:
    def ids(self, model, *options):
        return run_json(model, "hi", "-n", "20", "--seed", "3", *options)["token_ids"]

    def test_a_seed_repeats_and_is_told(self, model):
        first = run_json(model, "hi", "--temperature", "2", "-n", "20")
        again = ("--temperature", "2", "-n", "20", "--seed", first["seed"])
        assert run_json(model, "hi", *again)["token_ids"] == first["token_ids"]
        other = (*again[:-1], (first["seed"] + 1) % 2**32)
        assert run_json(model, "hi", *other)["token_ids"] != first["token_ids"]

    @pytest.mark.parametrize(
        ("preset", "same"),
        [
            ("chat", "0.7 0.9 50"),
            ("code", "0.1 0.95 10"),
            ("creative", "1.0 0.95 100"),
        ],
    )
    def test_a_preset_is_three_options(self, model, preset, same):
        temperature, top_p, top_k = same.split()
        spelled = ("--temperature", temperature, "--top-p", top_p, "--top-k", top_k)
        assert self.ids(model, "--preset", preset) == self.ids(model, *spelled)

    def test_presets_differ(self, model):
        found = [self.ids(model, "--preset", name) for name in ("chat", "code", "creative")]
        assert found[0] != found[1] != found[2] != found[0]

    def test_options_override_a_preset_wherever_they_stand(self, model):
        greedy = self.ids(model, "--temperature", "0")
        assert self.ids(model, "--preset", "creative", "--temperature", "0") == greedy
        assert self.ids(model, "--temperature", "0", "--preset", "creative") == greedy
        assert self.ids(model, "--preset", "creative", "--top-k", "1") == greedy

    def test_aliases(self, model):
        assert self.ids(model, "--temp", "0") == self.ids(model, "--temperature", "0")
        long = self.ids(model, "--temp", "0", "--repetition-penalty", "2")
        assert self.ids(model, "--temp", "0", "--repeat-penalty", "2") == long
        assert long != self.ids(model, "--temp", "0")

    def test_defaults_are_the_models_and_a_preset_and_an_option_override_them(self, directory):
        default = self.ids(directory)
        assert default == self.ids(directory, "--temperature", "0.7", "--top-p", "0.9")
        edit(directory / "generation_config.json", temperature=1.3, top_p=0.5, top_k=20)
        own = ("--temperature", "1.3", "--top-p", "0.5", "--top-k", "20")
        assert self.ids(directory) == self.ids(directory, *own)
        assert self.ids(directory) != default
        preset = ("--temperature", "0.7", "--top-p", "0.9", "--top-k", "50")
        assert self.ids(directory, "--preset", "chat") == self.ids(directory, *preset)
        edit(directory / "generation_config.json", do_sample=False)
        assert self.ids(directory) == self.ids(directory, "--temperature", "0")

    def test_stop_is_repeatable_and_not_printed(self, model):
        whole = run_json(model, "hi", "--temperature", "0", "-n", "40", "--raw")["text"]
        later, first = whole[9:11], whole[4:6]
        data = run_json(
            model, "hi", "--temperature", "0", "-n", "40", "--raw", "--stop", later, "--stop", first
        )
        assert data["text"] == whole[: whole.index(first)]
        assert data["finish_reason"] == "stop"

    def test_the_number_of_threads_does_not_change_the_tokens(self, model):
        before = torch.get_num_threads()
        try:
            found = [self.ids(model, "--threads", n, "--temp", "0") for n in (1, 2, 3)]
        finally:
            torch.set_num_threads(before)
        assert found[0] == found[1] == found[2]


def truncate(path, count=100):
    path.write_bytes(path.read_bytes()[:-count])


def poison(directory, name="model.layers.1.mlp.up_proj.weight", value=float("nan")):
    path = directory / "model.safetensors"
    weights = load_file(path)
    weights[name][0, 0] = value
    save_file(weights, path)


def write_index(directory, **changes):
    names = load_file(directory / "model.safetensors")
    weight_map = dict.fromkeys(names, "model.safetensors")
    weight_map = {n: f for n, f in (weight_map | changes).items() if f is not None}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def only_pickle(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def unfinished(directory):
    for path in directory.iterdir():
        path.unlink()
    (directory / "qinfer-progress.json").write_text('{"identity": "x", "shards": {}}')


BROKEN = {
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "empty config": (lambda d: (d / "config.json").write_bytes(b""), "config.json is empty"),
    "config not JSON": (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
    "unknown architecture": (
        lambda d: edit(d / "config.json", architectures=["MambaForCausalLM"]),
        "MambaForCausalLM is not supported",
    ),
    "heads not a number": (
        lambda d: edit(d / "config.json", num_attention_heads="four"),
        "num_attention_heads must be",
    ),
    "unknown rope": (
        lambda d: edit(d / "config.json", rope_parameters={"rope_type": "spiral"}),
        "rope type 'spiral'",
    ),
    "unknown activation": (lambda d: edit(d / "config.json", hidden_act="mish"), "'mish'"),
    "truncated weights": (lambda d: truncate(d / "model.safetensors"), "truncated"),
    "empty weights": (lambda d: (d / "model.safetensors").write_bytes(b""), "is empty"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has no model.safetensors"),
    "only pickle": (only_pickle, "pytorch_model.bin.*pickle"),
    "index points outside": (
        lambda d: write_index(d, **{"model.norm.weight": "../model.safetensors"}),
        "points outside",
    ),
    "index lacks a tensor": (
        lambda d: write_index(d, **{"model.norm.weight": None}),
        "model.norm.weight.*does not list",
    ),
    "index names a tensor too many": (
        lambda d: write_index(d, extra="model.safetensors"),
        "extra is in model.safetensors, but",
    ),
    "index names a missing shard": (
        lambda d: write_index(d, extra="model-2.safetensors"),
        "model-2.safetensors, which is not there",
    ),
    "empty index": (
        lambda d: (d / "model.safetensors.index.json").write_bytes(b""),
        "index.json is empty",
    ),
    "a layer too many in config": (
        lambda d: edit(d / "config.json", num_hidden_layers=4),
        r"no tensor model\.layers\.3\.",
    ),
    "another width in config": (
        lambda d: edit(d / "config.json", intermediate_size=100),
        r"has shape \[96, 64\].*\[100, 64\]",
    ),
    "another vocabulary in config": (
        lambda d: edit(d / "config.json", vocab_size=300),
        r"embed_tokens.*\[320, 64\].*\[300, 64\]",
    ),
    "a vocabulary smaller than the tokenizer's": (
        lambda d: edit(d / "config.json", vocab_size=200),
        "tokenizer has 264 tokens.*only 200",
    ),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json does not exist"),
    "empty tokenizer": (lambda d: (d / "tokenizer.json").write_bytes(b""), "json is empty"),
    "tokenizer not JSON": (lambda d: (d / "tokenizer.json").write_text("{"), "not a valid"),
    "tokenizer without a model": (lambda d: (d / "tokenizer.json").write_text("{}"), "not a valid"),
    "empty tokenizer config": (
        lambda d: (d / "tokenizer_config.json").write_bytes(b""),
        "tokenizer_config.json is not valid JSON",
    ),
    "empty generation config": (
        lambda d: (d / "generation_config.json").write_bytes(b""),
        "generation_config.json is empty",
    ),
    "generation config out of range": (
        lambda d: edit(d / "generation_config.json", temperature=-1),
        "temperature must be",
    ),
    "empty chat template": (
        lambda d: (d / "chat_template.jinja").write_bytes(b""),
        "chat_template.jinja",
    ),
    "chat template with a syntax error": (
        lambda d: (d / "chat_template.jinja").write_text("{% for %}"),
        "syntax error in line 1",
    ),
    "NaN weights": (poison, "NaN or infinite values, first in layer 1"),
    "infinite weights": (
        lambda d: poison(d, "model.layers.0.mlp.down_proj.weight", float("inf")),
        "NaN or infinite values, first in layer 0",
    ),
    "quantized by others": (
        lambda d: edit(d / "config.json", quantization_config={"quant_method": "awq"}),
        "quantized with awq",
    ),
    "an unfinished conversion": (unfinished, "is a conversion that was interrupted"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_model_is_one_error(directory, damage):
    break_it, pattern = BROKEN[damage]
    break_it(directory)
    assert_one_error(run("generate", directory, "hi", "-n", "4", code=1), pattern)


def test_json_of_a_model_that_breaks_down_tells_the_reason(directory):
    poison(directory)
    result = run("generate", directory, "hi", "--json", code=1)
    assert json.loads(result.stdout)["finish_reason"] == "error"
    assert result.stderr.startswith("Error: the model produced NaN")


@pytest.mark.parametrize(
    ("name", "pattern", "hint"),
    [
        ("missing", "missing does not exist", "org/name"),
        ("./no/such/model", "does not exist", "org/name"),
        ("model.gguf", "is a GGUF file", "qinfer convert .*model.gguf"),
        ("org/name:file.gguf", "is a GGUF file", "qinfer convert org/name:file.gguf"),
        ("file.txt", "is not a directory", "config.json"),
    ],
)
def test_what_is_no_model_is_an_error_that_says_what_to_name(
    name, pattern, hint, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "file.txt").write_text("text")
    assert_one_error(run("generate", name, "hi", code=1), pattern, hint)


def test_a_cache_larger_than_memory_is_an_error(directory):
    edit(directory / "config.json", max_position_embeddings=2**31 - 1)
    result = run("generate", directory, "hi", "--ctx-size", 2**31 - 1, code=1)
    assert_one_error(result, r"GB of KV cache for one sequence of 2,147,483,647", "--ctx-size")


def test_a_context_larger_than_the_models_is_an_error(model):
    result = run("generate", model, "hi", "--ctx-size", "257", code=1)
    assert_one_error(result, "--ctx-size 257 .* 256 positions", "256 or less")


def files(directory):
    return {p.relative_to(directory): p.stat().st_mtime_ns for p in directory.rglob("*")}


class TestConvert:
    def test_reports_on_stderr_and_leaves_stdout_empty(self, model, tmp_path):
        out = tmp_path / "out"
        result = run("convert", model, out)
        assert result.stdout == ""
        assert "int4 g32" in result.stderr
        assert f"Wrote {out} in " in result.stderr
        assert not list(tmp_path.glob("*.part"))
        data = run_json(out, "hi", *GREEDY)
        assert data["completion_tokens"] == 8

    def test_quiet_says_nothing(self, model, tmp_path):
        assert run("convert", model, tmp_path / "out", "-q").output == ""
        assert (tmp_path / "out" / "config.json").exists()

    @pytest.mark.parametrize("scheme", ["int8", "int4", "nf4", "bf16"])
    def test_every_scheme_runs(self, model, tmp_path, scheme):
        run("convert", model, tmp_path / "out", "--scheme", scheme, "-q")
        first, again = (run_json(tmp_path / "out", "hi", *GREEDY) for _ in range(2))
        assert first["token_ids"] == again["token_ids"]

    @pytest.mark.parametrize("quiet", [(), ("-q",)])
    def test_dry_run_prints_the_plan_and_writes_nothing(self, model, tmp_path, quiet):
        before = files(tmp_path)
        result = run("convert", model, tmp_path / "out", "--dry-run", *quiet)
        assert result.stderr == ""
        assert "int4 g32" in result.stdout
        assert "model.layers.[0-2].input_layernorm.weight" in result.stdout
        assert "bits per parameter" in result.stdout
        assert files(tmp_path) == before

    def test_an_existing_output_needs_force(self, model, tmp_path):
        out = tmp_path / "out"
        run("convert", model, out, "-q")
        before = files(out)
        assert_one_error(run("convert", model, out, code=1), "already holds", "--force")
        assert files(out) == before
        run("convert", model, out, "--scheme", "int8", "--force", "-q")
        assert files(out) != before
        assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]

    def test_what_qinfer_did_not_write_is_not_replaced(self, model, directory):
        before = files(directory)
        for force in ((), ("--force",)):
            result = run("convert", model, directory, *force, code=1)
            assert_one_error(result, "not empty and was not written by qinfer")
        (directory.parent / "file").write_text("text")
        result = run("convert", model, directory.parent / "file", "--force", code=1)
        assert_one_error(result, "is not a directory")
        assert files(directory) == before

    @pytest.mark.parametrize("dry", [(), ("--dry-run",)])
    def test_a_group_size_that_does_not_divide_names_tensor_and_sizes(self, model, tmp_path, dry):
        result = run("convert", model, tmp_path / "out", "--group-size", "64", *dry, code=1)
        assert_one_error(result, r"64 does not divide the 96 columns of .*down_proj", "32")
        assert list(tmp_path.iterdir()) == []

    def test_a_group_size_for_a_scheme_without_is_an_error(self, model, tmp_path):
        options = ("--scheme", "nf4", "--group-size", "64")
        assert_one_error(run("convert", model, tmp_path / "out", *options, code=1), "--group-size")

    @pytest.mark.parametrize(
        "damage",
        [
            name
            for name in BROKEN
            if not re.search("tokenizer|chat|generation|vocabulary smaller", name)
        ],
    )
    def test_a_broken_source_is_one_error_and_leaves_nothing(self, directory, damage, tmp_path):
        break_it, _ = BROKEN[damage]
        break_it(directory)
        result = run("convert", directory, tmp_path / "out", "-q", code=1)
        assert_one_error(result, ".")
        assert [p.name for p in tmp_path.iterdir()] == ["model"]

    @pytest.mark.parametrize(
        ("name", "pattern"),
        [
            ("missing", "does not exist"),
            ("missing.gguf", "does not exist"),
            ("empty.gguf", "empty.gguf"),
            ("text.gguf", "text.gguf"),
            ("weights.bin", "pickle"),
            ("model.safetensors", "one file of a model"),
        ],
    )
    def test_a_source_that_is_none_is_one_error(self, name, pattern, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "empty.gguf").write_bytes(b"")
        (tmp_path / "text.gguf").write_text("this is no model")
        (tmp_path / "weights.bin").write_bytes(b"")
        (tmp_path / "model.safetensors").write_bytes(b"")
        assert_one_error(run("convert", name, "out", "-q", code=1), pattern)
        assert not (tmp_path / "out").exists()

    def test_an_unfinished_conversion_goes_on(self, model, tmp_path):
        out = tmp_path / "out"
        run("convert", model, out, "-q")
        finished = (out / "model.safetensors").read_bytes()
        shutil.rmtree(out)
        (tmp_path / "out.part").mkdir()
        (tmp_path / "out.part" / "qinfer-progress.json").write_text('{"identity": "another"')
        run("convert", model, out, "-q")
        assert (out / "model.safetensors").read_bytes() == finished
        assert [p.name for p in tmp_path.iterdir()] == ["out"]


def program(*arguments, **options):
    return subprocess.run(
        [QINFER, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


@pytest.fixture(scope="module")
def endless_model(model, tmp_path_factory):
    """Would go on for a million tokens."""
    path = tmp_path_factory.mktemp("cli") / "endless"
    shutil.copytree(model, path)
    edit(path / "config.json", max_position_embeddings=10**6, eos_token_id=None)
    edit(path / "tokenizer_config.json", eos_token=None)
    return path


ENDLESS = ("hi", "-n", 10**6, "--temperature", "1", "--threads", "1")


@needs_program
class TestProgram:
    def test_prints_text_only_and_the_same_as_in_process(self, model):
        expected = run("generate", model, "hi", *GREEDY).stdout
        done = program("generate", model, "-", "-q", *GREEDY, input="hi\n")
        assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")

    def test_help_is_the_same_as_a_module_and_loads_nothing_heavy(self):
        code = """
import runpy, sys
sys.argv = ["qinfer", "generate", "--help"]
try:
    runpy.run_module("qinfer_cli", run_name="__main__")
finally:
    heavy = {"torch", "numpy", "transformers", "bitsandbytes", "tokenizers", "safetensors", "gguf"}
    heavy |= {"huggingface_hub", "jinja2", "tqdm"}
    print(sorted(heavy & sys.modules.keys()), file=sys.stderr)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stderr == "[]\n"
        assert done.stdout == program("generate", "--help").stdout

    def test_generate_loads_neither_transformers_nor_bitsandbytes(self, model, tmp_path):
        run("convert", model, tmp_path / "nf4", "--scheme", "nf4", "-q")
        code = """
import sys
from qinfer_cli.main import cli
for model in sys.argv[1:]:
    cli(["generate", model, "hi", "-q", "-n", "2"], standalone_mode=False)
heavy = {"transformers", "bitsandbytes", "gguf", "accelerate", "compressed_tensors"}
print(sorted(heavy & sys.modules.keys()), "torch" in sys.modules, file=sys.stderr)
"""
        done = subprocess.run(
            [sys.executable, "-c", code, model, tmp_path / "nf4"], capture_output=True, text=True
        )
        assert done.stderr == "[] True\n"

    def test_an_error_is_two_lines_and_exit_code_1(self, tmp_path):
        done = program("generate", tmp_path / "missing", "hi")
        assert (done.returncode, done.stdout) == (1, "")
        assert re.fullmatch("Error: .* does not exist\nHint: .*\n", done.stderr)

    def test_without_a_standard_input_asks_for_a_prompt(self, model):
        command = f'exec "{QINFER}" generate "{model}" <&-'
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        assert done.returncode == 2
        assert "Give a prompt" in done.stderr

    @pytest.mark.skipif(
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="interrupts are ignored here"
    )
    def test_an_interrupt_ends_it_with_130_and_the_text_so_far(self, endless_model):
        with subprocess.Popen(
            [QINFER, "generate", endless_model, *map(str, ENDLESS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        ) as process:
            assert process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        assert process.returncode == 130
        assert stderr == b"Interrupted.\n"

    def test_a_reader_that_goes_away_ends_it_without_a_traceback(self, endless_model):
        with subprocess.Popen(
            [QINFER, "generate", endless_model, *map(str, ENDLESS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        ) as process:
            assert process.stdout.read(1)
            process.stdout.close()
            stderr = process.stderr.read()
            process.wait(timeout=60)
        assert process.returncode != 0
        assert stderr == b""

    def test_a_prompt_that_is_not_unicode_is_an_error(self, model):
        done = subprocess.run(
            [QINFER, "generate", model, os.fsencode(b"abc\xff")], capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("Error: The prompt is not valid Unicode")
