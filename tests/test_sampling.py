"""Filters against literal distributions and against transformers; the sampler's promises."""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qinfer import sampling
from qinfer.errors import CheckpointError, NumericsError
from qinfer.sampling import PRESETS, Sampler, SamplingParams, resolve_params

INF = math.inf
OFF = SamplingParams(temperature=1.0, top_p=None, seed=0)

quickly = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**32 - 1)
probabilities = st.floats(0.01, 0.99)


def params(**changes: object) -> SamplingParams:
    return dataclasses.replace(OFF, **changes)


def random_logits(*shape: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def from_probabilities(*values: float) -> Tensor:
    return torch.tensor(values).log()


def assert_same_distribution(ours: Tensor, theirs: Tensor) -> None:
    assert not ours.isnan().any()
    assert torch.equal(ours == -INF, theirs == -INF)
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1))


# Filters against transformers


@quickly
@given(seed=seeds, penalty=st.floats(0.2, 5.0), length=st.integers(0, 60))
def test_repetition_penalty_is_that_of_transformers(seed: int, penalty: float, length: int) -> None:
    logits = random_logits(50, seed=seed)
    ids = torch.randint(0, 60, (length,), generator=torch.Generator().manual_seed(seed))
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids[None], logits[None])[0]
    ours = sampling.repetition_penalty(logits, ids.tolist(), penalty)
    assert torch.equal(ours, theirs)


@quickly
@given(
    seed=seeds,
    size=st.integers(1, 5),
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=40),
)
def test_no_repeat_ngram_is_that_of_transformers(seed: int, size: int, ids: list[int]) -> None:
    logits = random_logits(3, seed=seed)  # id 3 is outside the vocabulary
    theirs = NoRepeatNGramLogitsProcessor(size)(torch.tensor([ids]), logits[None])[0]
    assert torch.equal(sampling.no_repeat_ngram(logits, ids, size), theirs)


@quickly
@given(seed=seeds, value=st.floats(0.05, 5.0))
def test_temperature_is_that_of_transformers(seed: int, value: float) -> None:
    logits = random_logits(2, 30, seed=seed)
    assert_same_distribution(
        sampling.temperature(logits, value), TemperatureLogitsWarper(value)(None, logits)
    )


@quickly
@given(seed=seeds, k=st.integers(1, 40))
def test_top_k_is_that_of_transformers(seed: int, k: int) -> None:
    logits = random_logits(2, 30, seed=seed).round()  # rounding makes ties
    assert torch.equal(sampling.top_k(logits, k), TopKLogitsWarper(k)(None, logits))


@quickly
@given(seed=seeds, p=probabilities)
def test_top_p_is_that_of_transformers(seed: int, p: float) -> None:
    logits = random_logits(2, 30, seed=seed).double()  # fp32 sums differ where they reach p
    assert torch.equal(sampling.top_p(logits, p), TopPLogitsWarper(p)(None, logits))


@quickly
@given(seed=seeds, p=probabilities)
def test_min_p_is_that_of_transformers(seed: int, p: float) -> None:
    logits = random_logits(2, 30, seed=seed).double()
    assert torch.equal(sampling.min_p(logits, p), MinPLogitsWarper(p)(None, logits))


# Filters against literal distributions


