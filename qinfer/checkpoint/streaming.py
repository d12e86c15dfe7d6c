"""Token ids into text as they arrive: whole characters only, stop strings never half printed.

Which bytes a token stands for is read off the tokenizer's decoder, so that each token is looked at
once. Ending on EOS or on a token limit is the engine's business.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from qinfer.checkpoint.tokenizer import Tokenizer
from qinfer.errors import PromptError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PROMPT_TAIL_TOKENS = 16
_MAX_HELD_TOKENS = 8


class TextStream:
    """Turns token ids into text, piece by piece, and stops at stop strings.

    All that `push` and `finish` return, joined, is the text that `Tokenizer.decode` gives for all
    ids, cut before the first stop string, with two exceptions. A character whose last bytes never
    came is dropped instead of shown as U+FFFD. And where SentencePiece byte tokens go from valid to
    invalid UTF-8 without another token between them, the valid characters stay; `decode` turns the
    whole run into U+FFFD.

    Args:
        tokenizer: The tokenizer that the ids belong to.
        prompt_ids: What precedes the ids, if the text is to continue it: then a space at the very
            start of the new text is kept. Without it the ids are decoded as a text of their own.
        stop: Strings that end the text. The one that begins first counts, and it is not returned.

    Attributes:
        stop_string: The stop string that was found, or None so far.

    Raises:
        PromptError: A stop string is empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
    ) -> None:
        if not all(stop):
            raise PromptError("A stop string is empty", hint="Give at least one character.")
        self.stop_string: str | None = None
        self._special_ids = tokenizer.special_ids
        self._decoder = _decoder(tokenizer)
        self._stops = sorted(set(stop), key=len)
        self._pending = ""
        visible = [i for i in prompt_ids[-_PROMPT_TAIL_TOKENS:] if i not in self._special_ids]
        for token_id in visible:
            self._decoder.push(token_id)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; nothing more will be returned."""
        return self.stop_string is not None

    def push(self, token_id: int) -> str:
        """Add a token and return the text that became final, often empty."""
        if self.stopped or token_id in self._special_ids:
            return ""
        return self._scan(self._decoder.push(token_id))

    def finish(self) -> str:
        """Return the text held back so far; call it once, after the last token."""
        if self.stopped:
            return ""
        return self._scan(self._decoder.finish(), last=True)

    def _scan(self, text: str, *, last: bool = False) -> str:
        self._pending += text
        found = [(at, stop) for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        start, stop = min(found, key=lambda hit: hit[0], default=(len(self._pending), ""))
        # A longer stop string may have begun before the one found, or at the end of the text.
        held = len(self._pending) if last else self._first_partial_stop()
        if stop and start <= held:
            self.stop_string = stop
            held = start
        final, self._pending = self._pending[:held], self._pending[held:]
        return final

    def _first_partial_stop(self) -> int:
        longest = len(self._stops[-1]) if self._stops else 0
        end = len(self._pending)
        for at in range(max(0, end - longest + 1), end):
            tail = self._pending[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return end


class _Decoder(Protocol):
    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class _ByteLevelDecoder:
    """Every token is a string of bytes; a character may begin in one and end in another."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._id_to_token = tokenizer.backend.id_to_token
        self._utf8 = _Utf8(replace_each_byte=False)

    def push(self, token_id: int) -> str:
        token = self._id_to_token(token_id) or ""
        table = _byte_level_table()
        try:
            data = bytes([table[character] for character in token])
        except KeyError:  # an added token holds plain text
            data = token.encode()
        return self._utf8.push(data)

    def finish(self) -> str:
        return ""


class _SentencePieceDecoder:
    """Tokens are text with "▁" for spaces, or single bytes spelled like `<0xE2>`.

    Args:
        tokenizer: The tokenizer.
        strip: How many spaces at the start of the whole text are not part of it.
    """

    def __init__(self, tokenizer: Tokenizer, strip: int) -> None:
        self._id_to_token = tokenizer.backend.id_to_token
        self._utf8 = _Utf8(replace_each_byte=True)
        self._strip = strip

    def push(self, token_id: int) -> str:
        token = self._id_to_token(token_id) or ""
        if match := _BYTE_TOKEN.fullmatch(token):
            text = self._utf8.push(bytes([int(match[1], 16)]))
        elif token:
            text = self._utf8.flush() + token.replace("▁", " ")
        else:
            return ""
        while self._strip and text.startswith(" "):
            text = text[1:]
            self._strip -= 1
        if text:
            self._strip = 0
        return text

    def finish(self) -> str:
        return ""


class _WindowDecoder:
    """Any other decoder: decode a short window again for each token and return what is new.

    A window begins with the tokens of the last text returned, so that what a decoder does at the
    start of a text happens there once and not before every token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._window: list[int] = []
        self._shown = 0

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        held = len(self._window) - self._shown
        return self._take(hold=held < _MAX_HELD_TOKENS)

    def finish(self) -> str:
        return self._take(hold=False).rstrip(_REPLACEMENT)

    def _take(self, *, hold: bool) -> str:
        before = self._decode(self._window[: self._shown])
        text = self._decode(self._window)
        if hold and (len(text) <= len(before) or text.endswith(_REPLACEMENT)):
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return text[len(before) :]


class _Utf8:
    """Decodes bytes as they come, keeping back at most the three of an incomplete character.

    Args:
        replace_each_byte: Whether invalid bytes become one U+FFFD each, or one per sequence.
    """

    def __init__(self, *, replace_each_byte: bool) -> None:
        self._each = replace_each_byte
        self._rest = b""

    def push(self, data: bytes) -> str:
        """Return the characters that are complete."""
        data = self._rest + data
        self._rest = b""
        text = ""
        while data:
            try:
                return text + data.decode()
            except UnicodeDecodeError as error:
                text += data[: error.start].decode()
                if error.reason == "unexpected end of data":
                    self._rest = data[error.start :]
                    return text
                text += self._replacement(error.end - error.start)
                data = data[error.end :]
        return text

    def flush(self) -> str:
        """Give up on an incomplete character."""
        count, self._rest = len(self._rest), b""
        return self._replacement(count) if count else ""

    def _replacement(self, count: int) -> str:
        return _REPLACEMENT * (count if self._each else 1)


def _decoder(tokenizer: Tokenizer) -> _Decoder:
    decoder = tokenizer.backend.decoder
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    steps = state["decoders"] if state.get("type") == "Sequence" else [state]
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return _ByteLevelDecoder(tokenizer)
    strip = _sentencepiece_strip(steps)
    return _WindowDecoder(tokenizer) if strip is None else _SentencePieceDecoder(tokenizer, strip)


def _sentencepiece_strip(steps: Sequence[dict[str, Any]]) -> int | None:
    """Tell how many leading spaces a SentencePiece decoder strips; None for another decoder."""
    kinds = [step.get("type") for step in steps]
    if kinds not in (
        ["Replace", "ByteFallback", "Fuse"],
        ["Replace", "ByteFallback", "Fuse", "Strip"],
    ):
        return None
    if (steps[0]["pattern"], steps[0]["content"]) != ({"String": "▁"}, " "):
        return None
    if len(steps) == 3:
        return 0
    strip = steps[3]
    plain = strip["content"] == " " and strip["stop"] == 0
    return int(strip["start"]) if plain else None


@lru_cache(maxsize=1)
def _byte_level_table() -> dict[str, int]:
    """Make GPT-2's table: printable bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if chr(byte) not in table)
    return table | {chr(0x100 + number): byte for number, byte in enumerate(others)}
