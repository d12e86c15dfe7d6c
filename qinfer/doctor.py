"""What this installation can do, what is missing, and what to do about it.

Each check looks at one thing and says whether it is in order. Nothing is changed and no network is
used. torch is imported only inside of checks, so that a broken one is a finding.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qinfer.errors import QInferError

if TYPE_CHECKING:
    import torch

    from qinfer.config import ModelConfig
    from qinfer.quant.kv import KVFormat

State = Literal["ok", "warning", "problem"]
_ROOT = Path("/")
_LITTLE_MEMORY_BYTES = 1 << 30
_LITTLE_DISK_BYTES = 5 << 30
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(?:>=\s*(?P<least>[\d.]+))?")
_COMPILERS = ("cc", "gcc", "clang")
_COST = (
    "decoding takes about 4 times as long with 16-bit weights, 10 times with int8, 15 with int4 "
    "and more with nf4"
)  # measured with SmolLM2-135M
_REINSTALL = (
    "install qinfer again from its source, without pip's cache: "
    "pip install --force-reinstall --no-deps --no-cache-dir ."
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found.

    Attributes:
        name: Of what was looked at.
        state: `ok`; `warning`: it works, but less well than it could; `problem`: it does not work.
        text: What there is.
        hint: What to do about it; None if it is in order.
        facts: The same for programs.
        is_fatal: Whether nothing can be run because of it.
    """

    name: str
    state: State
    text: str
    hint: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    is_fatal: bool = False


def examine() -> Iterator[Finding]:
    """Look at everything; ends early where qinfer's own modules cannot be loaded."""
    yield versions()
    broken = libraries()
    if broken is not None:
        yield broken
        return
    for check in (processor, kernels, gpu, memory, huge_pages, hub_cache, hub_access):
        yield check()


def versions() -> Finding:
    """Python, qinfer, and the packages that it needs."""
    found = {"python": platform.python_version()}
    try:
        found["qinfer"], needed = metadata.version("qinfer"), list(_requirements())
    except metadata.PackageNotFoundError:
        text = f"python {found['python']}; qinfer is run from its source and not installed"
        return Finding("versions", "warning", text, "pip install .", dict(found))
    wrong = []
    for name, least in needed:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if _numbers(found[name]) < _numbers(least):
            wrong.append(f"{name} {found[name]} is older than {least}")
    names = ("qinfer", "python", "torch")
    text = ", ".join(f"{name} {found[name]}" for name in names if name in found)
    if wrong:
        hint = "Install qinfer again; pip then brings what it needs."
        text = f"{text}; {', '.join(wrong)}"
        return Finding("versions", "problem", text, hint, dict(found))
    return Finding("versions", "ok", text, facts=dict(found))


def _requirements() -> Iterator[tuple[str, str]]:
    """Name and least version of each package that qinfer needs, extras left out."""
    for line in metadata.requires("qinfer") or ():
        match = _REQUIREMENT.match(line)
        if match and "extra ==" not in line:
            yield match["name"], match["least"] or "0"


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, such as (2, 9) of `2.9.0+cpu`; final zeros mean nothing."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def libraries() -> Finding | None:
    """What keeps qinfer's own modules from being loaded, if anything does."""
    try:
        import qinfer.generation  # noqa: F401  (and with it torch)
    except (ImportError, OSError) as error:  # OSError: of a shared library
        hint = "Install what is named here again; torch as pytorch.org describes."
        text = f"cannot be loaded: {_first_line(error)}"
        return Finding("libraries", "problem", text, hint, is_fatal=True)
    return None


def processor() -> Finding:
    """Model, cores, and how many threads would compute."""
    from qinfer.ops.cpu import threads

    allowed, quota = len(threads.usable_processors()), threads.quota()
    cores, count = threads.usable_cores(), threads.default_threads()
    omp = os.environ.get("OMP_NUM_THREADS") or None
    notes = [f"{_count(cores, 'physical core')} to use", _count(count, "thread")]
    there = os.cpu_count() or allowed
    if allowed < there:
        notes.append(f"this process may use {allowed} of {there} processors")
    if quota < allowed:
        notes.append(f"the container's quota is {quota:g} processors")
    if omp:
        notes.append(f"OMP_NUM_THREADS is {omp}")
    facts = {
        "model": threads.processor_name(),
        "machine": platform.machine(),
        "usable_cores": cores,
        "usable_processors": allowed,
        "quota_processors": quota if quota < float("inf") else None,
        "omp_num_threads": omp,
        "threads": count,
    }
    text = f"{facts['model']}: {', '.join(notes)}"
    if omp and count != cores:
        hint = f"Unset OMP_NUM_THREADS, or pass --threads {cores}."
        return Finding("CPU", "warning", text, hint, facts)
    return Finding("CPU", "ok", text, facts=facts)


