"""The vocabulary of a GGUF file: token strings, their kinds, and the special ids.

Shared by the tokenizer and the model configuration; how text is split is in `tokenizer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from qinfer.errors import CheckpointError
from qinfer_converters.gguf.metadata import Metadata

# Control tokens that end a turn or a document, whether or not a key says so.
# fmt: off
_STOP_TEXTS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
    "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "<|return|>", "<|call|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
})
# fmt: on


class TokenKind(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids of special tokens, `None` for those that the model does not have.

    Attributes:
        bos: Begins a text.
        eos: Ends a text.
        unk: Stands for what cannot be encoded.
        pad: Fills up batches.
        stops: All ids after which generation ends, `eos` first.
    """

    bos: int | None
    eos: int | None
    unk: int | None
    pad: int | None
    stops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token strings and what they are.

    Attributes:
        tokens: By id.
        kinds: `[len(tokens)]`, values of `TokenKind`.
        special: Ids with a meaning of their own.
    """

    tokens: list[str]
    kinds: NDArray[np.int64]
    special: SpecialIds

    def ids_of(self, kind: TokenKind) -> list[int]:
        """All ids of one kind."""
        return [int(index) for index in np.flatnonzero(self.kinds == kind)]

    def text(self, index: int | None) -> str | None:
        """The string of an id that may be missing."""
        return None if index is None else self.tokens[index]


def read_vocabulary(metadata: Metadata, rows: int) -> Vocabulary:
    """Read and check the tokens, their kinds and the special ids.

    Args:
        metadata: The file's key-value pairs.
        rows: Rows of the token embedding, an upper limit of the number of tokens.

    Raises:
        CheckpointError: Something is missing or contradicts itself.
    """
    tokens = metadata.require_strings("tokenizer.ggml.tokens")
    if not 0 < len(tokens) <= rows:
        raise CheckpointError(
            f"{metadata.path}: {len(tokens)} tokens, but the embedding has {rows} rows"
        )
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    seen: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if (first := seen.setdefault(token, index)) != index:
            raise CheckpointError(f"{metadata.path}: tokens {first} and {index} are both {token!r}")
    kinds = np.full(len(tokens), TokenKind.NORMAL, dtype=np.int64)
    declared = metadata.numbers("tokenizer.ggml.token_type")
    if declared is not None:
        if len(declared) != len(tokens):
            raise CheckpointError(
                f"{metadata.path}: {len(tokens)} tokens, but {len(declared)} token types"
            )
        kinds = declared.astype(np.int64)
    return Vocabulary(tokens, kinds, _special_ids(metadata, tokens, kinds, seen))


def _special_ids(
    metadata: Metadata, tokens: list[str], kinds: NDArray[np.int64], ids: dict[str, int]
) -> SpecialIds:
    sentencepiece = metadata.string("tokenizer.ggml.model") == "llama"

    def find(name: str, default: int | None = None) -> int | None:
        index = metadata.integer(f"tokenizer.ggml.{name}_token_id")
        index = default if index is None else index
        return index if index is not None and 0 <= index < len(tokens) else None  # -1 is none

    eos = find("eos", 2 if sentencepiece else None)
    by_text = (ids[text] for text in sorted(_STOP_TEXTS & ids.keys(), key=ids.__getitem__))
    marked = (index for index in by_text if kinds[index] == TokenKind.CONTROL)
    stops = dict.fromkeys((eos, find("eot"), find("eom"), *marked))
    return SpecialIds(
        bos=find("bos", 1 if sentencepiece else None),
        eos=eos,
        unk=find("unknown", 0 if sentencepiece else None),
        pad=find("padding"),
        stops=tuple(index for index in stops if index is not None),
    )
