"""The run on a machine with a GPU, as far as it goes without one."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.generation import LanguageModel
from qinfer.quant import affine
from qinfer.quant.spec import SCHEMES
from qinfer.sampling import SamplingParams
from qinfer_converters.convert import convert
from qinfer_converters.huggingface import HuggingFaceSource
from qinfer_converters.plan import make_plan

SCRIPTS = Path(__file__).parents[1] / "scripts"


def module(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def models():
    return module("gpu_models")


@pytest.fixture(scope="module")
def bench():
    return module("gpu_bench")


@pytest.fixture(scope="module")
def plan():
    return module("gpu_plan")


@pytest.fixture(scope="module")
def report():
    return module("gpu_report")


@pytest.fixture(scope="module")
def table():
    return module("gpu_table")


@pytest.fixture(scope="module")
def pack():
    return module("gpu_pack")


@pytest.fixture(scope="module")
def written(models, tmp_path_factory):
    """Directories of the tiny shape by scheme."""
    root = tmp_path_factory.mktemp("synthetic")
    for scheme in SCHEMES:
        models.write(root / scheme, "tiny", scheme)
    return {scheme: root / scheme for scheme in SCHEMES}


class TestModels:
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_open_and_generate(self, written, scheme):
        model = LanguageModel(written[scheme], device="cpu", max_sequences=1)
        completion = model.complete([1, 2, 3], SamplingParams(temperature=0), max_tokens=5)
        list(completion)
        assert len(completion.token_ids) == 5
        assert completion.error is None

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_are_stored_as_a_conversion_stores_them(self, written, scheme, tmp_path):
        source = HuggingFaceSource(written["bf16"])
        convert(source, make_plan(source, scheme), tmp_path / "converted")

        def described(directory):
            tensors = Checkpoint(directory).tensors
            return {name: (its.dtype, its.shape) for name, its in tensors.items()}

        assert described(written[scheme]) == described(tmp_path / "converted")
        configs = [read(d / "config.json") for d in (written[scheme], tmp_path / "converted")]
        assert configs[0] == configs[1]

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_keep_the_size_of_activations(self, written, scheme):
        decoder = LanguageModel(written[scheme], device="cpu", max_sequences=1).engine.decoder
        for block in decoder.blocks:
            for weight in (block.parameters.down.weight, block.parameters.output.weight):
                n, k = weight.shape
                assert float(reference_rows(written[scheme], block, weight).std()) == pytest.approx(
                    k**-0.5, rel=0.05
                )
                assert n == 128

    def test_never_hold_the_code_of_minus_128(self, written):
        checkpoint = Checkpoint(written["int8"])
        name = "model.layers.0.mlp.down_proj.weight_packed"
        q = affine.unpack(checkpoint.tensor(name), 8, 192)
        assert (int(q.min()), int(q.max())) == (-127, 127)

    def test_tensors_differ_and_long_ones_go_on(self, models):
        noise = torch.arange(256, dtype=torch.uint8).repeat((1 << 20) // 256 + 4)
        rows = dict(models.runs("a.weight", noise, torch.int32, (6, 2), 16))
        assert sorted(rows) == [0, 2, 4]
        assert all(part.shape == (2, 2) for part in rows.values())
        other = dict(models.runs("b.weight", noise, torch.int32, (6, 2), 16))
        assert not torch.equal(rows[0], other[0])

    def test_many_shards_have_an_index(self, models, tmp_path, monkeypatch):
        monkeypatch.setattr(models, "make_plan", small_shards(models.make_plan))
        plan = models.write(tmp_path / "model", "tiny", "int4")
        assert len(plan.shards) > 1
        LanguageModel(tmp_path / "model", device="cpu", max_sequences=1)


def small_shards(make_plan):
    return lambda source, scheme: make_plan(source, scheme, max_shard_bytes=100_000)


def read(path):
    return json.loads(path.read_text())


def reference_rows(directory, block, weight):
    """Weights in fp32, whatever the backend made of them: from the file, by their shape's name."""
    from qinfer.quant.weights import load_weight

    name = "mlp.down_proj" if weight is block.parameters.down.weight else "self_attn.o_proj"
    stored = load_weight(Checkpoint(directory), f"model.layers.0.{name}", weight.shape)
    return stored.rows(0, weight.shape[0])


