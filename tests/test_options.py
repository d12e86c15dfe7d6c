"""Options that several commands share, and what reaches the model of them."""

from types import SimpleNamespace

import click
import pytest
import torch
from click.testing import CliRunner

from qinfer import ops
from qinfer.errors import QInferError
from qinfer.generation import LanguageModel
from qinfer.ops import DeviceOptions
from qinfer.quant.kv import KVFormat
from qinfer_cli import loading
from qinfer_cli.main import cli
from qinfer_cli.options import size

BATCH = ("-i", "in.txt", "-o", "out.jsonl")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1", 1),
        ("1048576", 2**20),
        ("12b", 12),
        ("2k", 2048),
        ("3KiB", 3072),
        ("3KB", 3000),
        ("500MB", 500_000_000),
        ("2g", 2**31),
        ("6GiB", 6 * 2**30),
        ("1.5 gib", 3 * 2**29),
        (" 1tb ", 10**12),
        ("9007199254740993", 2**53 + 1),
        ("9" * 400 + "g", int("9" * 400) * 2**30),
    ],
)
def test_a_size_is_a_number_of_bytes(text, size_bytes):
    assert size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "g", "0", "0.1", "-1g", "1e9", "6 apples", "1,5g", "٣g", "nan"]
)
def test_what_is_no_size_is_an_error_that_names_one(text):
    with pytest.raises(click.BadParameter, match=r"is not a size such as 6GiB, 500MB or 2g\."):
        size(text)


@pytest.fixture
def opened_with(monkeypatch, tmp_path):
    """What a command line opens its model with."""

    def opened_with(*arguments):
        def note(self, directory, **options):
            found.update(options)
            raise QInferError("opened")

        found = {}
        monkeypatch.setattr(LanguageModel, "__init__", note)
        (tmp_path / "config.json").write_text("{}")
        result = CliRunner().invoke(cli, ["generate", str(tmp_path), *map(str, arguments)])
        assert result.stderr == "Error: opened\n"
        return found

    return opened_with


def test_without_options_the_model_decides(opened_with):
    assert opened_with(*BATCH) == {
        "device": "auto",
        "context_tokens": None,
        "kv_format": None,
        "memory_bytes": None,
        "max_sequences": None,
        "context_policy": "stop",
        "device_options": DeviceOptions(),
    }


def test_options_reach_the_model(opened_with):
    options = ("--ctx-size", 99, "--memory", "2GiB", "--context-policy", "sinks")
    on_gpus = ("--embeddings", "host", "--int8-kernel", "bnb", "--no-graph", "--deterministic")
    found = opened_with(*BATCH, *options, *on_gpus, "--batch-size", 7, "--device", "cpu")
    assert found == {
        "device": "cpu",
        "context_tokens": 99,
        "kv_format": None,
        "memory_bytes": 2 << 30,
        "max_sequences": 7,
        "context_policy": "sinks",
        "device_options": DeviceOptions(
            deterministic=True, embeddings_on_host=True, int8_by_bitsandbytes=True, graphs=False
        ),
    }


def test_one_prompt_runs_alone(opened_with):
    assert opened_with("-p", "hi")["max_sequences"] == 1


@pytest.mark.parametrize(
    ("options", "k_bits", "v_bits"),
    [
        (("--kv-bits", 8), 8, 8),
        (("--kv-bits", 8, "--v-bits", 4), 8, 4),
        (("--k-bits", 32, "--kv-bits", 4), 32, 4),
        (("--k-bits", 8, "--v-bits", 4), 8, 4),
        (("--k-bits", 8), 8, 16),
        (("--v-bits", 4), 16, 4),
    ],
)
def test_bits_of_keys_and_values_go_before_those_of_both(opened_with, options, k_bits, v_bits):
    assert opened_with("-p", "hi", *options)["kv_format"] == KVFormat(k_bits, v_bits)


@pytest.mark.parametrize(
    ("device", "has_triton", "has_kernels", "words"),
    [
        ("cuda", False, True, "Triton is not installed"),
        ("cpu", True, False, "without a C compiler"),
        ("cuda", True, False, ""),
        ("cpu", False, True, ""),
    ],
)
def test_slow_operations_are_warned_of(monkeypatch, capsys, device, has_triton, has_kernels, words):
    monkeypatch.setattr(ops, "has_triton", lambda: has_triton)
    model = SimpleNamespace(
        engine=SimpleNamespace(
            decoder=SimpleNamespace(ops=SimpleNamespace(device=torch.device(device)))
        )
    )
    loading._warn_of_slow_operations(model, has_kernels)
    said = capsys.readouterr().err
    assert words in said
    assert said.count("Warning: ") == bool(words)
