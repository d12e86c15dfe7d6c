"""Carrying out a plan: stream the weights, shard by shard, into a directory that appears when done.

All is written to `OUT.part`; the finished directory is renamed to `OUT`. So `OUT` is a complete
model or does not exist, and what an interruption leaves behind says by its name that it is not
one. `qinfer-progress.json` in it lists the shards that are finished (written as `.part`, fsynced,
renamed) and what they were made from; the same conversion goes on behind them. It marks the
directory as ours, so it goes last, after the renaming.

Memory: a matrix is read, quantized and written in runs of rows, so the peak is one run, or one
whole tensor where the source stores it transposed.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qinfer
from qinfer.checkpoint.opening import PROGRESS_NAME, existing_path
from qinfer.checkpoint.record import RECORD_NAME
from qinfer.checkpoint.safetensors import INDEX_NAME, ShardWriter
from qinfer.config import read_json
from qinfer.errors import CheckpointError
from qinfer.quant import affine, nf4
from qinfer.quant.spec import NF4, Affine, Dense
from qinfer_converters.plan import Plan, TensorPlan
from qinfer_converters.source import Source

_RUN_WEIGHTS = 4 * 2**20  # weights handled at a time; fp32 temporaries are a few times 16 MB
_SPARE_BYTES = 64 * 2**20  # tokenizer, configuration, and room to breathe


def check_output(out: Path, *, force: bool) -> None:
    """Refuse an output that would overwrite something.

    Raises:
        CheckpointError: `out` is a model and `force` is not set, or is something else, or cannot
            be a directory's name.
    """
    for path in (out, _part_directory(out)):
        found = existing_path(str(path))
        if path.is_symlink() or (found is not None and not path.is_dir()):
            raise CheckpointError(
                f"{path} exists and is not a directory", hint="Move it away or name another output."
            )
    if not out.exists() or not any(out.iterdir()):
        return
    if not (out / RECORD_NAME).is_file():
        raise CheckpointError(
            f"{out} is not empty and was not written by qinfer",
            hint="Name a directory that does not exist yet; qinfer will not replace this one.",
        )
    known = {RECORD_NAME, PROGRESS_NAME, *read_json(out / RECORD_NAME).get("sha256", ())}
    for path in out.rglob("*"):
        if path.is_file() and path.relative_to(out).as_posix() not in known:
            raise CheckpointError(
                f"{path} was not written by qinfer, and replacing the model would remove it",
                hint="Move it away or name another output.",
            )
    if not force and not (out / PROGRESS_NAME).is_file():  # if so, all but its last step was done
        raise CheckpointError(
            f"{out} already holds a converted model", hint="Use --force to replace it."
        )


def check_disk(plan: Plan, out: Path) -> None:
    """Refuse to begin what will not fit.

    Raises:
        CheckpointError: Not enough free space beside `out` for what is still to be written.
    """
    parent = next(p for p in out.absolute().parents if p.exists())
    done = sum(p.stat().st_size for p in _part_directory(out).glob("*.safetensors"))
    needed = plan.nbytes - done + _SPARE_BYTES
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise CheckpointError(
            f"{parent} has {free / 1e6:,.0f} MB free, the conversion needs {needed / 1e6:,.0f} MB",
            hint="Free some space or name an output on another disk.",
        )


def convert(
    source: Source, plan: Plan, out: Path, *, progress: Callable[[int], object] = lambda _: None
) -> None:
    """Write the converted model; continue an earlier attempt at the same.

    Args:
        source: What the plan was made from.
        plan: From `make_plan`.
        out: Directory to create. A converted model that is there is replaced at the end.
        progress: Called with numbers of bytes written, those of earlier attempts included.

    Raises:
        CheckpointError: The weights hold NaN or infinite values (then nothing is left behind),
            or the disk is full or not writable (then the same call continues), or `out` is
            something else than a converted model.
    """
    out = out.absolute()
    check_output(out, force=True)
    part, identity = _part_directory(out), _identity(source, plan)
    try:
        with _locked(part):
            finished = _finished_shards(part, identity)
            for name, tensors in zip(plan.shard_names(), plan.shards, strict=True):
                if name in finished:
                    progress(sum(t.nbytes for t in tensors))
                    continue
                _write_shard(source, tensors, part / name, progress)
                finished[name] = _sha256(part / name)
                _record_progress(part, identity, finished)
            _finish(source, plan, part, finished)
            _publish(part, out)
    except _BadWeights as error:
        shutil.rmtree(part)
        raise CheckpointError(str(error), hint=error.hint) from None
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or part} cannot be written: {error.strerror}",
            hint="Make room or fix permissions; the same command then continues.",
        ) from None


class _BadWeights(CheckpointError):
    """The source's values cannot be quantized."""


