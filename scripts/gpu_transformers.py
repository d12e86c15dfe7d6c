"""Speed of transformers with bitsandbytes' nf4 on a shape of `gpu_models.py`: what to compare with.

Nothing is loaded: weights are drawn and quantized layer by layer where the model runs, so this
takes seconds and no more memory than the quantized model and one layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_models import options
from torch import nn

WARM_UP_TOKENS = 8


def measure(
    shape: str, *, device: torch.device, prompt_tokens: int, new_tokens: int, repetitions: int
) -> dict[str, Any]:
    """Decode greedily at batch 1 with `generate`, as a user would.

    What `generate` takes for one token, which is prefill and its own overhead, is subtracted.

    Returns:
        `tokens_per_s` with `median`, `low` and `high`; versions; `peak_memory_bytes` on a GPU.
    """
    import bitsandbytes
    import transformers

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = build(shape, device)
    ids = torch.randint(0, 256, (1, prompt_tokens), device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def generate(count: int) -> object:
        return model.generate(
            **inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )

    with torch.inference_mode():
        generate(WARM_UP_TOKENS)
        rates = []
        for _ in range(repetitions):
            first = _seconds(lambda: generate(1), device)
            whole = _seconds(lambda: generate(new_tokens), device)
            rates.append((new_tokens - 1) / (whole - first))
    return {
        "tokens_per_s": {
            "median": statistics.median(rates),
            "low": min(rates),
            "high": max(rates),
        },
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "versions": {
            "transformers": transformers.__version__,
            "bitsandbytes": bitsandbytes.__version__,
        },
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def build(shape: str, device: torch.device) -> Any:
    """The model, with all linear layers but the head in nf4."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    its = options(Path(), shape)
    config = LlamaConfig(
        hidden_size=its.hidden_size,
        num_hidden_layers=its.layers,
        num_attention_heads=its.heads,
        num_key_value_heads=its.kv_heads,
        head_dim=its.head_dim,
        intermediate_size=its.intermediate_size,
        vocab_size=its.vocab_size,
        max_position_embeddings=its.max_position_embeddings,
        rope_theta=its.rope_theta,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    linears = [
        (module, name)
        for module in model.model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.Linear)
    ]
    for module, name in linears:
        setattr(module, name, nf4_linear(getattr(module, name), device))
    _materialize(model, device)
    with torch.device(device):
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()


def nf4_linear(linear: nn.Linear, device: torch.device) -> nn.Module:
    """A random layer of the same shape in nf4."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    n, k = linear.weight.shape
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=device) * k**-0.5
    quantized = Linear4bit(
        *(k, n), bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta"
    )
    quantized.weight = Params4bit(
        weight, requires_grad=False, quant_type="nf4", compress_statistics=False, module=quantized
    ).to(device)
    return quantized


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Replace parameters that have no data yet: ones for norms, else random weights."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            data = torch.ones(parameter.shape, dtype=torch.bfloat16, device=device)
            if data.ndim > 1:
                data.normal_(std=data.shape[-1] ** -0.5)
            setattr(module, name, nn.Parameter(data, requires_grad=False))
