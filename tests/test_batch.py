"""Files of prompts: a record for every line, in order, whatever the line."""

import gzip
import json
import os
import re
import shutil
import signal

import pytest
import torch
from click.testing import CliRunner

from qinfer.generation import LanguageModel
from qinfer_cli.batch.output import FileOutput
from qinfer_cli.batch.parse import Parser
from qinfer_cli.main import cli
from tests.test_generation import write_tokenizer

OPTIONS = ("--temperature", "0", "-n", "6", "-q")
SUCCESS = {"id", "index", "text", "finish_reason", "prompt_tokens", "completion_tokens", "seed"}
SAME = ("text", "finish_reason", "prompt_tokens", "completion_tokens")
TOO_LONG = "x" * 300


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("batch") / "model"
    shutil.copytree(tiny_model("llama"), path)
    write_tokenizer(path)
    return path


def invoke(*arguments, code=0):
    result = CliRunner().invoke(cli, ["generate", *map(str, arguments)], prog_name="qinfer")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def read_records(path):
    """Every line is one JSON object, and the last one is ended too."""
    text = path.read_bytes().decode()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


@pytest.fixture
def answer(model, tmp_path):
    """`answer(b"...", ".txt")`: the records for an input file of this content, in its order."""

    def run(content, suffix, *options, code=0, directory=model):
        source, out = tmp_path / f"in{suffix}", tmp_path / "out.jsonl"
        source.write_bytes(content)
        arguments = (directory, "-i", source, "-o", out, "--ordered", *OPTIONS, *options)
        result = invoke(*arguments, code=code)
        assert result.stdout == ""
        count = sum("error" in record for record in read_records(out))
        expected = f"{count} prompts failed; see their error records in {out}.\n" if code else ""
        assert result.stderr == expected
        return read_records(out)

    return run


def single(model, prompt, *options):
    result = invoke(model, "--json", *OPTIONS, *options, "-p", prompt)
    return json.loads(result.stdout)


def lines(*requests):
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_txt_is_a_prompt_a_line_and_empty_lines_are_skipped(answer, model, end, last):
    content = end.join([b"one", b"", b"two the", b"  \t", "naïve 👍".encode(), b" four "])
    records = answer(content + (end if last else b""), ".txt")
    assert [r["id"] for r in records] == [1, 3, 5, 6]
    for record, prompt in zip(records, ["one", "two the", "naïve 👍", " four "], strict=True):
        assert record.keys() == SUCCESS
        alone = single(model, prompt)
        assert [alone[k] for k in SAME] == [record[k] for k in SAME]


def test_jsonl_answers_with_the_ids_given(answer, model):
    requests = [
        {"id": "first", "prompt": "one"},
        {"prompt": "two\nlines"},
        {"id": 7, "prompt": "three"},
        {"id": None, "prompt": "four"},
        {"id": "7", "prompt": "five"},
    ]
    records = answer(lines(*requests), ".jsonl")
    assert [r["id"] for r in records] == ["first", 2, 7, 4, "7"]
    for record, request in zip(records, requests, strict=True):
        assert record["text"] == single(model, request["prompt"])["text"]


def test_a_line_is_answered_as_if_it_were_alone(answer, model):
    """Also sampled, with the seed that was given, and whatever lines stand before it."""
    sampled = ("--temperature", "1.5", "--seed", "11")
    records = answer(b"one\ntwo\none\n", ".txt", *sampled)
    assert records[0]["text"] == records[2]["text"] == single(model, "one", *sampled)["text"]
    assert records[1]["text"] == single(model, "two", *sampled)["text"]