@pytest.mark.parametrize(
    ("filtered", "expected"),
    [
        pytest.param(lambda x: sampling.top_k(x, 1), [0, 0, 1, 0], id="top_k 1"),
        pytest.param(lambda x: sampling.top_k(x, 2), [0, 0.375, 0.625, 0], id="top_k 2"),
        pytest.param(lambda x: sampling.top_k(x, 9), [0.15, 0.3, 0.5, 0.05], id="top_k > vocab"),
        pytest.param(lambda x: sampling.top_p(x, 0.0), [0, 0, 1, 0], id="top_p 0"),
        pytest.param(lambda x: sampling.top_p(x, 0.49), [0, 0, 1, 0], id="top_p in the first"),
        pytest.param(lambda x: sampling.top_p(x, 0.51), [0, 0.375, 0.625, 0], id="top_p crosses"),
        pytest.param(
            lambda x: sampling.top_p(x, 0.94), [3 / 19, 6 / 19, 10 / 19, 0], id="top_p 0.94"
        ),
        pytest.param(lambda x: sampling.min_p(x, 0.59), [0, 0.375, 0.625, 0], id="min_p 0.59"),
        pytest.param(lambda x: sampling.min_p(x, 0.61), [0, 0, 1, 0], id="min_p 0.61"),
        pytest.param(
            lambda x: sampling.temperature(x, 0.5),
            [9 / 146, 36 / 146, 100 / 146, 1 / 146],
            id="temperature 0.5 squares",
        ),
    ],
)
def test_filter_leaves(filtered: object, expected: list[float]) -> None:
    logits = filtered(from_probabilities(0.15, 0.3, 0.5, 0.05))
    torch.testing.assert_close(logits.softmax(-1), torch.tensor(expected, dtype=torch.float32))


def test_equal_logits_rank_by_id() -> None:
    logits = from_probabilities(0.2, 0.2, 0.2, 0.2, 0.2)
    assert sampling.top_p(logits, 0.5).isfinite().tolist() == [True, True, True, False, False]
    assert sampling.top_k(logits, 2).isfinite().all()


def test_filters_keep_removed_tokens_removed() -> None:
    logits = torch.tensor([-INF, 1.0, -INF, 0.0])
    for result in (
        sampling.temperature(logits, 0.5),
        sampling.top_k(logits, 3),
        sampling.top_p(logits, 0.999),
        sampling.min_p(logits, 0.001),
        sampling.repetition_penalty(logits, [0, 1, 3], 1.3),
    ):
        assert result.isfinite().tolist() == [False, True, False, True]
        assert not result.isnan().any()


@pytest.mark.parametrize("value", [5e-324, 1e-45, 1e-8])
def test_tiny_temperatures_neither_overflow_nor_divide_by_zero(value: float) -> None:
    logits = torch.tensor([1e38, -1e38, 3e38, -INF])
    assert sampling.temperature(logits, value).tolist() == [-INF, -INF, 0.0, -INF]


def test_filters_leave_their_input_alone() -> None:
    logits = random_logits(20, seed=0)
    before = logits.clone()
    sampling.repetition_penalty(logits, [1, 2], 2.0)
    sampling.no_repeat_ngram(logits, [1, 2, 1], 2)
    everything = {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 2.0}
    Sampler(params(**everything), vocab_size=10).sample(logits, [1, 2])
    assert torch.equal(logits, before)


# Drawing


@pytest.mark.parametrize(
    ("uniform", "expected"), [(0.0, 1), (0.24, 1), (0.26, 2), (0.74, 2), (0.76, 4), (1 - 2**-53, 4)]
)
def test_draw_inverts_the_cumulative_distribution(uniform: float, expected: int) -> None:
    assert sampling.draw(from_probabilities(0, 0.25, 0.5, 0, 0.25, 0), uniform) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.05, 0.25]),
        ({"top_k": 3}, [0, 8 / 17, 4 / 17, 0, 5 / 17]),
        ({"top_p": 0.6}, [0, 8 / 13, 0, 0, 5 / 13]),
        ({"min_p": 0.2}, [2 / 19, 8 / 19, 4 / 19, 0, 5 / 19]),
        ({"temperature": 0.5}, [4 / 110, 64 / 110, 16 / 110, 1 / 110, 25 / 110]),
    ],
)
def test_draws_follow_the_distribution(changes: dict[str, float], expected: list[float]) -> None:
    logits, n = from_probabilities(0.1, 0.4, 0.2, 0.05, 0.25), 4000
    sampler = Sampler(params(**changes), vocab_size=None)
    counts = [0] * 5
    for _ in range(n):
        counts[sampler.sample(logits, [])] += 1
    assert [c == 0 for c in counts] == [p == 0 for p in expected]
    chi_square = sum((c - n * p) ** 2 / (n * p) for c, p in zip(counts, expected, strict=True) if p)
    assert chi_square < 18.5  # the 0.1% point with 4 degrees of freedom


