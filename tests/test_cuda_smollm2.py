"""A real chat model on a GPU: its greedy text is what the reference operations write."""

import subprocess
import sys

import pytest
import torch
from fetch_demo_model import path

from qinfer.checkpoint.tokenizer import Tokenizer
from qinfer.ops.reference import ReferenceOps
from qinfer.sampling import SamplingParams
from tests.engines import engine_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(
        not path().exists(), reason="the model is not here; scripts/fetch_demo_model.py gets it"
    ),
]
GREEDY = SamplingParams(temperature=0)
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived a fisherman who",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
]
NEW_TOKENS = 48


@pytest.fixture(scope="module", params=["int4", "int8", "nf4", "bf16"])
def directory(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("smollm2") / request.param
    command = [sys.executable, "-m", "qinfer_cli", "convert", path(), out]
    subprocess.run([*command, "--scheme", request.param], check=True, capture_output=True)
    return out


def cuda_ops(dtype):
    from qinfer.ops.cuda.ops import CUDAOps

    return CUDAOps(torch.device("cuda", 0), dtype, half=torch.float16)


def texts(directory, ops, bits, **options):
    tokenizer = Tokenizer.load(directory)
    engine = engine_of(directory, ops, bits=bits, memory_bytes=None, **options)
    running = [engine.add(tokenizer.encode(text), GREEDY, NEW_TOKENS) for text in TEXTS]
    while engine.stats.running or engine.stats.waiting:
        engine.step()
    return [sequence.token_ids for sequence in running]


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_greedy_text_is_the_reference_operations(directory, bits):
    reference = ReferenceOps(torch.device("cuda", 0), torch.float32, half=torch.float16)
    expected = texts(directory, reference, bits)
    assert texts(directory, cuda_ops(torch.float32), bits) == expected


def test_a_graph_writes_what_single_launches_write(directory):
    ops = cuda_ops(torch.float16)
    assert texts(directory, ops, 8, graphs=True) == texts(directory, ops, 8, graphs=False)