BAD_LINES = {
    "not JSON": (b"{", "PromptError", "not JSON"),
    "text": (b"hello", "PromptError", "not JSON"),
    "deeply nested": (b"[" * 100_000, "PromptError", "not JSON"),
    "an array": (b'["prompt"]', "PromptError", '"prompt"'),
    "no prompt": (b'{"id": "bad"}', "PromptError", '"prompt"'),
    "a number as prompt": (b'{"id": "bad", "prompt": 3}', "PromptError", '"prompt"'),
    "unknown field": (b'{"id": "bad", "prompt": "x", "topk": 3}', "PromptError", '"topk"'),
    "not UTF-8": (b'{"id": "bad", "prompt": "\xff"}', "PromptError", "not UTF-8"),
    "lone surrogate": (b'{"id": "bad", "prompt": "a\\ud83d"}', "PromptError", "Unicode"),
    "empty prompt": (b'{"id": "bad", "prompt": ""}', "PromptError", "empty"),
    "too long": (lines({"id": "bad", "prompt": TOO_LONG})[:-1], "PromptError", "45 more"),
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line_becomes_an_error_record_and_the_others_are_answered(answer, bad):
    line, kind, message = BAD_LINES[bad]
    good = lines({"prompt": "one"})
    first, error, last = answer(good + line + b"\n" + good, ".jsonl", code=3)
    assert error.keys() == {"id", "index", "error"}
    assert error["id"] in ("bad", 2)
    assert error["error"].keys() == {"type", "message", "line"}
    assert error["error"]["line"] == 2
    assert error["error"]["type"] == kind
    assert message in error["error"]["message"]
    assert first["text"] == last["text"]
    assert (first["id"], last["id"]) == (1, 3)


def test_bad_lines_of_txt_become_error_records_too(answer):
    content = b"one\n\xff\xfe\n" + TOO_LONG.encode() + b"\none\n"
    first, undecodable, too_long, last = answer(content, ".txt", code=3)
    assert "not UTF-8" in undecodable["error"]["message"]
    assert "45 more than the context of 256" in too_long["error"]["message"]
    assert first["text"] == last["text"]


def test_an_id_that_utf8_cannot_spell_comes_back_as_it_was(answer):
    records = answer(b'{"id": "\\ud83d", "prompt": "one"}\n{"prompt": "two"}\n', ".jsonl")
    assert [r["id"] for r in records] == ["\ud83d", 2]


def test_text_is_written_as_it_is_read(answer, tmp_path):
    answer('{"id": "naïve 👍", "prompt": "one"}\n'.encode(), ".jsonl")
    assert '"naïve 👍"' in (tmp_path / "out.jsonl").read_text(encoding="utf-8")


def test_memory_that_does_not_suffice_is_an_error_and_leaves_no_output(model, tmp_path):
    (tmp_path / "in.txt").write_text("one\n")
    out = tmp_path / "out.jsonl"
    arguments = ("-i", tmp_path / "in.txt", "-o", out, "--memory", "1MB")
    result = invoke(model, *arguments, *OPTIONS, code=1)
    assert "more than the 1.0 MB it may use\nHint: Raise --memory" in result.stderr
    assert not out.exists()


def test_a_model_that_breaks_down_makes_error_records(answer, monkeypatch):
    monkeypatch.setattr(
        "qinfer.models.decoder.Decoder.logits",
        lambda self, hidden: torch.full((1, 320), float("nan")),
    )
    (record,) = answer(b"one\n", ".txt", code=3)
    assert record["error"]["type"] == "NumericsError"
    assert record.keys() == {"id", "index", "error"}


def test_stop_and_system_prompt_apply_to_every_line(answer, model, tmp_path):
    chat = tmp_path / "chat"
    shutil.copytree(model, chat)
    write_tokenizer(chat, chat=True)
    options = ("-n", "30", "--system-prompt", "Be kind.")
    text = single(chat, "one", *options)["text"]
    options += ("--stop", text[3:5])
    (record,) = answer(b"one\n", ".txt", *options, directory=chat)
    assert record["finish_reason"] == "stop"
    assert record["text"] == text[: text.index(text[3:5])]
    assert record["prompt_tokens"] == single(chat, "one", *options)["prompt_tokens"]


def test_a_long_prompt_is_cut_where_that_was_asked_for(answer):
    (record,) = answer(TOO_LONG.encode(), ".txt", "--truncate-prompt", "left")
    assert record["prompt_tokens"] == 250


def test_nothing_to_answer_is_an_empty_result(answer):
    assert answer(b"\n \n\t\n", ".txt") == []


def test_messages_are_answered_as_the_same_prompt_is(answer, model, tmp_path):
    chat = tmp_path / "chat"
    shutil.copytree(model, chat)
    write_tokenizer(chat, chat=True)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "one"}]
    body = {"messages": messages, "max_tokens": 6}
    content = lines(
        {"messages": messages},
        {"prompt": "one", "system": "Be kind."},
        {"custom_id": "c", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "d", "url": "/v1/completions", "body": {"prompt": "one"}},
    )
    first, second, third, fourth = answer(content, ".jsonl", directory=chat)
    alone = single(chat, "one", "--system-prompt", "Be kind.")
    assert first["text"] == second["text"] == alone["text"]
    (choice,) = third["response"]["body"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": alone["text"]}
    (choice,) = fourth["response"]["body"]["choices"]
    assert choice["text"] == single(chat, "one", "--raw")["text"]


def test_messages_without_a_chat_template_are_an_error_record(answer):
    content = lines({"messages": [{"role": "user", "content": "one"}]})
    (record,) = answer(content, ".jsonl", code=3)
    assert "messages have no place without a chat template" in record["error"]["message"]


def test_choices_are_drawn_with_seeds_that_follow_each_other(answer, model):
    sampled = ("--temperature", "1.5")
    records = answer(lines({"prompt": "one", "n": 3, "seed": 5}), ".jsonl", *sampled)
    assert [(r["index"], r["seed"]) for r in records] == [(0, 5), (1, 6), (2, 7)]
    for record in records:
        assert record["text"] == single(model, "one", *sampled, "--seed", record["seed"])["text"]
    records = answer(lines({"prompt": "one", "n": 2}), ".jsonl", *sampled, "--force")
    assert records[1]["seed"] == (records[0]["seed"] + 1) % 2**32


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_pipes_and_gzip(model, tmp_path, suffix):
    content = lines({"id": "a", "prompt": "one"})
    result = CliRunner().invoke(
        cli, ["generate", str(model), "-i", "-", "-o", "-", *OPTIONS], input=content
    )
    assert (result.exit_code, result.stderr) == (0, "")
    expected = json.loads(result.stdout)["text"]
    source, out = tmp_path / f"in.jsonl{suffix}", tmp_path / f"out.jsonl{suffix}"
    source.write_bytes(gzip.compress(content) if suffix else content)
    invoke(model, "-i", source, "-o", out, *OPTIONS)
    data = out.read_bytes()
    assert json.loads(gzip.decompress(data) if suffix else data)["text"] == expected


def test_totals_go_to_stderr_and_as_json_to_stdout(model, tmp_path):
    source = tmp_path / "in.txt"
    source.write_text("one\ntwo\n")
    options = ("--temperature", "0", "-n", "6")
    result = invoke(model, "-i", source, "-o", tmp_path / "a.jsonl", *options)
    assert result.stdout == ""
    assert re.fullmatch(
        r"2 answered, 0 failed: \d+ prompt tokens, 12 new in .* s "
        r"\([\d.]+ tok/s prompt, [\d.]+ tok/s output\)\n",
        result.stderr,
    )
    result = invoke(model, "-i", source, "-o", tmp_path / "b.jsonl", *options, "--json")
    totals = json.loads(result.stdout)
    assert (totals["answered"], totals["completion_tokens"]) == (2, 12)
    assert totals["prompt_tokens_per_s"] > 0
    assert result.stderr == ""
    result = invoke(model, "-i", source, "-o", "-", "--ordered", *options, "--json")
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == [1, 2]
    assert json.loads(result.stderr).keys() == totals.keys()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--resume", "-p", "hi"),
        ("--force", "-p", "hi"),
        ("--ordered", "-p", "hi"),
        ("--batch-size", "2", "-p", "hi"),
        ("-i", "in.txt", "-o", "out.jsonl", "--retry-errors"),
    ],
)
def test_options_of_batches_want_a_batch(model, arguments):
    assert "Error: --re" in invoke(model, *arguments, code=2).stderr


