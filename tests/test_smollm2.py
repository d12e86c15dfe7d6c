"""End to end on a real chat model: GGUF file → converted directory → text, against transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fetch_demo_model import path

from qinfer.generation import LanguageModel
from qinfer.sampling import SamplingParams
from tests.test_formats import load_in_transformers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not path().exists(), reason="the model is not here; scripts/fetch_demo_model.py gets it"
    ),
]
GREEDY = SamplingParams(temperature=0)
PROMPTS = [
    "What is the capital of France?",
    "List three prime numbers larger than 12345. 🐍",
]


def qinfer(*arguments):
    script = Path(sys.executable).with_name("qinfer")
    return subprocess.run([script, *arguments], capture_output=True, text=True, check=True)


@pytest.fixture(scope="module", params=["int4", "nf4"])
def converted(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("smollm2") / request.param
    qinfer("convert", path(), out, "--scheme", request.param)
    return out


def test_greedy_tokens_equal_transformers(converted):
    """With the 16-bit cache that is the default, alone and side by side."""
    model = LanguageModel(converted, device="cpu")
    expected = []
    reference = load_in_transformers(converted)
    for prompt in PROMPTS:
        ids = model.prompt_ids(prompt)
        tensor = torch.tensor([ids])
        tokens = reference.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=sorted(model.engine.stop_ids),
        )[0, len(ids) :].tolist()
        expected.append(tokens)
        completion = model.complete(ids, GREEDY, max_tokens=32)
        list(completion)
        assert completion.token_ids == tokens
    together = [
        model.complete(model.prompt_ids(prompt), GREEDY, max_tokens=32) for prompt in PROMPTS
    ]
    list(together[0]), list(together[1])
    assert [completion.token_ids for completion in together] == expected


def test_answers_a_question(converted):
    run = qinfer("generate", converted, "--temperature", "0", "--json", PROMPTS[0])
    result = json.loads(run.stdout)
    assert "Paris" in result["text"]
    assert result["finish_reason"] == "stop"
    assert result["prompt_tokens"] == 37
