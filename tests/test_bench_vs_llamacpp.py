"""The comparison with llama.cpp: what it runs, what it reads, what it makes of the numbers."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qinfer.errors import QInferError

SCRIPTS = Path(__file__).parents[1] / "scripts"

# What llama-bench of build 0c1e570 printed with -p 16 -n 4 -d 64 -o json, some fields left out.
RECORDED = """[
  {
    "build_commit": "0c1e570", "backends": "CPU", "model_type": "llama 256M (guessed) Q4_0",
    "n_threads": 2, "type_k": "q8_0", "type_v": "q8_0", "n_gpu_layers": -1, "flash_attn": 1,
    "n_prompt": 16, "n_gen": 0, "n_depth": 64,
    "avg_ns": 45720577, "stddev_ns": 0, "avg_ts": 349.951839, "stddev_ts": 0.000000,
    "samples_ns": [ 45720577 ], "samples_ts": [ 349.952 ]
  },
  {
    "build_commit": "0c1e570", "backends": "CPU", "model_type": "llama 256M (guessed) Q4_0",
    "n_threads": 2, "type_k": "q8_0", "type_v": "q8_0", "n_gpu_layers": -1, "flash_attn": 1,
    "n_prompt": 0, "n_gen": 4, "n_depth": 64,
    "avg_ns": 31193210, "stddev_ns": 0, "avg_ts": 128.233035, "stddev_ts": 0.000000,
    "samples_ns": [ 31193210 ], "samples_ts": [ 128.233 ]
  }
]"""

# Prints rates that tell its calls apart, and notes how it was called.
FAKE = """#!{python}
import json, os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open({log!r}, "a") as log:
    waiting = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    print(json.dumps([given, [name for name in waiting if name in os.environ]]), file=log)
if os.environ.get("BROKEN"):
    sys.exit("cannot load the model")