def test_an_existing_output_is_refused_and_stays(model, tmp_path):
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("one\n")
    out.write_text("precious\n")
    result = invoke(model, "-i", source, "-o", out, *OPTIONS, code=1)
    assert result.stderr.startswith(f"Error: {out} exists already\nHint: ")
    assert out.read_text() == "precious\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("in.csv", "prompts come as .txt"),
        ("in", "prompts come as .txt"),
        ("missing.txt", "cannot be read: No such file"),
        ("directory.txt", "cannot be read: Is a directory"),
        ("empty.txt", "is empty"),
        ("binary.txt", "is not UTF-8 text"),
    ],
)
def test_an_input_that_cannot_be_read_is_an_error_and_leaves_no_output(
    model, tmp_path, name, message
):
    (tmp_path / "in.csv").write_text("one\n")
    (tmp_path / "in").write_text("one\n")
    (tmp_path / "directory.txt").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    out = tmp_path / "out.jsonl"
    result = invoke(model, "-i", tmp_path / name, "-o", out, *OPTIONS, code=1)
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert not out.exists()


def test_an_output_that_cannot_be_written_is_an_error(model, tmp_path):
    (tmp_path / "in.txt").write_text("one\n")
    out = tmp_path / "missing" / "out.jsonl"
    result = invoke(model, "-i", tmp_path / "in.txt", "-o", out, *OPTIONS, code=1)
    assert result.stderr == f"Error: {out} cannot be written: No such file or directory\n"