def test_seeds_reproduce_and_differ() -> None:
    def run(sampler: Sampler) -> list[int]:
        return [sampler.sample(random_logits(100, seed=i), []) for i in range(20)]

    first = run(Sampler(params(seed=7), vocab_size=None))
    assert run(Sampler(params(seed=7), vocab_size=None)) == first
    assert run(Sampler(params(seed=8), vocab_size=None)) != first


def test_a_random_seed_is_reported_and_reproduces() -> None:
    one, two = (Sampler(params(seed=None), vocab_size=None) for _ in range(2))
    assert one.seed != two.seed
    again = Sampler(params(seed=one.seed), vocab_size=None)
    logits = random_logits(1000, seed=0)
    assert [one.sample(logits, []) for _ in range(9)] == [
        again.sample(logits, []) for _ in range(9)
    ]


def test_every_draw_takes_one_number() -> None:
    """A sequence's draws do not depend on how its earlier tokens were filtered."""
    flat, certain = random_logits(3000, seed=1), torch.tensor([0.0] + [-INF] * 2999)
    one, two = (Sampler(params(top_p=0.9), vocab_size=None) for _ in range(2))
    one.sample(flat, [])
    two.sample(certain, [])
    assert [one.sample(flat, []) for _ in range(9)] == [two.sample(flat, []) for _ in range(9)]


def test_greedy_takes_the_first_maximum_and_no_number() -> None:
    sampler = Sampler(params(temperature=0), vocab_size=None)
    untouched = sampler._generator.get_state()
    logits = torch.zeros(40_000)
    logits[[17, 30_000]] = 5.0
    assert sampler.sample(logits, []) == 17
    assert torch.equal(sampler._generator.get_state(), untouched)


def test_greedy_is_penalized_too() -> None:
    logits = torch.tensor([1.0, 0.9, 0.1])
    assert (
        Sampler(params(temperature=0, repetition_penalty=2.0), vocab_size=None).sample(logits, [0])
        == 1
    )
    assert (
        Sampler(params(temperature=0, no_repeat_ngram_size=1), vocab_size=None).sample(
            logits, [0, 1]
        )
        == 2
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype(dtype: torch.dtype) -> None:
    logits = random_logits(100, seed=3).to(dtype)
    low, full = (Sampler(params(top_k=9, top_p=0.8), vocab_size=None) for _ in range(2))
    assert [low.sample(logits, []) for _ in range(9)] == [
        full.sample(logits.float(), []) for _ in range(9)
    ]


# The sampler's shortcuts against the filters


@settings(deadline=None, max_examples=300)
@given(
    seed=seeds,
    scale=st.sampled_from([0.05, 1.0, 4.0, 12.0]),
    ties=st.booleans(),
    temperature=st.floats(0.1, 2.0),
    top_k=st.none() | st.integers(1, 1600),
    top_p=st.none() | probabilities | st.sampled_from([0.99, 0.999, 0.99999]),
    min_p=st.none() | st.floats(0.001, 0.5),
)
@example(seed=3, scale=4.0, ties=True, temperature=1.0, top_k=None, top_p=0.99999, min_p=None)
def test_sampler_is_its_filters_in_order(
    seed: int, scale: float, *, ties: bool, temperature: float, **filters: float | None
) -> None:
    logits = random_logits(1500, seed=seed, scale=scale)
    logits = (logits * 4).round() / 4 if ties else logits
    expected = sampling.temperature(logits, temperature)
    for name, value in filters.items():
        expected = expected if value is None else getattr(sampling, name)(expected, value)
    sampler = Sampler(params(temperature=temperature, seed=seed, **filters), vocab_size=None)
    ids, kept = sampler._filter(logits)
    left = kept if ids is None else torch.full_like(logits, -INF).scatter(0, ids, kept)
    assert torch.equal(left, expected)
    uniform = torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert sampler.sample(logits, []) == sampling.draw(expected, float(uniform))


@quickly
@given(
    prompt=st.lists(st.integers(0, 7), max_size=10),
    steps=st.lists(st.integers(0, 7), max_size=30),
    penalty=st.none() | st.floats(0.5, 3.0),
    size=st.none() | st.integers(2, 4),
    cut=st.integers(0, 20),
)
def test_penalties_kept_step_by_step_are_those_of_the_whole(
    prompt: list[int], steps: list[int], penalty: float | None, size: int | None, cut: int
) -> None:
    changes = {"repetition_penalty": penalty, "no_repeat_ngram_size": size, "temperature": 0}
    sampler = Sampler(params(**changes), vocab_size=None)
    histories = [prompt + steps[:n] for n in range(len(steps) + 1)]
    kept = histories[-1][:cut]
    histories += [kept, [*kept, 5, 4], [*kept, 5, 3], [*kept, 5, 6, 5]]  # cut back, then others
    for number, ids in enumerate(histories):
        logits = expected = random_logits(9, seed=number)  # id 8 is never banned
        if penalty is not None:
            expected = sampling.repetition_penalty(expected, ids, penalty)
        if size is not None:
            expected = sampling.no_repeat_ngram(expected, ids, size)
        assert torch.equal(sampler._penalize(logits, ids), expected)


# Vocabulary and bad numbers


@pytest.mark.parametrize("changes", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}])
@pytest.mark.parametrize("padding", [INF, math.nan, 1e4])
def test_padding_of_the_vocabulary_is_never_drawn_and_changes_nothing(
    changes: dict[str, float], padding: float
) -> None:
    logits = random_logits(30, seed=5)
    padded = torch.cat((logits, torch.full((34,), padding)))
    with_padding, without = (Sampler(params(**changes), vocab_size=30) for _ in range(2))
    tokens = [with_padding.sample(padded, []) for _ in range(50)]
    assert tokens == [without.sample(logits, []) for _ in range(50)]
    assert max(tokens) < 30


