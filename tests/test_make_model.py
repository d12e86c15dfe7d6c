"""The synthetic checkpoint loads in transformers as declared, and is a function of its options."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(__file__).parents[1] / "scripts" / "make_model.py"
TINY = {
    "hidden-size": 64,
    "layers": 2,
    "heads": 4,
    "kv-heads": 2,
    "intermediate-size": 96,
    "vocab-size": 320,
    "max-position-embeddings": 128,
}


def run(out: Path, *flags: str, **options: object) -> subprocess.CompletedProcess[str]:
    given = TINY | {name.replace("_", "-"): value for name, value in options.items()}
    words = [f"--{name}={value}" for name, value in given.items()]
    return subprocess.run(
        [sys.executable, SCRIPT, out, *words, *flags], capture_output=True, text=True, check=False
    )


def make(out: Path, *flags: str, **options: object) -> Path:
    done = run(out, *flags, **options)
    assert done.returncode == 0, done.stderr
    return out


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def load(directory: Path) -> torch.nn.Module:
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tiny") / "model", dtype="float32")


def test_loads_in_transformers(tiny: Path) -> None:
    model = load(tiny)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.float32
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (32, 64)
    assert (model.model.norm.weight == 1).all()
    logits = model(torch.arange(100)[None]).logits
    assert logits.shape == (1, 100, 320)
    assert 0.5 < logits.std() < 2.0
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (
        256,
        257,
    )


def test_weights_are_normal_and_all_different(tiny: Path) -> None:
    weights = {n: p for n, p in load(tiny).state_dict().items() if p.dim() == 2}
    assert len(weights) == 2 + 2 * 7
    for weight in weights.values():
        scaled = weight * weight.shape[1] ** 0.5
        assert abs(scaled.mean()) < 0.1
        assert abs(scaled.std() - 1) < 0.1
    assert len({tuple(w[0, :8].tolist()) for w in weights.values()}) == len(weights)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tied_and_own_head_dim(tmp_path: Path, dtype: str) -> None:
    out = make(tmp_path / "model", "--tie", dtype=dtype, head_dim=32)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - not a mapping
    model = load(out)
    assert model.dtype == getattr(torch, dtype)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[1].self_attn.o_proj.weight.shape == (64, 128)
    assert model(torch.arange(20)[None]).logits.isfinite().all()


def test_shards_hold_the_same_tensors_as_one_file(tmp_path: Path) -> None:
    shape = {"vocab_size": 6000, "dtype": "float32"}  # 1.5 MiB each for the embedding and the head
    one = make(tmp_path / "one", **shape)
    many = make(tmp_path / "many", max_shard_mib=1, **shape)
    index = json.loads((many / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in many.glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(set(index["weight_map"].values())) == files
    expected, got = load(one).state_dict(), load(many).state_dict()
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in expected.values())
    assert list(index["weight_map"]) == [
        name for path in files for name in header(many / path) if name != "__metadata__"
    ]
    for name, weight in expected.items():
        assert torch.equal(weight, got[name]), name


def header(path: Path) -> dict[str, object]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    return json.loads(data[8 : 8 + length])


def test_the_same_seed_gives_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    same = contents(make(tmp_path / "same", dtype="float32"))
    other = contents(make(tmp_path / "other", dtype="float32", seed=1))
    assert same == contents(tiny)
    assert {name for name in same if same[name] != other[name]} == {"model.safetensors"}


def test_tokenizer_covers_every_byte(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "Grüße,\n\t 世界 🙂 " + "".join(map(chr, range(256)))
    ids = tokenizer(text).input_ids
    assert ids == [256, *text.encode()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode([256, 65, 257]) == "<s>A</s>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (256, 257, 258)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 299}, "--vocab-size must be at least 300"),
        ({"heads": 3, "head_dim": 16}, "not a multiple of --kv-heads"),
        ({"heads": 6}, "give --head-dim"),
        ({"head_dim": 15}, "must be even"),
        ({"layers": 0}, "--layers must be at least 1"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_impossible_shapes_are_usage_errors(
    tmp_path: Path, options: dict[str, int], message: str
) -> None:
    done = run(tmp_path / "model", **options)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "model").exists()


def test_bfloat16_is_float32_rounded_to_nearest_even(tmp_path: Path) -> None:
    high = load(make(tmp_path / "high", vocab_size=6000, dtype="float32")).state_dict()
    low = load(make(tmp_path / "low", vocab_size=6000, dtype="bfloat16")).state_dict()
    for name, weight in high.items():
        assert torch.equal(weight.bfloat16(), low[name]), name


def test_files_are_not_overwritten(tiny: Path) -> None:
    before = contents(tiny)
    done = run(tiny, seed=5)
    assert done.returncode == 2
    assert "not an empty directory" in done.stderr
    assert contents(tiny) == before


def test_presets_are_defaults_that_options_override(tmp_path: Path) -> None:
    options = ["--preset=8b", "--layers=1", "--vocab-size=300", "--intermediate-size=8"]
    options += ["--hidden-size=64", "--heads=8"]
    subprocess.run([sys.executable, SCRIPT, tmp_path, *options], check=True, capture_output=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    assert config["num_key_value_heads"] == 8
    assert config["rope_theta"] == 500000.0
    assert config["max_position_embeddings"] == 8192
