"""`qinfer bench`: its table, JSON, CSV and plots, and what it refuses. No test asserts a time."""

import csv
import importlib.util
import io
import json
import re
import shutil

import pytest

from qinfer import benchmark
from qinfer.config import ModelConfig
from qinfer.errors import QInferError
from qinfer_cli import results
from tests.test_cli import assert_one_error, run

SHORT = ("-p", 40, "-n", 3, "-r", 2)
KEYS = [
    "phase",
    "tokens",
    "depth",
    "batch",
    "k_bits",
    "v_bits",
    "tokens_per_s",
    "tokens_per_s_min",
    "tokens_per_s_max",
    "ttft_s",
    "ttft_s_min",
    "ttft_s_max",
    "tpot_s",
    "tpot_s_min",
    "tpot_s_max",
    "flops_per_s",
    "bytes_per_token",
    "read_bytes_per_s",
    "read_share",
    "peak_memory_bytes",
]


@pytest.fixture(autouse=True)
def limit(monkeypatch):
    """The probe takes a second; its own test is in test_benchmark.py."""
    monkeypatch.setattr(benchmark, "read_bandwidth", lambda device, *, free_bytes: 2e9)


@pytest.fixture
def no_run(monkeypatch):
    """A test whose command has to stop before anything is opened."""

    def fail(*_):
        raise AssertionError("the model was looked at")

    monkeypatch.setattr(ModelConfig, "read", fail)


def bench(model, *arguments, **options):
    return run("bench", model, "--device", "cpu", *arguments, **options)


def report(model, *arguments):
    result = bench(model, *arguments, "--json")
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


class TestJSON:
    def test_what_it_holds(self, tiny_model):
        model = tiny_model("llama")
        found = report(model, *SHORT, "-b", "1,2", "--kv-bits", "16,k8v4", "--threads", 2)
        assert (found["model"], found["device"], found["threads"]) == (str(model), "cpu", 2)
        assert (found["read_limit_bytes_per_s"], found["repetitions"]) == (2e9, 2)
        assert list(found["versions"]) == ["qinfer", "torch", "python"]
        assert found["device_name"]
        tests = [[r[key] for key in KEYS[:6]] for r in found["results"]]
        assert tests == [
            [phase, tokens, 0, batch, *bits]
            for bits in ([16, 16], [8, 4])
            for batch in (1, 2)
            for phase, tokens in (("prefill", 40), ("decode", 3))
        ]
        for its in found["results"]:
            assert list(its) == KEYS
            absent = {key for key, value in its.items() if value is None}
            times = {f"{'tpot' if its['phase'] == 'prefill' else 'ttft'}_s{e}" for e in ENDS}
            reads = {"bytes_per_token", "read_bytes_per_s", "read_share"}
            assert absent == times | (reads if its["phase"] == "prefill" else {"flops_per_s"})
            if its["phase"] == "decode":
                assert its["read_bytes_per_s"] == its["bytes_per_token"] * its["tokens_per_s"]
                assert its["read_share"] == its["read_bytes_per_s"] / 2e9

    def test_the_defaults(self, tiny_model, monkeypatch):
        seen = []

        def refuse(*arguments, **_):
            seen.extend(arguments[2])
            raise QInferError("enough", hint="Stop.")

        monkeypatch.setattr(benchmark, "require_memory", refuse)
        assert_one_error(bench(tiny_model("llama"), code=1), "enough")
        (prefill, decode) = seen
        assert (prefill.phase, prefill.tokens, prefill.batch) == ("prefill", 255, 1)
        assert (decode.phase, decode.tokens, decode.depth) == ("decode", 64, 0)
        assert str(decode.kv_format) == "k16v16"

    def test_a_models_own_cache_is_the_default(self, tiny_model, tmp_path):
        shutil.copytree(tiny_model("llama"), tmp_path / "m")
        (tmp_path / "m" / "qinfer.json").write_text('{"kv_cache": {"k_bits": 8, "v_bits": 4}}')
        (its,) = report(tmp_path / "m", "-p", 0, "-n", 2, "-r", 1)["results"]
        assert (its["k_bits"], its["v_bits"]) == (8, 4)

    def test_a_phase_can_be_left_out(self, tiny_model):
        found = report(tiny_model("llama"), "-p", 8, "-n", 0, "-r", 1)["results"]
        assert [its["phase"] for its in found] == ["prefill"]


