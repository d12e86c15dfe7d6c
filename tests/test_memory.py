"""What fits in memory: plans against their budgets, and what the system says is free."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qinfer.cache.blocks import BlockPool
from qinfer.cache.paged import CacheLayout, PagedCache
from qinfer.cache.tables import BlockTables, Reach
from qinfer.config import ModelConfig
from qinfer.engine import memory
from qinfer.engine.memory import default_budget, free_bytes, plan_memory, workspace_bytes
from qinfer.errors import QInferError
from qinfer.quant.kv import KV_BITS, KVFormat

CPU = torch.device("cpu")
GIB = 1 << 30


def make_config(*, layers=2, heads=4, kv_heads=2, head_dim=64, context=4096, windows=None, **more):
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 320,
        "hidden_size": heads * head_dim,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        **more,
    }
    config = ModelConfig.from_dict(raw)
    return dataclasses.replace(config, layer_windows=windows or (None,) * layers)


def make_layout(config, kv_format=None, *, context=None):
    formats = [kv_format or KVFormat()] * config.num_hidden_layers
    return CacheLayout.of(config, formats, context=context)


def plan(config, layout, budget, **options):
    defaults = {"weights_bytes": 0, "device": CPU, "step_tokens": 256}
    return plan_memory(config, layout, budget_bytes=budget, **(defaults | options))


def tables_of(layout, plan, step_tokens):
    step_tokens = max(step_tokens, plan.max_sequences)
    pools = [BlockPool(count) for count in plan.blocks]
    return BlockTables(layout.reaches, pools, step_tokens=step_tokens)


@st.composite
def requests(draw):
    """A model, a cache of it, and options of a plan."""
    windows = tuple(draw(st.lists(st.sampled_from((None, 1, 16, 100, 1000)), min_size=1)))
    config = make_config(
        layers=len(windows),
        kv_heads=draw(st.sampled_from((1, 2, 4))),
        head_dim=draw(st.sampled_from((24, 64, 80, 128))),
        context=draw(st.sampled_from((40, 64, 300, 4096, 131072))),
        windows=windows,
    )
    kv_format = KVFormat(draw(st.sampled_from(KV_BITS)), draw(st.sampled_from(KV_BITS)))
    limit = config.max_position_embeddings
    options = {
        "weights_bytes": draw(st.integers(0, 2 << 20)),
        "step_tokens": draw(st.sampled_from((1, 32, 256))),
        "max_sequences": draw(st.none() | st.integers(1, 300)),
        "context_tokens": draw(st.none() | st.integers(1, limit)),
    }
    return config, make_layout(config, kv_format), options


@given(request=requests(), more=st.integers(0, 26))
@settings(max_examples=120, deadline=None)
def test_a_plan_is_within_the_budget_and_one_full_sequence_fits(request, more):
    config, layout, options = request
    budget = 80_000_000 + 2**more
    try:
        made = plan(config, layout, budget, **options)
    except QInferError:
        assume(False)
    cache = sum(count * layout.block_bytes(group) for group, count in enumerate(made.blocks))
    slots = made.max_sequences * layout.slot_bytes()
    assert made.kv_bytes == cache + slots
    assert made.weights_bytes + made.workspace_bytes + made.kv_bytes <= budget
    assert tables_of(layout, made, options["step_tokens"]).fits_alone(made.context_tokens)
    limit = config.max_position_embeddings
    assert made.context_tokens in (options["context_tokens"], *range(min(limit, 64), limit + 1))
    assert options["context_tokens"] in (None, made.context_tokens)
    assert options["max_sequences"] in (None, made.max_sequences)
    assert made.max_sequences >= 1
    assert len(made.blocks) == len(layout.reaches)
    step = max(options["step_tokens"], made.max_sequences)
    needed = workspace_bytes(config, tokens=step, sequences=made.max_sequences)
    assert made.workspace_bytes >= needed


@given(request=requests(), more=st.integers(0, 26))
@settings(max_examples=100, deadline=None)
def test_a_plan_is_refused_only_where_the_least_is_more_than_the_budget(request, more):
    config, layout, options = request
    budget = 70_000_000 + 2**more
    most = options["max_sequences"] or 32
    step = max(options["step_tokens"], most)
    context = options["context_tokens"] or min(config.max_position_embeddings, 64)
    others = ((options["max_sequences"] or 1) - 1) * layout.slot_bytes()
    cache = layout.sequence_bytes(context, step) + others
    workspace = workspace_bytes(config, tokens=step, sequences=most)
    excess = options["weights_bytes"] + workspace + cache - budget
    if excess <= 0:
        plan(config, layout, budget, **options)
        return
    with pytest.raises(QInferError, match=f"{context:,} tokens") as caught:
        plan(config, layout, budget, **options)
    for size in (options["weights_bytes"], workspace, cache, excess, budget):
        assert memory._size(size) in str(caught.value)


@given(request=requests())
@settings(max_examples=50, deadline=None)
def test_the_cache_reserved_has_the_bytes_that_were_planned(request):
    config, layout, options = request
    options |= {"max_sequences": 3, "context_tokens": min(40, config.max_position_embeddings)}
    made = plan(config, layout, 100_000_000, **options)
    device = torch.device("meta")
    cache = PagedCache(layout, made.blocks, 3, half=torch.float16, device=device)
    assert cache.nbytes == made.kv_bytes


class TestPlan:
    config = make_config()
    layout = make_layout(config)
    weights_and_workspace = 5_000_000 + workspace_bytes(config, tokens=256, sequences=32)

    def plan(self, kv_bytes, **options):
        budget = self.weights_and_workspace + kv_bytes
        return plan(self.config, self.layout, budget, weights_bytes=5_000_000, **options)

    def test_ample_memory_gives_all_the_model_allows_and_no_more_than_can_be_used(self):
        made = self.plan(10 * GIB)
        assert (made.context_tokens, made.max_sequences) == (4096, 32)
        assert made.blocks == (32 * 128 + 256,)

    def test_a_context_that_was_not_asked_for_shrinks_to_what_fits(self):
        made = self.plan(40 * self.layout.block_bytes(0))
        assert made.context_tokens == 40 * 32
        assert made.blocks == (40,)

    def test_a_context_that_was_asked_for_does_not_shrink(self):
        with pytest.raises(QInferError, match="one sequence of 1,281 tokens"):
            self.plan(40 * self.layout.block_bytes(0), context_tokens=1281)
        assert self.plan(40 * self.layout.block_bytes(0), context_tokens=1280).blocks == (40,)

    def test_fewer_sequences_run_where_memory_is_short(self):
        one = self.layout.sequence_bytes(1024, 256)
        assert self.plan(3 * one).max_sequences == 3
        assert self.plan(3 * one - 1).max_sequences == 2

    def test_the_least_context_is_64_tokens(self):
        assert self.plan(2 * self.layout.block_bytes(0)).context_tokens == 64
        with pytest.raises(QInferError, match="one sequence of 64 tokens"):
            self.plan(2 * self.layout.block_bytes(0) - 1)

    def test_the_error_names_what_is_needed_and_what_there_is(self):
        with pytest.raises(QInferError, match=r"for one sequence of 4,096 tokens: ") as caught:
            self.plan(0, context_tokens=4096)
        sizes = re.findall(r"[\d.]+ MB", str(caught.value))
        need = memory._size(128 * self.layout.block_bytes(0))
        assert sizes[0] == "5.0 MB"
        assert sizes[2:4] == [need, need]
        assert len(sizes) == 5

    def test_one_sequence_alone_is_given_no_blocks_for_finished_ones(self):
        assert self.plan(10 * GIB, max_sequences=1).blocks == (128,)

    def test_a_gpu_runs_more_sequences_at_once(self):
        made = self.plan(10 * GIB, device=torch.device("cuda"))
        assert made.max_sequences == 256


def test_open_blocks_of_all_sequences_are_within_the_budget():
    """With 4 bits an open block is as large as three others; the context takes what is left."""
    config = make_config(context=131072)
    layout = make_layout(config, KVFormat(4, 4))
    budget = workspace_bytes(config, tokens=256, sequences=32) + 20_000_000
    made = plan(config, layout, budget)
    assert made.max_sequences > 1
    assert made.workspace_bytes + made.kv_bytes <= budget


def test_an_asked_for_context_that_just_fits_leaves_one_sequence():
    config = make_config()
    layout = make_layout(config, KVFormat(8, 8))
    just = workspace_bytes(config, tokens=256, sequences=32) + layout.sequence_bytes(4096, 256)
    made = plan(config, layout, just, context_tokens=4096)
    assert (made.context_tokens, made.max_sequences) == (4096, 1)
    assert made.workspace_bytes + made.kv_bytes == just
    made = plan(config, layout, just + layout.slot_bytes(), context_tokens=4096)
    assert made.max_sequences == 2


def test_layers_with_a_window_need_no_more_than_it():
    config = make_config(windows=(None, 100))
    layout = make_layout(config)
    made = plan(config, layout, 10 * GIB, max_sequences=1)
    assert made.blocks == (128, 12 + 1)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("context", [33, 64, 65, 96, 300])
@pytest.mark.parametrize("step", [1, 32, 256])
def test_a_context_that_slides_leaves_room_for_a_sequence_that_never_ends(context, sinks, step):
    config = make_config(windows=(None, 40))
    layout = make_layout(config, context=Reach(context - sinks, sinks))
    made = plan(config, layout, GIB, max_sequences=1, context_tokens=context, step_tokens=step)
    assert tables_of(layout, made, step).fits_alone(100_000)


@given(
    tokens=st.integers(1, 600),
    sequences=st.integers(1, 300),
    heads=st.sampled_from(((4, 2), (8, 8), (6, 1))),
    gated=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_the_workspace_is_no_less_than_a_steps_largest_tensors(tokens, sequences, heads, gated):
    config = make_config(heads=heads[0], kv_heads=heads[1], head_dim=32)
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = heads[0] * 32, heads[1] * 32
    residual_and_normed = 2 * tokens * hidden
    attention = tokens * 2 * (q + 2 * kv)  # before and after rotary
    mlp = tokens * ((2 if gated else 1) * inner + hidden)
    logits = 2 * sequences * config.vocab_size  # of the model and in fp32
    floats = residual_and_normed + max(attention, mlp) + logits
    assert workspace_bytes(config, tokens=tokens, sequences=sequences) >= 4 * floats


class TestFreeBytes:
    @pytest.fixture(autouse=True)
    def _system(self, tmp_path, monkeypatch):
        self.meminfo, self.cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
        self.cgroup.mkdir()
        monkeypatch.setattr(memory, "_MEMINFO", self.meminfo)
        monkeypatch.setattr(memory, "_CGROUP", self.cgroup)
        self.meminfo.write_text(
            "MemTotal:        8000000 kB\nMemFree:          100000 kB\n"
            "MemAvailable:    4000000 kB\nHugePages_Total:       0\n"
        )

    def limit(self, limit, used, **stat):
        (self.cgroup / "memory.max").write_text(f"{limit}\n")
        (self.cgroup / "memory.current").write_text(f"{used}\n")
        lines = "".join(f"{key} {value}\n" for key, value in stat.items())
        (self.cgroup / "memory.stat").write_text(lines)

    def test_is_what_the_system_has_available(self):
        assert free_bytes(CPU) == 4_000_000 * 1024

    def test_is_what_a_container_has_left_if_that_is_less(self):
        self.limit(GIB, 300 << 20, anon=1, inactive_file=100 << 20, active_file=7)
        assert free_bytes(CPU) == (1024 - 300 + 100) << 20

    def test_is_what_the_system_has_if_the_container_is_allowed_more(self):
        self.limit(100 * GIB, GIB, inactive_file=0)
        assert free_bytes(CPU) == 4_000_000 * 1024

    def test_a_container_without_a_limit_has_none(self):
        self.limit("max", GIB)
        assert free_bytes(CPU) == 4_000_000 * 1024

    @pytest.mark.parametrize("damage", ["memory.current", "memory.stat"])
    def test_files_of_the_container_that_are_missing_are_no_limit(self, damage):
        self.limit(GIB, GIB, inactive_file=0)
        (self.cgroup / damage).unlink()
        assert free_bytes(CPU) == 4_000_000 * 1024

    def test_a_file_of_the_container_that_is_damaged_is_no_limit(self):
        self.limit("lots", GIB)
        assert free_bytes(CPU) == 4_000_000 * 1024

    @pytest.mark.parametrize("text", [None, "", "MemTotal: 5 kB\n", "MemAvailable\n"])
    def test_without_the_systems_word_it_is_all_there_is(self, text):
        self.meminfo.unlink() if text is None else self.meminfo.write_text(text)
        assert free_bytes(CPU) >= 256 << 20

    def test_a_margin_is_left_to_others(self):
        assert default_budget(CPU) == int(4_000_000 * 1024 * 0.9)


class TestRemedies:
    """Whoever follows the hint gets a model that fits."""

    config = make_config(layers=24, heads=16, kv_heads=8, context=8192)

    def refuse(self, spare, *, weights=10**9, kv_format=None, context=8192, **more):
        """The hint for a budget that is `spare` bytes beyond the weights and the workspace."""
        layout = make_layout(self.config, kv_format)
        work = workspace_bytes(self.config, tokens=256, sequences=1)
        options = {"weights_bytes": weights, "max_sequences": 1, "context_tokens": context} | more
        with pytest.raises(QInferError) as caught:
            plan(self.config, layout, weights + work + spare, **options)
        return caught.value.hint

    def accepts(self, spare, *, weights=10**9, kv_format=None, context=8192, before=10**9):
        work = workspace_bytes(self.config, tokens=256, sequences=1)
        layout, budget = make_layout(self.config, kv_format), before + work + spare
        options = {"weights_bytes": weights, "max_sequences": 1, "context_tokens": context}
        return plan(self.config, layout, budget, **options)

    def test_a_shorter_context_is_named_exactly(self):
        hint = self.refuse(100 << 20, kv_format=KVFormat(4, 4))
        longest = int(re.search(r"--ctx-size (\d+)", hint)[1])
        assert self.accepts(100 << 20, kv_format=KVFormat(4, 4), context=longest)
        with pytest.raises(QInferError):
            self.accepts(100 << 20, kv_format=KVFormat(4, 4), context=longest + 32)

    @pytest.mark.parametrize(("share", "bits"), [(0.6, "8"), (0.35, "4")])
    def test_a_smaller_cache_is_named_if_it_is_enough(self, share, bits):
        whole = make_layout(self.config).sequence_bytes(8192, 256)
        hint = self.refuse(int(share * whole))
        assert f"--kv-bits {bits}" in hint
        assert ("--kv-bits 8" in hint) == (bits == "8")
        smaller = KVFormat(int(bits), int(bits))
        assert self.accepts(int(share * whole), kv_format=smaller)

    def test_a_smaller_model_is_named_if_there_can_be_one(self):
        hint = self.refuse(-(700 << 20), context=256)
        assert "a model converted with --scheme int4" in hint
        assert self.accepts(-(700 << 20), weights=int(60e6), context=256)

    def test_several_changes_are_named_where_one_is_not_enough(self):
        hint = self.refuse(-(900 << 20), context=8192, weights=10**9)
        assert "with --kv-bits" in hint or ", and --ctx-size" in hint

    def test_nothing_is_named_where_nothing_helps(self):
        assert "use a smaller model" in self.refuse(-(10**9) + 1000)
