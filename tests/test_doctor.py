"""`qinfer doctor` finds what is missing, on machines that are made up here."""

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from qinfer import doctor
from qinfer.config import ModelConfig, read_json
from qinfer.engine import memory
from qinfer.ops.cpu import kernels, threads
from qinfer.quant.kv import KVFormat
from tests.fake_machine import FakeMachine
from tests.test_cli import assert_one_error, run

SECRET = "hf_thisMustNotBeShown"
GIB = 1 << 30


class Machine(FakeMachine):
    """A Linux machine without faults, of which tests take parts away."""

    def library(self, variant):
        """None: not built. An exception: raised when it is loaded."""

        def load():
            if isinstance(variant, Exception):
                raise variant
            return None if variant is None else SimpleNamespace()

        self.patch.setattr(kernels, "library", load)
        self.patch.setattr(kernels, "variant", lambda library: variant or None)

    def programs(self, *names):
        self.patch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in names else None)

    def gpu(self, major, minor, cuda="12.8"):
        properties = SimpleNamespace(
            name="Some GPU", total_memory=8 * 10**9, major=major, minor=minor
        )
        self.patch.setattr(torch.version, "cuda", cuda)
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_properties": lambda index: properties,
            "get_device_capability": lambda index: (major, minor),
        }.items():
            self.patch.setattr(torch.cuda, name, value)

    def triton(self, version):
        self.patch.setattr(doctor, "_version_of", lambda package: version)

    def system(self, name, machine):
        self.patch.setattr(platform, "system", lambda: name)
        self.patch.setattr(platform, "machine", lambda: machine)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    root = tmp_path / "root"
    made = Machine(root, monkeypatch)
    for module in (doctor, threads):
        monkeypatch.setattr(module, "_ROOT", root)
    monkeypatch.setattr(memory, "_MEMINFO", root / "proc/meminfo")
    monkeypatch.setattr(memory, "_CGROUP", root / "sys/fs/cgroup")
    made.write("proc/meminfo", "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n")
    made.write("proc/cpuinfo", "processor\t: 0\nmodel name\t: Some CPU: fast\n")
    made.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    disk = SimpleNamespace(free=100 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    made.system("Linux", "x86_64")
    made.library("avx2")
    made.programs("cc")
    made.triton(None)
    return made


def judge(finding, state, text, hint=None):
    assert finding.state == state, finding
    assert text in finding.text
    assert (finding.hint is None) == (state == "ok")
    assert hint is None or hint in finding.hint


def test_a_sound_machine_is_all_ok(machine):
    found = list(doctor.examine())
    assert [its.state for its in found] == ["ok"] * 8
    assert len({its.name for its in found}) == 8
    assert not any(its.is_fatal for its in found)


class TestVersions:
    def test_are_of_what_is_installed(self):
        found = doctor.versions()
        assert found.facts["torch"] == metadata.version("torch")
        assert {"qinfer", "python", "tokenizers", "numpy"} <= found.facts.keys()
        assert "pytest" not in found.facts  # an extra
        judge(found, "ok", f"torch {torch.__version__}")

    @pytest.mark.parametrize(
        ("installed", "needed", "state"),
        [
            ("2.9.0+cpu", "2.9", "ok"),
            ("2.10.0", "2.9", "ok"),
            ("2.8.1", "2.9", "problem"),
            ("1.99", "2", "problem"),
            ("2", "2.0.0", "ok"),
            ("2.9rc1", "2.9", "ok"),
        ],
    )
    def test_that_are_too_old_are_a_problem(self, monkeypatch, installed, needed, state):
        monkeypatch.setattr(metadata, "requires", lambda name: [f"torch>={needed}", "b"])
        monkeypatch.setattr(metadata, "version", lambda name: installed)
        found = doctor.versions()
        judge(found, state, f"torch {installed}")
        assert ("older than" in found.text) == (state == "problem")

    def test_a_package_that_is_missing_is_a_problem(self, monkeypatch):
        monkeypatch.setattr(
            metadata, "requires", lambda name: ["no-such_package>=1", 'nor-this; extra == "x"']
        )
        found = doctor.versions()
        judge(found, "problem", "no-such_package is missing", "Install")
        assert "nor-this" not in found.text

    def test_of_source_that_is_not_installed(self, monkeypatch):
        def missing(name):
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "version", missing)
        judge(doctor.versions(), "warning", "not installed", "pip install")


