"""Which operations a device gets."""

import pytest
import torch

from qinfer import ops
from qinfer.errors import QInferError
from qinfer.ops import DeviceOptions
from qinfer.ops.cpu.ops import CPUOps
from qinfer.ops.reference import ReferenceOps


@pytest.fixture
def card(monkeypatch):
    """Let torch see a CUDA device of a compute capability; Triton is there or not."""

    def insert(major, minor, *, triton=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Card")
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: major >= 8)
        monkeypatch.setattr(ops, "has_triton", lambda: triton)

    return insert


def test_without_a_card_the_cpu_computes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(ops.select("auto"), CPUOps)
    with pytest.raises(QInferError, match="no CUDA device") as caught:
        ops.select("cuda")
    assert "--device" in caught.value.hint


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((7, 0), torch.float16), ((7, 5), torch.float16), ((8, 0), torch.bfloat16)],
)
def test_a_card_computes_in_bf16_if_it_has_that(card, capability, dtype):
    pytest.importorskip("triton")
    from qinfer.ops.cuda.ops import CUDAOps

    card(*capability)
    for device in ("auto", "cuda"):
        selected = ops.select(device)
        assert isinstance(selected, CUDAOps)
        assert (selected.dtype, selected.half) == (dtype, dtype)
        assert selected.device == torch.device("cuda", 0)
        assert selected.fixed_steps
    assert isinstance(ops.select("cpu"), CPUOps)


def test_an_old_card_is_refused_by_name_and_left_alone(card):
    card(6, 1)
    assert isinstance(ops.select("auto"), CPUOps)
    with pytest.raises(QInferError, match=r"Card has compute capability 6\.1, and 7\.0"):
        ops.select("cuda")


def test_options_of_a_card_reach_its_operations(card):
    pytest.importorskip("triton")
    card(9, 0)
    selected = ops.select("cuda", DeviceOptions(embeddings_on_host=True))
    assert selected.maps_tables
    assert not ops.select("cuda").maps_tables


@pytest.mark.parametrize(
    ("triton", "options"),
    [(False, DeviceOptions()), (True, DeviceOptions(deterministic=True))],
    ids=["without Triton", "deterministic"],
)
def test_the_reference_operations_run_where_no_kernels_can(card, triton, options):
    card(8, 6, triton=triton)
    selected = ops.select("cuda", options)
    assert type(selected) is ReferenceOps
    assert selected.device.type == "cuda"
    assert selected.deterministic == options.deterministic
    assert not selected.fixed_steps