def speed(key, rate, *, share=None, depth=0, batch=1, kv=16, phase="decode", **how):
    is_prefill = phase == "prefill"
    return {
        "key": key,
        "seconds": 1.0,
        "speed": {
            "case": {
                "phase": phase,
                "tokens": 64,
                "depth": depth,
                "batch": batch,
                "kv_format": {"k_bits": kv, "v_bits": kv},
            },
            "tokens_per_s": {"median": rate, "low": rate - 1, "high": rate + 1},
            "latency_s": {"median": 1 / rate, "low": 1 / rate, "high": 1 / rate},
            "flops_per_s": 4e14 if is_prefill else None,
            "bytes_per_token": None if is_prefill else 5e9,
            "peak_memory_bytes": 6_000_000_000,
            "read_share": share,
            **({"graphs": True, "sampled": False} | how),
        },
    }


def memory(key, beside):
    sizes = {"weights_bytes": 5_000_000_000, "kv_bytes": 500_000_000}
    return {
        "key": key,
        "seconds": 9.0,
        "memory": sizes | {"reserved_bytes": 5_500_000_000 + beside},
    }


def made_up(**more):
    results = [
        memory("8b int4 memory", 300_000_000),
        speed("8b int4 decode a", 400.0, share=0.56),
        speed("8b int4 decode sampled", 300.0, share=0.42, sampled=True),
        speed("8b int4 decode no graph", 100.0, share=0.14, graphs=False),
        speed("8b int4 decode b", 3300.0, share=0.3, batch=16),
        speed("8b int4 decode c", 200.0, share=0.3, depth=16384),
        speed("8b int4 decode d", 190.0, share=0.3, depth=16384, kv=8),
        speed("8b int4 prefill e", 9000.0, phase="prefill"),
        memory("8b int4 memory again", 900_000_000),
        {"key": "8b int8 memory", "seconds": 1.0, "error": "the process ended in it"},
        memory("8b int8 memory again", 700_000_000),
        speed("8b int8 decode f", 200.0, share=0.64),
        {"key": "8b bf16 memory", "seconds": 1.0, "error": "RuntimeError: it | broke\nthere"},
        {
            "key": "8b transformers",
            "seconds": 9.0,
            "transformers": {
                "tokens_per_s": {"median": 40.0, "low": 39.0, "high": 41.0},
                "new_tokens": 64,
            },
        },
    ]
    return {
        "format": 1,
        "date": "2026-01-31T10:00:00+00:00",
        "commit": "abc",
        "tiny": False,
        "device": {"type": "cuda", "name": "NVIDIA H200"},
        "versions": {"qinfer": "0.1.0", "torch": "2.11", "cuda": None},
        "copy_bytes_per_s": 4.3e12,
        "results": results,
        "running": None,
        **more,
    }


