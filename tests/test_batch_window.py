"""Many requests in flight: the same records as one after another, in bounded memory."""

import contextlib
import gzip
import io
import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.errors import QInferError
from qinfer_cli.batch.output import FileOutput
from qinfer_cli.batch.progress import Bar
from tests.batch_fakes import FakeModel, Killed, records, run

PROMPTS = ["one", "two", "naïve", "bad", ""]
LINES = st.one_of(
    st.builds(
        lambda prompt, n, id: {"prompt": prompt, "n": n} | ({"id": id} if id else {}),
        st.sampled_from(PROMPTS),
        st.integers(1, 4),
        st.sampled_from([None, None, "a", "b"]),
    ),
    st.builds(
        lambda prompt, n, id: {
            "custom_id": id,
            "url": "/v1/completions",
            "body": {"prompt": prompt, "n": n},
        },
        st.sampled_from(PROMPTS),
        st.integers(1, 4),
        st.sampled_from("abcdef"),
    ),
    st.just("not a request"),
)


@pytest.fixture
def model(tmp_path):
    return FakeModel(tmp_path / "model")


def write_lines(path, count):
    path.write_text("".join(f"line {i}\n" for i in range(1, count + 1)))
    return path


def run_to_the_end(model, source, out, **changes):
    """Whether some of the lines fail or not."""
    with contextlib.suppress(click.exceptions.Exit):
        run(model, source, out, **changes)


def fails(prompt, seed):
    return prompt == "bad" and seed % 2 == 1


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(LINES, min_size=1, max_size=12),
    order=st.integers(0, 2**32),
    max_sequences=st.integers(1, 3),
    kills=st.lists(st.integers(1, 12), max_size=4),
    ordered=st.booleans(),
    suffix=st.sampled_from(["", ".gz"]),
)
def test_any_order_and_any_kills_give_the_records_of_an_undisturbed_run(
    requests, order, max_sequences, kills, ordered, suffix
):
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch("time.time", return_value=1.0),  # of OpenAI's `created`
        mock.patch("os.fsync"),
    ):
        directory = Path(name)
        source = directory / "in.jsonl"
        source.write_text("".join(json.dumps(request) + "\n" for request in requests))
        sampling = {"seed": 5}

        undisturbed = FakeModel(directory / "model", max_sequences=1)
        undisturbed.fails = fails
        run_to_the_end(
            undisturbed, source, directory / "expected.jsonl", ordered=True, sampling=sampling
        )
        expected = (directory / "expected.jsonl").read_bytes().splitlines()

        out = directory / f"out.jsonl{suffix}"
        for dies_at in [*kills, None]:
            model = FakeModel(directory / "model", max_sequences=max_sequences, order=order)
            model.fails, model.dies_at = fails, dies_at
            try:
                run_to_the_end(model, source, out, ordered=ordered, sampling=sampling, resume=True)
            except Killed:
                assert model.steps == dies_at
            assert model.most_in_flight < 2 * max_sequences + 4  # a line has up to 4 choices
        found = (gzip.decompress if suffix else bytes)(out.read_bytes()).splitlines()
        assert found == expected if ordered else sorted(found) == sorted(expected)


@pytest.mark.parametrize("ordered", [False, True])
def test_little_of_a_long_input_is_read_before_its_first_results(model, tmp_path, ordered):
    source, out = write_lines(tmp_path / "in.txt", 500), tmp_path / "out.jsonl"
    asked = []
    step = model.step

    def watched():
        asked.append(len(model.calls) - len(out.read_bytes().splitlines()))
        return step()

    model.step = watched
    run(model, source, out, ordered=ordered)
    assert model.most_in_flight == 8
    assert max(asked) == 8


def test_others_go_ahead_of_a_slow_prompt(model, tmp_path):
    source, out = write_lines(tmp_path / "in.txt", 200), tmp_path / "out.jsonl"
    model.steps_of = lambda prompt: 1000 if prompt == "line 1" else 1
    run(model, source, out)
    assert [r["id"] for r in records(out.read_bytes())] == [*range(2, 201), 1]


def test_with_ordered_others_go_ahead_of_a_slow_prompt_so_far(model, tmp_path):
    source, out = write_lines(tmp_path / "in.txt", 200), tmp_path / "out.jsonl"
    model.steps_of = lambda prompt: 1000 if prompt == "line 1" else 1
    asked = {}
    step = model.step

    def watched():
        asked[model.steps] = len(model.calls)
        return step()

    model.step = watched
    run(model, source, out, ordered=True)
    assert asked[999] == 8 * model.max_sequences
    assert [r["id"] for r in records(out.read_bytes())] == list(range(1, 201))


def test_bad_lines_behind_a_slow_prompt_are_bounded_too(model, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "slow"}\n' + "x\n" * 1000)
    model.steps_of = lambda prompt: 5
    with pytest.raises(click.exceptions.Exit):
        run(model, source, out, ordered=True)
    found = records(out.read_bytes())
    assert [r["id"] for r in found] == list(range(1, 1002))
    assert "error" not in found[0]


def test_the_first_failure_of_an_openai_line_cancels_its_other_choices(model, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "bad", "n": 6, "seed": 0}
    source.write_text(
        json.dumps({"custom_id": "a", "url": "/v1/completions", "body": body})
        + '\n{"prompt": "good"}\n'
    )
    model.fails = lambda prompt, seed: prompt == "bad" and seed in (1, 3)
    with pytest.raises(click.exceptions.Exit):
        run(model, source, out)
    failure, success = records(out.read_bytes())
    assert (failure["custom_id"], failure["error"]["code"]) == ("a", "NumericsError")
    assert success["text"] == "<good> 77"
    assert sorted(c.seed for c in model.cancelled) == [
        4,
        5,
    ]  # the first four ended in the same step


