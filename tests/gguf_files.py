"""GGUF files for tests, written with the gguf package, which shares no code with the reader."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH, GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Type = GGMLQuantizationType
CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? 12345 + 678 = 13023!",
    "def f(x):\n    return x ** 2\n\n\tif y:\n  pass",
    "Ünïcödé, 中文测试 你好世界. 日本語 한국어 🎉🎊 аяЖ кириллица",
    "It's  a   test with    spaces, WE'LL see; they're 3½ miles/hour away.",
]
EXTRA = [
    "",
    " ",
    "a  b",
    "\n\n\n",
    "x\ty",
    "e\u0301 combining",
    "1234567890",
    "IT'S",
    "👩\u200d👧",
    "\x00",
]


def write(
    path: Path,
    keys: Mapping[str, Any],
    tensors: Iterable[tuple[str, NDArray[Any], Type]] = (),
) -> Path:
    """Write a file; fp32 arrays are quantized, uint8 arrays are taken as stored data."""
    writer = GGUFWriter(path, str(keys["general.architecture"]))
    adders = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in keys.items():
        if key != "general.architecture" and value is not None:  # the writer adds that itself
            adders[type(value)](key, value)
    for name, values, kind in tensors:
        if kind in (Type.F32, Type.F16) or values.dtype == np.uint8:
            data = values.astype(np.float16) if kind == Type.F16 else values
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            data = np.ascontiguousarray(quantize(values, kind)).view(np.uint8)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_keys(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    """The keys of a small model with one block; `changes` go under the architecture's prefix."""
    keys: dict[str, Any] = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 256,
        "feed_forward_length": 512,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    return {
        "general.architecture": arch,
        **{f"{arch}.{key}": value for key, value in keys.items()},
        **tiny_vocabulary(),
    }


def tiny_vocabulary() -> dict[str, Any]:
    """A byte-level vocabulary with one merge, as small as it can be."""
    tokens = ["<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * 257,
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def llama_shapes() -> dict[str, tuple[int, ...]]:
    """GGUF names and shapes that go with `llama_keys`."""
    return {
        "token_embd.weight": (259, 256),
        "output_norm.weight": (256,),
        "blk.0.attn_norm.weight": (256,),
        "blk.0.attn_q.weight": (256, 256),
        "blk.0.attn_k.weight": (128, 256),
        "blk.0.attn_v.weight": (128, 256),
        "blk.0.attn_output.weight": (256, 256),
        "blk.0.ffn_norm.weight": (256,),
        "blk.0.ffn_gate.weight": (512, 256),
        "blk.0.ffn_up.weight": (512, 256),
        "blk.0.ffn_down.weight": (256, 512),
    }


def llama_tensors(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random fp32 values for `llama_shapes`."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in llama_shapes().items()}


def as_f32(tensors: Mapping[str, NDArray[Any]]) -> list[tuple[str, NDArray[Any], Type]]:
    """Tensors to be stored in fp32."""
    return [(name, values, Type.F32) for name, values in tensors.items()]


def pair_up_rotary(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """What llama.cpp's converter does to the rows of query and key projections."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def from_state_dict(
    arch: MODEL_ARCH, state: Mapping[str, torch.Tensor], blocks: int, heads: tuple[int, int]
) -> dict[str, NDArray[Any]]:
    """A transformers model's weights under GGUF names, as llama.cpp's converter stores them."""
    names = get_tensor_name_map(arch, blocks)
    tensors = {}
    for name, tensor in state.items():
        values = tensor.numpy()
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise KeyError(name)
        if arch == MODEL_ARCH.LLAMA and ".attn_q." in found:
            values = pair_up_rotary(values, heads[0])
        if arch == MODEL_ARCH.LLAMA and ".attn_k." in found:
            values = pair_up_rotary(values, heads[1])
        if arch == MODEL_ARCH.GPT2 and ".c_" in name and values.ndim == 2:
            values = values.T
        tensors[found] = np.ascontiguousarray(values)
    return tensors


def train_byte_level(pre: pre_tokenizers.PreTokenizer, **options: Any) -> Tokenizer:
    """A small byte-level BPE tokenizer of the tokenizers library, trained on `CORPUS`."""
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def byte_level_keys(tokenizer: Tokenizer, pre: str | None) -> dict[str, Any]:
    """The GGUF keys of a tokenizer made by `train_byte_level`."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