def kernels() -> Finding:
    """Whether the compiled kernels are there, and which variant of them runs."""
    from qinfer.ops.cpu import kernels as compiled

    compiler = next(filter(shutil.which, (os.environ.get("CC") or "cc", *_COMPILERS)), None)
    try:
        library = compiled.library()
    except (OSError, AttributeError) as error:  # of another system, or of another version
        text = f"compiled, but they cannot be loaded: {_first_line(error)}"
        facts = {"compiled": True, "variant": None, "compiler": compiler}
        return Finding("kernels", "problem", text, _sentence(_REINSTALL), facts, is_fatal=True)
    variant = None if library is None else compiled.variant(library)
    facts = {"compiled": library is not None, "variant": variant, "compiler": compiler}
    if library is None:
        text = f"not compiled, there was no C compiler at install time; {_COST}"
        hint = f"Now there is one: {_REINSTALL}" if compiler else _get_a_compiler()
        return Finding("kernels", "warning", text, hint, facts)
    if variant is None:
        text = "compiled by an earlier version, which does not say for which processor"
        return Finding("kernels", "warning", text, _sentence(_REINSTALL), facts)
    if variant == "plain" and platform.machine().lower() in ("x86_64", "amd64"):
        text = "compiled; the plain variant runs, since this processor lacks AVX2, FMA or F16C"
        hint = "In a virtual machine, pass the host's processor model through to it."
        return Finding("kernels", "warning", text, hint, facts)
    return Finding("kernels", "ok", f"compiled, the {variant} variant runs", facts=facts)


def _get_a_compiler() -> str:
    how = "xcode-select --install" if platform.system() == "Darwin" else "such as gcc"
    return f"Install a C compiler ({how}), then {_REINSTALL}"


