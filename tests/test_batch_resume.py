"""Results and their continuation, whatever was cut off: with a model that is not there."""

import errno
import gzip
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from qinfer.errors import NumericsError, QInferError
from qinfer_cli.batch import output, sidecar
from tests.batch_fakes import FakeModel, records, run

REQUESTS = [
    {"prompt": "one"},
    {"id": "b", "prompt": "two", "n": 3, "seed": 2**32 - 2},
    {"id": "b", "prompt": "twice"},
    {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "three", "n": 2}},
    {"custom_id": "d", "url": "/v1/completions", "body": {"prompt": "three", "x": 2}},
    {"id": 9, "prompt": "naïve \ud83d"},
    {"prompt": ""},
    {"prompt": "last"},
]


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1.0)  # of OpenAI's `created`
    return FakeModel(tmp_path / "model")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in REQUESTS) + "not JSON\n")
    return path


def text_of(path):
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def run_failing(model, source, out, **changes):
    """Some of the lines are bad ones, which the exit code says."""
    with pytest.raises(click.exceptions.Exit) as caught:
        run(model, source, out, **changes)
    assert caught.value.exit_code == 3


def test_results_have_the_form_of_the_lines_and_if_asked_their_order(model, source, tmp_path):
    run_failing(model, source, tmp_path / "out.jsonl", ordered=True)
    found = records(text_of(tmp_path / "out.jsonl"))
    assert [(r.get("custom_id", r["id"]), r.get("index")) for r in found[:5]] == [
        (1, 0),
        ("b", 0),
        ("b", 1),
        ("b", 2),
        ("b", 0),
    ]
    assert found[0] == {
        "id": 1,
        "index": 0,
        "text": "<one> 77",
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "seed": 77,
    }
    assert [r["seed"] for r in found[1:4]] == [2**32 - 2, 2**32 - 1, 0]
    message = 'the id "b" occurs in a line before'
    assert found[4]["error"] == {"type": "PromptError", "message": message, "line": 3}
    body = found[5]["response"]["body"]
    assert [c["text"][:8] for c in body["choices"]] == ["<three> "] * 2
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13}
    assert (found[5]["custom_id"], found[5]["error"]) == ("c", None)
    assert (found[6]["custom_id"], found[6]["response"], found[6]["error"]["line"]) == (
        "d",
        None,
        5,
    )
    assert found[7]["text"] == "<naïve \ud83d> 77"
    assert (found[8]["id"], found[8]["error"]["message"]) == (7, "the prompt is empty")
    assert [r["id"] for r in found[9:]] == [8, 9]


def test_what_a_line_says_goes_before_what_the_command_line_says(model, tmp_path):
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "a"}\n'
        '{"prompt": "b", "system": "T", "stop": "y", "max_tokens": 2, "top_k": 3, "seed": 1}\n'
        '{"messages": [{"role": "system", "content": "U"}]}\n'
        '{"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "d"}}\n'
    )
    given = {"top_k": 5, "temperature": 0.2}
    changes = {"system_prompt": "S", "stop": ("x",), "sampling": given}
    run(model, tmp_path / "in.jsonl", tmp_path / "out.jsonl", **changes)
    a, b, c, d = model.calls
    assert (a["system"], a["stop"], a["max_tokens"], a["params"].top_k) == ("S", ("x",), 9, 5)
    assert (b["system"], b["stop"], b["max_tokens"], b["params"].top_k) == ("T", ("y",), 2, 3)
    assert (b["params"].temperature, b["params"].seed) == (0.2, 1)
    assert (c["system"], c["raw"], c["continues"]) == (None, False, False)
    assert (d["system"], d["raw"], d["continues"]) == (None, True, True)


@pytest.mark.parametrize(
    ("name", "ordered"), [("out.jsonl", False), ("out.jsonl", True), ("out.jsonl.gz", False)]
)
def test_a_run_cut_at_any_byte_is_continued_to_the_same_results(
    source, tmp_path, monkeypatch, name, ordered
):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # hundreds of runs
    monkeypatch.setattr("time.time", lambda: 1.0)
    out, order = tmp_path / name, itertools.count()
    options = {"sampling": {"seed": 5}, "ordered": ordered}

    def results():
        lines = text_of(out).splitlines(keepends=True)
        return lines if ordered else sorted(lines)

    def run_anew(**changes):
        model = FakeModel(tmp_path / "model", order=next(order))
        run_failing(model, source, out, **options, **changes)
        return model

    run_anew()
    data, expected = out.read_bytes(), results()
    for cut in range(len(data)):
        out.write_bytes(data[:cut])
        run_anew(resume=True)
        assert results() == expected, cut
    assert run_anew(resume=True).calls == []
    assert results() == expected
    assert sorted(p.name for p in tmp_path.iterdir() if "out" in p.name) == [
        name,
        f"{name}.qinfer.json",
    ]


