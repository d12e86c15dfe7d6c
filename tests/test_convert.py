"""A conversion is right, complete or absent, resumable after anything, and small in memory."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from qinfer.checkpoint.safetensors import INDEX_NAME, Checkpoint
from qinfer.config import ModelConfig, read_json
from qinfer.errors import CheckpointError, QInferError, UnsupportedModelError
from qinfer.quant import affine, nf4
from qinfer.quant.spec import NF4, SCHEMES, Affine, Dense
from qinfer.quant.weights import load_weight
from qinfer_converters import convert as module
from qinfer_converters.convert import RECORD_NAME, check_disk, check_output, convert
from qinfer_converters.huggingface import TOKENIZER_FILES, HuggingFaceSource
from qinfer_converters.plan import make_plan

SHARD = 12_000  # several shards of a tiny model
ROOT = Path(__file__).parents[1]


class InterruptError(Exception):
    pass


def contents(directory):
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir())}


def run(directory, out, scheme="int4", group=None, *, limit=SHARD, **options):
    source = HuggingFaceSource(directory)
    plan = make_plan(source, scheme, group, max_shard_bytes=limit)
    convert(source, plan, out, **options)
    return plan


def stop_after(nbytes):
    """A progress callback that raises once so many bytes are written."""
    total = 0

    def progress(count):
        nonlocal total
        total += count
        if total >= nbytes:
            raise InterruptError

    return progress


def stop_in_shard(plan, k):
    """A progress callback that raises when k shards are finished and the next is begun."""
    done = sum(t.nbytes for shard in plan.shards[:k] for t in shard)
    return stop_after(done + 1)


def interrupted(directory, out, k, scheme="int4", group=None):
    source = HuggingFaceSource(directory)
    plan = make_plan(source, scheme, group, max_shard_bytes=SHARD)
    assert len(plan.shards) > k + 1
    with pytest.raises(InterruptError):
        convert(source, plan, out, progress=stop_in_shard(plan, k))
    assert not out.exists()
    return plan


def part_of(out):
    return out.with_name(out.name + ".part")


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # slow, and shows in no test but one


@pytest.fixture
def source(tiny_model, tmp_path):
    """A copy of a model that a test may change."""
    return Path(shutil.copytree(tiny_model("llama", "bfloat16"), tmp_path / "source"))


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def change_tensor(directory, name, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})


def expected_outputs(tensor, data, dtype):
    """What a plan's tensor should become, computed in one piece."""
    fmt = tensor.format
    if isinstance(fmt, Dense):
        return {tensor.source: data.to(dtype)}
    matrix = (data.t() if tensor.transposed else data).float()
    n, k = matrix.shape
    if isinstance(fmt, Affine):
        q, scale = affine.quantize(matrix.contiguous(), fmt.bits, fmt.group_size, dtype)
        return {
            f"{tensor.module}.weight_packed": affine.pack(q, fmt.bits),
            f"{tensor.module}.weight_scale": scale,
            f"{tensor.module}.weight_shape": torch.tensor([n, k]),
        }
    assert isinstance(fmt, NF4)
    packed, absmax = nf4.quantize(matrix)
    weight = f"{tensor.module}.weight"
    return {
        weight: packed,
        f"{weight}.absmax": absmax,
        f"{weight}.quant_map": torch.tensor(nf4.CODE),
        f"{weight}.{nf4.STATE_SUFFIX}": nf4.state_tensor((n, k), fmt.dtype),
    }


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "float32"),
        ("llama", "bfloat16"),
        ("llama-untied-bias", "float16"),
        ("qwen3", "bfloat16"),
        ("gpt2", "float32"),
        ("gpt2", "float16"),
    ],
)
@pytest.mark.parametrize(
    ("scheme", "group"),
    [("int4", None), ("int8", None), ("int8", 32), ("nf4", None), ("bf16", None)],
)
def test_every_tensor_is_what_it_would_be_in_one_piece(
    name, dtype, scheme, group, tiny_model, out, monkeypatch
):
    monkeypatch.setattr(module, "_RUN_WEIGHTS", 64)  # runs of 64 rows: most matrices take several
    directory = tiny_model(name, dtype)
    plan = run(directory, out, scheme, group)
    stored = {n: t for p in directory.glob("*.safetensors") for n, t in load_file(p).items()}
    checkpoint = Checkpoint(out)
    assert checkpoint.tensors.keys() == {name for t in plan.tensors for name in t.outputs}
    half = torch.float16 if dtype == "float16" and scheme != "bf16" else torch.bfloat16
    for tensor in plan.tensors:
        for output, expected in expected_outputs(tensor, stored[tensor.source], half).items():
            found = checkpoint.tensor(output)
            assert found.dtype == expected.dtype, output
            assert torch.equal(found, expected), output
            assert tensor.outputs[output] == (expected.dtype, tuple(expected.shape))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