ENDS = ("", "_min", "_max")


class TestTable:
    def test_a_line_for_each_test(self, tiny_model):
        result = bench(tiny_model("llama"), *SHORT, "-d", "0,64", "--kv-bits", "8,k8v4")
        head, table = result.stdout.split("\n\n")
        assert [line.split("  ")[0] for line in head.splitlines()] == [
            "model",
            "device",
            "memory reads",
            "runs",
        ]
        assert "2.0 GB/s" in head
        assert "2 of each" in head
        titles, *rows = table.splitlines()
        assert len({len(line) for line in (titles, *rows)}) == 1
        assert [row.split()[:5] for row in rows] == [
            [phase, tokens, depth, "1", kv]
            for kv in ("8", "k8v4")
            for depth in ("0", "64")
            for phase, tokens in (("prefill", "40"), ("decode", "3"))
        ]
        for row in rows:
            units = ("TTFT", "GFLOP/s") if "prefill" in row else ("TPOT", "GB/s", "%")
            assert all(unit in row for unit in (*units, " ms", " MB"))
        assert result.stderr == ""  # a bar is for terminals

    def test_tests_show_when_they_are_done(self, tiny_model, tmp_path, monkeypatch):
        runs = benchmark.Benchmark.run

        def fail_behind_the_first(*arguments, **options):
            yield next(runs(*arguments, **options))
            raise QInferError("enough", hint="Stop.")

        monkeypatch.setattr(benchmark.Benchmark, "run", fail_behind_the_first)
        file = tmp_path / "old.csv"
        file.write_text("old")
        result = bench(tiny_model("llama"), *SHORT, "--csv", file, code=1)
        assert result.stdout.splitlines()[-1].startswith("prefill 40")
        assert result.stderr == "Error: enough\nHint: Stop.\n"
        assert file.read_text() == "old"


class TestCSV:
    def test_it_has_what_json_has(self, tiny_model, tmp_path):
        file = tmp_path / "new.csv"
        found = report(tiny_model("llama"), *SHORT, "--csv", file)
        rows = list(csv.DictReader(io.StringIO(file.read_text())))
        for row, its in zip(rows, found["results"], strict=True):
            assert list(row) == ["model", "device", "threads", "read_limit_bytes_per_s", *KEYS]
            expected = {key: "" if value is None else str(value) for key, value in its.items()}
            assert {key: row[key] for key in KEYS} == expected
            assert row["model"] == found["model"]
        assert list(tmp_path.iterdir()) == [file]

    def test_on_stdout_it_replaces_the_table(self, tiny_model):
        result = bench(tiny_model("llama"), *SHORT, "--csv", "-")
        rows = list(csv.DictReader(io.StringIO(result.stdout)))
        assert [row["phase"] for row in rows] == ["prefill", "decode"]

    def test_beside_a_table(self, tiny_model, tmp_path):
        file = tmp_path / "old.csv"
        file.write_text("old")
        assert "decode 3" in bench(tiny_model("llama"), *SHORT, "--csv", file).stdout
        assert file.read_text().startswith("model,")

    def test_a_device_is_written_to(self, tmp_path):
        results.write_file(results.Path("/dev/null"), b"x")
        assert results.Path("/dev/null").is_char_device()

    def test_a_link_stays_one(self, tmp_path):
        (tmp_path / "link").symlink_to(tmp_path / "file")
        results.write_file(tmp_path / "link", b"x")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "file").read_bytes() == b"x"

    def test_a_full_disk_leaves_the_old_file(self, tmp_path, monkeypatch):
        file = tmp_path / "file"
        file.write_bytes(b"old")

        def fail(path, data):
            path.touch()
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(results.Path, "write_bytes", fail)
        with pytest.raises(QInferError, match="file cannot be written: No space left"):
            results.write_file(file, b"new")
        assert [p.name for p in tmp_path.iterdir()] == ["file"]
        assert file.read_bytes() == b"old"