@pytest.mark.parametrize("changes", [{"temperature": 0}, {}, {"top_k": 2, "top_p": 0.5}])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([0.0, math.nan, 1.0], "contain nan"),
        ([0.0, INF, 1.0], "contain inf"),
        ([math.nan, INF, -INF], "contain nan"),
        ([-INF, -INF, -INF], "all -inf"),
    ],
)
def test_bad_logits_raise(changes: dict[str, float], bad: list[float], message: str) -> None:
    with pytest.raises(NumericsError, match=message):
        Sampler(params(**changes), vocab_size=None).sample(torch.tensor(bad), [])


def test_banning_every_token_raises() -> None:
    sampler = Sampler(params(no_repeat_ngram_size=1), vocab_size=3)
    with pytest.raises(NumericsError, match="no_repeat_ngram_size"):
        sampler.sample(torch.zeros(3), [0, 1, 2])


def test_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[vocab\], got \[1, 5\]"):
        Sampler(OFF, vocab_size=None).sample(torch.zeros(1, 5), [])


# Parameters


def test_defaults() -> None:
    assert SamplingParams() == SamplingParams(0.7, None, 0.9, None, None, None, None)
    for option in dataclasses.fields(SamplingParams):
        assert option.metadata["help"].endswith(".")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 0),
        ("top_k", -1),
        ("top_p", 1.0),
        ("top_p", 1),
        ("min_p", 0.0),
        ("repetition_penalty", 1.0),
        ("no_repeat_ngram_size", 0),
    ],
)
def test_values_that_mean_off_become_none(name: str, value: float) -> None:
    assert getattr(params(**{name: value}), name) is None
    assert getattr(resolve_params({name: value}, "chat", {name: 2}), name) is None


