"""Text to token ids and back, as the checkpoint's own `tokenizer.json` says.

A thin layer over the `tokenizers` library that gives the ids that `AutoTokenizer` of transformers 5
gives for the same directory. Chat templates live in `chat.py`, incremental decoding in
`streaming.py`.
"""

import json
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qinfer.errors import CheckpointError, PromptError

if TYPE_CHECKING:
    import tokenizers

_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_SLOW_FILES = ("tokenizer.model", "vocab.json", "merges.txt")
_SAVE_HINT = (
    "Write one with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR), "
    "or copy it from the original model."
)


class Tokenizer:
    """A checkpoint's tokenizer.

    Whether raw text gets a BOS token is decided by the post-processor in `tokenizer.json` alone. An
    `add_bos_token` in `tokenizer_config.json` is ignored, as transformers 5 ignores it whenever a
    `tokenizer.json` exists: files of old models often contradict each other there.

    Args:
        backend: A tokenizer of the `tokenizers` library; its padding and truncation are turned off.
        config: The content of `tokenizer_config.json`.
    """

    def __init__(self, backend: "tokenizers.Tokenizer", config: dict[str, Any]) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.named_tokens = named_tokens(config)
        self._add_special_tokens(config)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._delimited: dict[str, tokenizers.Tokenizer] = {}

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read `tokenizer.json` and, if present, `tokenizer_config.json`.

        Raises:
            CheckpointError: A file is missing, empty or malformed.
        """
        backend = _read_backend(directory)
        config = read_tokenizer_config(directory)
        if _is_rebuilt_by_transformers(directory, config, backend):
            _use_llama_spacing(backend, config)
        return cls(backend, config)

    @cached_property
    def vocab_size(self) -> int:
        """The highest id plus one, added tokens included."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def require_vocabulary(self, vocab_size: int, directory: Path) -> None:
        """Refuse a model that has no embedding for some of the tokens.

        Raises:
            CheckpointError: Its vocabulary is smaller.
        """
        if self.vocab_size > vocab_size:
            raise CheckpointError(
                f"{directory}: the tokenizer has {self.vocab_size:,} tokens, the model's "
                f"vocabulary only {vocab_size:,}",
                hint="Tokenizer and model do not belong together; download the model again.",
            )

    @property
    def bos_token_id(self) -> int | None:
        """The id of the configured `bos_token`, if there is one."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of the configured `eos_token`; a model may stop on others too."""
        return self._named_id("eos_token")

    @cached_property
    def special_token_strings(self) -> frozenset[str]:
        """The texts of all special tokens, those that `decode` skips."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(added[id_].content for id_ in self.special_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode text; special tokens spelled out in it become special tokens.

        Args:
            text: Any text, never truncated.
            add_special_tokens: Add what the post-processor adds, usually BOS or nothing. A BOS that
                the text itself begins with is not doubled.

        Raises:
            PromptError: The text is not valid Unicode.
        """
        encoding = _encode(self.backend, text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        added = encoding.special_tokens_mask[:1] == [1]
        if added and self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            return ids[1:]
        return ids

    def encode_with_literals(self, text: str, literals: Sequence[tuple[int, int]]) -> list[int]:
        """Encode text of which some spans are ordinary text, whatever special tokens they spell.

        The spans are tokenized together with the text around them, as if their letters had no
        special meaning. Nothing is added at the ends.

        Args:
            text: The text.
            literals: Spans `(start, end)` in order, without overlap.

        Raises:
            PromptError: The vocabulary yields a special token even from ordinary text.
        """
        if not literals:
            return self.encode(text, add_special_tokens=False)
        filler, delimiter = unused_characters(text)
        masked = _fill(text, literals, filler)
        encoding = _encode(self.backend, masked, add_special_tokens=False)
        special = [
            (id_, span)
            for id_, span in zip(encoding.ids, encoding.offsets, strict=True)
            if id_ in self.special_ids
        ]
        ordinary = _fill(text, [span for _, span in special], delimiter, keep_length=False)
        backend = self._with_delimiter(delimiter)
        delimiter_id = backend.token_to_id(delimiter)
        genuine = iter([id_ for id_, _ in special])
        ids: list[int] = []
        for id_ in _encode(backend, ordinary, add_special_tokens=False).ids:
            if id_ in self.special_ids:
                token = self.backend.id_to_token(id_)
                raise PromptError(
                    f"{token!r} in the prompt cannot be told apart from the control token",
                    hint=f"Remove {token!r} from the prompt.",
                )
            ids.append(next(genuine) if id_ == delimiter_id else id_)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text without special tokens and without any clean-up of spaces."""
        return str(self.backend.decode(list(ids), skip_special_tokens=True))

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def _add_special_tokens(self, config: dict[str, Any]) -> None:
        # Tokens that only the configuration calls special. No ids are made: the model has no rows
        # for them.
        from tokenizers import AddedToken

        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
        listed = extra.values() if isinstance(extra, dict) else extra
        others = [_content(token) for token in listed] if isinstance(listed, Iterable) else []
        names = [*self.named_tokens.values(), *(others if not isinstance(extra, str) else [])]
        known = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        self.backend.add_special_tokens(
            [
                AddedToken(name, special=True, normalized=False)
                for name in dict.fromkeys(names)
                if name and name not in known and self.backend.token_to_id(name) is not None
            ]
        )

    def _with_delimiter(self, delimiter: str) -> "tokenizers.Tokenizer":
        # A copy that knows one token more and takes special tokens for ordinary text. Copying takes
        # about a third of a second, and only prompts that spell a special token need it.
        if delimiter not in self._delimited:
            from tokenizers import AddedToken

            backend = deepcopy(self.backend)
            backend.add_tokens([AddedToken(delimiter, special=False, normalized=False)])
            backend.encode_special_tokens = True
            self._delimited[delimiter] = backend
        return self._delimited[delimiter]


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """Read `tokenizer_config.json`, and `special_tokens_map.json` where transformers does.

    Returns:
        The configuration, empty if the directory has none.

    Raises:
        CheckpointError: A file is not a JSON object.
    """
    config = _read_object(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_object(directory / "special_tokens_map.json")
    return config


def named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Collect `bos_token`, `eos_token`, … of a tokenizer configuration as plain strings."""
    tokens = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
    return {key: text for key, text in tokens.items() if text is not None}


def unused_characters(text: str) -> tuple[str, str]:
    """Find two private-use characters that do not occur in a text."""
    used = set(text)
    free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
    return next(free), next(free)


def _content(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    valid = isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
    return value if isinstance(value, str) and valid else None


def _fill(
    text: str, spans: Sequence[tuple[int, int]], filler: str, *, keep_length: bool = True
) -> str:
    parts, end = [], 0
    for start, stop in spans:
        parts += [text[end:start], filler * (stop - start) if keep_length else filler]
        end = stop
    return "".join([*parts, text[end:]])


def _encode(
    backend: "tokenizers.Tokenizer", text: str, *, add_special_tokens: bool
) -> "tokenizers.Encoding":
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"The prompt is not valid Unicode text: character {error.start} is a lone surrogate",
            hint="Save the prompt as UTF-8.",
        ) from error
    return backend.encode(text, add_special_tokens=add_special_tokens)


def _read_backend(directory: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    path = directory / "tokenizer.json"
    if not path.is_file():
        slow = [name for name in _SLOW_FILES if (directory / name).is_file()]
        found = f"; found only {', '.join(slow)}" if slow else ""
        raise CheckpointError(f"{path} does not exist{found}", hint=_SAVE_HINT)
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty", hint=_SAVE_HINT)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.encode("a")  # where parts do not fit together, the library only panics here
    except BaseException as error:  # the library raises nothing narrower
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        message = f"{path} is not a valid tokenizer: {error}"
        raise CheckpointError(message, hint=_SAVE_HINT) from error
    return backend


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}", hint="Check the file's permissions."
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not valid JSON: {error}", hint="Copy it again from the original model."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a JSON {type(value).__name__}, expected an object",
            hint="Copy it again from the original model.",
        )
    return value


def _is_rebuilt_by_transformers(
    directory: Path, config: dict[str, Any], backend: "tokenizers.Tokenizer"
) -> bool:
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    if name != "LlamaTokenizer" or _mentions(backend.pre_tokenizer, "ByteLevel"):
        return False
    if _mentions(backend.decoder, "ByteLevel"):
        return False
    return _read_object(directory / "config.json").get("model_type") == "llama"


def _mentions(component: Any, name: str) -> bool:
    return component is not None and f'"{name}"' in component.__getstate__().decode()


def _use_llama_spacing(backend: "tokenizers.Tokenizer", config: dict[str, Any]) -> None:
    """Put the "▁" of a Llama SentencePiece model where transformers 5 puts it.

    For these models transformers takes only the vocabulary from `tokenizer.json` and makes the rest
    anew. It matters after special tokens: most such files add a "▁" there, and transformers does
    not, unless the configuration says `legacy`.
    """
    from tokenizers import decoders, pre_tokenizers

    prefix = config.get("add_prefix_space") is not False
    scheme = "never" if not prefix else "always" if config.get("legacy") else "first"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
