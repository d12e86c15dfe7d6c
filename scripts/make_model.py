"""Write a synthetic Llama checkpoint: a real shape, seeded random weights, a byte tokenizer.

For benchmarks and memory measurements where only the shape matters, and no download is possible:

    python scripts/make_model.py /tmp/tiny-1.1b
    python scripts/make_model.py /tmp/llama-8b --preset 8b --layers 4

Every shard's header is written first, then its tensors follow a chunk at a time, so that no more
than a few megabytes are held. The same options give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

PRESETS = {
    "1.1b": {},  # the options' defaults: TinyLlama's shape
    "8b": {  # Llama 3 8B's shape
        "hidden_size": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
}
DTYPES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}  # name, bytes
BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 256, 257  # after the 256 bytes
MIN_VOCAB_SIZE = 300
CHUNK_ELEMENTS = 1 << 16  # stays in the processor's cache


class TensorSpec(NamedTuple):
    """One tensor to write; `stream` selects its random numbers."""

    name: str
    shape: tuple[int, ...]
    stream: int


def parse_args() -> argparse.Namespace:
    """Parse and check the command line; a preset supplies other defaults."""
    parser = argparse.ArgumentParser(
        description="Write a synthetic Llama checkpoint with seeded random weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory, new or empty")
    parser.add_argument("--preset", choices=PRESETS, default="1.1b", help="shape to start from")
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, help="hidden size / heads if not given")
    parser.add_argument("--intermediate-size", type=int, default=5632)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--max-position-embeddings", type=int, default=2048)
    parser.add_argument("--rope-theta", type=float, default=10000.0)
    parser.add_argument("--tie", action="store_true", help="output head = embedding")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-shard-mib", type=int, default=1024)
    parser.set_defaults(**PRESETS[parser.parse_known_args()[0].preset])
    args = parser.parse_args()
    check_args(parser, args)
    return args


def check_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a usage error if the shape is impossible or OUT holds files; set `head_dim`."""
    for name, value in vars(args).items():
        if isinstance(value, int) and value < 1 and name not in ("seed", "tie"):
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.seed < 0:
        parser.error(f"--seed must not be negative, got {args.seed}")
    if args.vocab_size < MIN_VOCAB_SIZE:
        parser.error(f"--vocab-size must be at least {MIN_VOCAB_SIZE}, got {args.vocab_size}")
    if args.heads % args.kv_heads:
        parser.error(f"--heads {args.heads} is not a multiple of --kv-heads {args.kv_heads}")
    if args.head_dim is None:
        if args.hidden_size % args.heads:
            parser.error(f"--hidden-size {args.hidden_size} / {args.heads} heads: give --head-dim")
        args.head_dim = args.hidden_size // args.heads
    if args.head_dim % 2:
        parser.error(f"--head-dim must be even for rotary embeddings, got {args.head_dim}")
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        parser.error(f"{args.out} exists and is not an empty directory")


def tensor_specs(args: argparse.Namespace) -> list[TensorSpec]:
    """List the checkpoint's tensors in order, with their Hugging Face names."""
    hidden, inner = args.hidden_size, args.intermediate_size
    queries, keys = args.heads * args.head_dim, args.kv_heads * args.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (args.vocab_size, hidden)}
    for i in range(args.layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm"] = (hidden,)
    if not args.tie:
        shapes["lm_head"] = (args.vocab_size, hidden)
    return [TensorSpec(f"{name}.weight", s, i) for i, (name, s) in enumerate(shapes.items())]


def chunks(spec: TensorSpec, dtype: str, seed: int) -> Iterator[bytes]:
    """Yield a tensor's bytes: ones for a norm, else normal with deviation 1/sqrt(inputs).

    With that deviation every projection keeps the size of what it is given, so that activations
    stay near 1 at any width and depth.
    """
    random = np.random.Generator(np.random.SFC64([seed, spec.stream]))
    elements = math.prod(spec.shape)
    buffer = np.ones(CHUNK_ELEMENTS, dtype=np.float32)
    for start in range(0, elements, CHUNK_ELEMENTS):
        values = buffer[: elements - start]
        if len(spec.shape) > 1:
            random.standard_normal(out=values, dtype=np.float32)
            values *= spec.shape[-1] ** -0.5
        yield encode(values, dtype)


def encode(values: np.ndarray, dtype: str) -> bytes:
    """Round float32 to `dtype`, to nearest even; numpy has no bfloat16, so that is done by hand."""
    if dtype != "bfloat16":
        return values.astype(dtype).tobytes()
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    return rounded.view("<u2")[1::2].tobytes()  # the upper halves


def nbytes(spec: TensorSpec, dtype: str) -> int:
    """Return a tensor's size in bytes."""
    return math.prod(spec.shape) * DTYPES[dtype][1]


def write_header(file: BinaryIO, specs: list[TensorSpec], dtype: str) -> None:
    """Write a safetensors header: its length as 8 bytes, little-endian, then padded JSON."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + nbytes(spec, dtype)
        header[spec.name] = {
            "dtype": DTYPES[dtype][0],
            "shape": spec.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def split_shards(specs: list[TensorSpec], dtype: str, max_bytes: int) -> list[list[TensorSpec]]:
    """Cut the list so that no part exceeds `max_bytes`, unless a single tensor does."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + nbytes(spec, dtype) > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += nbytes(spec, dtype)
    return shards


def write_weights(args: argparse.Namespace) -> int:
    """Write the shards, and their index if there are several; return the tensors' bytes."""
    dtype = args.dtype
    specs = tensor_specs(args)
    shards = split_shards(specs, dtype, args.max_shard_mib << 20)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        with (args.out / name).open("wb") as file:
            write_header(file, shard, dtype)
            for spec in shard:
                for chunk in chunks(spec, dtype, args.seed):
                    file.write(chunk)
    total_bytes = sum(nbytes(spec, dtype) for spec in specs)
    if len(shards) > 1:
        weight_map = {s.name: n for n, shard in zip(names, shards, strict=True) for s in shard}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(args.out / "model.safetensors.index.json", index)
    return total_bytes


def write_json(path: Path, content: dict[str, object]) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_configs(args: argparse.Namespace) -> None:
    """Write config.json and generation_config.json."""
    ids: dict[str, object] = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "intermediate_size": args.intermediate_size,
        "vocab_size": args.vocab_size,
        "max_position_embeddings": args.max_position_embeddings,
        "rope_theta": args.rope_theta,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": args.tie,
        "torch_dtype": args.dtype,
    }
    write_json(args.out / "config.json", config | ids)
    write_json(args.out / "generation_config.json", ids)


def byte_alphabet() -> list[str]:
    """Return the character by which byte-level BPE writes each byte, in the order of the bytes."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]


def write_tokenizer(args: argparse.Namespace) -> None:
    """Write a byte-level BPE without merges: ids 0-255 are the bytes, then `<s>` and `</s>`."""
    vocab = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (BOS, EOS)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    tokenizer.save(str(args.out / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": args.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    write_json(args.out / "tokenizer_config.json", config)


def main() -> None:
    """Write the checkpoint and say what it is."""
    args = parse_args()
    start = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    write_configs(args)
    write_tokenizer(args)
    total_bytes = write_weights(args)
    parameters = total_bytes // DTYPES[args.dtype][1]
    seconds = time.perf_counter() - start
    print(
        f"{args.out}: {parameters / 1e6:.1f}M parameters, {total_bytes / 1e9:.3f} GB {args.dtype},"
        f" written in {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
