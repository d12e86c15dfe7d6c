import json
import re
from collections.abc import Sequence
from itertools import groupby, pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from qinfer.checkpoint.streaming import TextStream
from qinfer.checkpoint.tokenizer import Tokenizer
from qinfer.errors import PromptError

CORPUS = ["Hello world, the cat sat on the mat.", "aab aaab abc naïve café 👍 日本語\n"] * 4


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool 日>"])
    return Tokenizer(backend, {})


def sentencepiece(*, strip: bool = True) -> Tokenizer:
    backend = Backend(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        limit_alphabet=30,
        special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in special]
    state["pre_tokenizer"] = None
    return Tokenizer(Backend.from_str(json.dumps(state)), {})


def metaspace() -> Tokenizer:
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=90, special_tokens=["<unk>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend, {})


BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece()
METASPACE = metaspace()
TOKENIZERS = {
    "byte-level": BYTE_LEVEL,
    "sentencepiece": SENTENCEPIECE,
    "sentencepiece, no strip": sentencepiece(strip=False),
    "metaspace": METASPACE,
}
STOPS = st.lists(st.text("ab the", min_size=1, max_size=5), max_size=3)


def stream(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    prompt_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
) -> str:
    stream = TextStream(tokenizer, prompt_ids=prompt_ids, stop=stop)
    pieces = [stream.push(token_id) for token_id in ids]
    return "".join([*pieces, stream.finish()])


def tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    kept = [i for i in ids if i not in tokenizer.special_ids]
    return [token for i in kept if (token := tokenizer.backend.id_to_token(i)) is not None]


def byte_runs(tokenizer: Tokenizer, ids: Sequence[int]) -> list[bytes]:
    """The runs of byte tokens in the ids of a SentencePiece tokenizer."""
    found = [re.fullmatch(r"<0x(..)>", token) for token in tokens(tokenizer, ids)]
    runs = [list(run) for is_byte, run in groupby(found, key=bool) if is_byte]
    return [bytes(int(match[1], 16) for match in run if match) for run in runs]


def is_mixed(run: bytes) -> bool:
    """Whether a run holds both whole characters and bytes that are none."""
    kept = run.decode(errors="ignore").encode()
    return kept not in (b"", run)


def cut(text: str, stops: Sequence[str]) -> str:
    return text[: min([text.find(stop) for stop in stops if stop in text], default=len(text))]


@given(data=st.data(), name=st.sampled_from(sorted(TOKENIZERS)), stops=STOPS)
def test_valid_text_streams_as_it_decodes(data: st.DataObject, name: str, stops: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    words = st.sampled_from([*"ab ▁\n日👍é", "the ", " cat", "aab", "  ", "<tool 日>", "</s>"])
    text = "".join(data.draw(st.lists(words, max_size=20)))
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    assert stream(tokenizer, ids) == whole
    assert stream(tokenizer, ids, stop=stops) == cut(whole, stops)


@given(st.lists(st.integers(0, 310), max_size=30), STOPS)
@example([0xC3 + 2, 300], [])
def test_random_byte_level_ids(ids: list[int], stops: list[str]) -> None:
    whole = BYTE_LEVEL.decode(ids)
    # Bytes of an unfinished character at the end become one U+FFFD there and nothing here.
    got = stream(BYTE_LEVEL, ids)
    assert got == whole or got + "\N{REPLACEMENT CHARACTER}" == whole
    assert stream(BYTE_LEVEL, ids, stop=stops) == cut(got, stops)


@given(st.lists(st.integers(0, 340) | st.integers(258, 340), max_size=30), STOPS)
def test_random_sentencepiece_ids(ids: list[int], stops: list[str]) -> None:
    assume(not any(map(is_mixed, byte_runs(SENTENCEPIECE, ids))))
    got = stream(SENTENCEPIECE, ids)
    rest = SENTENCEPIECE.decode(ids).removeprefix(got)
    assert got + rest == SENTENCEPIECE.decode(ids)
    assert rest in [n * "\N{REPLACEMENT CHARACTER}" for n in range(4)]
    assert stream(SENTENCEPIECE, ids, stop=stops) == cut(got, stops)


@given(st.lists(st.integers(0, 340) | st.integers(258, 340), max_size=30))
def test_all_valid_characters_of_mixed_byte_runs_are_kept(ids: list[int]) -> None:
    got = stream(SENTENCEPIECE, ids)
    for run in byte_runs(SENTENCEPIECE, ids):
        for character in run.decode(errors="ignore").strip(" "):
            assert character in got


@given(st.lists(st.integers(0, 100), max_size=30), STOPS)
def test_random_ids_of_another_decoder(ids: list[int], stops: list[str]) -> None:
    whole = METASPACE.decode(ids)
    assert stream(METASPACE, ids) == whole
    assert stream(METASPACE, ids, stop=stops) == cut(whole, stops)


@given(
    name=st.sampled_from(["byte-level", "sentencepiece", "metaspace"]),
    prompt=st.sampled_from(["the cat", "a", "日本 日本 日本 日本 日本 日本 👍", "a ", "</s>the"]),
    text=st.sampled_from(["the cat sat", "日 👍", "  a", "</s> on"]),
)
def test_continuing_a_prompt(name: str, prompt: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(text)
    whole = tokenizer.decode([*prompt_ids, *ids])
    before = tokenizer.decode(prompt_ids)
    assert before + stream(tokenizer, ids, prompt_ids=prompt_ids) == whole


def test_leading_space_is_kept_only_after_a_prompt() -> None:
    ids = SENTENCEPIECE.encode("cat")
    assert stream(SENTENCEPIECE, ids) == "cat"
    assert stream(SENTENCEPIECE, ids, prompt_ids=SENTENCEPIECE.encode("the")) == " cat"
    assert stream(SENTENCEPIECE, ids, prompt_ids=[1]) == "cat"  # a prompt of BOS alone


def test_emoji_appears_with_its_last_byte() -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        prompt_ids = tokenizer.encode("a")
        ids = tokenizer.encode("a🦜")[len(prompt_ids) :]
        out = TextStream(tokenizer, prompt_ids=prompt_ids)
        shown = [out.push(i) for i in ids]
        assert len(shown) > 1
        assert shown == [""] * (len(ids) - 1) + ["🦜"]


def test_invalid_bytes_are_not_held_forever() -> None:
    bad = SENTENCEPIECE.backend.token_to_id("<0xFF>")
    out = TextStream(SENTENCEPIECE)
    assert out.push(bad) == "\N{REPLACEMENT CHARACTER}"
    start = SENTENCEPIECE.backend.token_to_id("<0xF0>")
    shown = "".join(out.push(start) for _ in range(50))
    assert len(shown) == 49
    lead = BYTE_LEVEL.backend.token_to_id("ð")  # byte F0
    out = TextStream(BYTE_LEVEL)
    assert len("".join(out.push(lead) for _ in range(50))) == 49


@pytest.mark.parametrize("after", ["<0xFF>", "a", "<0xE2>"])
def test_unfinished_character_in_the_middle(after: str) -> None:
    ids = [SENTENCEPIECE.backend.token_to_id(token) for token in ("<0xE2>", "<0x82>", after, "b")]
    shown = stream(SENTENCEPIECE, ids)
    assert shown == SENTENCEPIECE.decode(ids)
    assert shown.startswith("\N{REPLACEMENT CHARACTER}" * 2)
    ids = [BYTE_LEVEL.backend.token_to_id(token) for token in ("â", "Ĥ", "b")]
    assert stream(BYTE_LEVEL, ids) == BYTE_LEVEL.decode(ids) == "\N{REPLACEMENT CHARACTER}b"


def test_real_replacement_character_is_text() -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        ids = tokenizer.encode("a\N{REPLACEMENT CHARACTER}")
        assert stream(tokenizer, ids) == "a\N{REPLACEMENT CHARACTER}"


def test_incomplete_character_at_the_end_is_dropped() -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        assert stream(tokenizer, tokenizer.encode("a🦜")[:-1]) == "a"


def test_special_tokens_are_skipped_inside_a_character() -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        *head, last = tokenizer.encode("🦜")
        assert stream(tokenizer, [*head, 1, last]) == "🦜"


def letters(text: str) -> list[int]:
    ids = [BYTE_LEVEL.backend.token_to_id(letter.replace(" ", "Ġ")) for letter in text]
    assert None not in ids
    return ids


@pytest.mark.parametrize(
    ("text", "stops", "expected", "found"),
    [
        ("xaaaby", ["aab"], "xa", "aab"),
        ("xaaa", ["aab"], "xaaa", None),
        ("one two three", ["three", "two"], "one ", "two"),
        ("one two", ["wo", "two"], "one ", "two"),
        ("one two", ["tw", "two"], "one ", "tw"),
        ("abcde", ["bcd", "abcde"], "", "abcde"),
        ("abcdx", ["bcd", "abcde"], "a", "bcd"),
        ("abcd", ["bcd", "abcde"], "a", "bcd"),
        ("end", ["end"], "", "end"),
        ("en", ["end"], "en", None),
    ],
)
def test_stop_strings(text: str, stops: list[str], expected: str, found: str | None) -> None:
    for ids in (letters(text), BYTE_LEVEL.encode(text)):
        out = TextStream(BYTE_LEVEL, stop=stops)
        shown = "".join(out.push(i) for i in ids) + out.finish()
        assert (shown, out.stop_string, out.stopped) == (expected, found, found is not None)


def test_nothing_comes_after_a_stop() -> None:
    out = TextStream(BYTE_LEVEL, stop=["ab"])
    assert [out.push(i) for i in letters("xabyz")] == ["x", "", "", "", ""]
    assert out.finish() == ""


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_are_never_half_printed(text: str, stops: list[str]) -> None:
    out = TextStream(BYTE_LEVEL, stop=stops)
    shown = [""]
    for token_id in letters(text):
        shown.append(shown[-1] + out.push(token_id))
    assert all(cut(text, stops).startswith(part) for part in shown)
    # Text is held back only as long as it may be the beginning of a stop string.
    for read, part in enumerate(shown):
        held = cut(text[:read], stops)[len(part) :]
        assert not held or any(stop.startswith(held[:1]) for stop in stops)
    assert all(after.startswith(before) for before, after in pairwise(shown))


def test_stop_string_in_the_prompt_does_not_count() -> None:
    prompt = BYTE_LEVEL.encode("a stop")
    assert stream(BYTE_LEVEL, BYTE_LEVEL.encode(" x"), prompt_ids=prompt, stop=["stop"]) == " x"
    assert stream(BYTE_LEVEL, letters("p"), prompt_ids=letters("sto"), stop=["stop"]) == "p"


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(PromptError, match="empty"):
        TextStream(BYTE_LEVEL, stop=[""])


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_long_texts_are_decoded_in_short_windows(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    lengths = []
    decode = tokenizer.backend.decode

    class Counting:
        def __getattr__(self, attribute: str) -> object:
            return getattr(tokenizer.backend, attribute)

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            lengths.append(len(ids))
            return decode(ids, skip_special_tokens=skip_special_tokens)

    ids = tokenizer.encode("the cat sat on the mat " * 50)
    counted = Tokenizer(tokenizer.backend, {})
    counted.backend = Counting()  # type: ignore[assignment]
    assert stream(counted, ids) == decode(ids, skip_special_tokens=True)
    assert max(lengths, default=0) < 20