def gpu() -> Finding:
    """The GPU that torch sees, and whether it can be used."""
    import torch

    from qinfer.ops import LEAST_CAPABILITY

    triton = _version_of("triton")
    facts: dict[str, Any] = {"cuda": torch.version.cuda, "triton": triton, "devices": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        return _no_gpu(facts, [_first_line(warning.message) for warning in caught])
    facts["devices"] = [_device(torch, i) for i in range(torch.cuda.device_count())]
    first = facts["devices"][0]  # the one that --device cuda takes
    text = (
        f"{first['name']}, {_gb(first['memory_bytes'])}, compute capability "
        f"{first['capability']}, CUDA {torch.version.cuda}"
    )
    if torch.cuda.get_device_capability(0) < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        text = f"{text}; qinfer supports GPUs from {least} on"
        return Finding("GPU", "problem", text, "Run on the CPU: --device cpu.", facts)
    if triton is None:
        hint = "pip install triton"
        return Finding("GPU", "warning", f"{text}; Triton is not installed", hint, facts)
    return Finding("GPU", "ok", f"{text}, Triton {triton}", facts=facts)


def _no_gpu(facts: dict[str, Any], complaints: list[str]) -> Finding:
    """Why there is none; something is amiss if the driver's device is there."""
    has_driver = (_ROOT / "dev/nvidia0").exists()
    if has_driver and facts["cuda"] is None:
        text = "there is one, but this torch is built for the CPU alone"
        hint = "Install a CUDA build of torch, as pytorch.org describes."
        return Finding("GPU", "warning", text, hint, facts)
    if has_driver:
        text = f"there is one, but torch, built for CUDA {facts['cuda']}, cannot use it"
        text = ": ".join([text, *complaints[:1]])
        hint = "Check that nvidia-smi works, its CUDA version, and CUDA_VISIBLE_DEVICES."
        return Finding("GPU", "warning", text, hint, facts)
    return Finding("GPU", "ok", "none that torch can use; models run on the CPU", facts=facts)


def _device(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
    }


def memory() -> Finding:
    """Main memory, and how much of it is free to us."""
    import torch

    from qinfer.engine.memory import free_bytes

    free, total = free_bytes(torch.device("cpu")), _total_memory_bytes()
    text, facts = f"{_gb(free)} of {_gb(total)} free", {"free_bytes": free, "total_bytes": total}
    if free < _LITTLE_MEMORY_BYTES:
        hint = "Close other programs, or raise the container's limit."
        return Finding("memory", "warning", text, hint, facts)
    return Finding("memory", "ok", text, facts=facts)


def _total_memory_bytes() -> int:
    match = re.search(r"^MemTotal:\s*(\d+) kB", _read("proc/meminfo") or "", re.MULTILINE)
    if match:
        return int(match[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def huge_pages() -> Finding:
    """Whether Linux may give the weights large pages, which are faster to read."""
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    match = re.search(r"\[(\w+)\]", _read(path) or "")
    mode = match[1] if match else None
    facts = {"transparent": mode}
    if mode is None:
        return Finding("huge pages", "ok", "this system has no setting for them", facts=facts)
    if mode == "never":
        text = "transparent huge pages are off; weights are read faster with them"
        hint = f"echo madvise | sudo tee /{path}"
        return Finding("huge pages", "warning", text, hint, facts)
    return Finding("huge pages", "ok", f"transparent huge pages: {mode}", facts=facts)


def hub_cache() -> Finding:
    """Where downloads go, and the space there."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).absolute()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    writable = os.access(existing, os.W_OK | os.X_OK)
    text = f"{_gb(free)} free in {cache}"
    facts = {"directory": str(cache), "free_bytes": free, "writable": writable}
    if not writable:
        hint = "Set HF_HOME to a directory of yours; models in directories run all the same."
        return Finding("hub cache", "warning", f"{cache} cannot be written", hint, facts)
    if free < _LITTLE_DISK_BYTES:
        hint = "Free some space, or set HF_HOME to a directory on another disk."
        return Finding("hub cache", "warning", text, hint, facts)
    return Finding("hub cache", "ok", text, facts=facts)


def hub_access() -> Finding:
    """Whether there is a token for gated models, and whether the hub may be asked at all."""
    from huggingface_hub import constants, get_token

    has_token, offline = get_token() is not None, bool(constants.HF_HUB_OFFLINE)
    facts = {"token": has_token, "offline": offline}
    if offline:
        text = "offline, as HF_HUB_OFFLINE says: only models in the cache are found"
    else:
        text = "a token is set" if has_token else "no token; gated and private models need one"
    return Finding("hub", "ok", text, facts=facts)


def fit(directory: Path, config: ModelConfig, kv_format: KVFormat) -> Finding:
    """Whether a model would run here, and with how long a context.

    Args:
        directory: The model.
        config: Its configuration.
        kv_format: Of its key-value cache.
    """
    from qinfer.cache.paged import CacheLayout
    from qinfer.checkpoint.safetensors import Checkpoint
    from qinfer.engine.assembly import weights_bytes
    from qinfer.engine.engine import step_tokens_on
    from qinfer.engine.memory import default_budget, plan_memory
    from qinfer.quant.kv import BLOCK_TOKENS

    device = _device_to_use()
    layout = CacheLayout.of(config, (kv_format,) * config.num_hidden_layers)
    maps_tables = device.type == "cpu"
    weights = weights_bytes(Checkpoint(directory), config, maps_tables=maps_tables)
    budget = default_budget(device)
    groups = range(len(layout.reaches))
    token = sum(layout.block_bytes(group) for group in groups) / BLOCK_TOKENS
    facts = {
        "directory": str(directory),
        "device": device.type,
        "weights_bytes": weights,
        "kv_bytes_per_token": round(token),
        "budget_bytes": budget,
        "context_tokens": None,
        "max_sequences": None,
    }
    try:
        plan = plan_memory(
            config,
            layout,
            weights_bytes=weights,
            budget_bytes=budget,
            device=device,
            step_tokens=step_tokens_on(device),
        )
    except QInferError as error:
        return Finding("model", "problem", str(error), error.hint, facts, is_fatal=True)
    facts |= {"context_tokens": plan.context_tokens, "max_sequences": plan.max_sequences}
    where = "GPU" if device.type == "cuda" else "CPU"
    text = (
        f"runs on the {where}: {_gb(weights)} of weights, {token:,.0f} B of KV cache a token, "
        f"{plan.context_tokens:,} tokens of context, "
        f"{_count(plan.max_sequences, 'sequence')} at once"
    )
    limit = config.max_position_embeddings
    if plan.context_tokens < limit:
        hint = "Free some memory, or use --kv-bits 8 or 4."
        text = f"{text}; memory does not allow the model's {limit:,}"
        return Finding("model", "warning", text, hint, facts)
    return Finding("model", "ok", text, facts=facts)


def _device_to_use() -> torch.device:
    import torch

    from qinfer.ops import LEAST_CAPABILITY

    usable = torch.cuda.is_available() and torch.cuda.get_device_capability(0) >= LEAST_CAPABILITY
    return torch.device("cuda" if usable else "cpu")


def _version_of(package: str) -> str | None:
    """The version of a package that can be imported."""
    try:
        return metadata.version(package) if importlib.util.find_spec(package) else None
    except metadata.PackageNotFoundError:
        return None


def _read(path: str) -> str | None:
    try:
        return (_ROOT / path).read_text(encoding="utf-8", errors="replace")
    except OSError:  # not there, or not Linux
        return None


def _first_line(error: object) -> str:
    return str(error).strip().split("\n", 1)[0]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:,.2f} GB"
