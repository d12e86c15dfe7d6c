"""From what a user typed to an opened source: directory, GGUF file, or either from the hub."""

from __future__ import annotations

from pathlib import Path

from qinfer.checkpoint import hub
from qinfer.checkpoint.chat import ChatTemplate
from qinfer.checkpoint.opening import existing_path
from qinfer.checkpoint.tokenizer import Tokenizer
from qinfer.config import token_ids
from qinfer.errors import CheckpointError
from qinfer.sampling import resolve_params
from qinfer_converters.gguf.source import GGUFSource
from qinfer_converters.huggingface import HuggingFaceSource
from qinfer_converters.source import Source

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def open_source(text: str, *, progress: bool = True) -> Source:
    """Open what SOURCE names; reads headers only, and downloads first if it must.

    Args:
        text: A directory, a .gguf file, `org/name[@revision]` or `org/name:file.gguf`.
        progress: Show download bars on stderr.

    Raises:
        CheckpointError: It does not exist, is damaged, or is of a kind that is never loaded.
        UnsupportedModelError: It cannot be converted.
    """
    path = existing_path(text)
    if path is not None and path.is_dir():
        return _checked(HuggingFaceSource(path), path)
    if text.lower().endswith(_PICKLES):
        raise CheckpointError(
            f"{text} is a pickle file, and pickle files are never loaded: they can run code",
            hint="Use a safetensors or GGUF version of the model.",
        )
    if path is not None:
        if path.suffix.lower() == ".safetensors":
            raise CheckpointError(
                f"{text} is one file of a model", hint="Name the directory that holds it."
            )
        return GGUFSource(path)
    ref = hub.parse(text)
    if ref is None:
        raise CheckpointError(
            f"{text} does not exist",
            hint="Name a directory, a .gguf file, or a hub id such as org/name.",
        )
    found = hub.download(ref, progress=progress)
    label = f"{ref} at {hub.describe(ref, found)['commit']}"
    if found.is_dir():
        return _checked(HuggingFaceSource(found, label), found)
    return GGUFSource(found, label)


def _checked(source: HuggingFaceSource, directory: Path) -> HuggingFaceSource:
    """Refuse a model whose tokenizer, template or defaults would only fail when it is run."""
    tokenizer = Tokenizer.load(directory)
    vocab_size = source.config.get("vocab_size")
    if isinstance(vocab_size, int):
        tokenizer.require_vocabulary(vocab_size, directory)
    ChatTemplate.load(directory)
    resolve_params({}, None, source.generation_config)
    token_ids(source.generation_config, "eos_token_id", origin="generation_config.json")
    return source