@pytest.mark.parametrize("ordered", [False, True])
def test_an_openai_line_that_is_refused_has_one_record_for_all_choices(model, tmp_path, ordered):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "", "n": 3}
    source.write_text(
        json.dumps({"custom_id": "a", "url": "/v1/chat/completions", "body": body})
        + json.dumps({"custom_id": "b", "url": "/v1/completions", "body": body}).join("\n\n")
    )
    with pytest.raises(click.exceptions.Exit):
        run(model, source, out, ordered=ordered)
    assert [r["custom_id"] for r in records(out.read_bytes())] == ["a", "b"]


def test_a_choice_is_written_when_it_is_done_and_an_openai_line_when_all_are(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    openai = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a", "n": 3}}
    source.write_text(json.dumps(openai) + "\n" + '{"prompt": "b", "n": 3}\n')
    model = FakeModel(tmp_path / "model", max_sequences=6)
    steps = iter([1, 4, 1, 3, 2, 1])
    model.steps_of = lambda prompt: next(steps)
    run(model, source, out)
    found = [(r["id"], r.get("index")) for r in records(out.read_bytes())]
    assert found[:3] == [(2, 2), (2, 1), (2, 0)]
    last = records(out.read_bytes())[3]
    assert [c["index"] for c in last["response"]["body"]["choices"]] == [0, 1, 2]


@pytest.mark.parametrize(("ordered", "written"), [(False, 7), (True, 4)])
def test_an_interrupt_keeps_what_is_done(model, tmp_path, capsys, ordered, written):
    """With `ordered` up to the first that is not: what is behind it is computed again."""
    source, out = write_lines(tmp_path / "in.txt", 30), tmp_path / "out.jsonl"
    model.steps_of = lambda prompt: 5 if prompt == "line 5" else 1
    step = model.step

    def interrupted():
        if model.steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step()

    model.step = interrupted
    with pytest.raises(click.exceptions.Exit) as caught:
        run(model, source, out, ordered=ordered)
    assert caught.value.exit_code == 143
    assert capsys.readouterr().err == f"Interrupted; {written} records written.\nContinue: RESUME\n"
    assert len(records(out.read_bytes())) == written
    run(FakeModel(tmp_path / "model"), source, out, ordered=ordered, resume=True)
    ids = [r["id"] for r in records(out.read_bytes())]
    assert sorted(ids) == list(range(1, 31))
    assert not ordered or ids == sorted(ids)


def test_an_interrupt_waits_for_all_that_a_step_has_ended(model, tmp_path, monkeypatch):
    source, out = write_lines(tmp_path / "in.txt", 30), tmp_path / "out.jsonl"
    pack = FileOutput._packed

    def interrupted(self, line):
        if json.loads(line)["id"] == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return pack(self, line)

    monkeypatch.setattr(FileOutput, "_packed", interrupted)
    with pytest.raises(click.exceptions.Exit) as caught:
        run(model, source, out)
    assert caught.value.exit_code == 130
    assert [r["id"] for r in records(out.read_bytes())] == [1, 2, 3, 4]


def test_what_comes_before_damage_is_answered(model, tmp_path):
    source, out = tmp_path / "in.txt.gz", tmp_path / "out.jsonl"
    content = b"".join(b"%d %s\n" % (i, os.urandom(20).hex().encode()) for i in range(2000))
    source.write_bytes(gzip.compress(content)[:-1000])
    model.steps_of = lambda prompt: 3
    with pytest.raises(QInferError, match="damaged gzip"):
        run(model, source, out)
    asked = len(model.calls)
    assert 0 < asked < 2000
    assert [r["id"] for r in records(out.read_bytes())] == list(range(1, asked + 1))


def test_answers_to_a_pipe_do_not_wait_for_its_next_lines(model, tmp_path):
    """The writer wants the answer to a line before it writes the rest of the next."""
    source, out = tmp_path / "pipe.txt", tmp_path / "out.jsonl"
    os.mkfifo(source)
    model.steps_of = lambda prompt: 3
    answered = []

    def converse():
        with source.open("wb", buffering=0) as pipe:
            for count, piece in enumerate([b"one\nt", b"wo\nthr", b"ee\n"], 1):
                pipe.write(piece)
                deadline = time.monotonic() + 20
                while not out.exists() or len(out.read_bytes().splitlines()) < count:
                    if time.monotonic() > deadline:
                        return
                    time.sleep(0.001)
                answered.append(count)

    writer = threading.Thread(target=converse)
    writer.start()
    run(model, source, out)
    writer.join()
    assert answered == [1, 2, 3]


def test_the_bar_shows_what_runs(model, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("qinfer_cli.batch.progress._REFRESH_S", 0)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a", "n": 4}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    model.steps_of = lambda prompt: 2
    run(model, source, out, quiet=False)
    shown = terminal.getvalue()
    assert "4 running, KV 100%" in shown
    assert "2 running, KV 50%" in shown
    assert "1/3" in shown
    assert "3/3" in shown
    assert "4/" not in shown
    assert "tok/s, output " in shown
    assert "6 answered, 0 failed: 18 prompt tokens (6 of them cached), 30 new in " in shown
    assert shown.endswith("tok/s output), 2 preemptions\n")


def test_the_bar_counts_a_line_when_its_last_choice_is_written(model, tmp_path, monkeypatch):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a", "n": 3}\n{"prompt": "b"}\n')
    steps, counted = iter([1, 3, 2, 5]), []
    model.steps_of = lambda prompt: next(steps)
    monkeypatch.setattr(Bar, "advance", lambda self, *, skipped: counted.append(model.steps))
    run(model, source, out)
    assert counted == [3, 5]
