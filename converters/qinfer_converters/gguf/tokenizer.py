"""Tokenizer files of a Hugging Face directory from the keys of a GGUF file.

Two kinds are rebuilt exactly: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`). Which
tokens there are is read in `vocabulary`, the splitting rules of byte-level BPE are listed in
`pretokenizers`.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
)

from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer_converters.gguf.metadata import Metadata
from qinfer_converters.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from qinfer_converters.gguf.vocabulary import SpecialIds, TokenKind, Vocabulary

_SPACE = "▁"  # SentencePiece's stand-in for a space
_PRE_OF_ARCHITECTURE = {"gpt2": "gpt-2", "qwen2": "qwen2", "qwen3": "qwen2"}  # if no key says so
_TEMPLATE = "tokenizer.chat_template"


def tokenizer_files(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, bytes]:
    """Build `tokenizer.json`, `tokenizer_config.json` and the chat templates.

    Args:
        metadata: The file's key-value pairs.
        vocabulary: The file's tokens.

    Returns:
        Content by path relative to the output directory.

    Raises:
        UnsupportedModelError: The tokenizer is of a kind that cannot be rebuilt exactly.
        CheckpointError: A key is missing or contradicts another.
    """
    kind = metadata.require_string("tokenizer.ggml.model")
    if kind == "gpt2":
        pre = _pre_tokenizer(metadata)
        tokenizer = _byte_level(metadata, vocabulary, pre)
        add_bos = pre.add_bos
    elif kind == "llama":
        vocabulary = _with_plain_spaces(vocabulary)
        tokenizer = _sentencepiece(metadata, vocabulary)
        add_bos = True
    else:
        raise UnsupportedModelError(
            f"{metadata.path}: tokenizer.ggml.model {kind} is not supported",
            hint="Supported are gpt2 and llama. Convert the model from its safetensors files.",
        )
    special = vocabulary.special
    declared = metadata.flag("tokenizer.ggml.add_bos_token")
    add_bos = (add_bos if declared is None else declared) and special.bos is not None
    add_eos = bool(metadata.flag("tokenizer.ggml.add_eos_token")) and special.eos is not None
    template = _post_processor(vocabulary, add_bos=add_bos, add_eos=add_eos)
    if kind == "gpt2":
        offsets = processors.ByteLevel(trim_offsets=False)
        tokenizer.post_processor = processors.Sequence([offsets, template])
    else:
        tokenizer.post_processor = template
    _add_tokens(tokenizer, vocabulary)
    config = _config(vocabulary, add_bos=add_bos, add_eos=add_eos)
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode(),
        **_chat_templates(metadata),
    }


def _pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    name = metadata.string("tokenizer.ggml.pre")
    if name is None:
        name = _PRE_OF_ARCHITECTURE.get(metadata.string("general.architecture") or "")
    if name is None:
        raise UnsupportedModelError(
            f"{metadata.path}: key tokenizer.ggml.pre is missing, so it is unknown how this "
            "tokenizer splits text",
            hint="The file is old; download or convert it again.",
        )
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{metadata.path}: tokenizer.ggml.pre {name} is not supported",
            hint=f"Supported are {', '.join(sorted(PRE_TOKENIZERS))}.",
        )
    return PRE_TOKENIZERS[name]


def _byte_level(metadata: Metadata, vocabulary: Vocabulary, pre: PreTokenizer) -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it."""
    ids = {token: index for index, token in enumerate(_without_padding(vocabulary))}
    merges = _declared_merges(metadata, ids)
    if merges is None:
        raise metadata.missing("tokenizer.ggml.merges")
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=pre.ignore_merges))
    if (normalizer := pre.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Metadata, vocabulary: Vocabulary) -> Tokenizer:
    """SentencePiece BPE with byte fallback, as Llama 2 and Mistral have it."""
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    merges = _declared_merges(metadata, ids)
    if merges is None:
        merges = _merges_from_scores(metadata, vocabulary)
    byte_fallback = bool(vocabulary.ids_of(TokenKind.BYTE))
    unk = vocabulary.text(vocabulary.special.unk)
    tokenizer = Tokenizer(
        models.BPE(ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=byte_fallback)
    )
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix") is not False
    normalize: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*normalize, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _with_plain_spaces(vocabulary: Vocabulary) -> Vocabulary:
    """Restore the spaces of user-defined tokens, which are matched in the text as it is typed."""
    tokens = list(vocabulary.tokens)
    taken = set(tokens)
    for index in vocabulary.ids_of(TokenKind.USER_DEFINED):
        plain = tokens[index].replace(_SPACE, " ")
        if plain not in taken:
            tokens[index] = plain
    return replace(vocabulary, tokens=tokens)