def test_zeros_that_a_lost_disk_leaves_are_cut(model, source, tmp_path):
    for name in ("out.jsonl", "out.jsonl.gz"):
        out = tmp_path / name
        run_failing(model, source, out, sampling={"seed": 5}, ordered=True)
        text = text_of(out)
        with out.open("ab") as file:
            file.write(bytes(1000))
        run_failing(model, source, out, sampling={"seed": 5}, ordered=True, resume=True)
        assert text_of(out) == text


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_errors_are_kept_or_tried_again(model, tmp_path, name):
    source, out = tmp_path / "in.txt", tmp_path / name
    source.write_text("one\ntwo\nthree\n")

    def fail(prompt):
        if prompt == "two":
            raise NumericsError("NaN in layer 3")

    model.before_answer = fail
    run_failing(model, source, out)
    model.before_answer = lambda prompt: None
    before = text_of(out)
    assert records(before)[1]["error"]["type"] == "NumericsError"
    run_failing(model, source, out, resume=True)
    assert text_of(out) == before
    model.calls.clear()
    run(model, source, out, resume=True, retry_errors=True)
    assert [call["prompt"] for call in model.calls] == ["two"]
    assert [r["id"] for r in records(text_of(out))] == [1, 3, 2]


def test_a_missing_output_is_begun_by_resume(model, source, tmp_path):
    run_failing(model, source, tmp_path / "out.jsonl", resume=True)
    assert len(records(text_of(tmp_path / "out.jsonl"))) == 11


def test_what_exists_is_replaced_by_force_only(model, source, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    with pytest.raises(QInferError, match="exists already") as caught:
        run(model, source, out)
    assert "--resume" in caught.value.hint
    assert out.read_text() == "precious\n"
    run_failing(model, source, out, force=True)
    assert len(records(text_of(out))) == 11


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sampling": {"temperature": 0}}, "temperature: 0.7 → 0"),
        ({"sampling": {"seed": 4}}, "seed: null → 4"),
        ({"max_tokens": 8}, "max_tokens: 9 → 8"),
        ({"stop": ("x",)}, "stop"),
        ({"system_prompt": "x"}, "system_prompt"),
        ({"raw": True}, "raw"),
        ({"context_policy": "sinks"}, 'context_policy: "stop" → "sinks"'),
    ],
)
def test_other_settings_are_refused_unless_forced(model, source, tmp_path, changes, named):
    out = tmp_path / "out.jsonl"
    run_failing(model, source, out)
    before = out.read_bytes()
    with pytest.raises(QInferError, match=f"other settings: .*{named}"):
        run(model, source, out, resume=True, **changes)
    assert out.read_bytes() == before
    run_failing(model, source, out, resume=True, force=True, **changes)
    assert out.read_bytes() == before
    run_failing(model, source, out, resume=True, **changes)  # they are the settings from now on


def test_another_cache_format_is_refused(model, source, tmp_path):
    run_failing(model, source, tmp_path / "out.jsonl")
    model.kv_format = "k8v4"
    with pytest.raises(QInferError, match='other settings: kv_bits: "k16v16" → "k8v4"'):
        run(model, source, tmp_path / "out.jsonl", resume=True)


def test_what_only_orders_the_results_may_differ(model, source, tmp_path):
    run_failing(model, source, tmp_path / "out.jsonl")
    model.max_sequences = 2
    run_failing(model, source, tmp_path / "out.jsonl", resume=True, ordered=True)


def test_another_model_is_refused(model, source, tmp_path):
    run_failing(model, source, tmp_path / "out.jsonl")
    (model.directory / "config.json").write_text('{"other": 1}')
    with pytest.raises(QInferError, match="other settings: model: "):
        run(model, source, tmp_path / "out.jsonl", resume=True)


@pytest.mark.parametrize("side", [None, "", "{}", '{"format": "qinfer-batch", "version": 2}'])
def test_results_without_a_side_file_are_refused_unless_forced(model, source, tmp_path, side):
    out = tmp_path / "out.jsonl"
    run_failing(model, source, out)
    path = sidecar.sidecar_path(out)
    path.unlink() if side is None else path.write_text(side)
    with pytest.raises(QInferError, match=r"no out\.jsonl\.qinfer\.json"):
        run(model, source, out, resume=True)
    run_failing(model, source, out, resume=True, force=True)


