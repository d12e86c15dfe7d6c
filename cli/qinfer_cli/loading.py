"""From the options of a command to the model that it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qinfer.generation import LanguageModel


def load_model(directory: Path, options: dict[str, Any], **settings: Any) -> LanguageModel:
    """Open a model; its warnings go to stderr.

    Args:
        directory: Where it is.
        options: `device`, `threads`, `kv_bits`, `quiet` and, if the command has them,
            `device_options` of the command line.
        settings: More of `LanguageModel`'s arguments.

    Raises:
        QInferError: It cannot be run, or not in this memory.
    """
    import numpy  # noqa: F401  (loaded by torch, it would swallow a Ctrl-C)

    from qinfer.generation import LanguageModel  # only now: an error in the arguments shows at once
    from qinfer.ops import DeviceOptions
    from qinfer.ops.cpu.kernels import library
    from qinfer.ops.cpu.threads import set_threads
    from qinfer.quant.kv import KVFormat

    set_threads(options["threads"])
    kv_format = KVFormat(*options["kv_bits"]) if options["kv_bits"] else None
    model = LanguageModel(
        directory,
        device=options["device"],
        kv_format=kv_format,
        device_options=DeviceOptions(**options.get("device_options", {})),
        **settings,
    )
    if options["quiet"]:
        return model
    model.warn_with(warn)
    _warn_of_slow_operations(model, library() is not None)
    return model


def _warn_of_slow_operations(model: LanguageModel, has_cpu_kernels: bool) -> None:
    from qinfer.ops import has_triton

    on_gpu = model.engine.decoder.ops.device.type == "cuda"
    if on_gpu and not has_triton():
        warn(
            "Triton is not installed, so without kernels for the GPU; decoding takes many times as "
            "long. On Linux torch brings it along; elsewhere pip install triton-windows may help."
        )
    if not on_gpu and not has_cpu_kernels:
        warn(
            "qinfer was installed without a C compiler, so without its CPU kernels; "
            "decoding takes many times as long. qinfer doctor says how to get them."
        )


def warn(message: str) -> None:
    """Print a warning, above a progress bar if there is one."""
    from tqdm import tqdm

    tqdm.write(f"Warning: {message}", file=sys.stderr)