def test_integers_are_numbers() -> None:
    assert isinstance(params(temperature=1).temperature, float)
    assert params(repetition_penalty=2).repetition_penalty == 2.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", INF),
        ("temperature", None),
        ("temperature", "0.7"),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 2.0),
        ("top_k", True),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.nan),
        ("no_repeat_ngram_size", -1),
        ("no_repeat_ngram_size", 2.5),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_invalid_values_name_the_field(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got "):
        params(**{name: value})
    if value is not None and name != "seed":
        with pytest.raises(CheckpointError, match=rf"generation_config.json: {name} must be"):
            resolve_params({}, None, {name: value})
        assert resolve_params({name: 1}, None, {name: value}) == SamplingParams(**{name: 1})


MODEL = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("explicit", "preset", "model", "expected"),
    [
        ({}, None, {}, {}),
        ({}, None, MODEL, MODEL),
        ({}, None, {"top_k": None, "max_length": 20, "seed": 3}, {}),
        ({}, None, {"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
        ({}, "code", {}, PRESETS["code"]),
        ({}, "code", MODEL, MODEL | PRESETS["code"]),
        ({"top_k": 7, "seed": 3}, "chat", MODEL, MODEL | PRESETS["chat"] | {"top_k": 7, "seed": 3}),
        ({"top_k": None}, "chat", {}, PRESETS["chat"]),
        ({"top_k": 0}, "chat", MODEL, MODEL | PRESETS["chat"] | {"top_k": None}),
        ({}, None, {"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({}, None, {"do_sample": False}, {"temperature": 0}),
        ({}, None, {"do_sample": False, "temperature": 0.6}, {"temperature": 0}),
        ({"top_k": 5}, None, {"do_sample": False}, {"temperature": 0, "top_k": 5}),
        ({"temperature": 0.3}, None, {"do_sample": False}, {"temperature": 0.3}),
        ({}, "creative", {"do_sample": False}, PRESETS["creative"]),
    ],
)
def test_precedence(
    explicit: dict[str, object],
    preset: str | None,
    model: dict[str, object],
    expected: dict[str, object],
) -> None:
    assert resolve_params(explicit, preset, model) == SamplingParams(**expected)


def test_presets() -> None:
    assert {name: tuple(p.values()) for name, p in PRESETS.items()} == {
        "chat": (0.7, 0.9, 50),
        "code": (0.1, 0.95, 10),
        "creative": (1.0, 0.95, 100),
    }
    with pytest.raises(ValueError, match="preset must be one of chat, code, creative, got 'x'"):
        resolve_params({}, "x", {})


def test_invalid_explicit_values_are_the_users() -> None:
    with pytest.raises(ValueError, match="top_p"):
        resolve_params({"top_p": 2.0}, None, {})


def test_importing_does_not_load_torch() -> None:
    code = "import qinfer.sampling, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_numbers_ahead_are_those_that_are_drawn_with() -> None:
    """Whoever draws in the sampler's place gets what it would take, in any portions."""
    ahead, drawing = (Sampler(OFF, vocab_size=None) for _ in range(2))
    numbers = ahead.upcoming(3)
    assert ahead.upcoming(40)[:3] == numbers
    assert ahead.upcoming(2) == numbers[:2]
    logits = random_logits(50, seed=4)
    for uniform in ahead.upcoming(40):
        assert sampling.draw(sampling.temperature(logits, 1.0), uniform) == drawing.sample(
            logits, []
        )
        assert ahead.take() == uniform
    assert ahead.upcoming(1) == drawing.upcoming(1)


@pytest.mark.parametrize(
    ("params", "is_memoryless", "is_greedy"),
    [
        (OFF, True, False),
        (SamplingParams(temperature=0), True, True),
        (SamplingParams(temperature=0, repetition_penalty=1.1), False, False),
        (SamplingParams(no_repeat_ngram_size=3), False, False),
    ],
)
def test_who_looks_back_is_not_memoryless(
    params: SamplingParams, is_memoryless: bool, is_greedy: bool
) -> None:
    sampler = Sampler(params, vocab_size=None)
    assert (sampler.is_memoryless, sampler.is_greedy) == (is_memoryless, is_greedy)