class TestGoals:
    def test_hold_or_not_by_what_was_found(self, table):
        found = {row["goal"]: (row["found"], row["holds"]) for row in table.goals(made_up())}
        assert [holds for _, holds in found.values()] == [
            *(True, False, None),  # int4, int8 and bf16 by the bandwidth
            *(True, None),  # int4 and nf4 by transformers
            *(False, True),  # the cache at depth, and the batch
            *(True, False),  # memory
            None,  # no tests were run
        ]
        assert found["8b int4, batch 1: at least 55% of the copy bandwidth"][0] == "56.0%"
        assert found["pytest -m gpu: all pass"][0] == "not run"
        assert "10.00 times (400.0 and 40.0 tok/s)" in [text for text, _ in found.values()]
        assert "0.95 times (190.0 and 200.0 tok/s)" in [text for text, _ in found.values()]
        assert "700 MB" in [text for text, _ in found.values()]

    @pytest.mark.parametrize(
        ("counts", "holds"), [((9, 0, 0), True), ((9, 1, 0), False), ((9, 0, 1), False)]
    )
    def test_of_tests(self, table, counts, holds):
        its = dict(zip(("passed", "failed", "errors"), counts, strict=True)) | {"skipped": 2}
        assert table.goals(made_up(tests=its))[-1]["holds"] is holds

    def test_no_test_that_passed_is_no_success(self, table):
        none = {"passed": 0, "failed": 0, "errors": 0, "skipped": 3}
        assert table.goals(made_up(tests=none))[-1]["holds"] is False

    def test_of_an_empty_result_are_open(self, table):
        assert {row["holds"] for row in table.goals(made_up(results=[]))} == {None}


