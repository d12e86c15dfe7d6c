"""The kernels that choose tokens, those for CPUs and for GPUs, against the reference.

Those for GPUs run interpreted, or on a device if there is one.
"""

import ctypes
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from qinfer.ops.cpu import kernels
from qinfer.ops.draws import COLUMNS, UNIFORMS, Draws
from qinfer.ops.reference import ReferenceOps
from qinfer.sampling import Sampler, SamplingParams
from tests import kernel_builds

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

# Numbers that are none are part of the tests; numpy, which computes for the interpreter, warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SEEDS = st.integers(0, 2**31)
UNIFORM = st.floats(0, 1, exclude_max=True)


def triton_choice():
    """Tokens and flags by the kernels for GPUs."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from qinfer.ops.cuda import choice

    def choose(logits, draws=None, size=None):
        if draws is None:
            return choice.argmax_or_nan(logits.to(DEVICE), size)
        there = Draws(draws.table.to(DEVICE), draws.positions.to(DEVICE))
        return choice.draw_or_nan(logits.to(DEVICE), there, size)

    return choose


@pytest.fixture(
    scope="module",
    params=["installed", "plain", pytest.param("triton", marks=pytest.mark.gpu if HAS_GPU else ())],
)
def choose(request):
    """`choose(logits, draws=None, size=None)`: tokens and flags."""
    if request.param == "triton":
        return triton_choice()
    library = kernels.library()
    if library is None:
        pytest.skip("the extension was not built: no C compiler at install time")
    if request.param == "plain":
        path = request.getfixturevalue("tmp_path_factory").mktemp("plain") / "choice.so"
        kernel_builds.compile_plain(path, "choice.c", "pool.c", "rows.c")
        plain = ctypes.CDLL(str(path))
        plain.qinfer_choose.argtypes = library.qinfer_choose.argtypes
        library = plain

    def choose(logits, draws=None, size=None):
        return kernels.choose(library, logits, size, draws, threads=2)

    return choose


def randn(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * 3


@settings(deadline=None, max_examples=21)
@given(
    sequences=st.integers(0, 4),
    columns=st.integers(1, 5000),
    padding=st.integers(0, 70),
    spread=st.sampled_from([1, 30, 10**6]),
    seed=SEEDS,
)
def test_argmax_is_the_first_of_equals(choose, sequences, columns, padding, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-spread, spread, (sequences, columns), generator=generator).float()
    wide = torch.cat((logits, torch.full((sequences, padding), 1e9)), 1)
    ids, flags = choose(wide, size=columns)
    assert ids.dtype == torch.int64
    assert flags.dtype == torch.bool
    assert ids.tolist() == logits.numpy().argmax(-1).tolist()
    assert not flags.any()


@settings(deadline=None, max_examples=21)
@given(
    columns=st.integers(1, 3000),
    bad=st.sampled_from([float("nan"), float("inf")]),
    place=st.floats(0, 1, exclude_max=True),
    seed=SEEDS,
)
def test_a_number_that_is_none_marks_its_row_and_no_other(choose, columns, bad, place, seed):
    logits = randn(3, columns, seed=seed)
    logits[1, int(place * columns)] = bad
    ids, flags = choose(logits)
    assert flags.tolist() == [False, True, False]
    assert ids[::2].tolist() == logits[::2].numpy().argmax(-1).tolist()
    assert 0 <= ids[1] < columns


@pytest.mark.parametrize("columns", [1, 5, 1024, 1025, 4000])
def test_a_row_without_any_token_is_marked_and_its_id_is_within_the_vocabulary(choose, columns):
    logits = torch.full((2, columns + 3), float("-inf"))
    logits[1, columns - 1] = -1e30
    logits[0, columns:] = float("nan")  # padding, which does not count
    ids, flags = choose(logits, size=columns)
    assert flags.tolist() == [True, False]
    assert ids.tolist() == [0, columns - 1]


def test_argmax_of_a_whole_vocabulary_in_rows_that_are_apart(choose):
    wide = randn(3, 131_000, seed=0)
    ids, flags = choose(wide[::2, :128_256], size=200_000)
    assert ids.tolist() == np.argmax(wide[::2, :128_256].numpy(), -1).tolist()
    assert not flags.any()


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(2, 8).half(), torch.zeros(8, 2).t(), torch.zeros(8), torch.zeros(2, 0)],
    ids=["fp16", "columns apart", "no rows", "no columns"],
)
def test_what_has_no_most_likely_token_is_an_error(choose, wrong):
    with pytest.raises(ValueError, match=r"fp32|no column counts"):
        choose(wrong)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.1, 0.7, 1.0, 1.5, 100.0]),
    top_k=st.none() | st.sampled_from([1, 2, 5, 40, 1000, 4000]),
    top_p=st.none() | st.sampled_from([0.0, 0.01, 0.3, 0.9, 0.999, 1 - 2**-53]),
    min_p=st.none() | st.sampled_from([1e-9, 0.02, 0.5, 1.0]),
)


def table_of(rows, positions):
    """Of (params, uniform); all other numbers would be out of range, and so be noticed."""
    table = torch.full((len(rows), COLUMNS), 7.0, dtype=torch.float64)
    for i, (params, uniform) in enumerate(rows):
        its = Draws.row(params.temperature, params.top_k, params.top_p, params.min_p)
        table[i, :4] = torch.tensor(its, dtype=torch.float64)
        table[i, 4 + positions[i] % UNIFORMS] = uniform
    return table


def draw(logits, rows, choose, size=None, positions=None):
    """Tokens and flags of the kernels, and of the reference."""
    positions = positions or [37 * i for i in range(len(rows))]
    draws = Draws(table_of(rows, positions), torch.tensor(positions))
    expected = ReferenceOps(torch.device("cpu"), torch.float32).draw(
        logits, size or logits.shape[1], draws
    )
    found = choose(logits, draws, size)
    return [x.tolist() for x in found], [x.tolist() for x in expected]


# To shrink an example takes the interpreter many minutes.
@settings(deadline=None, max_examples=15, phases=[Phase.explicit, Phase.generate])
@given(
    rows=st.lists(st.tuples(PARAMS, UNIFORM), min_size=1, max_size=3),
    columns=st.integers(1, 3000),
    padding=st.integers(0, 70),
    steps=st.sampled_from([0.0, 0.5, 3.0]),
    scale=st.sampled_from([0.01, 1.0, 5.0, 1000.0]),
    seed=SEEDS,
)
def test_drawn_tokens_are_those_of_the_reference(
    choose, rows, columns, padding, steps, scale, seed
):
    logits = randn(len(rows), columns, seed=seed) * scale
    if steps:
        logits = (logits / steps).round() * steps  # many are equal
    wide = torch.cat((logits, torch.full((len(rows), padding), 1e9)), 1)
    found, expected = draw(wide, rows, choose, columns)
    assert found == expected
    assert all(0 <= token < columns for token in found[0])


ALL = {"temperature": 1.0, "top_p": None}
LAST = 1 - 2**-53


@pytest.mark.parametrize(
    ("logits", "params", "uniform", "expected"),
    [
        pytest.param([0.0, -0.0, 0.0, -0.0, -1.0], ALL | {"top_k": 2}, 0.99, 3, id="signed zeros"),
        pytest.param(
            [1.0] * 10, {"temperature": 1.0, "top_p": 0.25}, LAST, 2, id="ties rounded up"
        ),
        pytest.param(
            [1.0, 2.0, 4.0, 2.0], {"temperature": 1.0, "top_p": 0.0}, LAST, 2, id="top_p 0"
        ),
        pytest.param(
            [1.0] * 8 + [0.0] * 4,
            {"temperature": 1.0, "top_p": 0.25, "min_p": 1.0},
            LAST,
            2,
            id="top_p and min_p at the same depth",
        ),
        pytest.param(
            [-i / 10 for i in range(8)],
            {"temperature": 0.01, "top_k": 5, "top_p": 0.5},
            LAST,
            0,
            id="the k-th is beyond what top_p needs",
        ),
        pytest.param(
            [1.0] * 2500, {"temperature": 1.0, "top_p": 0.6}, LAST, 1499, id="ties over blocks"
        ),
        pytest.param(
            [-2.0 * i for i in range(30)],
            {"temperature": 20.0, "top_p": None, "top_k": 20},
            LAST,
            19,
            id="the k-th is far below the peak",
        ),
        pytest.param(
            [0.0] + [-15.0] * 100_000, ALL, 0.99, 66_310, id="what is unlikely one by one"
        ),
        pytest.param([0.0, 1.0, 1.0, 1.0], ALL | {"temperature": 5e-324}, 0.9, 3, id="nearly 0"),
        pytest.param([0.0, 1.0, 1.0], ALL | {"top_k": 10**400}, LAST, 2, id="a huge top_k"),
    ],
)
def test_drawn_by_hand(choose, logits, params, uniform, expected):
    rows = [(SamplingParams(**params), uniform)]
    (found, _), (reference, _) = draw(torch.tensor([logits]), rows, choose)
    assert reference == pytest.approx([expected], abs=20 if expected > 60_000 else 0)
    assert found == pytest.approx(reference, abs=1 if expected > 60_000 else 0)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0, top_p=None),
        SamplingParams(temperature=1.5, top_p=0.95),
        SamplingParams(temperature=1.0, top_p=None, min_p=0.05),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=50),
        SamplingParams(temperature=1.0, top_p=None, top_k=30),
    ],
    ids=str,
)
def test_a_whole_vocabulary_is_drawn_from_as_the_host_does(choose, params):
    logits = randn(2, 12_100, seed=1)
    samplers = [Sampler(params, vocab_size=12_000) for _ in logits]
    rows = [(params, *sampler.upcoming(1)) for sampler in samplers]
    (found, flags), (expected, _) = draw(logits, rows, choose, 12_000)
    assert found == expected
    assert found == [sampler.sample(x, []) for sampler, x in zip(samplers, logits, strict=True)]
    assert not any(flags)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1.0, top_p=None), {0: 4, 1: 2, 2: 1, 3: 1}),
        (SamplingParams(temperature=1.0, top_p=0.75), {0: 4, 1: 2}),
        (SamplingParams(temperature=1.0, top_p=0.76), {0: 4, 1: 2, 2: 1}),
        (SamplingParams(temperature=1.0, top_p=0.0), {0: 1}),
        (SamplingParams(temperature=1.0, top_p=None, top_k=3), {0: 4, 1: 2, 2: 1, 3: 1}),
        (SamplingParams(temperature=1.0, top_p=0.6, top_k=2), {0: 1}),
        (SamplingParams(temperature=1.0, top_p=None, min_p=0.4), {0: 4, 1: 2}),
        (SamplingParams(temperature=0.5, top_p=None), {0: 16, 1: 4, 2: 1, 3: 1}),
    ],
    ids=str,
)
def test_the_distribution_is_the_one_that_was_asked_for(choose, params, kept):
    """Uniform numbers in even steps give each token as often as its probability says."""
    steps = sum(kept.values())
    logits = torch.tensor([[4.0, 2.0, 1.0, 1.0]]).log().expand(steps, 4).contiguous()
    rows = [(params, (i + 0.5) / steps) for i in range(steps)]
    (found, _), _ = draw(logits, rows, choose)
    assert Counter(found) == kept


def test_a_number_that_is_none_spoils_its_row_alone(choose):
    logits = randn(5, 2500, seed=2)
    logits[1, 2000], logits[2, 3], logits[3] = math.nan, math.inf, -math.inf
    rows = [(SamplingParams(temperature=1.0, top_k=5), 0.7)] * 4 + [(SamplingParams(), 0.2)]
    (found, flags), (expected, _) = draw(logits, rows, choose)
    assert flags == [False, True, True, True, False]
    assert found[::4] == expected[::4]
    assert all(0 <= token < 2500 for token in found)


def test_tokens_at_minus_infinity_are_never_drawn(choose):
    logits = torch.full((2, 3000), -math.inf)
    logits[:, 1500] = -5.0
    rows = [(SamplingParams(temperature=9.0, top_p=None), 0.0), (SamplingParams(top_k=7), 0.999)]
    assert draw(logits, rows, choose)[0] == [[1500, 1500], [False, False]]


def test_each_position_takes_its_own_number(choose):
    logits = torch.zeros(1, 4)
    table = table_of([(SamplingParams(temperature=1.0, top_p=None), 0.0)], [0])
    table[0, 4:] = torch.arange(UNIFORMS) % 4 / 4 + 0.1
    for position in (0, 1, 33, 62, 127):
        token, _ = choose(logits, Draws(table, torch.tensor([position])))
        assert token.tolist() == [position % 4]


@pytest.mark.parametrize(
    "draws",
    [
        Draws(torch.zeros(2, COLUMNS, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)),
        Draws(torch.zeros(3, COLUMNS), torch.zeros(3, dtype=torch.int64)),
        Draws(torch.zeros(3, COLUMNS + 1, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)),
        Draws(torch.zeros(3, COLUMNS, dtype=torch.float64), torch.zeros(3, dtype=torch.int32)),
    ],
    ids=["other rows", "fp32", "more columns", "int32"],
)
def test_draws_that_are_not_as_described_are_an_error(choose, draws):
    with pytest.raises(ValueError, match="draws must be"):
        choose(torch.zeros(3, 8), draws)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device")
def test_all_of_it_can_be_captured_in_a_graph():
    from qinfer.ops.cuda import choice

    table = table_of([(SamplingParams(), 0.3), (SamplingParams(temperature=0), 0.0)], [0, 5])
    draws = Draws(table.to(DEVICE), torch.tensor([0, 5], device=DEVICE))
    logits = randn(2, 5000, seed=0).to(DEVICE)
    expected = choice.draw_or_nan(logits, draws)  # compiles, which a capture must not
    inside, graph = torch.empty_like(logits), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = choice.draw_or_nan(inside, draws)
    inside.copy_(logits)
    graph.replay()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