class TestProcessor:
    def test_names_it_and_counts_cores(self, machine):
        found = doctor.processor()
        judge(found, "ok", "Some CPU: fast: 4 physical cores to use, 4 threads")
        assert found.facts["threads"] == found.facts["usable_cores"] == 4
        assert found.facts["quota_processors"] is None

    def test_says_what_limits_it(self, machine, monkeypatch):
        monkeypatch.setattr(os, "cpu_count", lambda: 64)
        machine.write("proc/self/cgroup", "0::/\n")
        machine.write("sys/fs/cgroup/cpu.max", "150000 100000\n")
        found = doctor.processor()
        judge(found, "ok", "2 physical cores to use, 2 threads")
        assert "may use 4 of 64 processors" in found.text
        assert "quota is 1.5 processors" in found.text
        assert found.facts["quota_processors"] == 1.5

    def test_warns_of_omp_num_threads(self, machine, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        judge(doctor.processor(), "warning", "1 thread, OMP_NUM_THREADS is 1", "--threads 4")
        monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
        judge(doctor.processor(), "ok", "4 threads")

    @pytest.mark.parametrize("text", ["", "model name\n", "model name :\n", "\x00:\x01\n::\n"])
    def test_odd_files_leave_what_python_knows(self, machine, monkeypatch, text):
        machine.write("proc/cpuinfo", text)
        monkeypatch.setattr(platform, "processor", lambda: "")
        assert doctor.processor().text.startswith("x86_64: 4 physical")


class TestKernels:
    def test_name_the_variant(self, machine):
        found = doctor.kernels()
        judge(found, "ok", "avx2")
        assert found.facts == {"compiled": True, "variant": "avx2", "compiler": "cc"}

    def test_plain_ones_are_less_than_x86_could_have(self, machine):
        machine.library("plain")
        judge(doctor.kernels(), "warning", "lacks AVX2", "virtual machine")

    def test_plain_ones_are_all_there_is_elsewhere(self, machine):
        machine.library("plain")
        machine.system("Darwin", "arm64")
        judge(doctor.kernels(), "ok", "plain")

    @pytest.mark.parametrize(
        ("programs", "system", "hint"),
        [
            ((), "Linux", "Install a C compiler (such as gcc), then install qinfer again"),
            ((), "Darwin", "Install a C compiler (xcode-select --install), then"),
            (("clang",), "Linux", "Now there is one: install qinfer again"),
        ],
    )
    def test_without_a_compiler_at_install_time(self, machine, programs, system, hint):
        machine.library(None)
        machine.programs(*programs)
        machine.system(system, "x86_64")
        found = doctor.kernels()
        judge(found, "warning", "15 with int4", hint)
        assert "pip install --force-reinstall --no-deps" in found.hint
        assert found.facts["compiled"] is False
        assert not found.is_fatal

    def test_of_an_earlier_version_do_not_say(self, machine):
        machine.library("")
        judge(doctor.kernels(), "warning", "earlier version", "Install qinfer again")

    @pytest.mark.parametrize(
        "error", [OSError("invalid ELF header\nmore"), AttributeError("undefined symbol: f")]
    )
    def test_that_cannot_be_loaded_are_fatal(self, machine, error):
        machine.library(error)
        found = doctor.kernels()
        judge(found, "problem", str(error).split("\n")[0], "pip install")
        assert found.is_fatal
        assert "more" not in found.text


class TestGPU:
    def test_none_is_ok(self, machine):
        judge(doctor.gpu(), "ok", "none")

    def test_with_all_it_needs(self, machine):
        machine.gpu(8, 6)
        machine.triton("3.4.0")
        found = doctor.gpu()
        judge(found, "ok", "Some GPU, 8.00 GB, compute capability 8.6, CUDA 12.8, Triton 3.4.0")
        assert found.facts["devices"][0]["capability"] == "8.6"

    def test_without_triton(self, machine):
        machine.gpu(7, 0)
        judge(doctor.gpu(), "warning", "Triton is not installed", "triton")

    @pytest.mark.parametrize("capability", [(6, 1), (5, 2)])
    def test_too_old_is_a_problem_but_the_cpu_is_left(self, machine, capability):
        machine.gpu(*capability)
        machine.triton("3.4.0")
        found = doctor.gpu()
        judge(found, "problem", "from 7.0 on", "--device cpu")
        assert not found.is_fatal

    def test_with_a_torch_for_cpus(self, machine, monkeypatch):
        machine.write("dev/nvidia0", "")
        monkeypatch.setattr(torch.version, "cuda", None)
        judge(doctor.gpu(), "warning", "built for the CPU", "CUDA build")

    def test_that_torch_cannot_use(self, machine, monkeypatch):
        def complain():
            import warnings

            warnings.warn("the driver is too old\nsee …", stacklevel=1)
            return False

        machine.write("dev/nvidia0", "")
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "is_available", complain)
        found = doctor.gpu()
        judge(found, "warning", "CUDA 12.8, cannot use it: the driver is too old", "nvidia-smi")
        assert "see" not in found.text


