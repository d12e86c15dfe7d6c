"""A converted directory opens in transformers and generates the same tokens there."""

import json
import warnings

import pytest
import torch
import transformers

from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.generation import LanguageModel
from qinfer.models.decoder import Decoder
from qinfer.ops.paged import Batch
from qinfer.ops.reference import ReferenceOps
from qinfer.quant.kv import KVFormat
from qinfer.sampling import SamplingParams
from qinfer_converters.convert import convert
from qinfer_converters.huggingface import HuggingFaceSource
from qinfer_converters.plan import make_plan

GREEDY = SamplingParams(temperature=0)
SIXTEEN_BIT_ACTIVATIONS = 0.01
"""Largest error of a logit by the CPU's kernels for 4- and 8-bit weights, which multiply them with
activations in 16 bits (measured: 0.0010 to 0.0026)."""
CASES = [
    ("int4", 32, "llama"),
    ("int4", None, "qwen2"),
    ("int4", None, "mistral"),
    ("int8", None, "llama-untied-bias"),
    ("int8", 32, "llama"),
    ("nf4", None, "llama"),
    ("nf4", None, "qwen3"),
    ("nf4", None, "gpt2"),
    ("bf16", None, "llama"),
    ("bf16", None, "gpt2"),
]


def load_in_transformers(directory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries that load it
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, device_map="cpu"
        )
    for module in model.modules():  # bitsandbytes would compute in bf16, whatever was asked for
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = torch.float32
            module.compute_type_is_set = True
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return model.eval()


@torch.inference_mode()
def logits_of(decoder, cache, ids):
    batch = Batch.of([(ids, 0)], [[[0]]] * len(cache.blocks), [0], torch.device("cpu"))
    return decoder.logits(decoder.forward(batch, cache.layers))


def generate(model, ids, count):
    completion = model.complete(ids, GREEDY, max_tokens=count)
    list(completion)
    return completion.token_ids


@pytest.mark.parametrize(("scheme", "group_size", "name"), CASES)
def test_transformers_generates_the_same_tokens(scheme, group_size, name, tiny_model, tmp_path):
    source = HuggingFaceSource(tiny_model(name))
    out = tmp_path / "out"
    convert(source, make_plan(source, scheme, group_size), out)
    config = json.loads((out / "config.json").read_text())
    config["eos_token_id"] = None  # both run to the end
    (out / "config.json").write_text(json.dumps(config))
    ids = [10, 20, 30, 40, 50, 60, 70]
    reference = load_in_transformers(out)
    tensor = torch.tensor([ids])
    with torch.inference_mode():
        expected_logits = reference(tensor).logits[0]
        expected = reference.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            max_new_tokens=48,
            do_sample=False,
            eos_token_id=None,
        )[0, len(ids) :].tolist()
    model = LanguageModel(out, device="cpu", kv_format=KVFormat(32, 32))
    model.engine.stop_ids = frozenset()
    for part in filter(None, (model.engine, model.engine.decoding)):
        part.vocab_size = model.config.vocab_size  # transformers does not mask padding
    exact = Decoder(Checkpoint(out), model.config, ReferenceOps(torch.device("cpu"), torch.float32))
    error = (logits_of(exact, model.engine.cache, ids) - expected_logits).abs().max()
    assert error < 1e-4
    error = (logits_of(model.engine.decoder, model.engine.cache, ids) - expected_logits).abs().max()
    assert error < (SIXTEEN_BIT_ACTIVATIONS if scheme in ("int4", "int8") else 1e-4)
    assert generate(model, ids, 48) == expected