@pytest.mark.parametrize(
    ("old", "new", "ids"),
    [
        (b"a\nb\n", b"a\nb\nc\n", [1, 2, 3]),
        (b"a\nb", b"a\nb\nc\n", [1, 2, 3]),
        (b"a\nb", b"a\nb\r\n", [1, 2]),
        (b"a\nb", b"a\nbc\n", None),
        (b"a\nb\n", b"a\n", None),
        (b"a\nb\n", b"a\nB\n", None),
    ],
)
def test_an_input_may_grow_but_not_change(model, tmp_path, old, new, ids):
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_bytes(old)
    run(model, source, out)
    source.write_bytes(new)
    if ids is None:
        with pytest.raises(QInferError, match=r"in\.txt has changed since"):
            run(model, source, out, resume=True)
    run(model, source, out, resume=True, force=ids is None)
    assert [r["id"] for r in records(out.read_bytes())] == (ids or [1, 2])


def test_an_input_is_vouched_for_before_it_is_answered(model, tmp_path, monkeypatch):
    monkeypatch.setattr(sidecar, "_STEP_BYTES", 10)
    monkeypatch.setattr("qinfer_cli.batch.lines._BUFFER_BYTES", 8)
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("".join(f"line {i}\n" for i in range(10, 50)))
    covered = []

    def look(prompt):
        covered.append(sidecar.load(sidecar.sidecar_path(out))["input"]["bytes"])
        assert covered[-1] >= 8 * len(covered)

    model.before_answer = look
    run(model, source, out)
    assert covered[0] < covered[20] < covered[-1] == 320


def test_failures_are_tried_again_where_lines_have_moved(model, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('bad\n{"id": "a", "prompt": "a"}\n')
    run_failing(model, source, out)
    source.write_text('{"id": "b", "prompt": "b"}\n{"id": "a", "prompt": "a"}\n')
    run(model, source, out, resume=True, force=True)
    assert [r["id"] for r in records(out.read_bytes())] == ["a", "b"]


@pytest.mark.parametrize("line", ["x", "[]", '{"id": 1}', '{"id": 1, "error": {}}', "[" * 10**5])
def test_an_output_of_something_else_is_not_continued(model, source, tmp_path, line):
    out = tmp_path / "out.jsonl"
    run_failing(model, source, out)
    before = f"{line}\n".encode() + out.read_bytes()
    out.write_bytes(before)
    with pytest.raises(QInferError, match="line 1 is not a result of a batch"):
        run(model, source, out, resume=True)
    assert out.read_bytes() == before


def test_two_runs_do_not_write_one_file(model, source, tmp_path):
    out = tmp_path / "out.jsonl"

    def intrude(prompt):
        with pytest.raises(QInferError, match="being written by another batch"):
            run(model, source, out, resume=True)

    model.before_answer = intrude
    run_failing(model, source, out)


def test_the_input_is_not_overwritten(model, source):
    before = source.read_bytes()
    with pytest.raises(QInferError, match="both input and output"):
        run(model, source, source, force=True)
    assert source.read_bytes() == before


def test_a_symbolic_link_stays_one(model, source, tmp_path):
    (tmp_path / "real.jsonl").touch()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    run_failing(model, source, tmp_path / "link.jsonl")
    run_failing(model, source, tmp_path / "link.jsonl", resume=True, retry_errors=True)
    assert (tmp_path / "link.jsonl").is_symlink()
    assert len(records((tmp_path / "real.jsonl").read_bytes())) == 11


@pytest.mark.parametrize("is_freed", [False, True])
@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_a_disk_that_fills_up_keeps_what_is_written(model, tmp_path, monkeypatch, name, is_freed):
    source, out = tmp_path / "in.txt", tmp_path / name
    source.write_text("".join(f"line {i}\n" for i in range(20)))
    limit, write, failed = (700 if name == "out.jsonl" else 300), os.write, []

    def full(fd, data):
        room = limit - os.fstat(fd).st_size
        if failed and is_freed:  # there is room again when the file is closed
            room = len(data)
        if room <= 0:
            failed.append(fd)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:room])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(QInferError, match=r"No space left on device; \d+ records") as caught:
        run(model, source, out)
    assert caught.value.hint == "Make room, then continue: RESUME"
    if name == "out.jsonl":
        assert 0 < len(records(out.read_bytes())) < 20
    monkeypatch.setattr(os, "write", write)
    written = int(re.search(r"(\d+) records", str(caught.value))[1])
    model = FakeModel(tmp_path / "model")
    run(model, source, out, resume=True)
    assert [r["id"] for r in records(text_of(out))] == list(range(1, 21))
    assert len(model.calls) == 20 - written


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs takes root")
def test_a_real_disk_that_fills_up(model, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this root may not mount a tmpfs")
    try:
        source, out = tmp_path / "in.txt", disk / "out.jsonl"
        source.write_text("".join(f"line {i} {'x' * 300}\n" for i in range(300)))
        with pytest.raises(QInferError, match="No space left on device"):
            run(model, source, out)
        assert len(records(out.read_bytes())) > 50
        assert subprocess.run(["mount", "-o", "remount,size=1m", str(disk)]).returncode == 0
        run(FakeModel(tmp_path / "model"), source, out, resume=True)
        assert [r["id"] for r in records(out.read_bytes())] == list(range(1, 301))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_device_is_written_as_it_is_and_not_resumed(model, source):
    run_failing(model, source, Path("/dev/null"))
    with pytest.raises(QInferError, match="No space left on device") as caught:
        run(model, source, Path("/dev/full"))
    assert caught.value.hint is None
    for path in ("/dev/null", "-"):
        with pytest.raises(QInferError, match="cannot be resumed"):
            run(model, source, Path(path), resume=True)
    assert not Path("/dev/null.qinfer.json").exists()


def test_records_reach_the_disk_at_an_interval(model, tmp_path, monkeypatch):
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl.gz"
    source.write_text("".join(f"line {i}\n" for i in range(10)))
    now, synced, fsync = [0.0], [], os.fsync

    def tick(prompt):
        now[0] += 2

    def watched(fd):
        if os.path.samestat(os.fstat(fd), out.stat()):
            synced.append(now[0])
        fsync(fd)

    model.before_answer, model.max_sequences = tick, 1
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "fsync", watched)
    run(model, source, out)
    assert synced == [6, 12, 18, 20]
    assert out.read_bytes().count(b"\x1f\x8b\x08") == 4  # a member for each


