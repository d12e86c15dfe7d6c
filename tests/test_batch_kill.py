"""Batches of a real model that are killed or interrupted, and end as if they had not been."""

import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.batch_fakes import records
from tests.test_generation import write_tokenizer

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    "OMP_NUM_THREADS": "1",
}
KILLS = 20


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("kill") / "model"
    shutil.copytree(tiny_model("llama"), path)
    write_tokenizer(path)
    return path


@pytest.mark.parametrize(
    ("name", "temperature", "ordered"),
    [
        ("out.jsonl", 0, False),
        ("out.jsonl", 1.2, False),
        ("out.jsonl.gz", 0, False),
        ("out.jsonl.gz", 1.2, False),
        ("out.jsonl", 1.2, True),
        ("out.jsonl.gz", 0, True),
    ],
)
def test_a_batch_killed_twenty_times_ends_as_an_undisturbed_one(
    model, tmp_path, name, temperature, ordered
):
    source, out = tmp_path / "in.jsonl", tmp_path / name
    requests = [{"prompt": f"prompt {i}", "n": 1 + i % 2} for i in range(40)]
    source.write_text("".join(json.dumps(request) + "\n" for request in requests))
    arguments = [model, source, out, str(KILLS), str(temperature), *["--ordered"][: int(ordered)]]
    done = subprocess.run(
        [sys.executable, "-m", "tests.batch_killer", *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{KILLS} kills")
    results, undisturbed = (
        gzip.decompress(path.read_bytes()) if name.endswith("gz") else path.read_bytes()
        for path in (out, tmp_path / f"undisturbed{name[3:]}")
    )
    assert len(records(results)) == 60
    if ordered:
        assert results == undisturbed
    else:
        assert sorted(results.splitlines()) == sorted(undisturbed.splitlines())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_batch_prints_the_command_that_completes_it(model, tmp_path, number, code):
    source, out = tmp_path / "my prompts.txt", tmp_path / "out.jsonl"
    source.write_text("".join(f"prompt {i}\n" for i in range(80)))
    qinfer = [sys.executable, "-m", "qinfer_cli"]
    arguments = ["generate", model, "-i", source, "-o", out, "-n", "20", "--seed", "1", "--force"]
    process = subprocess.Popen(
        [*qinfer, *map(str, arguments), "--stop", "it's", "--stop=-"],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while (not out.exists() or out.stat().st_size == 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == code, stderr
    done = len(records(out.read_bytes()))
    assert 0 < done < 80
    match = re.fullmatch(
        rf"Interrupted; {done} records? written\.\nContinue: (.* generate .*)\n", stderr
    )
    assert match, stderr
    words = shlex.split(match[1])
    assert words[-1] == "--resume"
    assert "--force" not in words
    subprocess.run(
        [*qinfer, *words[words.index("generate") :]], check=True, env=ENVIRONMENT, timeout=120
    )
    assert sorted(r["id"] for r in records(out.read_bytes())) == list(range(1, 81))
