"""From a checkpoint to an engine: what fits is worked out, then weights and cache are set up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from qinfer.cache.paged import CacheLayout, PagedCache
from qinfer.cache.tables import Reach
from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.config import ModelConfig
from qinfer.engine.decoding import Decoding
from qinfer.engine.engine import Engine, step_tokens_on
from qinfer.engine.memory import MemoryPlan, default_budget, plan_memory
from qinfer.errors import QInferError
from qinfer.models.architectures import TABLE, prefix_in
from qinfer.models.decoder import Decoder
from qinfer.ops.reference import ReferenceOps
from qinfer.quant.kv import KVFormat

ContextPolicy = Literal["stop", "slide", "sinks"]
"""At the end of the context: end, drop the oldest tokens, or the same but keep the first four.

Kept keys stay rotated as they are, and positions go on counting. Sinks are of "Efficient Streaming
Language Models with Attention Sinks", arXiv 2309.17453, which counts positions within the cache.
"""

SINK_TOKENS = 4


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine is set up.

    Attributes:
        vocab_size: Of the tokenizer.
        stop_ids: Tokens that end a sequence.
        formats: Of the key-value cache, per layer.
        context_tokens: Most tokens a sequence attends to; None is what model and memory allow.
        context_policy: What happens there.
        memory_bytes: For everything; None is what is free, less a margin.
        max_sequences: Most that run at once; None is what the memory allows.
        step_tokens: Most tokens in a step; None is what suits the device.
        graphs: Whether decoding steps are captured as CUDA graphs on a GPU.
    """

    vocab_size: int
    stop_ids: frozenset[int]
    formats: tuple[KVFormat, ...]
    context_tokens: int | None = None
    context_policy: ContextPolicy = "stop"
    memory_bytes: int | None = None
    max_sequences: int | None = None
    step_tokens: int | None = None
    graphs: bool = True


def build_engine(
    checkpoint: Checkpoint, config: ModelConfig, ops: ReferenceOps, options: EngineOptions
) -> Engine:
    """Set up an engine.

    Raises:
        CheckpointError: A tensor is missing or has another shape than the config implies.
        QInferError: The options do not fit the model, or the model not the memory.
        UnsupportedModelError: A weight is quantized in a way that is not covered.
    """
    _check(config, options)
    layout, plan = _plan(checkpoint, config, ops, options)
    decoder = Decoder(checkpoint, config, ops)
    try:
        cache = PagedCache(
            layout,
            plan.blocks,
            plan.max_sequences,
            half=ops.half,
            device=ops.device,
            padding=ops.fixed_steps,
        )
    except RuntimeError:  # the allocators of torch raise nothing narrower on all devices
        raise QInferError(
            f"the KV cache of {plan.kv_bytes / 1e9:,.2f} GB cannot be reserved",
            hint="Lower --memory, --ctx-size or --kv-bits.",
        ) from None
    engine = Engine(
        decoder,
        cache,
        vocab_size=options.vocab_size,
        stop_ids=options.stop_ids,
        context_tokens=plan.context_tokens,
        max_sequences=plan.max_sequences,
        step_tokens=_step_tokens(options, ops),
        ends_at_context=options.context_policy == "stop",
    )
    engine.decode_with(
        Decoding.of(
            decoder,
            cache,
            vocab_size=options.vocab_size,
            positions=plan.context_tokens,
            graphs=options.graphs,
        )
    )
    return engine


def _step_tokens(options: EngineOptions, ops: ReferenceOps) -> int:
    return options.step_tokens or step_tokens_on(ops.device)


def _check(config: ModelConfig, options: EngineOptions) -> None:
    limit, asked = config.context_tokens(options.context_tokens), options.context_tokens
    if options.context_policy == "stop":
        return
    if config.rope is None:
        raise QInferError(
            f"--context-policy {options.context_policy} needs rotary positions; this model has "
            f"learned ones, and {limit:,} of them",
            hint="Leave it out: generation then ends at the end of the context.",
        )
    if asked is not None and asked <= SINK_TOKENS:
        raise QInferError(f"--ctx-size {asked} leaves no window to slide", hint="Use a larger one.")


def _reach(policy: ContextPolicy, context_tokens: int) -> Reach | None:
    if policy == "stop":
        return None
    sinks = SINK_TOKENS if policy == "sinks" else 0
    return Reach(context_tokens - sinks, sinks)


def _plan(
    checkpoint: Checkpoint, config: ModelConfig, ops: ReferenceOps, options: EngineOptions
) -> tuple[CacheLayout, MemoryPlan]:
    """What fits. Where a context that slides has to shrink, layers may come to see equally far."""
    budget, policy = options.memory_bytes, options.context_policy
    limit = config.context_tokens(options.context_tokens)
    while True:
        layout = CacheLayout.of(config, options.formats, context=_reach(policy, limit))
        plan = plan_memory(
            replace(config, max_position_embeddings=limit),
            layout,
            weights_bytes=weights_bytes(checkpoint, config, maps_tables=ops.maps_tables),
            budget_bytes=default_budget(ops.device) if budget is None else budget,
            device=ops.device,
            step_tokens=_step_tokens(options, ops),
            max_sequences=options.max_sequences,
            context_tokens=options.context_tokens,
        )
        if policy == "stop" or plan.context_tokens == limit:
            return layout, plan
        limit = plan.context_tokens


def weights_bytes(checkpoint: Checkpoint, config: ModelConfig, *, maps_tables: bool = True) -> int:
    """Bytes of the weights that a forward pass reads.

    An embedding that is not the head as well is left out where it is mapped: few rows are touched.
    """
    arch = TABLE[config.architecture]
    prefix = prefix_in(checkpoint.tensors, arch)
    is_read = config.tie_word_embeddings or not maps_tables
    mapped = set() if is_read else {f"{prefix}{arch.embedding}.weight"}
    return sum(info.nbytes for name, info in checkpoint.tensors.items() if name not in mapped)