class TestTable:
    def test_holds_everything(self, table):
        tests = {"passed": 1, "failed": 1, "errors": 0, "skipped": 0, "failures": ["tests.a::b"]}
        data = made_up(tests=tests, not_run=["1.1b int4 memory"])
        text = table.markdown(data | {"goals": table.goals(data)})
        assert "NVIDIA H200, 2026-01-31, qinfer 0.1.0, torch 2.11." in text
        assert "4,300 GB/s" in text
        rows = text.replace(" | ", "|").splitlines()
        assert "| 8b int4|decode 64|0|1|16|400.0|399.0–401.0|2,000 GB/s|56% |" in rows  # noqa: RUF001
        assert "8b int4|decode 64, no graph|0|1|16|" in text.replace(" | ", "|")
        assert "| 8b int4|prefill 64|0|1|16|9,000|8,999–9,001|400 TFLOP/s| |" in rows  # noqa: RUF001
        assert "| 8b int8|5,000 MB|500 MB|6,200 MB|700 MB |" in rows
        assert "- 8b bf16 memory: `RuntimeError: it | broke there`" in text
        assert "- `tests.a::b`" in text
        assert text.endswith("The time did not suffice for:\n\n- 1.1b int4 memory\n")

    def test_is_printed_by_the_script(self, tmp_path):
        (tmp_path / "result.json").write_text(json.dumps(made_up()))
        command = [sys.executable, SCRIPTS / "gpu_table.py", tmp_path / "result.json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "at least 55% of the copy bandwidth | 56.0% | yes |" in done.stdout


TESTED = """import pytest
def test_passes(): pass
def test_fails(): assert "this" == "that"
@pytest.mark.skip
def test_skipped(): pass
@pytest.fixture
def broken():
    yield
    assert 0
def test_breaks_at_its_end(broken): pass
"""


class TestBench:
    @pytest.fixture
    def run(self, bench, tmp_path, monkeypatch):
        """`run(jobs)`: measure them, in the file that is returned as an object."""

        def run(jobs, **more):
            monkeypatch.setattr(bench, "jobs", lambda: jobs)
            options = {"device": "cpu", "out": tmp_path / "result.json", **more}
            words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
            bench.main([*words, "--tiny"])
            return read(tmp_path / "result.json")

        return run

    def test_measures_models_and_transformers(self, plan, run):
        jobs = [
            plan.Job("8b", "int4", (plan.decode(), plan.decode(2, 16384, 8, graphs=False))),
            plan.Job("8b", "nf4", (plan.prefill(), plan.decode(sampled=True))),
            plan.Job("8b", "transformers"),
        ]
        data = run(jobs)
        assert [result["key"] for result in data["results"]] == [
            "8b int4 memory",
            "8b int4 decode 4, depth 0, batch 1, kv 16",
            "8b int4 decode 4, depth 64, batch 2, kv 8, no graph",
            "8b nf4 memory",
            "8b nf4 prefill 32, depth 0, batch 1, kv 16",
            "8b nf4 decode 4, depth 0, batch 1, kv 16, sampled",
            "8b transformers",
        ]
        assert not [result for result in data["results"] if "error" in result]
        assert (data["running"], data["not_run"], data["tiny"]) == (None, [], True)
        assert data["results"][1]["speed"]["read_share"] > 0
        assert data["results"][-1]["transformers"]["tokens_per_s"]["median"] > 0
        assert [g["found"] for g in data["goals"]].count("not measured") < len(data["goals"])

    def test_goes_on_behind_what_fails_and_is_not_repeated(self, bench, plan, run, monkeypatch):
        time = bench.Runner._time

        def broken(self, benchmark, test):
            if test.case.batch == 2:
                raise RuntimeError("broken")
            return time(self, benchmark, test)

        monkeypatch.setattr(bench.Runner, "_time", broken)
        jobs = [plan.Job("8b", "int4", (plan.decode(2), plan.decode()))]
        data = run(jobs)
        assert [r.get("error") for r in data["results"]] == [None, "RuntimeError: broken", None]
        assert run(jobs)["results"] == data["results"]

    def test_goes_on_after_the_process_ended(self, plan, run, tmp_path):
        key = "8b int4 decode 4, depth 0, batch 1, kv 16"
        state = made_up(results=[], running=key, tiny=True)
        (tmp_path / "result.json").write_text(json.dumps(state))
        data = run([plan.Job("8b", "int4", (plan.decode(), plan.decode(4)))])
        assert [r["key"] for r in data["results"]][:2] == [key, "8b int4 memory"]
        assert data["results"][0]["error"] == "the process ended in it"
        assert len(data["results"]) == 3

    def test_models_can_be_made_before(self, bench, plan, run, tmp_path, monkeypatch):
        job = plan.Job("8b", "int4", (plan.decode(),))
        monkeypatch.setattr(bench, "jobs", lambda: [job, plan.Job("8b", "transformers"), job])
        bench.main([f"--out={tmp_path / 'x'}", "--make", f"--work={tmp_path / 'work'}", "--tiny"])
        assert [path.name for path in (tmp_path / "work").iterdir()] == ["8b-int4"]
        monkeypatch.delattr(bench.gpu_models, "write")
        data = run([job], work=tmp_path / "work")
        assert not [result for result in data["results"] if "error" in result]
        assert list((tmp_path / "work").iterdir()) == []

    def test_without_time_everything_is_not_run(self, plan, run):
        job = plan.Job("8b", "int4", (plan.decode(),))
        data = run([job], budget_s=-1)
        assert data["results"] == []
        assert data["not_run"] == plan.tiny(job).keys

    def test_a_measurement_that_hangs_ends_the_process(self, report, tmp_path):
        script = (
            "import sys, time; sys.path.insert(0, sys.argv[1]); import gpu_report as b;"
            "from pathlib import Path; report = b.Report(Path(sys.argv[2]));"
            "report.begin('it')\nwith b.watched(report, 0.2): time.sleep(60)"
        )
        out = tmp_path / "result.json"
        done = subprocess.run(
            [sys.executable, "-c", script, SCRIPTS, out], check=False, capture_output=True
        )
        assert done.returncode == report.AGAIN
        assert read(out)["results"][0]["error"].startswith("no end after")

    def test_every_job_is_of_a_shape_and_the_goals_come_first(self, plan, table):
        jobs = plan.jobs()
        schemes = {(job.shape, job.scheme) for job in jobs}
        assert schemes >= {(shape, s) for shape in ("8b", "1.1b") for s in SCHEMES}
        first = [key for job in jobs[:5] for key in job.keys]
        for scheme in table.SHARES:
            assert f"8b {scheme} decode 64, depth 0, batch 1, kv 16" in first
        assert {"8b transformers", "8b int4 decode 64, depth 16384, batch 1, kv 8"} <= set(first)

    def test_tests_are_counted_as_they_end(self, report, tmp_path):
        (tmp_path / "test_it.py").write_text(TESTED)
        (tmp_path / "test_not.py").write_text("import nothing_of_this_name")
        (tmp_path / "pytest.ini").write_text("[pytest]")
        variables = {"PYTHONPATH": str(SCRIPTS), "GPU_CHECK_TESTS": str(tmp_path / "tests.jsonl")}
        options = ["-p", "gpu_pytest", "--continue-on-collection-errors"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        subprocess.run(
            [sys.executable, "-m", "pytest", *options],
            cwd=tmp_path,
            env={**environment, **variables, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            check=False,
        )
        with (tmp_path / "tests.jsonl").open("a") as file:
            file.write('{"test": "test_it.py::test_hangs"}\n')
        found = report.read_tests(tmp_path / "tests.jsonl")
        assert found.pop("seconds") >= 0
        assert found == {
            **{"passed": 1, "failed": 1, "errors": 3, "skipped": 1},
            "failures": [
                "test_not.py (error)",
                "test_it.py::test_fails (failed)",
                "test_it.py::test_breaks_at_its_end (error)",
                "test_it.py::test_hangs (unfinished)",
            ],
        }
        assert "assert 'this' == 'that'" in (tmp_path / "tests.jsonl").read_text()
        assert report.read_tests(tmp_path / "nothing.jsonl") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
class TestWithoutGPU:
    def test_the_check_says_so_in_a_line(self, tmp_path):
        done = subprocess.run(
            [SCRIPTS / "gpu_check.sh"],
            env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "OUT": str(tmp_path / "out")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("Error: ")
        assert len(done.stderr.splitlines()) == 1
        assert not (tmp_path / "out").exists()

    def test_measuring_is_refused(self, bench, tmp_path):
        with pytest.raises(SystemExit, match="no CUDA device"):
            bench.main([f"--out={tmp_path / 'result.json'}"])


class TestPack:
    def test_versions_are_those_of_the_constraints(self, pack):
        constraints = (SCRIPTS / "constraints.txt").read_text()
        found = pack.pinned(pack.PACKAGES, constraints)
        assert set(found) <= set(constraints.split())
        assert len(found) == len(pack.PACKAGES)

    def test_the_model_is_split_and_whole_again(self, pack, tmp_path, monkeypatch):
        monkeypatch.setattr(pack, "PACK", tmp_path)
        (tmp_path / "base").mkdir()
        (tmp_path / "model.gguf").write_bytes(bytes(range(200)))
        pack.split_model(tmp_path / "model.gguf", 150)
        parts = sorted(tmp_path.glob("model-*/part-*"))
        assert [path.stat().st_size for path in parts] == [150, 50]
        (tmp_path / "model.gguf").write_bytes(b"".join(path.read_bytes() for path in parts))
        command = ["sha256sum", "--quiet", "-c", "base/MODEL"]
        assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0

    def test_what_goes_together_is_limited(self, pack, tmp_path, monkeypatch):
        monkeypatch.setattr(pack, "PACK", tmp_path)
        monkeypatch.setattr(pack, "tree_bytes", lambda: 10)
        for name, size in (("base", 20), ("model-1", 60), ("model-2", 30)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "file").write_bytes(bytes(size))
        assert pack.sendings(70) == [(["model-1"], 70), (["base", "model-2"], 60)]
        with pytest.raises(SystemExit, match="model-1 with the sources"):
            pack.sendings(69)

    def test_of_bitsandbytes_one_library_is_copied(self, pack, tmp_path):
        pack.copy_bitsandbytes(tmp_path)
        libraries = [path.name for path in tmp_path.rglob("*.so")]
        assert libraries == [pack.CUDA_LIBRARY]
        assert (tmp_path / "bitsandbytes" / "__init__.py").is_file()
        assert list(tmp_path.glob("bitsandbytes-*.dist-info/METADATA"))