class TestMemory:
    def test_is_counted(self, machine):
        found = doctor.memory()
        judge(found, "ok", "8.19 GB of 16.38 GB free")
        assert found.facts == {"free_bytes": 8000000 << 10, "total_bytes": 16000000 << 10}

    def test_little_is_a_warning(self, machine):
        machine.write("proc/meminfo", "MemTotal: 16000000 kB\nMemAvailable: 900000 kB\n")
        judge(doctor.memory(), "warning", "0.92 GB of 16.38 GB", "container")

    @pytest.mark.parametrize("text", ["", "MemTotal: lots\nMemAvailable: few\n"])
    def test_odd_files_leave_what_the_system_says(self, machine, text):
        machine.write("proc/meminfo", text)
        pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert doctor.memory().facts["total_bytes"] == pages

    @pytest.mark.parametrize(
        ("text", "state", "part"),
        [
            ("[always] madvise never\n", "ok", "always"),
            ("always madvise [never]\n", "warning", "off"),
            ("", "ok", "no setting"),
            ("odd\n", "ok", "no setting"),
        ],
    )
    def test_huge_pages(self, machine, text, state, part):
        machine.write("sys/kernel/mm/transparent_hugepage/enabled", text)
        judge(doctor.huge_pages(), state, part)


def test_without_proc_sys_or_affinity_as_on_macos(machine, monkeypatch):
    for directory in ("proc", "sys"):
        machine.remove(directory)
    monkeypatch.delattr(os, "sched_getaffinity")
    machine.system("Darwin", "arm64")
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    found = {its.name: its for its in doctor.examine()}
    assert {its.state for its in found.values()} == {"ok"}
    assert found["CPU"].text.startswith("arm: 4 physical cores")
    assert found["memory"].facts["total_bytes"] > 0
    assert "no setting" in found["huge pages"].text


class TestHub:
    def test_a_cache_that_is_not_there_yet(self, machine, tmp_path):
        found = doctor.hub_cache()
        judge(found, "ok", f"107.37 GB free in {tmp_path / 'hub'}")
        assert not (tmp_path / "hub").exists()

    def test_little_space(self, machine, monkeypatch):
        little = SimpleNamespace(free=GIB)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: little)
        judge(doctor.hub_cache(), "warning", "1.07 GB free", "HF_HOME")

    def test_a_cache_that_cannot_be_written(self, machine, monkeypatch):
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        judge(doctor.hub_cache(), "warning", "cannot be written", "HF_HOME")

    def test_a_token_is_said_to_be_there_and_not_shown(self, machine, monkeypatch):
        judge(doctor.hub_access(), "ok", "no token")
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: SECRET)
        judge(doctor.hub_access(), "ok", "a token is set")
        for arguments in ((), ("--json",)):
            result = run("doctor", *arguments)
            assert "a token is set" in result.stdout
            assert SECRET not in result.stdout + result.stderr

    def test_offline(self, machine, monkeypatch):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        found = doctor.hub_access()
        judge(found, "ok", "only models in the cache")
        assert found.facts["offline"] is True