prompt, new, depth = (int(given[k]) for k in ("-p", "-n", "-d"))
rate = 1000.0 * (2 if "fast" in given["-m"] else 1) + (500 if "-ctk" in given else 0)
print(json.dumps([{{"n_prompt": prompt, "n_gen": new, "n_depth": depth, "avg_ts": rate}}]))
"""


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("bench_vs_llamacpp")


@pytest.fixture
def files(tmp_path):
    """A directory that stands for a model, and two for files."""
    for name in ("model", "slow.gguf", "fast.gguf", "other/slow.gguf"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


class TestArguments:
    def test_defaults_are_llama_benchs_tests(self, bench, files):
        args = bench.parse_args([str(files / "model"), str(files / "slow.gguf")])
        assert args.measure == ["decode", "prefill", "depth"]
        found = bench.measures(args)
        assert found["decode"] == bench.Measure(new_tokens=64)
        assert found["prefill"] == bench.Measure(prompt_tokens=512)
        assert (found["depth"].new_tokens, found["depth"].depth) == (32, 4096)
        assert (found["depth"].kv_bits, found["depth"].caches) == (8, ("f16", "q8_0"))
        assert args.threads >= 1

    @pytest.mark.parametrize(
        ("words", "part"),
        [
            ([], "required"),
            (["model"], "name a GGUF file"),
            (["nothing", "slow.gguf"], "does not exist"),
            (["model", "nothing"], "does not exist"),
            (["model", "slow.gguf", "other/slow.gguf"], "different names"),
            (["model", "slow.gguf", "--measure", "decode,speed"], "not speed"),
            (["model", "slow.gguf", "--rounds", "0"], "--rounds"),
            (["model", "slow.gguf", "--threads", "many"], "--threads"),
            (["model", "--alone"], "one --measure"),
            (["model", "slow.gguf", "--alone", "--measure", "decode"], "no GGUF"),
        ],
    )
    def test_that_make_no_sense(self, bench, files, monkeypatch, capsys, words, part):
        monkeypatch.chdir(files)
        with pytest.raises(SystemExit) as caught:
            bench.parse_args(words)
        assert caught.value.code == 2
        assert part in capsys.readouterr().err


class TestReading:
    @pytest.mark.parametrize(("prompt", "new", "rate"), [(16, 0, 349.951839), (0, 4, 128.233035)])
    def test_a_recorded_answer(self, bench, prompt, new, rate):
        measure = bench.Measure(prompt_tokens=prompt, new_tokens=new, depth=64)
        assert bench.parse_llama(RECORDED, measure) == rate

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            (RECORDED, "did not measure"),
            ("[]", "did not measure"),
            (RECORDED.replace('"n_depth": 64', '"n_depth": 0').replace("128.233035", "0"), "not m"),
            ("", "something else"),
            ("| model | size |", "something else"),
            ('[{"n_prompt": 0}]', "something else"),
            ("3", "something else"),
        ],
    )
    def test_another_answer_is_an_error(self, bench, text, part):
        with pytest.raises(SystemExit, match=part):
            bench.parse_llama(text, bench.Measure(new_tokens=4))


class TestComparing:
    def test_is_with_the_fastest_by_the_median_round_by_round(self, bench):
        rates = {"qinfer": [10.0, 30.0, 20.0], "a": [99.0, 1.0, 2.0], "b": [5.0, 10.0, 20.0]}
        found = bench.compare(rates)
        assert found["against"] == "b"
        assert found["ratios"]["b"] == [2.0, 3.0, 1.0]
        assert found["ratio"] == 2.0
        assert found["tokens_per_s"] == rates

    def test_the_order_rotates_and_every_contender_runs_once_a_round(self, bench):
        order, said = [], []

        def contender(name, measure):
            def run():
                order.append(f"{measure}{name}")
                return float(len(order))

            return bench.Contender(name, run)

        who = {m: [contender(name, m) for name in ("x", "y", "z")] for m in "dp"}
        rates = bench.run_rounds(who, 4, said.append)
        assert [order[i : i + 6] for i in range(0, 24, 6)] == [
            ["dx", "dy", "dz", "px", "py", "pz"],
            ["dy", "dz", "dx", "py", "pz", "px"],
            ["dz", "dx", "dy", "pz", "px", "py"],
            ["dx", "dy", "dz", "px", "py", "pz"],
        ]
        assert rates["d"]["x"] == [1.0, 9.0, 14.0, 19.0]
        assert len(said) == 4

    def test_the_table(self, bench, capsys):
        rates = {"qinfer": [10.0, 30.0, 20.0], "b": [5.0, 10.0, 20.0]}
        bench.print_table("decode: …", bench.compare(rates))
        lines = capsys.readouterr().out.splitlines()
        assert lines[2].split() == ["qinfer", "20.0", "10.0", "30.0"]
        assert lines[3].split() == ["b", "10.0", "5.0", "20.0", "2.00"]
        assert lines[4] == "qinfer / b: 2.00 (1.00-3.00)"


class Clock:
    """Time that passes only in the model: a second for each token that goes through it."""

    def __init__(self, bench, monkeypatch):
        self.now, self.passes = 0.0, []
        run, decode = bench.Engine._run, bench.Engine._decode

        def count(chunks):
            self.passes.append(sum(chunk.tokens for chunk in chunks))
            self.now += self.passes[-1]

        monkeypatch.setattr(
            bench.Engine, "_run", lambda e, chunks, ready: (count(chunks), run(e, chunks, ready))[1]
        )
        monkeypatch.setattr(
            bench.Engine, "_decode", lambda e, by, chunks: (count(chunks), decode(e, by, chunks))[1]
        )
        monkeypatch.setattr(bench.time, "perf_counter", lambda: self.now)


class TestTiming:
    """With a second a token, what is timed has one token a second, and nothing else counts."""

    @pytest.mark.parametrize(
        ("sizes", "passes"),
        [
            ({"new_tokens": 5}, [1, 1] + [1] + [1] * 5),
            ({"new_tokens": 5, "depth": 40, "kv_bits": 8}, [1, 1] + [40] + [1] * 5),
            ({"prompt_tokens": 48}, [48, 48]),
        ],
    )
    def test_counts_what_is_asked_for_only(self, bench, monkeypatch, tiny_model, sizes, passes):
        clock = Clock(bench, monkeypatch)
        assert bench.time_qinfer(tiny_model("llama"), bench.Measure(**sizes)) == 1.0
        assert clock.passes == passes

    def test_the_cache_has_the_bits_that_were_asked_for(self, bench, monkeypatch, tiny_model):
        made = []
        monkeypatch.setattr(
            bench,
            "LanguageModel",
            lambda *a, **k: made.append(k) or (_ for _ in ()).throw(KeyError),
        )
        with pytest.raises(KeyError):
            bench.time_qinfer(tiny_model("llama"), bench.Measure(new_tokens=4, kv_bits=8))
        assert (made[0]["kv_format"].k_bits, made[0]["kv_format"].v_bits) == (8, 8)
        assert made[0]["device"] == "cpu"

    def test_more_than_the_context_is_an_error(self, bench, tiny_model):
        with pytest.raises(QInferError):
            bench.time_qinfer(tiny_model("llama"), bench.Measure(new_tokens=8, depth=250))


STAND_IN = """
import time


class Generator:
    def __init__(self, path, device, intra_threads):
        assert (device, intra_threads) == ("cpu", 1)
        self.seconds = 1

    def generate_batch(self, prompts, max_length, include_prompt_in_result):
        [prompt] = prompts
        assert len(prompt) == 16 and set(prompt) <= {"a", "b"} and max_length == 1
        time.sleep(self.seconds)
        self.seconds = 0.1