class TestPlot:
    @pytest.mark.parametrize(("name", "content"), [("a.png", b"\x89PNG\r\n"), ("a.SVG", b"<?xml")])
    def test_a_file_is_written(self, tiny_model, tmp_path, name, content):
        pytest.importorskip("matplotlib")
        file = tmp_path / name
        lists = ("-d", "0,32", "-b", "1,2", "--kv-bits", "16,8", "-r", 1)
        bench(tiny_model("llama"), "-p", 8, "-n", 2, *lists, "--plot", file)
        assert file.read_bytes().startswith(content)

    def test_lines_are_named_by_what_varies(self, tiny_model):
        pytest.importorskip("matplotlib")
        from qinfer_cli.plot import plot

        lists = ("-d", "0,32", "-b", "1,2", "--kv-bits", "16,k8v4", "-r", 1)
        found = report(tiny_model("llama"), "-p", 0, "-n", 2, *lists)
        text = plot(found, "svg").decode()
        labels = set(re.findall(r"<!-- (.*KV.*) -->", text))
        assert labels == {
            f"{other}, KV {kv} bits"
            for other in ("depth 0", "depth 32", "batch 1", "batch 2")
            for kv in ("16", "8/4")
        }
        assert re.findall(r"<!-- (\w+, tok/s) -->", text) == ["decode, tok/s"] * 2

    def test_another_ending_is_wrong_usage(self, no_run, tmp_path):
        result = bench(tmp_path, "--plot", tmp_path / "a.jpg", code=2)
        assert "must end with .png or .svg" in result.stderr

    def test_without_matplotlib_is_one_error(self, no_run, tmp_path, monkeypatch):
        found = importlib.util.find_spec
        monkeypatch.setattr(
            results.importlib.util,
            "find_spec",
            lambda name: None if name == "matplotlib" else found(name),
        )
        result = bench(tmp_path, "--plot", tmp_path / "a.png", code=1)
        assert_one_error(result, "needs matplotlib", r"pip install 'qinfer\[plot\]'")
        assert list(tmp_path.iterdir()) == []


class TestRefusals:
    @pytest.mark.parametrize("option", ["--csv", "--plot"])
    @pytest.mark.parametrize(
        ("name", "reason"),
        [("none/a.png", "No such file or directory"), ("d.png", "Is a directory")],
    )
    def test_a_file_that_cannot_be_written(self, no_run, tmp_path, option, name, reason):
        (tmp_path / "d.png").mkdir()
        result = bench(tmp_path, option, tmp_path / name, code=1)
        assert_one_error(result, f"{name} cannot be written: {reason}")

    @pytest.mark.parametrize(
        ("arguments", "pattern"),
        [
            (["--batch", "0"], "0 is less than 1"),
            (["--batch", "1,,2"], "'1,,2' is not a number, or a list such as 1,8"),
            (["--depth", "1k"], "'1k' is not a number"),
            (["--prompt", "-1"], "'-1' is not a number"),
            (["--new-tokens", ""], "'' is not a number"),
            (["--kv-bits", "16,5"], "'16,5' is not one of 4, 8, 16, 32 or k8v4"),
            (["--kv-bits", "k8"], "'k8' is not one of"),
            (["--repetitions", "0"], "0 is not in the range"),
            (["-p", "0", "-n", "0"], "Nothing to measure"),
            (["--json", "--csv", "-"], "both print on stdout"),
        ],
    )
    def test_wrong_usage(self, no_run, tmp_path, arguments, pattern):
        result = bench(tmp_path, *arguments, code=2)
        assert pattern in result.stderr
        assert result.stdout == ""

    def test_a_depth_beyond_the_context(self, tiny_model):
        result = bench(tiny_model("llama"), "--depth", 4096, code=1)
        assert_one_error(
            result, "depth 4,096, .* a context of 4,162 .* 256", "--depth, .* by 3,906"
        )

    def test_an_odd_head_at_4_bits(self, monkeypatch, tmp_path):
        from tests import tiny_models

        family, fields = tiny_models.SHAPES["gpt2"]
        monkeypatch.setitem(tiny_models.SHAPES, "odd", (family, {**fields, "n_embd": 60}))
        model = tiny_models.build(tmp_path / "odd", "odd")
        assert_one_error(bench(model, "--kv-bits", "16,4", code=1), "even head_dim", "8")

    def test_a_model_that_is_not_there(self, tmp_path):
        assert_one_error(bench(tmp_path / "none", code=1), "does not exist")

    def test_more_than_memory_holds(self, tiny_model, monkeypatch):
        monkeypatch.setattr(benchmark, "default_budget", lambda device: 1 << 20)
        result = bench(tiny_model("llama"), *SHORT, "--batch", "1,64", code=1)
        assert_one_error(result, "64 sequences of 41 tokens", "--batch")