def _without_padding(vocabulary: Vocabulary) -> list[str]:
    """The tokens without the unused ones at the end, which only fill up the embedding."""
    count = len(vocabulary.tokens)
    special = vocabulary.special
    keep = (special.bos, special.eos, special.unk, special.pad, *special.stops)
    needed = max((index + 1 for index in keep if index is not None), default=1)
    while count > needed and vocabulary.kinds[count - 1] == TokenKind.UNUSED:
        count -= 1
    return vocabulary.tokens[:count]


def _declared_merges(metadata: Metadata, ids: dict[str, int]) -> list[tuple[str, str]] | None:
    """The pairs of `tokenizer.ggml.merges`, if the file has them."""
    lines = metadata.strings("tokenizer.ggml.merges")
    if lines is None:
        return None
    merges = []
    for index, line in enumerate(lines):
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or left not in ids or right not in ids or left + right not in ids:
            raise CheckpointError(
                f"{metadata.path}: merge {index} of tokenizer.ggml.merges, {line!r}, does not "
                "join two tokens into a token"
            )
        merges.append((left, right))
    return merges


def _merges_from_scores(metadata: Metadata, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union has the best score: all of those, in order."""
    scores = metadata.numbers("tokenizer.ggml.scores")
    if scores is None:
        raise metadata.missing("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{metadata.path}: {len(vocabulary.tokens)} tokens, but {len(scores)} scores"
        )
    normal = {vocabulary.tokens[index]: index for index in vocabulary.ids_of(TokenKind.NORMAL)}
    ranks: list[float] = (-scores.astype(np.float64)).tolist()
    ranked = [
        (ranks[index], index, token[:cut], token[cut:])
        for token, index in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    return [(left, right) for _, _, left, right in sorted(ranked)]


def _post_processor(
    vocabulary: Vocabulary, *, add_bos: bool, add_eos: bool
) -> processors.TemplateProcessing:
    """Puts the first and last tokens around each text."""
    special = vocabulary.special
    before = [special.bos] if add_bos and special.bos is not None else []
    after = [special.eos] if add_eos and special.eos is not None else []
    texts = {index: vocabulary.tokens[index] for index in before + after}

    def around(part: str) -> list[str]:
        return [*(texts[index] for index in before), part, *(texts[index] for index in after)]

    try:
        return processors.TemplateProcessing(
            single=around("$A"),
            pair=[f"{part}:0" for part in around("$A")] + [f"{part}:1" for part in around("$B")],
            special_tokens=[(text, index) for index, text in texts.items()],
        )
    except ValueError:
        names = ", ".join(repr(text) for text in texts.values())
        raise UnsupportedModelError(
            f"the tokens around a text have names that cannot be used: {names}",
            hint="The file is damaged; download it again.",
        ) from None


def _add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Declare the tokens that are found in a text before anything is split."""
    special = vocabulary.special
    controls = {index for index in _named(special) if index is not None}
    controls |= {*vocabulary.ids_of(TokenKind.CONTROL), *vocabulary.ids_of(TokenKind.UNKNOWN)}
    for index in sorted(controls | set(vocabulary.ids_of(TokenKind.USER_DEFINED))):
        token = AddedToken(vocabulary.tokens[index], normalized=False, special=index in controls)
        if index in controls:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])


def _named(special: SpecialIds) -> tuple[int | None, ...]:
    return (special.bos, special.eos, special.unk, special.pad, *special.stops)


def _config(vocabulary: Vocabulary, *, add_bos: bool, add_eos: bool) -> dict[str, object]:
    """The content of `tokenizer_config.json`."""
    special = vocabulary.special
    named = {
        "bos_token": special.bos,
        "eos_token": special.eos,
        "unk_token": special.unk,
        "pad_token": special.pad,
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        **{key: vocabulary.tokens[index] for key, index in named.items() if index is not None},
    }


def _chat_templates(metadata: Metadata) -> dict[str, bytes]:
    """The default template and the named ones, as files."""
    files = {}
    default = metadata.string(_TEMPLATE)
    if default is not None:
        files["chat_template.jinja"] = default.encode()
    for key in metadata:
        name = key.removeprefix(f"{_TEMPLATE}.")
        if name != key and re.fullmatch(r"\w[\w-]*", name, re.ASCII):
            content = metadata.string(key) or ""
            files[f"additional_chat_templates/{name}.jinja"] = content.encode()
    return files