class TestFit:
    def fit(self, directory, bits=16):
        config = ModelConfig.from_dict(read_json(directory / "config.json"))
        return doctor.fit(directory, config, KVFormat(bits, bits))

    def test_sizes_are_what_arithmetic_says(self, machine, tiny_model):
        found = self.fit(tiny_model("llama"))
        judge(found, "ok", "runs on the CPU")
        assert found.facts["kv_bytes_per_token"] == 2 * 3 * 2 * 16 * 2
        assert found.facts["context_tokens"] == 256
        assert found.facts["weights_bytes"] == sum(
            4 * n for n in (320 * 64, 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64), 64)
        )
        assert "384 B of KV cache a token, 256 tokens of context" in found.text

    def test_fewer_bits_take_less(self, machine, tiny_model):
        assert self.fit(tiny_model("llama"), 8).facts["kv_bytes_per_token"] == 2 * 3 * 2 * (16 + 2)

    def leave(self, machine, directory, kv_tokens):
        """So much memory that a cache of these tokens fits."""
        need = self.fit(directory).facts
        config = ModelConfig.from_dict(read_json(directory / "config.json"))
        workspace = memory.workspace_bytes(config, tokens=256, sequences=32)
        budget = need["weights_bytes"] + workspace + kv_tokens * need["kv_bytes_per_token"]
        free = int(budget / 0.9 / 1024) + 2
        machine.write("proc/meminfo", f"MemTotal: 16000000 kB\nMemAvailable: {free} kB\n")

    def test_a_context_that_memory_cuts_is_a_warning(self, machine, tiny_model):
        self.leave(machine, tiny_model("llama"), 96)
        found = self.fit(tiny_model("llama"))
        judge(found, "warning", "96 tokens of context", "--kv-bits")
        assert "does not allow the model's 256" in found.text

    def test_one_that_does_not_fit_is_fatal(self, machine, tiny_model):
        self.leave(machine, tiny_model("llama"), 20)
        found = self.fit(tiny_model("llama"))
        judge(found, "problem", "one sequence of 64 tokens", "--scheme")
        assert found.is_fatal
        assert run("doctor", tiny_model("llama"), code=1).stdout.splitlines()[-2].startswith("prob")

    @pytest.mark.parametrize(("capability", "device"), [((6, 1), "cpu"), ((7, 5), "cuda")])
    def test_it_runs_on_a_gpu_that_can_be_used(
        self, machine, monkeypatch, tiny_model, capability, device
    ):
        machine.gpu(*capability)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 2 * GIB))
        assert self.fit(tiny_model("llama")).facts["device"] == device


class TestCommand:
    def test_a_line_a_check_and_hints_below(self, machine):
        machine.library(None)
        lines = run("doctor").stdout.splitlines()
        assert len(lines) == 9
        assert [line.split()[0] for line in lines if "Hint:" not in line].count("ok") == 7
        below = next(i for i, line in enumerate(lines) if line.startswith("warning  kernels"))
        assert lines[below + 1].strip().startswith("Hint: ")

    def test_json(self, machine, tiny_model):
        machine.library(None)
        found = json.loads(run("doctor", tiny_model("llama"), "--kv-bits", 8, "--json").stdout)
        assert found["usable"] is True
        checks = {check["name"]: check for check in found["checks"]}
        assert checks["kernels"]["state"] == "warning"
        assert checks["kernels"]["hint"]
        assert checks["memory"]["hint"] is None
        assert checks["model"]["facts"]["kv_bytes_per_token"] == 2 * 3 * 2 * (16 + 2)

    def test_what_makes_qinfer_unusable_exits_with_1(self, machine, tiny_model):
        machine.library(OSError("invalid ELF header"))
        found = json.loads(run("doctor", tiny_model("llama"), "--json", code=1).stdout)
        assert found["usable"] is False
        assert "model" not in {check["name"] for check in found["checks"]}

    def test_a_gpu_that_is_too_old_does_not(self, machine):
        machine.gpu(6, 1)
        assert "problem  GPU" in run("doctor").stdout

    def test_a_torch_that_cannot_be_loaded_is_a_finding(self):
        code = "import sys; sys.modules['torch'] = None; import qinfer_cli.main as m; m.cli()"
        words = [sys.executable, "-c", code, "doctor"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, "")
        last = done.stdout.splitlines()[-2:]
        assert last[0].startswith("problem  libraries  cannot be loaded")
        assert "torch" in last[0]
        assert "Hint: " in last[1]

    def test_a_model_that_is_not_there_is_one_error(self, machine, tmp_path):
        assert_one_error(run("doctor", tmp_path / "none", code=1), "does not exist")

    @pytest.mark.parametrize("arguments", [("--kv-bits", "4"), ("a", "b"), ("--k-bits", "5", "m")])
    def test_wrong_usage(self, arguments):
        assert run("doctor", *arguments, code=2).stdout == ""
