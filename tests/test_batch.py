"""Files of prompts: a record for every line, in order, whatever the line."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner

from qinfer.engine.engine import Engine
from qinfer_cli import batch
from qinfer_cli.main import cli
from tests.test_generation import write_tokenizer

OPTIONS = ("--temperature", "0", "-n", "6", "-q")
SUCCESS = {"id", "text", "finish_reason", "prompt_tokens", "completion_tokens"}
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
    """`answer(b"...", ".txt")`: the records for an input file of this content."""

    def run(content, suffix, *options, code=0, directory=model):
        source, out = tmp_path / f"in{suffix}", tmp_path / "out.jsonl"
        source.write_bytes(content)
        result = invoke(directory, "-i", source, "-o", out, *OPTIONS, *options, code=code)
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
        assert {k: alone[k] for k in SUCCESS - {"id"}} == {k: record[k] for k in SUCCESS - {"id"}}


def test_jsonl_answers_with_the_ids_given(answer, model):
    requests = [
        {"id": "first", "prompt": "one"},
        {"prompt": "two\nlines"},
        {"id": 7, "prompt": "three"},
        {"prompt": "four", "id": ["any", {"json": None}]},
        {"id": None, "prompt": "five"},
        {"id": "first", "prompt": "one"},
    ]
    records = answer(lines(*requests), ".jsonl")
    assert [r["id"] for r in records] == ["first", 2, 7, ["any", {"json": None}], None, "first"]
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
    "unknown field": (b'{"id": "bad", "prompt": "x", "topk": 3}', "PromptError", "'topk'"),
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
    assert error.keys() == {"id", "error"}
    assert error["id"] in ("bad", 2)
    assert error["error"].keys() == {"type", "message"}
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


def test_a_cache_that_does_not_fit_is_an_error_record(answer, model, tmp_path):
    large = tmp_path / "large"
    shutil.copytree(model, large)
    config = json.loads((large / "config.json").read_text())
    (large / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**31 - 1}))
    records = answer(b"one\n", ".txt", "-n", 2**31 - 100, code=3, directory=large)
    assert "KV cache" in records[0]["error"]["message"]


def test_a_model_that_breaks_down_makes_error_records(answer, monkeypatch):
    monkeypatch.setattr(
        "qinfer.models.decoder.Decoder.logits",
        lambda self, hidden: torch.full((1, 320), float("nan")),
    )
    (record,) = answer(b"one\n", ".txt", code=3)
    assert record["error"]["type"] == "NumericsError"
    assert record.keys() == {"id", "error"}


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


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n"])
def test_nothing_to_answer_is_an_empty_result(answer, content):
    assert answer(content, ".txt") == []


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
    ],
)
def test_an_input_that_cannot_be_read_is_an_error_and_leaves_no_output(
    model, tmp_path, name, message
):
    (tmp_path / "in.csv").write_text("one\n")
    (tmp_path / "in").write_text("one\n")
    (tmp_path / "directory.txt").mkdir()
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


def test_each_result_is_on_disk_when_the_next_prompt_starts(model, tmp_path, monkeypatch):
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("one\ntwo\nthree\n")
    seen = []
    start = Engine.start

    def watched(*arguments):
        seen.append(len(read_records(out)))
        return start(*arguments)

    monkeypatch.setattr(Engine, "start", watched)
    invoke(model, "-i", source, "-o", out, *OPTIONS)
    assert seen == [0, 1, 2]


def test_a_mistake_of_ours_is_not_hidden_in_a_record(model, tmp_path, monkeypatch):
    def mistaken(*arguments, **options):
        raise KeyError("a bug")

    (tmp_path / "in.txt").write_text("one\n")
    monkeypatch.setattr(batch, "_parse", mistaken)
    with pytest.raises(KeyError, match="a bug"):
        invoke(model, "-i", tmp_path / "in.txt", "-o", tmp_path / "out.jsonl", *OPTIONS)


def test_what_was_answered_stays_when_it_is_interrupted(model, tmp_path, monkeypatch):
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("one\ntwo\nthree\n")
    answer = batch._answer

    def interrupted(model, options, params, number, line):
        if number == 3:
            raise KeyboardInterrupt
        return answer(model, options, params, number, line)

    monkeypatch.setattr(batch, "_answer", interrupted)
    result = invoke(model, "-i", source, "-o", out, *OPTIONS, code=130)
    assert result.stderr == "Interrupted.\n"
    assert [r["id"] for r in read_records(out)] == [1, 2]