@pytest.mark.parametrize("name", ["generation_config.json"])
def test_a_model_that_cannot_sample_at_all_is_an_error_and_leaves_no_output(model, tmp_path, name):
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / name).write_text('{"top_p": 7}')
    (tmp_path / "in.txt").write_text("one\n")
    out = tmp_path / "out.jsonl"
    result = invoke(broken, "-i", tmp_path / "in.txt", "-o", out, *OPTIONS, code=1)
    assert result.stderr.startswith("Error: generation_config.json: top_p")
    assert not out.exists()


@pytest.mark.parametrize("batch_size", [1, 2])
def test_what_has_ended_is_on_disk_at_the_next_step(model, tmp_path, monkeypatch, batch_size):
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("one\ntwo\nthree\n")
    ended = []
    step = LanguageModel.step

    def watched(self):
        assert len(read_records(out)) == len(ended)
        ended.extend(step(self))
        return ended[len(read_records(out)) :]

    monkeypatch.setattr(LanguageModel, "step", watched)
    invoke(model, "-i", source, "-o", out, *OPTIONS, "--batch-size", batch_size)
    assert len(read_records(out)) == len(ended) == 3


def test_a_mistake_of_ours_is_not_hidden_in_a_record(model, tmp_path, monkeypatch):
    def mistaken(*arguments, **options):
        raise KeyError("a bug")

    (tmp_path / "in.txt").write_text("one\n")
    monkeypatch.setattr(Parser, "__call__", mistaken)
    with pytest.raises(KeyError, match="a bug"):
        invoke(model, "-i", tmp_path / "in.txt", "-o", tmp_path / "out.jsonl", *OPTIONS)


def test_what_was_answered_stays_when_it_is_interrupted(model, tmp_path, monkeypatch):
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("one\ntwo\nthree\n")
    step = LanguageModel.step

    def interrupted(*arguments):
        if len(read_records(out)) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(*arguments)

    before = signal.getsignal(signal.SIGINT)
    options = ("--batch-size", 1, "--ordered", "--memory", "2g", "--k-bits", 16)
    with monkeypatch.context() as patched:
        patched.setattr(LanguageModel, "step", interrupted)
        result = invoke(model, "-i", source, "-o", out, *OPTIONS, *options, code=130)
    assert signal.getsignal(signal.SIGINT) is before
    command = (
        f"qinfer generate {model} --temperature 0.0 --max-tokens 6 --quiet "
        f"--batch-size 1 --ordered --memory {2 << 30} --k-bits 16"
    )
    assert result.stderr.startswith("Interrupted; 2 records written.\nContinue: qinfer ")
    words = result.stderr.split("Continue: ")[1].split()
    assert sorted(words) == sorted(
        f"{command} --input-file {source} --output-file {out} --resume".split()
    )
    assert [r["id"] for r in read_records(out)] == [1, 2]
    invoke(*words[2:])
    assert [r["id"] for r in read_records(out)] == [1, 2, 3]


def test_an_interrupt_waits_for_a_record_to_be_written(model, tmp_path, monkeypatch):
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl.gz"
    source.write_text("one\ntwo\n")
    pack = FileOutput._packed

    def interrupted(self, line):
        os.kill(os.getpid(), signal.SIGINT)
        return pack(self, line)

    monkeypatch.setattr(FileOutput, "_packed", interrupted)
    result = invoke(model, "-i", source, "-o", out, *OPTIONS, "--batch-size", 1, code=130)
    assert result.stderr.startswith("Interrupted; 1 record written.")
    assert json.loads(gzip.decompress(out.read_bytes()))["id"] == 1
