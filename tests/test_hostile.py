"""What went wrong once: inputs that ended in a traceback, in lost data, or in a useless model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from qinfer_cli.main import cli
from tests.gguf_files import as_f32, llama_keys, llama_tensors, tiny_vocabulary, write

QINFER = Path(sys.executable).with_name("qinfer")


def run(*arguments, code):
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def refused(*arguments, reason):
    """One error line that says the reason, and a hint."""
    result = run(*arguments, code=1)
    error, hint = result.stderr.splitlines()
    assert error.startswith("Error: ")
    assert reason in error
    assert hint.startswith("Hint: ")
    assert "Traceback" not in result.output


@pytest.fixture
def source(tiny_model, tmp_path):
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))


def edit(path, **values):
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | values))


class TestNothingIsLost:
    def test_a_directory_that_only_looks_unfinished(self, source, tmp_path):
        part = tmp_path / "out.part"
        part.mkdir()
        (part / "progress.json").write_text('{"a": 1}')
        (part / "data.txt").write_text("precious")
        refused("convert", "-q", source, tmp_path / "out", reason="is in the way")
        assert (part / "data.txt").read_text() == "precious"

    def test_files_beside_a_model_that_is_replaced(self, source, tmp_path):
        out = tmp_path / "out"
        run("convert", "-q", source, out, code=0)
        (out / "notes.txt").write_text("mine")
        refused("convert", "-q", "--force", source, out, reason="notes.txt was not written by")
        assert (out / "notes.txt").read_text() == "mine"

    def test_a_source_within_the_output(self, source, tmp_path):
        out = tmp_path / "out"
        run("convert", "-q", source, out, code=0)
        inner = Path(shutil.copytree(source, out / "inner"))
        result = run("convert", "-q", "--force", inner, out, code=1)
        assert "Error: " in result.stderr
        assert (inner / "model.safetensors").exists()

    def test_a_source_that_is_the_output(self, source, tmp_path):
        out = tmp_path / "out"
        run("convert", "-q", "--scheme", "bf16", source, out, code=0)
        before = (out / "model.safetensors").read_bytes()
        refused("convert", "-q", "--force", out, out, reason="is or contains SOURCE")
        assert (out / "model.safetensors").read_bytes() == before

    def test_the_current_directory(self, source, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        refused("convert", "-q", source, ".", reason="is not empty")
        (tmp_path / "empty").mkdir()
        monkeypatch.chdir(tmp_path / "empty")
        refused("convert", "-q", source, ".", reason="the current directory")

    def test_a_working_directory_that_is_a_link(self, source, tmp_path):
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "out.part").symlink_to(tmp_path / "elsewhere")
        refused("convert", "-q", source, tmp_path / "out", reason="is not a directory")


BROKEN_SOURCES = {
    "an empty tokenizer": (lambda d: (d / "tokenizer.json").write_text(""), "is empty"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "does not exist"),
    "a damaged tokenizer": (
        lambda d: (d / "tokenizer.json").write_text('{"model": null}'),
        "is not a valid tokenizer",
    ),
    "a tokenizer of another model": (
        lambda d: add_tokens(d / "tokenizer.json", 100),
        "the model's vocabulary only",
    ),
    "a damaged tokenizer_config": (
        lambda d: (d / "tokenizer_config.json").write_text("[" * 100_000),
        "tokenizer_config.json is not valid JSON",
    ),
    "a damaged template": (
        lambda d: (d / "chat_template.jinja").write_text("{% for %}"),
        "has a syntax error",
    ),
    "a damaged generation_config": (
        lambda d: edit(d / "generation_config.json", temperature="hot"),
        "temperature must be",
    ),
    "text where ids belong": (
        lambda d: edit(d / "generation_config.json", eos_token_id="258"),
        "eos_token_id must be",
    ),
    "absurdly many layers": (
        lambda d: edit(d / "config.json", num_hidden_layers=2_000_000),
        "num_hidden_layers must be at most",
    ),
    "yarn over nothing": (
        lambda d: edit(
            d / "config.json",
            rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1},
        ),
        "rope_theta must be",
    ),
}


def add_tokens(path, count):
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([f"<extra {i}>" for i in range(count)])
    tokenizer.save(str(path))


@pytest.mark.parametrize("command", ["convert", "generate"])
@pytest.mark.parametrize("damage", BROKEN_SOURCES)
def test_a_broken_model_is_refused_by_both_commands(source, tmp_path, damage, command):
    break_it, reason = BROKEN_SOURCES[damage]
    break_it(source)
    rest = [tmp_path / "out"] if command == "convert" else ["hi"]
    refused(command, "-q", source, *rest, reason=reason)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.part").exists()


@pytest.mark.parametrize("value", ["text", [1], True, {"quant_method": "gptq"}], ids=str)
def test_any_quantization_config_is_named(source, tmp_path, value):
    edit(source / "config.json", quantization_config=value)
    refused("generate", "-q", source, "hi", reason="is quantized with")
    refused("convert", "-q", source, tmp_path / "out", reason="is quantized already")


@pytest.mark.parametrize("value", [5, True, 1.5, "abc", {"x": "<s>"}, ["<s>", None]], ids=str)
def test_any_list_of_extra_tokens_is_read(source, value):
    edit(source / "tokenizer_config.json", extra_special_tokens=value, bos_token="\ud800")
    run("generate", "-q", "--raw", "-n", "1", source, "abc", code=0)


@pytest.mark.parametrize(
    "template",
    ["{{ 'a' * 10 ** 13 }}", "{{ cycler() }}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"],
)
def test_a_template_that_cannot_run(source, template):
    (source / "chat_template.jinja").write_text(template)
    refused("generate", "-q", source, "hi", reason="chat template")


def test_lone_surrogates_in_configuration_are_kept(source, tmp_path):
    edit(source / "config.json", note="\ud800")
    run("convert", "-q", source, tmp_path / "out", code=0)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["note"] == "\ud800"


@pytest.mark.parametrize("length", [252, 300])
def test_a_name_that_is_too_long(source, tmp_path, length):
    refused("convert", "-q", source, tmp_path / ("x" * length), reason="File name too long")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_stdout_is_an_error(source):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [QINFER, "generate", "-q", "--raw", "-n", "3", source, "hi"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: stdout cannot be written")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_a_closed_stdout_is_an_error(source):
    command = f'exec "{QINFER}" generate -q --raw -n 3 "{source}" hi >&-'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: stdout is closed")


def test_a_gguf_file_with_named_templates_converts(tmp_path):
    extra = {"tokenizer.chat_template": "x", "tokenizer.chat_template.tool_use": "y"}
    path = tmp_path / "t.gguf"
    write(path, {**llama_keys(), **tiny_vocabulary(), **extra}, as_f32(llama_tensors()))
    out = tmp_path / "out"
    run("convert", "-q", path, out, code=0)
    name = "additional_chat_templates/tool_use.jinja"
    assert (out / name).read_text() == "y"
    assert name in json.loads((out / "qinfer.json").read_text())["sha256"]
    run("convert", "-q", "--force", path, out, code=0)
