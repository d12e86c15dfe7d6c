"""From the options of a command to the model that it runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qinfer.generation import LanguageModel


def load_model(options: dict[str, Any], *, max_sequences: int | None) -> LanguageModel:
    """Open the model of a command line; its warnings go to stderr.

    Args:
        options: `model`, `quiet`, and what the options of `options` give a command.
        max_sequences: Most that run at once; None is what memory allows.

    Raises:
        QInferError: There is no such model, it cannot be run, or not in this memory.
    """
    from qinfer.checkpoint.opening import find_model

    directory = find_model(options["model"], progress=not options["quiet"])

    import numpy  # noqa: F401  (loaded by torch, it would swallow a Ctrl-C)
    import torch  # only now: an error in the arguments shows at once

    from qinfer.generation import LanguageModel
    from qinfer.ops.cpu.kernels import library
    from qinfer.quant.kv import KVFormat

    if options["threads"] is not None:
        torch.set_num_threads(options["threads"])
    model = LanguageModel(
        directory,
        device=options["device"],
        context_tokens=options["ctx_size"],
        kv_format=KVFormat(*options["kv_bits"]) if options["kv_bits"] else None,
        memory_bytes=options["memory"],
        max_sequences=max_sequences,
        context_policy=options["context_policy"],
        deterministic=options["deterministic"],
    )
    if options["quiet"]:
        return model
    model.warn_with(warn)
    if model.engine.decoder.ops.device.type == "cpu" and library() is None:
        warn(
            "qinfer was installed without a C compiler, so without its CPU kernels; "
            "decoding takes several times as long."
        )
    return model


def warn(message: str) -> None:
    """Print a warning, above a progress bar if there is one."""
    from tqdm import tqdm

    tqdm.write(f"Warning: {message}", file=sys.stderr)