def _part_directory(out: Path) -> Path:
    return out.with_name(out.name + ".part")


def _identity(source: Source, plan: Plan) -> str:
    """Changes when anything does that a finished shard depends on."""
    layout = [[(t.source, str(t.format), str(t.outputs)) for t in shard] for shard in plan.shards]
    text = json.dumps([qinfer.__version__, source.fingerprint, layout])
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def _locked(part: Path) -> Iterator[None]:
    """Make the working directory, or take over what is left of an interrupted conversion."""
    if part.exists() and not _is_unfinished(part):
        raise CheckpointError(
            f"{part} is in the way and is not an unfinished conversion",
            hint="Move it away or name another output.",
        )
    part.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(part, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone when the process is
        yield
    except BlockingIOError:
        raise CheckpointError(
            f"another process is writing {part}", hint="Wait for it, or name another output."
        ) from None
    finally:
        os.close(descriptor)


def _finished_shards(part: Path, identity: str) -> dict[str, str]:
    """The sha256 of each shard that an earlier attempt at the same finished; others are removed."""
    try:
        state = read_json(part / PROGRESS_NAME)
    except CheckpointError:
        state = {}  # there is none, or it was torn by a crash: nothing can be trusted
    shards = state.get("shards")
    if state.get("identity") == identity and isinstance(shards, dict):
        return {n: digest for n, digest in shards.items() if (part / n).is_file()}
    _record_progress(part, identity, {})
    _clear(part, keep={PROGRESS_NAME})
    return {}


def _clear(directory: Path, keep: set[str]) -> None:
    for path in directory.iterdir():
        if path.name in keep:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _is_unfinished(part: Path) -> bool:
    """Whether a conversion left it behind, perhaps before it could write its first record."""
    if not part.is_dir():
        return False
    names = {p.name for p in part.iterdir()}
    return PROGRESS_NAME in names or names <= {PROGRESS_NAME + ".part"}


def _record_progress(part: Path, identity: str, shards: dict[str, str]) -> None:
    _write_json(part / PROGRESS_NAME, {"identity": identity, "shards": shards})


def _write_shard(
    source: Source,
    tensors: list[TensorPlan],
    path: Path,
    progress: Callable[[int], object],
) -> None:
    temporary = path.with_name(path.name + ".part")
    declared = {name: what for t in tensors for name, what in t.outputs.items()}
    writer = ShardWriter(temporary, declared)
    try:
        for tensor in tensors:
            for name, start, rows in _converted(source, tensor):
                writer.write(name, start, rows)
                progress(rows.nbytes)
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    temporary.replace(path)
    _sync_directory(path.parent)


def _converted(source: Source, tensor: TensorPlan) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (output name, first row, rows) for all that is written of one tensor."""
    fmt = tensor.format
    if isinstance(fmt, Dense):
        yield from _dense(source, tensor)
        return
    for start, rows in _matrix_rows(source, tensor):
        if isinstance(fmt, Affine):
            yield from _affine_rows(tensor, fmt, start, rows)
        else:
            yield from _nf4_rows(tensor, fmt, start, rows)
    yield from _constants(tensor, fmt)


def _runs(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(64, _RUN_WEIGHTS // max(columns, 1) // 64 * 64)  # whole NF4 blocks: 64 divides
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _dense(source: Source, tensor: TensorPlan) -> Iterator[tuple[str, int, Tensor]]:
    ((name, (dtype, shape)),) = tensor.outputs.items()
    columns = shape[1] if len(shape) > 1 else 1
    for start, stop in _runs(shape[0], columns):
        rows = source.read(tensor.source, start, stop).to(dtype)
        _require_finite(tensor.source, rows)
        yield name, start, rows


def _matrix_rows(source: Source, tensor: TensorPlan) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, rows) of the matrix as [outputs, inputs]."""
    n, k = tensor.shape
    whole = source.read(tensor.source, 0, k).t() if tensor.transposed else None
    for start, stop in _runs(n, k):
        rows = source.read(tensor.source, start, stop) if whole is None else whole[start:stop]
        rows = rows.float()
        _require_finite(tensor.source, rows)
        yield start, rows


def _require_finite(name: str, rows: Tensor) -> None:
    if not bool(rows.isfinite().all()):
        raise _BadWeights(
            f"{name} holds NaN or infinite values",
            hint="The checkpoint is damaged, or its values do not fit 16 bits; download it again.",
        )


def _affine_rows(
    tensor: TensorPlan, fmt: Affine, start: int, rows: Tensor
) -> Iterator[tuple[str, int, Tensor]]:
    scale_name = f"{tensor.module}.weight_scale"
    q, scale = affine.quantize(rows, fmt.bits, fmt.group_size, tensor.outputs[scale_name][0])
    _require_finite(tensor.source, scale)
    yield f"{tensor.module}.weight_packed", start, affine.pack(q, fmt.bits)
    yield scale_name, start, scale


def _nf4_rows(
    tensor: TensorPlan, fmt: NF4, start: int, rows: Tensor
) -> Iterator[tuple[str, int, Tensor]]:
    first = start * tensor.shape[1]
    packed, absmax = nf4.quantize(rows, fmt.block_size)
    yield f"{tensor.module}.weight", first // 2, packed
    yield f"{tensor.module}.weight.absmax", first // fmt.block_size, absmax


def _constants(tensor: TensorPlan, fmt: Affine | NF4) -> Iterator[tuple[str, int, Tensor]]:
    n, k = tensor.shape
    if isinstance(fmt, Affine):
        yield f"{tensor.module}.weight_shape", 0, torch.tensor([n, k])
        return
    weight = f"{tensor.module}.weight"
    yield f"{weight}.quant_map", 0, torch.tensor(nf4.CODE)
    state = nf4.state_tensor((n, k), fmt.dtype, fmt.block_size)
    yield f"{weight}.{nf4.STATE_SUFFIX}", 0, state


def _finish(source: Source, plan: Plan, part: Path, digests: dict[str, str]) -> None:
    """Write all but the weights; the record comes last."""
    _clear(part, keep={*digests, PROGRESS_NAME})  # an attempt may have been interrupted here
    names = plan.shard_names()
    if len(names) > 1:
        weight_map = {
            output: name
            for name, tensors in zip(names, plan.shards, strict=True)
            for tensor in tensors
            for output in tensor.outputs
        }
        index = {"metadata": {"total_size": plan.nbytes}, "weight_map": weight_map}
        _write_json(part / INDEX_NAME, index)
    for name, content in source.files.items():
        data = content if isinstance(content, bytes) else content.read_bytes()
        _write(part / name, data)
    if source.generation_config:
        _write_json(part / "generation_config.json", source.generation_config)
    _write_json(part / "config.json", plan.config)
    written = {p.relative_to(part).as_posix(): p for p in part.rglob("*") if p.is_file()}
    others = {n: _sha256(p) for n, p in written.items() if n not in {*digests, PROGRESS_NAME}}
    _write_json(part / RECORD_NAME, _record(source, plan, digests | others))
    _sync_directory(part)


def _record(source: Source, plan: Plan, digests: dict[str, str]) -> dict[str, Any]:
    kv_cache = {} if plan.kv_format is None else {"kv_cache": dataclasses.asdict(plan.kv_format)}
    return {
        "format_version": 1,
        "qinfer_version": qinfer.__version__,
        "source": source.label,
        "source_fingerprint": source.fingerprint,
        "scheme": plan.scheme,
        "group_size": plan.group_size,
        "parameters": plan.parameters,
        "bits_per_weight": round(plan.bits_per_weight, 3),
        **kv_cache,
        "tensors": {t.module: str(t.format) for t in plan.tensors if len(t.shape) == 2},
        "sha256": dict(sorted(digests.items())),
    }


def _publish(part: Path, out: Path) -> None:
    """Put the finished directory in place; an older model goes only when the new one is there."""
    check_output(out, force=True)  # again: hours may have passed
    old = None
    if out.exists() and any(out.iterdir()):
        old = Path(tempfile.mkdtemp(prefix=f"{out.name}.old-", dir=out.parent))
        out.replace(old / out.name)
    part.replace(out)
    (out / PROGRESS_NAME).unlink()
    _sync_directory(out.parent)
    if old is not None:
        shutil.rmtree(old)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    _write(path, text.encode(errors="backslashreplace"))  # a lone surrogate stays a JSON escape


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_directory(path: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
