"""llama.cpp to compare with: its tools, built once, and models of the same weights for it.

    python scripts/llamacpp.py build
    python scripts/llamacpp.py convert MODEL OUT.gguf --type q4_0

`build` compiles the sources that the sdist of llama-cpp-python carries, which takes about 15
minutes on two cores; tools on PATH are used instead where there are any. `convert` writes the
tensors of a 16-bit Llama directory without its tokenizer, which benchmarks have no need of.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import gguf
import numpy as np

from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.config import ModelConfig, read_json

SDIST = "llama-cpp-python==0.3.36"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "qinfer" / "llama.cpp"
TOOLS = ("llama-bench", "llama-batched-bench")
TYPES = {
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
_BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def find_tool(name: str) -> Path | None:
    """One of `TOOLS` on PATH or built before."""
    on_path, built = shutil.which(name), CACHE / "bin" / name
    return Path(on_path) if on_path else built if built.exists() else None


def build() -> None:
    """Download, compile and keep `TOOLS` outside of the repository."""
    work = CACHE / "build"
    work.mkdir(parents=True, exist_ok=True)
    download = ["download", "--no-deps", "--no-binary", ":all:", "-d", str(work), SDIST]
    subprocess.run([sys.executable, "-m", "pip", *download], check=True)
    with tarfile.open(next(work.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(work, filter="data")
    source = next(work.glob("llama_cpp_python-*/vendor/llama.cpp"))
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF"]
    options += ["-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DGGML_NATIVE=ON"]
    made = work / "made"
    subprocess.run(["cmake", "-S", str(source), "-B", str(made), *options], check=True)
    jobs = ["-j", str(os.cpu_count())]
    subprocess.run(["cmake", "--build", str(made), "--target", *TOOLS, *jobs], check=True)
    (CACHE / "bin").mkdir(exist_ok=True)
    for name in TOOLS:
        shutil.copy2(made / "bin" / name, CACHE / "bin" / name)
    shutil.rmtree(work)


def convert(model: Path, out: Path, kind: str) -> None:
    """Write a Llama model of 16-bit weights as GGUF.

    Args:
        model: Its Hugging Face directory.
        out: The file.
        kind: A key of `TYPES`; embedding and head are Q8_0 in a 4-bit file, as qinfer's head is.
    """
    config = ModelConfig.from_dict(read_json(model / "config.json"))
    if config.architecture != "LlamaForCausalLM":
        raise SystemExit(f"{model} is a {config.architecture}, not a LlamaForCausalLM")
    checkpoint = Checkpoint(model)
    writer = gguf.GGUFWriter(out, "llama")
    _add_shape(writer, config)
    for name in checkpoint.tensors:
        _add_tensor(writer, config, name, checkpoint.tensor(name).float().numpy(), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta if config.rope else 10000.0)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _add_tensor(
    writer: gguf.GGUFWriter, config: ModelConfig, name: str, data: np.ndarray, kind: str
) -> None:
    data = _permuted(data, name, config)
    quantized = TYPES[kind]
    if name in ("model.embed_tokens.weight", "lm_head.weight") and kind == "q4_0":
        quantized = TYPES["q8_0"]
    if data.ndim == 1:
        writer.add_tensor(_gguf_name(name), data)
    elif kind == "f16":
        writer.add_tensor(_gguf_name(name), data.astype(np.float16))
    else:
        packed = gguf.quants.quantize(data, quantized)
        writer.add_tensor(_gguf_name(name), packed, raw_dtype=quantized)


def _permuted(data: np.ndarray, name: str, config: ModelConfig) -> np.ndarray:
    """Rows of q and k in llama.cpp's order: the two halves of a head interleaved."""
    heads = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads,
    }.get(name.removesuffix(".weight").rsplit(".", 1)[-1])
    if heads is None:
        return data
    rows, columns = data.shape
    halves = data.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def _gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module = name.removesuffix(".weight")
    if module in fixed:
        return f"{fixed[module]}.weight"
    layer, rest = module.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_BLOCK_NAMES[rest]}.weight"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="compile the tools")
    converter = commands.add_parser("convert", help="write a GGUF file")
    converter.add_argument("model", type=Path, metavar="MODEL", help="16-bit Llama directory")
    converter.add_argument("out", type=Path, metavar="OUT")
    converter.add_argument("--type", choices=TYPES, default="q4_0")
    args = parser.parse_args()
    if args.command == "build":
        build()
    else:
        convert(args.model, args.out, args.type)


if __name__ == "__main__":
    main()
