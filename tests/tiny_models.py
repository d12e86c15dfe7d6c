"""Tiny random models of every architecture, written by transformers, with a tiny tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

VOCAB_SIZE = 320
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ROTARY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
# name → (transformers' prefix, configuration)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_ROTARY, "tie_word_embeddings": True}),
    "llama-untied-bias": ("Llama", {**_ROTARY, "attention_bias": True, "mlp_bias": True}),
    "llama-mqa-llama3": (
        "Llama",
        {**_ROTARY, "num_key_value_heads": 1, "rope_parameters": _LLAMA3_ROPE},
    ),
    "llama-linear-rope": (
        "Llama",
        {
            **_ROTARY,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        },
    ),
    "mistral": ("Mistral", {**_ROTARY, "head_dim": 24, "sliding_window": 16}),
    "mistral-no-window": ("Mistral", {**_ROTARY, "sliding_window": None}),
    "qwen2": ("Qwen2", {**_ROTARY, "tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {**_ROTARY, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen2-yarn": ("Qwen2", {**_ROTARY, "rope_parameters": _YARN_ROPE}),
    "qwen3": ("Qwen3", {**_ROTARY, "head_dim": 32, "hidden_act": "silu"}),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": 258,
            "eos_token_id": 258,
            "initializer_range": 0.2,
        },
    ),
}


def write_tokenizer(directory: Path, *, chat: bool = False, bos: bool = False) -> None:
    """A byte-level BPE of the 256 bytes, a few merges and three special tokens (256 to 258)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    specials = ["<s>", "<|im_start|>", "<|im_end|>"]
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("i", "n"), ("Ġ", "the")]
    vocab |= {token: 256 + i for i, token in enumerate(specials)}
    vocab |= {a + b: 259 + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [
        {
            "id": 256 + i,
            "content": token,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, token in enumerate(specials)
    ]
    tokenizer = Tokenizer.from_str(json.dumps(data))
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "tokenizer_class": "TokenizersBackend"}
    if not bos:
        del config["bos_token"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if chat:
        (directory / "chat_template.jinja").write_text(CHATML)


def build(directory: Path, name: str, *, dtype: str = "float32", **save: Any) -> Path:
    """Write a random model of a shape from `SHAPES` with its tokenizer."""
    import transformers

    family, fields = SHAPES[name]
    config_class = getattr(transformers, f"{family}Config")
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{head}")(config_class(**fields))
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide mistakes
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(getattr(torch, dtype)).save_pretrained(directory, **save)
    (directory / "generation_config.json").unlink(missing_ok=True)
    write_tokenizer(directory)
    return directory