"""


class TestScript:
    @pytest.fixture
    def call(self, files, tiny_model):
        """`call(*words, **environment)`, with a llama-bench on PATH that notes its calls."""
        tool, log = files / "bin" / "llama-bench", files / "log"
        tool.parent.mkdir()
        tool.write_text(FAKE.format(python=sys.executable, log=str(log)))
        tool.chmod(0o755)
        path = f"{tool.parent}{os.pathsep}{os.environ['PATH']}"

        def run(*words, **environment):
            command = [sys.executable, SCRIPTS / "bench_vs_llamacpp.py", tiny_model("llama")]
            return subprocess.run(
                [*command, *map(str, words)],
                capture_output=True,
                text=True,
                env={**os.environ, "PATH": path, **environment},
                check=False,
            )

        run.log = lambda: [json.loads(line) for line in log.read_text().splitlines()]
        return run

    def test_from_end_to_end(self, call, files):
        sizes = ("--prompt-tokens", 24, "--new-tokens", 3, "--depth", 40, "--depth-new-tokens", 2)
        ggufs = (files / "slow.gguf", files / "fast.gguf")
        words = (*ggufs, *sizes, "--rounds", 1, "--threads", 1, "--json")
        done = call(*words, OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0")
        assert done.returncode == 0, done.stderr
        assert "round 1 of 1" in done.stderr
        found = json.loads(done.stdout)
        assert (found["rounds"], found["threads"], found["depth"]) == (1, 1, 40)
        measures = found["measures"]
        assert list(measures) == ["decode", "prefill", "depth"]
        for name, against, rate in (
            ("decode", "llama.cpp fast.gguf", 2000),
            ("prefill", "llama.cpp fast.gguf", 2000),
            ("depth", "llama.cpp fast.gguf, q8_0 cache", 2500),
        ):
            its = measures[name]
            assert its["against"] == against
            assert its["tokens_per_s"][against] == [rate]
            assert its["ratio"] == its["tokens_per_s"]["qinfer"][0] / rate
        assert len(measures["depth"]["tokens_per_s"]) == 1 + 4
        calls = [given for given, _ in call.log()]
        assert {(c["-p"], c["-n"], c["-d"]) for c in calls} == {
            ("0", "3", "0"),
            ("24", "0", "0"),
            ("0", "2", "40"),
        }
        assert {(c["-t"], c["-r"], c["-ngl"], c["-o"]) for c in calls} == {("1", "1", "0", "json")}
        quantized = [c for c in calls if "-ctk" in c]
        assert {(c["-ctk"], c["-ctv"], c["-fa"], c["-d"]) for c in quantized} == {
            ("q8_0", "q8_0", "1", "40")
        }

    def test_llama_cpp_may_spin_whatever_the_shell_says(self, call, files):
        """Asleep between operations it is several times slower, and qinfer would seem to win."""
        words = (files / "slow.gguf", "--measure", "decode", "--new-tokens", 2, "--rounds", 1)
        done = call(*words, OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0")
        assert done.returncode == 0, done.stderr
        [(_, waiting)] = call.log()
        assert waiting == []
        assert "llama.cpp slow.gguf" in done.stdout

    def test_ctranslate2_takes_part_in_prefill(self, call, files, tmp_path):
        (tmp_path / "vocabulary.json").write_text('["a", "b"]')
        (tmp_path / "ctranslate2.py").write_text(STAND_IN)
        words = ("--measure", "decode,prefill", "--new-tokens", 2, "--prompt-tokens", 16)
        words += ("--rounds", 1, "--threads", 1, "--json", "--ctranslate2", tmp_path)
        done = call(files / "slow.gguf", *words, PYTHONPATH=str(tmp_path))
        assert done.returncode == 0, done.stderr
        measures = json.loads(done.stdout)["measures"]
        assert "ctranslate2" not in measures["decode"]["ratios"]
        [rate] = measures["prefill"]["tokens_per_s"]["ctranslate2"]
        assert 16 / 0.5 < rate < 16 / 0.1  # the stand-in takes 0.1 s, after a warm-up of 1 s

    def test_a_tool_that_fails_is_one_error_with_what_it_said(self, call, files):
        done = call(files / "slow.gguf", "--measure", "decode", "--new-tokens", 2, BROKEN="1")
        assert done.returncode == 1
        assert "llama-bench" in done.stderr
        assert "cannot load the model" in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""

    def test_a_model_that_cannot_go_so_deep_is_one_error(self, call, files):
        done = call(files / "slow.gguf", "--measure", "depth", "--depth", 300)
        assert done.returncode == 1
        assert "256" in done.stderr
        assert "Traceback" not in done.stderr


def test_qinfer_runs_as_its_command_does(bench, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert bench.environment(bench.PASSIVE)["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "OMP_WAIT_POLICY" not in bench.environment(None)


def test_a_tool_that_is_nowhere_is_built(bench, monkeypatch, tmp_path, capsys):
    built = []
    monkeypatch.setattr(bench, "build", lambda: built.append(1))
    monkeypatch.setattr(bench, "find_tool", lambda name: tmp_path / name if built else None)
    assert bench.find_or_build() == tmp_path / "llama-bench"
    assert built == [1]
    assert "15 minutes" in capsys.readouterr().err
    bench.find_or_build()
    assert built == [1]
