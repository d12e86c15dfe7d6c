"""Throughput of a batch by the number of sequences that run at once, beside llama.cpp's.

    python scripts/bench_batch.py MODEL --sequences 1,8,16,32
    python scripts/bench_batch.py MODEL --equal --gguf MODEL.gguf --rounds 5

Prompts are random token ids of mixed lengths, or with `--equal` as many of 128 tokens as sequences,
as llama-batched-bench runs them. Settings take turns within a round; medians over the rounds are
printed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from llamacpp import find_tool

from qinfer.generation import LanguageModel
from qinfer.quant.kv import KVFormat
from qinfer.sampling import SamplingParams

EQUAL_PROMPT_TOKENS, EQUAL_NEW_TOKENS = 128, 48
_PIPES = re.compile(r"^\|(.*)\|$")


@dataclass(frozen=True, slots=True)
class Load:
    """What one run has to do: the lengths of its prompts and of their answers."""

    lengths: tuple[tuple[int, int], ...]

    @classmethod
    def mixed(cls, prompts: int) -> Load:
        """Prompts of 16 to 256 tokens, answers of 16 to 64."""
        draw = random.Random(0)
        return cls(tuple((draw.randint(16, 256), draw.randint(16, 64)) for _ in range(prompts)))

    @property
    def tokens(self) -> int:
        """Of prompts and answers."""
        return sum(prompt + new for prompt, new in self.lengths)


def run(model: LanguageModel, load: Load, seed: int) -> float:
    """Seconds that a load takes; token ids are new each time, so that no prefix is reused."""
    draw = random.Random(seed)
    engine = model.engine
    greedy, known = SamplingParams(temperature=0), model.tokenizer.vocab_size
    engine.stop_ids = frozenset()
    start = time.perf_counter()
    for prompt_tokens, new_tokens in load.lengths:
        engine.add([draw.randrange(known) for _ in range(prompt_tokens)], greedy, new_tokens)
    while engine.stats.running or engine.stats.waiting:
        engine.step()
    return time.perf_counter() - start


def run_llama(tool: Path, gguf: Path, sequences: int, threads: int, bits: int) -> float:
    """Tokens per second, prompts and answers together, of llama-batched-bench."""
    kind = {16: "f16", 8: "q8_0", 4: "q4_0"}[bits]
    shape = ["-npp", EQUAL_PROMPT_TOKENS, "-ntg", EQUAL_NEW_TOKENS, "-npl", sequences]
    cache = ["-c", sequences * 256, "-ctk", kind, "-ctv", kind]
    words = [tool, "-m", gguf, "-t", threads, *shape, *cache]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True)
    rows = [m[1].split("|") for line in done.stdout.splitlines() if (m := _PIPES.match(line))]
    return float(rows[-1][-1])


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="a model directory")
    parser.add_argument("--sequences", default="1,8,16,32", help="numbers to compare")
    parser.add_argument("--prompts", type=int, default=64, help="of the mixed load")
    parser.add_argument("--equal", action="store_true", help="llama-batched-bench's load instead")
    parser.add_argument("--gguf", type=Path, help="run llama-batched-bench on this file in turn")
    parser.add_argument("--kv-bits", type=int, choices=(16, 8, 4), default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.gguf is not None and not args.equal:
        parser.error("--gguf goes with --equal: llama-batched-bench has prompts of one length")
    return args


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second of each setting, one number a round."""
    torch.set_num_threads(args.threads)
    kv_format = KVFormat(args.kv_bits, args.kv_bits)
    numbers = [int(n) for n in args.sequences.split(",")]
    models = {n: LanguageModel(args.model, max_sequences=n, kv_format=kv_format) for n in numbers}
    tool = find_tool("llama-batched-bench") if args.gguf is not None else None
    found: dict[str, list[float]] = {}
    for turn in range(args.rounds):
        for n in numbers:
            one = ((EQUAL_PROMPT_TOKENS, EQUAL_NEW_TOKENS),)
            load = Load(one * n) if args.equal else Load.mixed(args.prompts)
            seconds = run(models[n], load, seed=turn)
            found.setdefault(f"qinfer {n}", []).append(load.tokens / seconds)
            if tool is not None:
                rate = run_llama(tool, args.gguf, n, args.threads, args.kv_bits)
                found.setdefault(f"llama.cpp {n}", []).append(rate)
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
    if args.gguf is not None and tool is None:
        print("llama-batched-bench was not found; see scripts/llamacpp.py", file=sys.stderr)
    return found


def main() -> None:
    """Measure and print."""
    args = parse_args()
    found = measure(args)
    if args.json:
        print(json.dumps(found))
        return
    first = next(iter(found.values()))
    print(f"{'sequences':<14} {'tok/s':>8} {'lowest':>8} {'highest':>8} {'ratio':>6}")
    for name, rates in found.items():
        ratio = statistics.median(a / b for a, b in zip(rates, first, strict=True))
        middle = statistics.median(rates)
        print(f"{name:<14} {middle:8.1f} {min(rates):8.1f} {max(rates):8.1f} {ratio:6.2f}")


if __name__ == "__main__":
    main()
