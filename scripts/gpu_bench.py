"""Measure qinfer on a GPU within a few minutes: speed and memory of synthetic models, as JSON.

    python scripts/gpu_bench.py --out result.json --budget-s 200

Models of 1.1 and 8 billion weights are made on the spot (`gpu_models.py`). What matters most comes
first; what the time does not suffice for is listed as not run. An error is recorded and the rest
goes on. The file is written after every measurement, and one that exists is continued: exit code
75 says that the device or a measurement was lost and that the same call goes on behind it.
`--device cpu --tiny` runs all of it on shapes so small that only the way there is tested.

The result is an object with:

    format         1
    date           of the start, UTC, ISO 8601
    commit         of the sources, if it is known
    tiny           whether figures mean nothing
    device         {type, name, capability, memory_bytes, multiprocessors}
    versions       {qinfer, python, torch, triton, cuda}
    copy_bytes_per_s   read and written by a copy in the device's memory: the limit of decoding
    results        [{key, seconds, …}], in the order they were measured; with `error` where one
                   failed, else with one of
      memory       {weights_bytes, kv_bytes, reserved_bytes, allocated_bytes, device_used_bytes,
                   reserved_before_bytes, load_s, made_s, warnings}: of opening a model and of 32
                   tokens behind a prompt; reserved and allocated are torch's peaks
      speed        a `qinfer.benchmark.Result`: {case {phase, tokens, depth, batch, kv_format
                   {k_bits, v_bits}}, tokens_per_s {median, low, high}, latency_s {…}, flops_per_s,
                   bytes_per_token, peak_memory_bytes}, and beside them {graphs, sampled,
                   read_share}
      transformers what `gpu_transformers.measure` returns
    running        key of what is being measured, null at the end
    not_run        keys of what is still to be done: at the end, what the time did not suffice for
    tests          {passed, failed, errors, skipped, seconds, failures [names]} of `pytest -m gpu`;
                   one that did not end counts as an error
    goals          [{goal, found, holds}] from `gpu_table.goals`; holds is null if not measured

Keys are words: `8b int4 decode 64, depth 0, batch 1, kv 16`, with `, no graph` or `, sampled`
behind some; `8b int4 memory`, with ` again` behind it where a model was opened once more; `8b
transformers`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import os
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gpu_models
import gpu_transformers
import torch
from gpu_plan import NEW_TOKENS, TRANSFORMERS, Job, Test, jobs, tiny
from gpu_report import AGAIN, Report, circumstances, read_tests, watched
from gpu_table import goals

from qinfer import ops
from qinfer.benchmark import Benchmark
from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.engine.memory import default_budget, peak_bytes
from qinfer.generation import LanguageModel
from qinfer.ops.bandwidth import read_bandwidth
from qinfer.sampling import PRESETS, SamplingParams

CASE_LIMIT_S = 60.0
MEMORY_LIMIT_S = 120.0  # the first one compiles kernels
TRANSFORMERS_LIMIT_S = 100.0  # with its import
REPETITIONS = 3
MEMORY_PROMPT_TOKENS = 1000
MEMORY_NEW_TOKENS = 32
MEMORY_CONTEXT_TOKENS = 4096
TINY_CONTEXT_TOKENS = 512
GREEDY = SamplingParams(temperature=0)


class Runner:
    """Goes through jobs.

    Attributes:
        report: Where results go.
        device: Where models run.
        directory: Where they are made.
        tiny: Whether all of them are of the tiny shape.
        deadline: Of `time.monotonic`; nothing is begun behind it.
    """

    def __init__(
        self, report: Report, device: torch.device, directory: Path, *, tiny: bool, deadline: float
    ) -> None:
        self.report = report
        self.device = device
        self.directory = directory
        self.tiny = tiny
        self.deadline = deadline

    @property
    def left_s(self) -> float:
        """Time that is left."""
        return self.deadline - time.monotonic()

    def run(self, todo: Sequence[Job]) -> None:
        """Do what there is time for; the rest stays listed as not run."""
        keys = dict.fromkeys(key for job in todo for key in job.keys)
        self.report.data["not_run"] = [key for key in keys if not self.report.has(key)]
        self.report.save()
        for i, job in enumerate(todo):
            missing = [key for key in job.keys if not self.report.has(key)]
            if not missing or self.left_s < job.least_s:
                continue
            gc.collect()
            gc.freeze()  # no model is there now; what is need not be looked at after each test
            if job.scheme == TRANSFORMERS:
                work = partial(self._transformers, job)
                self.attempt(job.name, work, limit_s=TRANSFORMERS_LIMIT_S)
            else:
                self._run_tests(job)
            if all((job.shape, job.scheme) != (its.shape, its.scheme) for its in todo[i + 1 :]):
                shutil.rmtree(self.directory / job.place, ignore_errors=True)

    def attempt(
        self, key: str, work: Callable[[], dict[str, Any]], *, limit_s: float | None = None
    ) -> bool:
        """Measure one thing, unless that was done; whatever goes wrong there is recorded."""
        if self.report.has(key):
            return True
        self.report.begin(key)
        try:
            with watched(self.report, limit_s or CASE_LIMIT_S):
                found = work()
        except Exception as error:  # of any kind: the others can still be measured
            traceback.print_exc()
            self.report.fail(f"{type(error).__name__}: {error}"[:2000])
            failed = True
        else:
            self.report.add(found)
            failed = False
        self._tidy()
        return not failed

    def _tidy(self) -> None:
        """Give memory back; leave if the device does not answer any more."""
        gc.collect()
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"the device is lost: {error}", flush=True)
            os._exit(AGAIN)
        with contextlib.suppress(RuntimeError):  # where capturing a graph has failed
            torch.cuda.empty_cache()

    def _transformers(self, job: Job) -> dict[str, Any]:
        return {
            TRANSFORMERS: gpu_transformers.measure(
                "tiny" if self.tiny else job.shape,
                device=self.device,
                prompt_tokens=16,
                new_tokens=8 if self.tiny else NEW_TOKENS,
                repetitions=1 if self.tiny else REPETITIONS,
            )
        }

    def _run_tests(self, job: Job) -> None:
        """Open a model, which is a measurement of memory by itself, and time it."""
        opened: list[LanguageModel] = []

        def memory() -> dict[str, Any]:
            model, figures = self._open(job)
            opened.append(model)
            return {"memory": figures}

        key = job.keys[0]
        while self.report.has(key):  # in an earlier job, or before the process was lost
            key += " again"
        self.attempt(key, memory, limit_s=MEMORY_LIMIT_S)
        if opened:
            self._time_all(Benchmark(opened.pop()), job)
        self._tidy()

    def _time_all(self, benchmark: Benchmark, job: Job) -> None:
        for test in job.tests:
            if self.left_s > 0:
                self.attempt(f"{job.name} {test}", partial(self._time, benchmark, test))

    def _open(self, job: Job) -> tuple[LanguageModel, dict[str, Any]]:
        start = time.perf_counter()
        place = make_model(self.directory, job, tiny=self.tiny)
        made_s = time.perf_counter() - start
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved() if on_gpu else 0
        start = time.perf_counter()
        model = LanguageModel(
            place,
            device=self.device.type,
            context_tokens=TINY_CONTEXT_TOKENS if self.tiny else MEMORY_CONTEXT_TOKENS,
            max_sequences=1,
        )
        load_s = time.perf_counter() - start
        warnings: list[str] = []
        model.warn_with(warnings.append)
        self._generate(model, 100 if self.tiny else MEMORY_PROMPT_TOKENS)
        free, total = torch.cuda.mem_get_info() if on_gpu else (0, 0)
        checkpoint = Checkpoint(place)
        figures = {
            "weights_bytes": sum(info.nbytes for info in checkpoint.tensors.values()),
            "kv_bytes": model.engine.cache.nbytes,
            "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else peak_bytes(),
            "allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
            "device_used_bytes": total - free if on_gpu else None,
            "reserved_before_bytes": before,
            "load_s": round(load_s, 2),
            "made_s": round(made_s, 2),
            "warnings": warnings,
        }
        return model, figures

    def _generate(self, model: LanguageModel, prompt_tokens: int) -> None:
        engine, draw = model.engine, random.Random(0)
        ids = draw.choices(range(model.tokenizer.vocab_size), k=prompt_tokens)
        sequence = engine.add(ids, GREEDY, MEMORY_NEW_TOKENS)
        while sequence.finish_reason is None:
            engine.step()
        if sequence.error is not None:
            raise sequence.error

    def _time(self, benchmark: Benchmark, test: Test) -> dict[str, Any]:
        model = benchmark.model
        model.device_options = dataclasses.replace(model.device_options, graphs=test.graphs)
        benchmark.params = SamplingParams(**PRESETS["chat"]) if test.sampled else GREEDY
        repetitions = 1 if self.tiny else REPETITIONS
        (result,) = benchmark.run([test.case], repetitions=repetitions)
        read, limit = result.read_bytes_per_s, self.report.data["copy_bytes_per_s"]
        beside = {
            "graphs": test.graphs,
            "sampled": test.sampled,
            "read_share": None if read is None else read / limit,
        }
        return {"speed": dataclasses.asdict(result) | beside}


def make_model(directory: Path, job: Job, *, tiny: bool) -> Path:
    """The model of a job, unless it is there already."""
    place = directory / job.place
    if not place.exists():
        part = place.with_name(place.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        gpu_models.write(part, "tiny" if tiny else job.shape, job.scheme)
        part.replace(place)
    return place


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file, new or to continue")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that only test the way")
    parser.add_argument("--budget-s", type=float, default=200.0, help="nothing begins behind it")
    parser.add_argument("--tests", type=Path, help="what gpu_pytest.py wrote, to be counted in")
    parser.add_argument("--work", type=Path, help="where models are made: 40 GB, best in memory")
    parser.add_argument("--make", action="store_true", help="only make them, in --work")
    args = parser.parse_args(words)
    if args.make and args.work is None:
        parser.error("--make needs --work")
    return args


def main(words: Sequence[str] | None = None) -> None:
    """Measure what there is time for."""
    start = time.monotonic()
    args = parse_args(words)
    todo = [tiny(job) for job in jobs()] if args.tiny else jobs()
    if args.make:
        for job in todo:
            if job.scheme != TRANSFORMERS:
                make_model(args.work, job, tiny=args.tiny)
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("Error: no CUDA device is available to this torch; nothing was measured.")
    device = ops.select(args.device).device
    report = open_report(args, device)
    with contextlib.ExitStack() as stack:
        work = args.work
        if work is None:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qinfer-gpu-")))
        deadline = start + args.budget_s
        Runner(report, device, work, tiny=args.tiny, deadline=deadline).run(todo)


def open_report(args: argparse.Namespace, device: torch.device) -> Report:
    """Begin a report, or continue one; what tests have come to is read again."""
    report = Report(args.out)
    if args.tests is not None:
        report.data["tests"] = read_tests(args.tests)
    if "device" not in report.data:
        free = 256 << 20 if args.tiny else default_budget(device)
        report.data |= {"tiny": args.tiny} | circumstances(device)
        report.data["copy_bytes_per_s"] = read_bandwidth(device, free_bytes=free)
    report.data["goals"] = goals(report.data)
    report.save()
    return report


if __name__ == "__main__":
    main()
