"""Speed of one sequence beside llama.cpp's on the same weights: both in turn, A B A B.

    python scripts/bench_vs_llamacpp.py MODEL MODEL.gguf
    python scripts/bench_vs_llamacpp.py MODEL Q4_0.gguf Q8_0.gguf --measure prefill --rounds 9

`decode` generates 64 tokens, `prefill` takes in a prompt of 512, `depth` generates 32 behind 4096,
as llama-bench's tg64, pp512 and tg32 @ d4096 do; at depth qinfer keeps its cache in 8 bits, and
llama.cpp runs with its cache in f16 and in q8_0. Each run is a process of its own, without a GPU;
loading, a warm-up and what lies before the depth are not timed. qinfer also picks each token,
which llama-bench does not. A round runs every contender once, in an order that rotates; the ratio
is qinfer's speed by that of the fastest llama.cpp (by the median) in the same round.

Nothing else may run on these cores: OpenMP's threads spin while they wait for each other, so that
another program slows llama.cpp down far more than its share, and the ratio says nothing.

`scripts/llamacpp.py convert` writes the GGUF files. llama-bench is taken from PATH, or built once.

With `--ctranslate2 DIRECTORY`, which `ct2-transformers-converter --quantization int8` writes,
CTranslate2 takes in the prompts of `prefill` too; it must be installed where this runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from llamacpp import build, find_tool

from qinfer.engine.engine import Engine
from qinfer.engine.sequence import Sequence as EngineSequence
from qinfer.errors import QInferError
from qinfer.generation import LanguageModel
from qinfer.ops.cpu.threads import default_threads
from qinfer.quant.kv import KVFormat
from qinfer.sampling import SamplingParams

TOOL = "llama-bench"
OURS = "qinfer"
CTRANSLATE2 = "ctranslate2"
PASSIVE = "PASSIVE"
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SIZES = ("prompt_tokens", "new_tokens", "depth", "depth_new_tokens")


@dataclass(frozen=True, slots=True)
class Measure:
    """What is timed.

    Attributes:
        prompt_tokens: That are taken in; 0 where generating is timed.
        new_tokens: That are generated; 0 where a prompt is timed.
        depth: Tokens before them, which are not timed.
        kv_bits: Of qinfer's cache.
        caches: Of llama.cpp, the types to try.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    depth: int = 0
    kv_bits: int = 16
    caches: tuple[str, ...] = ("f16",)

    @property
    def title(self) -> str:
        """For people."""
        done = f"{self.prompt_tokens} tokens of prompt" if self.prompt_tokens else ""
        done = done or f"{self.new_tokens} new tokens"
        return f"{done} at depth {self.depth}"


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that is timed: `run` gives its tokens per second."""

    name: str
    run: Callable[[], float]


def measures(args: argparse.Namespace) -> dict[str, Measure]:
    """Everything that `--measure` can name."""
    return {
        "decode": Measure(new_tokens=args.new_tokens),
        "prefill": Measure(prompt_tokens=args.prompt_tokens),
        "depth": Measure(
            new_tokens=args.depth_new_tokens, depth=args.depth, kv_bits=8, caches=("f16", "q8_0")
        ),
    }


def time_qinfer(directory: Path, measure: Measure) -> float:
    """Tokens per second of qinfer, in this process.

    Raises:
        QInferError: The model cannot be run, or not with so many tokens.
    """
    before = max(measure.depth, 1)
    model = LanguageModel(
        directory,
        device="cpu",
        max_sequences=1,
        context_tokens=max(before + measure.new_tokens, measure.prompt_tokens) + 1,
        kv_format=KVFormat(measure.kv_bits, measure.kv_bits),
    )
    engine, draw = model.engine, random.Random(0)
    engine.stop_ids = frozenset()

    def ids(count: int) -> list[int]:  # new ones each time, so that no prefix is found again
        return [draw.randrange(model.tokenizer.vocab_size) for _ in range(count)]

    if measure.prompt_tokens:
        for _ in ("warm-up", "timed"):
            seconds = prefill(engine, ids(measure.prompt_tokens))
        return measure.prompt_tokens / seconds
    decode(engine, ids(1), 1)
    return measure.new_tokens / decode(engine, ids(before), measure.new_tokens)


def time_ctranslate2(directory: Path, prompt_tokens: int, threads: int) -> float:
    """Tokens per second of CTranslate2 from a prompt to the token behind it, in this process."""
    import ctranslate2  # no dependency of ours

    model = ctranslate2.Generator(str(directory), device="cpu", intra_threads=threads)
    vocabulary = json.loads((directory / "vocabulary.json").read_text(encoding="utf-8"))
    for _ in ("warm-up", "timed"):
        prompt = random.choices(vocabulary, k=prompt_tokens)
        start = time.perf_counter()
        model.generate_batch([prompt], max_length=1, include_prompt_in_result=False)
        seconds = time.perf_counter() - start
    return prompt_tokens / seconds


def prefill(engine: Engine, prompt_ids: Sequence[int]) -> float:
    """Seconds from a prompt to its first token."""
    start = time.perf_counter()
    return finish(engine, engine.add(prompt_ids, SamplingParams(temperature=0), 1)) - start


def decode(engine: Engine, prompt_ids: Sequence[int], new_tokens: int) -> float:
    """Seconds for tokens after the first, which comes of the prompt."""
    sequence = engine.add(prompt_ids, SamplingParams(temperature=0), new_tokens + 1)
    while not sequence.new_tokens and sequence.finish_reason is None:
        engine.step()
    start = time.perf_counter()
    return finish(engine, sequence) - start


def finish(engine: Engine, sequence: EngineSequence) -> float:
    """Run a sequence to its end; the time then."""
    while sequence.finish_reason is None:
        engine.step()
    end = time.perf_counter()
    if sequence.error is not None:
        raise sequence.error
    return end


def run_qinfer(args: argparse.Namespace, name: str) -> float:
    """Tokens per second of qinfer, in a process of its own."""
    sizes = [f"--{size.replace('_', '-')}={getattr(args, size)}" for size in SIZES]
    words = [sys.executable, __file__, args.model, "--alone", "--measure", name, *sizes]
    return float(output_of([*words, f"--threads={args.threads}"], environment(PASSIVE)))


def run_ctranslate2(args: argparse.Namespace) -> float:
    """Tokens per second of CTranslate2, in a process of its own."""
    words = [sys.executable, __file__, args.model, "--alone", "--measure=prefill"]
    words += ["--ctranslate2", args.ctranslate2, f"--prompt-tokens={args.prompt_tokens}"]
    return float(output_of([*words, f"--threads={args.threads}"], environment(None)))


def run_llama(tool: Path, gguf: Path, measure: Measure, cache: str, threads: int) -> float:
    """Tokens per second of llama-bench."""
    words: list[object] = [tool, "-m", gguf, "-t", threads, "-ngl", 0, "-r", 1, "-o", "json"]
    words += ["-p", measure.prompt_tokens, "-n", measure.new_tokens, "-d", measure.depth]
    if cache != "f16":
        words += ["-ctk", cache, "-ctv", cache, "-fa", 1]
    return parse_llama(output_of(words, environment(None)), measure)


def environment(wait_policy: str | None) -> dict[str, str]:
    """Ours, with a policy of OpenMP for threads that wait, or without one.

    The command qinfer lets torch's threads sleep, since those of the kernels are others. llama.cpp
    computes on OpenMP's own: asleep between two operations, it would be several times slower.
    """
    rest = {name: value for name, value in os.environ.items() if name not in WAITING}
    return rest if wait_policy is None else rest | {"OMP_WAIT_POLICY": wait_policy}


def output_of(words: Sequence[object], environment: dict[str, str]) -> str:
    """What a program prints; where it fails, the end of what it says is the error."""
    command = list(map(str, words))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        said = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise SystemExit(f"{' '.join(command)}\nfailed with {done.returncode}: {said}")
    return done.stdout


def parse_llama(text: str, measure: Measure) -> float:
    """Tokens per second of a test in the JSON of llama-bench."""
    try:
        rows: list[dict[str, Any]] = json.loads(text)
        asked = (measure.prompt_tokens, measure.new_tokens, measure.depth)
        found = [
            float(row["avg_ts"])
            for row in rows
            if (row["n_prompt"], row["n_gen"], row.get("n_depth", 0)) == asked
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{TOOL} printed something else than expected: {error!r}") from None
    if len(found) != 1 or found[0] <= 0:
        raise SystemExit(f"{TOOL} did not measure {measure.title} once: {found}")
    return found[0]


def contenders(args: argparse.Namespace, name: str, tool: Path) -> list[Contender]:
    """Who runs; qinfer is the first."""
    measure = measures(args)[name]

    def llama(gguf: Path, cache: str) -> Contender:
        label = f"llama.cpp {gguf.name}" + (f", {cache} cache" if len(measure.caches) > 1 else "")
        return Contender(label, lambda: run_llama(tool, gguf, measure, cache, args.threads))

    ours = Contender(OURS, lambda: run_qinfer(args, name))
    those = [llama(gguf, cache) for gguf in args.gguf for cache in measure.caches]
    if args.ctranslate2 is not None and measure.prompt_tokens:
        those.append(Contender(CTRANSLATE2, lambda: run_ctranslate2(args)))
    return [ours, *those]


def run_rounds(
    who: dict[str, list[Contender]], rounds: int, say: Callable[[str], None]
) -> dict[str, dict[str, list[float]]]:
    """Run every contender of every measure once a round.

    Returns:
        Measure → contender → tokens per second, one number a round.
    """
    rates = {name: {its.name: [] for its in those} for name, those in who.items()}
    for turn in range(rounds):
        for name, those in who.items():
            first = turn % len(those)
            for its in (*those[first:], *those[:first]):
                rates[name][its.name].append(its.run())
        say(f"round {turn + 1} of {rounds}")
    return rates


def compare(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Set qinfer against the fastest of the others."""
    ratios = {
        name: [ours / theirs for ours, theirs in zip(rates[OURS], its, strict=True)]
        for name, its in rates.items()
        if name != OURS
    }
    against = max(ratios, key=lambda name: statistics.median(rates[name]))
    return {
        "tokens_per_s": rates,
        "ratios": ratios,
        "against": against,
        "ratio": statistics.median(ratios[against]),
    }