def test_records_reach_the_disk_also_while_none_is_added(model, tmp_path, monkeypatch):
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("short\nlong\n")
    now, synced, fsync, step = [0.0], [], os.fsync, model.step

    def slow_step():
        now[0] += 2
        return step()

    def watched(fd):
        if os.path.samestat(os.fstat(fd), out.stat()):
            synced.append((now[0], len(records(out.read_bytes()))))
        fsync(fd)

    model.step = slow_step
    model.steps_of = lambda prompt: {"short": 1, "long": 10}[prompt]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "fsync", watched)
    run(model, source, out)
    assert synced == [(6, 1), (20, 2)]


def test_a_mistake_of_ours_keeps_its_traceback(model, source, tmp_path):
    def mistaken(prompt):
        raise KeyError("a bug")

    model.before_answer = mistaken
    with pytest.raises(KeyError, match="a bug"):
        run(model, source, tmp_path / "out.jsonl")


def test_totals_as_json(model, source, tmp_path, capsys):
    run_failing(model, source, tmp_path / "out.jsonl", as_json=True)
    totals = json.loads(capsys.readouterr().out)
    assert (totals["answered"], totals["failed"], totals["kept_results"]) == (7, 4, 0)
    assert (totals["prompt_tokens"], totals["completion_tokens"]) == (8 * 3, 8 * 5)
    assert (totals["reused_tokens"], totals["preemptions"]) == (8, 2)
    for kind in ("prompt", "completion"):  # of the whole run's time, however much runs at once
        rate = totals[f"{kind}_tokens"] / totals["elapsed_s"]
        assert totals[f"{kind}_tokens_per_s"] == pytest.approx(rate, rel=0.5)
    run_failing(model, source, tmp_path / "out.jsonl", as_json=True, resume=True)
    totals = json.loads(capsys.readouterr().out)
    assert (totals["answered"], totals["failed"]) == (0, 0)
    assert (totals["kept_results"], totals["kept_errors"]) == (7, 4)


def test_memory_does_not_grow_with_the_prompts():
    """In a process of its own, whose peak is its own."""
    script = """
import resource, sys, tempfile
from pathlib import Path
from tests.batch_fakes import FakeModel, run
directory = Path(tempfile.mkdtemp())
model = FakeModel(directory / "model")
model.calls = type("Nothing", (), {"append": lambda self, call: None})()
def peak(count):
    (directory / f"{count}.txt").write_text("a prompt of some words\\n" * count)
    run(model, directory / f"{count}.txt", directory / f"{count}.jsonl")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(peak(1000), peak(10000))
"""
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    small, large = map(int, done.stdout.split())
    assert large - small < 1024  # KiB; the results alone take more than 1 MB