def test_every_file_is_flushed_before_it_is_renamed(source, out, monkeypatch):
    events = []
    rename = os.replace

    def fsync(descriptor):
        events.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink()))

    def replace(old, new, **options):
        events.append(("replace", Path(old), Path(new)))
        rename(old, new, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    plan = run(source, out)
    part = part_of(out)
    renamed = {new.name: i for i, (kind, *_, new) in enumerate(events) if kind == "replace"}
    for name in contents(out):
        written = events.index(("fsync", part / f"{name}.part"))
        assert written < renamed[name]
        assert ("fsync", part) in events[renamed[name] : renamed["out"]]
    records = [i for i, event in enumerate(events) if event[-1] == part / "qinfer-progress.json"]
    for name in plan.shard_names():  # is on the disk before a record says so
        recorded = min(i for i in records if i > renamed[name])
        assert ("fsync", part) in events[renamed[name] : recorded]
    assert events[renamed["out"]] == ("replace", part, out)
    assert ("fsync", out.parent) in events[renamed["out"] :]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_output_is_a_model_directory(scheme, source, out):
    (source / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": [1, 2]}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "README.md").write_text("not copied")
    plan = run(source, out, scheme)
    assert read_json(out / "generation_config.json") == {
        "temperature": 0.5,
        "eos_token_id": [1, 2],
    }
    for name in TOKENIZER_FILES:
        assert (out / name).exists() is (source / name).exists()
        if (out / name).exists():
            assert (out / name).read_bytes() == (source / name).read_bytes()
    assert read_json(out / "config.json") == plan.config
    config = ModelConfig.from_dict(plan.config)
    q_proj = load_weight(Checkpoint(out), "model.layers.0.self_attn.q_proj", (64, 64))
    stored = load_file(source / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    error = (q_proj.rows(0, 64) - stored.float()).norm() / stored.float().norm()
    assert error < {"int4": 0.12, "int8": 0.012, "nf4": 0.11, "bf16": 1e-9}[scheme]
    assert config.num_hidden_layers == 3
    expected = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    expected |= {"chat_template.jinja", RECORD_NAME, INDEX_NAME, *plan.shard_names()}
    assert set(contents(out)) == expected


def test_a_single_shard_has_no_index(source, out):
    run(source, out, limit=10**9)
    assert (out / "model.safetensors").exists()
    assert not (out / INDEX_NAME).exists()


def test_the_index_says_where_each_tensor_is(source, out):
    plan = run(source, out)
    index = read_json(out / INDEX_NAME)
    assert index["metadata"]["total_size"] == plan.nbytes
    for name in plan.shard_names():
        held = {n for n, file in index["weight_map"].items() if file == name}
        assert load_file(out / name).keys() == held


def test_the_record_holds_the_sha256_of_every_other_file(source, out):
    plan = run(source, out)
    record = read_json(out / RECORD_NAME)
    files = contents(out)
    del files[RECORD_NAME]
    assert record["sha256"] == {n: hashlib.sha256(b).hexdigest() for n, b in files.items()}
    assert record["scheme"] == "int4"
    assert record["group_size"] == 32
    assert record["bits_per_weight"] == round(plan.bits_per_weight, 3)
    assert record["source"] == str(source)
    assert record["tensors"]["lm_head"] == "int8 per channel"
    assert record["tensors"]["model.layers.2.mlp.down_proj"] == "int4 g32"
    assert "model.norm" not in record["tensors"]


def test_conversions_are_deterministic(source, tmp_path):
    run(source, tmp_path / "a")
    run(source, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_out_does_not_exist_before_it_is_done(source, out):
    calls = []

    def progress(count):
        assert not out.exists()
        assert part_of(out).is_dir()
        calls.append(count)

    plan = run(source, out, progress=progress)
    assert sum(calls) == plan.nbytes
    assert out.is_dir()
    assert not part_of(out).exists()


def test_parents_of_out_are_made(source, tmp_path):
    run(source, tmp_path / "a" / "b" / "out")
    assert (tmp_path / "a" / "b" / "out" / RECORD_NAME).is_file()


def test_out_may_be_relative(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(source, Path("here"))
    assert (tmp_path / "here" / RECORD_NAME).is_file()


def one_value(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[-3] = value
        return tensor

    return change


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ("int4", "model.layers.1.mlp.up_proj.weight"),
        ("int8", "model.layers.1.mlp.up_proj.weight"),
        ("nf4", "model.layers.1.mlp.up_proj.weight"),
        ("bf16", "model.layers.1.mlp.up_proj.weight"),
        ("int4", "model.embed_tokens.weight"),
        ("nf4", "model.layers.2.input_layernorm.weight"),
    ],
)
def test_weights_that_are_not_finite_are_named_and_nothing_is_left(
    scheme, name, value, source, out
):
    change_tensor(source, name, one_value(value))
    with pytest.raises(QInferError) as caught:
        run(source, out, scheme)
    assert type(caught.value) is CheckpointError
    assert str(caught.value) == f"{name} holds NaN or infinite values"
    assert "damaged" in caught.value.hint
    assert not out.exists()
    assert not part_of(out).exists()


@pytest.mark.parametrize("scheme", ["int4", "int8", "nf4"])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.gate_proj.weight"])
def test_values_that_do_not_fit_the_sixteen_bits_on_disk_are_named(
    scheme, name, tiny_model, tmp_path, out
):
    directory = Path(shutil.copytree(tiny_model("llama", "float32"), tmp_path / "source"))
    config = read_json(directory / "config.json") | {"dtype": "float16"}
    (directory / "config.json").write_text(json.dumps(config))
    change_tensor(directory, name, one_value(1e9))
    if scheme == "nf4" and name.endswith("proj.weight"):
        run(directory, out, scheme)  # its maxima are fp32
        return
    with pytest.raises(CheckpointError, match=name) as caught:
        run(directory, out, scheme)
    assert "do not fit 16 bits" in caught.value.hint
    assert not part_of(out).exists()


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("scheme", ["int4", "nf4", "bf16"])
def test_an_interrupted_conversion_goes_on_behind_its_finished_shards(
    k, scheme, source, out, tmp_path
):
    run(source, tmp_path / "reference", scheme)
    plan = interrupted(source, out, k, scheme)
    part = part_of(out)
    finished = plan.shard_names()[:k]
    assert {p.name for p in part.glob("*.safetensors")} == set(finished)
    before = {n: (part / n).stat() for n in finished}
    calls = []
    run(source, out, scheme, progress=calls.append)
    assert sum(calls) == plan.nbytes
    for name, stat in before.items():
        now = (out / name).stat()
        assert (now.st_ino, now.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    assert contents(out) == contents(tmp_path / "reference")


def test_a_conversion_may_be_interrupted_again_and_again(source, out, tmp_path):
    reference = run(source, tmp_path / "reference")
    for k in range(len(reference.shards) - 1):
        interrupted(source, out, k)
    run(source, out)
    assert contents(out) == contents(tmp_path / "reference")


@pytest.mark.parametrize("change", ["scheme", "group size", "weights", "config", "version"])
def test_another_conversion_starts_over(change, source, out, tmp_path, monkeypatch):
    scheme, group = ("int8" if change == "group size" else "int4"), None
    interrupted(source, out, 2, scheme)
    part = part_of(out)
    assert len(list(part.glob("*.safetensors"))) == 2
    if change == "scheme":
        scheme = "int8"
    elif change == "group size":
        group = 32
    elif change == "weights":
        change_tensor(source, "model.norm.weight", lambda t: t + 1)
        change_tensor(source, "model.embed_tokens.weight", lambda t: t + 1)
    elif change == "config":
        config = read_json(source / "config.json") | {"rope_theta": 7.0}
        (source / "config.json").write_text(json.dumps(config))
    else:
        monkeypatch.setattr("qinfer.__version__", "99")
    old = {p.stat().st_ino for p in part.glob("*.safetensors")}
    held = [p.open("rb") for p in part.glob("*.safetensors")]  # so that no inode is used again
    run(source, out, scheme, group)
    for file in held:
        file.close()
    assert not old & {p.stat().st_ino for p in out.glob("*.safetensors")}
    run(source, tmp_path / "reference", scheme, group)
    assert contents(out) == contents(tmp_path / "reference")


def test_another_scheme_that_cuts_the_shards_alike_starts_over(source, out, tmp_path):
    opened = HuggingFaceSource(source)
    plan = make_plan(opened, "int8", 32, max_shard_bytes=1)
    with pytest.raises(InterruptError):
        convert(opened, plan, out, progress=stop_in_shard(plan, 8))
    run(source, out, "int8", limit=1)
    run(source, tmp_path / "reference", "int8", limit=1)
    assert contents(out) == contents(tmp_path / "reference")


def test_leftovers_of_an_interruption_do_not_reach_the_model(source, out, tmp_path):
    interrupted(source, out, 2)
    for name in (RECORD_NAME, "config.json.part", "tokenizer.model"):
        (part_of(out) / name).write_bytes(b"{")
    run(source, out)
    run(source, tmp_path / "reference")
    assert contents(out) == contents(tmp_path / "reference")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"identity": 1, "shards": []}'])
def test_a_torn_progress_file_starts_over(content, source, out, tmp_path):
    interrupted(source, out, 2)
    (part_of(out) / "qinfer-progress.json").write_bytes(content)
    run(source, out)
    run(source, tmp_path / "reference")
    assert contents(out) == contents(tmp_path / "reference")


def test_a_finished_shard_that_is_gone_is_written_again(source, out, tmp_path):
    plan = interrupted(source, out, 2)
    (part_of(out) / plan.shard_names()[0]).unlink()
    run(source, out)
    run(source, tmp_path / "reference")
    assert contents(out) == contents(tmp_path / "reference")


@pytest.mark.parametrize("leftovers", [[], ["qinfer-progress.json.part"]])
def test_a_part_directory_from_before_the_first_record_is_used(leftovers, source, out):
    part_of(out).mkdir()
    for name in leftovers:
        (part_of(out) / name).write_bytes(b"{")
    run(source, out)
    assert RECORD_NAME in contents(out)
    assert not set(contents(out)) & {"qinfer-progress.json", *leftovers}


@pytest.mark.parametrize("kind", ["file", "directory", "model"])
def test_a_part_that_is_not_ours_is_refused_and_left_alone(kind, source, out):
    part = part_of(out)
    if kind == "file":
        part.write_bytes(b"mine")
    elif kind == "model":
        run(source, part)
    else:
        part.mkdir()
        (part / "notes.txt").write_bytes(b"mine")
    before = part.read_bytes() if kind == "file" else contents(part)
    with pytest.raises(QInferError) as caught:
        run(source, out)
    assert type(caught.value) is CheckpointError
    reason = "exists and is not a directory"
    if kind != "file":
        reason = "is in the way and is not an unfinished conversion"
    assert str(caught.value) == f"{part} {reason}"
    assert "Move it away" in caught.value.hint
    assert (part.read_bytes() if kind == "file" else contents(part)) == before
    assert not out.exists()


KILLED = """
import hashlib, json, os, shutil, signal, sys
from pathlib import Path

import torch

torch.set_num_threads(1)  # no thread pool, so that forking is safe
from qinfer_converters.convert import check_output, convert
from qinfer_converters.huggingface import HuggingFaceSource
from qinfer_converters.plan import make_plan

work = Path(sys.argv[1])
out = work / "out"
CALLS = ["fsync", "replace", "unlink", "rmdir", "mkdir", "ftruncate", "pwrite", "open"]


def run(target):
    source = HuggingFaceSource(work / "source")
    convert(source, make_plan(source, "int4", max_shard_bytes=30_000), target)


fsync = os.fsync
os.fsync = lambda _: None


def fork_and_run(kill_at):
    '''Convert in a child that is killed before its n-th change to the disk; True if it was.'''
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    count = 0

    def counted(call, weight):
        def wrapper(*args, **options):
            nonlocal count
            count += weight
            if count >= kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if call is not fsync:  # slow, and a killed process loses nothing without it
                return call(*args, **options)

        return wrapper

    os.fsync = fsync
    for name in CALLS:  # most writes are alike
        setattr(os, name, counted(getattr(os, name), 0.05 if name == "pwrite" else 1))
    run(out)
    os._exit(0)


def contents(directory):
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir())}


def is_whole(directory):
    record = json.loads((directory / "qinfer.json").read_text())
    return all(
        hashlib.sha256((directory / name).read_bytes()).hexdigest() == digest
        for name, digest in record["sha256"].items()
    )


def kill_at_every_moment(first, *, replace):
    '''Return how many moments there are, and what went wrong when.'''
    at, wrong = first, []
    while True:
        for path in work.glob("out*"):
            shutil.rmtree(path)
        if replace:
            shutil.copytree(work / "old", out)
        if not fork_and_run(at):
            return at - 1, wrong
        if out.exists() and not is_whole(out):
            wrong.append([at, "incomplete"])
        kept = [out, *work.glob("out.old-*/out")]
        if replace and not any(p.exists() and is_whole(p) for p in kept):
            wrong.append([at, "the old model is lost"])
        if not out.exists() or (out / "qinfer-progress.json").exists():
            check_output(out, force=False)  # the same command goes on
        run(out)
        if contents(out) != reference:
            wrong.append([at, "different"])
        if (work / "out.part").exists():
            wrong.append([at, "left over"])
        at += 1


run(work / "reference")
reference = contents(work / "reference")
moments, wrong = kill_at_every_moment(1, replace=False)
all_moments, more_wrong = kill_at_every_moment(moments - 4, replace=True)  # those before are alike
print(json.dumps({"moments": [moments, all_moments], "wrong": wrong + more_wrong}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment_the_next_run_gives_the_same_bytes(source, tmp_path):
    run(source, tmp_path / "old", "nf4")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["wrong"] == []
    moments, with_replacement = result["moments"]
    assert moments > 40
    assert with_replacement > moments + 2


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ({"quant_method": "gptq", "bits": 4}, "(gptq)"),
        ({"bits": 4}, "(in an unnamed way)"),
        ("fp8", "(fp8)"),
    ],
)
def test_a_quantized_source_is_refused(declared, text, source):
    config = read_json(source / "config.json") | {"quantization_config": declared}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError) as caught:
        HuggingFaceSource(source)
    assert str(caught.value) == f"{source} is quantized already {text}"
    assert "original 16-bit" in caught.value.hint


@pytest.mark.parametrize("declared", [None, {}])
def test_a_source_that_declares_no_quantization_is_read(declared, source):
    config = read_json(source / "config.json") | {"quantization_config": declared}
    (source / "config.json").write_text(json.dumps(config))
    assert HuggingFaceSource(source).tensors


def test_a_fresh_output_is_accepted(out):
    check_output(out, force=False)
    out.mkdir()
    check_output(out, force=False)


def assert_refused(text, hint, check):
    with pytest.raises(QInferError) as caught:
        check()
    assert type(caught.value) is CheckpointError
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert hint in caught.value.hint


def test_a_converted_model_needs_force(source, out):
    run(source, out)
    assert_refused("already holds", "--force", lambda: check_output(out, force=False))
    check_output(out, force=True)


def test_a_model_whose_publishing_was_interrupted_needs_no_force(source, out, tmp_path):
    run(source, tmp_path / "reference")
    shutil.copytree(tmp_path / "reference", out)
    (out / "qinfer-progress.json").write_text("{}")
    check_output(out, force=False)
    run(source, out)
    assert contents(out) == contents(tmp_path / "reference")


@pytest.mark.parametrize("force", [False, True])
def test_a_foreign_directory_is_refused_even_with_force(force, source, out):
    out.mkdir()
    (out / "notes.txt").write_bytes(b"mine")
    text = "is not empty and was not written by qinfer"
    assert_refused(text, "does not exist yet", lambda: check_output(out, force=force))
    assert_refused(text, "does not exist yet", lambda: run(source, out))
    assert contents(out) == {"notes.txt": b"mine"}
    assert not part_of(out).exists()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["file", "link to a directory", "dangling link"])
def test_a_file_or_link_is_refused_even_with_force(kind, force, source, out, tmp_path):
    if kind == "file":
        out.write_bytes(b"mine")
    else:
        if kind == "link to a directory":
            (tmp_path / "target").mkdir()
        out.symlink_to(tmp_path / "target")
    refused = "exists and is not a directory"
    assert_refused(refused, "another output", lambda: check_output(out, force=force))
    assert_refused(refused, "another output", lambda: run(source, out))
    assert out.is_symlink() or out.read_bytes() == b"mine"


def test_an_empty_directory_is_filled(source, out):
    out.mkdir()
    run(source, out)
    assert RECORD_NAME in contents(out)


def test_a_directory_that_fills_up_meanwhile_is_not_touched(source, out):
    def progress(_):
        out.mkdir(exist_ok=True)
        (out / "notes.txt").write_bytes(b"mine")

    with pytest.raises(CheckpointError, match="was not written by qinfer"):
        run(source, out, progress=progress)
    assert contents(out) == {"notes.txt": b"mine"}
    shutil.rmtree(out)
    calls = []
    plan = run(source, out, progress=calls.append)  # all shards were finished
    assert calls == [sum(t.nbytes for t in shard) for shard in plan.shards]


def test_a_converted_model_is_replaced(source, out, tmp_path):
    run(source, out, "nf4")
    run(source, out, "int8")
    run(source, tmp_path / "reference", "int8")
    assert contents(out) == contents(tmp_path / "reference")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "reference", "source"]


def test_a_backup_next_to_the_output_survives_a_replacement(source, out):
    run(source, out)
    backup = out.with_name("out.old")
    shutil.copytree(out, backup)
    before = contents(backup)
    run(source, out, "int8")
    assert contents(backup) == before


def test_a_failed_conversion_keeps_the_old_model(source, out):
    run(source, out)
    before = contents(out)
    change_tensor(source, "model.norm.weight", one_value(float("nan")))
    with pytest.raises(CheckpointError, match="NaN"):
        run(source, out, "int8")
    assert contents(out) == before
    with pytest.raises(InterruptError):
        run(source, out, "int8", progress=stop_after(1))
    assert contents(out) == before


def free(monkeypatch, nbytes):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=nbytes))


def test_too_little_disk_is_said_beforehand(source, out, monkeypatch):
    plan = make_plan(HuggingFaceSource(source), "int4", max_shard_bytes=SHARD)
    needed = plan.nbytes + 64 * 2**20
    free(monkeypatch, needed)
    check_disk(plan, out)
    free(monkeypatch, needed - 1)
    assert_refused("MB free, the conversion needs", "another disk", lambda: check_disk(plan, out))
    nested = out / "not" / "there" / "yet"
    assert_refused(str(out.parent), "another disk", lambda: check_disk(plan, nested))


def test_finished_shards_need_no_more_disk(source, out, monkeypatch):
    plan = interrupted(source, out, 2)
    done = sum((part_of(out) / n).stat().st_size for n in plan.shard_names()[:2])
    free(monkeypatch, plan.nbytes - done + 64 * 2**20)
    check_disk(plan, out)
    free(monkeypatch, plan.nbytes - done + 64 * 2**20 - 1)
    with pytest.raises(CheckpointError, match="MB free"):
        check_disk(plan, out)


@pytest.fixture
def small_disk(tmp_path):
    """A file system to fill: its directory and a function to mount it anew with options."""
    directory = tmp_path / "disk"
    directory.mkdir()

    def mount(options, *words):
        command = ["mount", *words, "-o", options, "tmpfs", directory]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    if os.name != "posix" or not shutil.which("mount") or not mount("size=4k", "-t", "tmpfs"):
        pytest.skip("needs the right to mount a tmpfs")
    yield directory, lambda options: mount(f"remount,{options}")
    subprocess.run(["umount", directory], check=True)


def test_a_full_disk_is_an_error_that_the_next_run_continues_from(source, small_disk, tmp_path):
    disk, remount = small_disk
    run(source, tmp_path / "reference")
    reference = contents(tmp_path / "reference")
    out = disk / "out"
    size = sum(len(data) for data in reference.values())
    errors = []
    for kibibytes in range(4, 2 * size // 1024, 8):  # a little further each time
        assert remount(f"size={kibibytes}k")
        try:
            run(source, out)
            break
        except CheckpointError as error:
            errors.append(error)
        assert not out.exists()
    assert len(errors) > 10
    for error in errors:
        assert "cannot be written: No space left on device" in str(error)
        assert str(disk) in str(error)
        assert "Make room" in error.hint
    assert contents(out) == reference
    assert not part_of(out).exists()


def test_a_read_only_disk_is_an_error_that_the_next_run_continues_from(
    source, small_disk, tmp_path
):
    disk, remount = small_disk
    out = disk / "out"
    assert remount("size=8m")
    interrupted(source, out, 2)
    assert remount("ro")
    with pytest.raises(QInferError) as caught:
        run(source, out)
    assert type(caught.value) is CheckpointError
    assert "cannot be written: Read-only file system" in str(caught.value)
    assert str(disk) in str(caught.value)
    assert "permissions" in caught.value.hint
    assert remount("rw")
    run(source, out)
    run(source, tmp_path / "reference")
    assert contents(out) == contents(tmp_path / "reference")


MEASURED = """
import json, sys
from pathlib import Path

from qinfer_converters.convert import convert
from qinfer_converters.huggingface import HuggingFaceSource
from qinfer_converters.plan import make_plan


def peak():
    '''Bytes. Not ru_maxrss, in which the process that started this one may count.'''
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024


before = peak()
source = HuggingFaceSource(Path(sys.argv[1]))
for scheme in ("int4", "nf4"):
    plan = make_plan(source, scheme)
    convert(source, plan, Path(sys.argv[2]) / scheme)
print(json.dumps({"growth": peak() - before, "weights": plan.parameters}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_peak_memory_is_that_of_a_run_of_rows(tmp_path):
    shape = "--hidden-size=1024 --layers=3 --heads=16 --kv-heads=4 --intermediate-size=4096 "
    shape += "--vocab-size=32000 --max-shard-mib=100"
    model = tmp_path / "model"
    script = ROOT / "scripts" / "make_model.py"
    subprocess.run([sys.executable, script, model, *shape.split()], check=True)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, model, tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    for path in ("model", "int4", "nf4"):
        shutil.rmtree(tmp_path / path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["weights"] > 100_000_000
    # A run is 4 M weights, and less than a dozen copies of it, of 16 MB as fp32, are alive at a
    # time: nothing grows with the model. In fp32 the whole of it would be 440 MB, its largest
    # matrix 131 MB; a converter that holds that matrix and two more of its size does not pass.
    assert result["growth"] < 300_000_000


def test_two_conversions_to_one_output_do_not_meet(tiny_model, tmp_path):
    source = HuggingFaceSource(tiny_model("llama"))
    plan = make_plan(source, "int4")
    out = tmp_path / "out"

    def second(_):
        with pytest.raises(CheckpointError, match="another process is writing"):
            convert(source, plan, out)

    convert(source, plan, out, progress=second)
    assert (out / RECORD_NAME).is_file()
