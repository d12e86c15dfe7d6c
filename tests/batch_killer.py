"""Run a batch of a real tiny model in forked children, and kill them at random moments.

usage: python -m tests.batch_killer MODEL IN OUT KILLS TEMPERATURE [--ordered]

Prints the times at which a child was killed. The model is opened once and nothing is computed
before a fork, so a child starts at once and has no threads to miss.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from qinfer.generation import LanguageModel
from tests.batch_fakes import run


def child(model: LanguageModel, source: Path, out: Path, temperature: float, ordered: bool) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        sampling = {"temperature": temperature, "seed": 3}
        options = {"resume": True, "max_tokens": 12, "sampling": sampling, "ordered": ordered}
        run(model, source, out, **options)
        code = 0
    finally:
        os._exit(code)


def finish(pid: int) -> None:
    assert os.waitpid(pid, 0)[1] == 0, "a run failed"


def main(model_path: str, source: str, out: str, kills: str, *how: str) -> None:
    model = LanguageModel(Path(model_path), device="cpu", max_sequences=8)
    temperature, ordered = float(how[0]), how[1:] == ("--ordered",)
    target = Path(out)
    undisturbed = target.with_name("undisturbed" + "".join(target.suffixes))
    start = time.monotonic()
    finish(child(model, Path(source), undisturbed, temperature, ordered))
    whole_s = time.monotonic() - start
    moments = random.Random(7)
    killed: list[float] = []
    while len(killed) < int(kills):
        pid = child(model, Path(source), target, temperature, ordered)
        delay_s = moments.uniform(0, 1.6 * whole_s / int(kills))
        time.sleep(delay_s)
        ended, _ = os.waitpid(pid, os.WNOHANG)
        if ended:  # it got to the end: begin again, so that every kill hits a run that is going on
            target.unlink()
            continue
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        killed.append(round(delay_s, 3))
    finish(child(model, Path(source), target, temperature, ordered))
    sys.stdout.write(f"{len(killed)} kills after {killed} of {whole_s:.3f} s\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
