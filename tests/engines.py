"""Engines over tiny models, for tests."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.config import ModelConfig
from qinfer.engine.assembly import EngineOptions, build_engine
from qinfer.engine.engine import Engine
from qinfer.ops.reference import ReferenceOps
from qinfer.quant.kv import KVFormat


def engine_of(
    directory: Path,
    ops: ReferenceOps,
    *,
    bits: int = 16,
    stop_ids: Collection[int] = (),
    **options: Any,
) -> Engine:
    """An engine over a model directory, without its tokenizer."""
    config = ModelConfig.read(directory)
    return build_engine(
        Checkpoint(directory),
        config,
        ops,
        EngineOptions(
            vocab_size=config.vocab_size,
            stop_ids=frozenset(stop_ids),
            formats=(KVFormat(bits, bits),) * config.num_hidden_layers,
            **{"max_sequences": 4, "memory_bytes": 1 << 30} | options,
        ),
    )