def print_table(title: str, compared: dict[str, Any]) -> None:
    """Medians, lowest and highest; behind llama.cpp's, the median of the ratios to it."""
    rates, ratios, against = (compared[key] for key in ("tokens_per_s", "ratios", "against"))
    width = max(map(len, rates))
    print(f"{title}\n{'':<{width}} {'tok/s':>8} {'lowest':>8} {'highest':>8} {'ratio':>6}")
    for name, its in rates.items():
        row = f"{name:<{width}} {statistics.median(its):8.1f} {min(its):8.1f} {max(its):8.1f}"
        print(row + (f" {statistics.median(ratios[name]):6.2f}" if name in ratios else ""))
    lowest, highest = min(ratios[against]), max(ratios[against])
    print(f"qinfer / {against}: {compared['ratio']:.2f} ({lowest:.2f}-{highest:.2f})\n")


def find_or_build() -> Path:
    """Path of llama-bench."""
    if find_tool(TOOL) is None:
        print(f"{TOOL} is not on PATH; building it takes about 15 minutes", file=sys.stderr)
        build()
    tool = find_tool(TOOL)
    if tool is None:
        raise SystemExit(f"the build made no {TOOL}")
    return tool


def positive(text: str) -> int:
    """A number from 1 on."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="a model directory")
    add("gguf", type=Path, nargs="*", metavar="GGUF", help="files of the same weights")
    add("--measure", default="decode,prefill,depth", help="which, separated by commas")
    add("--rounds", type=positive, default=5)
    add("--threads", type=positive, default=default_threads())
    add("--prompt-tokens", type=positive, default=512, help="of prefill")
    add("--new-tokens", type=positive, default=64, help="of decode")
    add("--depth", type=positive, default=4096, help="tokens before those of depth")
    add("--depth-new-tokens", type=positive, default=32, help="of depth")
    add("--ctranslate2", type=Path, metavar="DIRECTORY", help="the model as CTranslate2 takes it")
    add("--json", action="store_true", help="print one JSON object, with every number")
    add("--alone", action="store_true", help="run qinfer once, here, and print its tok/s")
    args = parser.parse_args(words)
    args.measure = args.measure.split(",")
    unknown = [name for name in args.measure if name not in measures(args)]
    if unknown:
        parser.error(f"--measure takes {', '.join(measures(args))}, not {', '.join(unknown)}")
    if args.alone and (args.gguf or len(args.measure) > 1):
        parser.error("--alone takes one --measure and no GGUF")
    if not args.alone and not args.gguf:
        parser.error("name a GGUF file; scripts/llamacpp.py convert writes one")
    if len({path.name for path in args.gguf}) < len(args.gguf):
        parser.error("GGUF files need different names, by which the results call them")
    missing = [str(path) for path in (args.model, *args.gguf) if not path.exists()]
    if missing:
        parser.error(f"{missing[0]} does not exist")
    return args


def main() -> None:
    """Measure and print."""
    args = parse_args()
    if args.alone:
        torch.set_num_threads(args.threads)
        if args.ctranslate2 is not None:
            print(time_ctranslate2(args.ctranslate2, args.prompt_tokens, args.threads))
            return
        try:
            print(time_qinfer(args.model, measures(args)[args.measure[0]]))
        except QInferError as error:
            raise SystemExit(f"Error: {error}") from None
        return
    tool = find_or_build()
    who = {name: contenders(args, name, tool) for name in args.measure}
    rates = run_rounds(who, args.rounds, lambda text: print(text, file=sys.stderr))
    compared = {name: compare(its) for name, its in rates.items()}
    if args.json:
        settings = {name: getattr(args, name) for name in ("rounds", "threads", *SIZES)}
        print(json.dumps({"model": str(args.model), **settings, "measures": compared}))
        return
    for name, its in compared.items():
        print_table(f"{name}: {measures(args)[name].title}", its)


if __name__ == "__main__":
    main()
