"""Tokenizers rebuilt from GGUF keys, id by id against the tokenizers they were written from."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from qinfer.errors import CheckpointError, UnsupportedModelError
from qinfer_converters.gguf.metadata import Metadata
from qinfer_converters.gguf.pretokenizers import PRE_TOKENIZERS
from qinfer_converters.gguf.source import GGUFSource
from qinfer_converters.gguf.tokenizer import tokenizer_files
from qinfer_converters.gguf.vocabulary import read_vocabulary
from tests.gguf_files import (
    CORPUS,
    EXTRA,
    as_f32,
    byte_level_keys,
    llama_keys,
    llama_tensors,
    train_byte_level,
    write,
)

TEXTS = [*CORPUS, *EXTRA]
Split, ByteLevel, Sequence = (
    pre_tokenizers.Split,
    pre_tokenizers.ByteLevel,
    pre_tokenizers.Sequence,
)
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = CL100K.replace("{1,3}", "")


def gguf_metadata(keys: dict[str, Any]) -> Metadata:
    """Keys as the reader hands them on: number arrays are numpy arrays."""
    return Metadata(
        Path("model.gguf"),
        {
            key: np.array(value)
            if isinstance(value, list) and value and not isinstance(value[0], str)
            else value
            for key, value in keys.items()
            if value is not None
        },
    )


def rebuild(keys: dict[str, Any]) -> dict[str, bytes]:
    metadata = gguf_metadata(keys)
    return tokenizer_files(metadata, read_vocabulary(metadata, 10**6))


def rebuilt(keys: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(rebuild(keys)["tokenizer.json"].decode())


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    plain = ByteLevel(add_prefix_space=False, use_regex=False)
    return Sequence([Split(Regex(pattern), "isolated"), plain])


GPT2 = ByteLevel(add_prefix_space=False)
SMOLLM = Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
BYTE_LEVEL = {
    "gpt-2": (GPT2, None),
    "smollm": (SMOLLM, None),
    "starcoder": (SMOLLM, None),
    "llama-bpe": (split_by(CL100K), None),
    "dbrx": (split_by(CL100K), None),
    "qwen2": (split_by(QWEN2), normalizers.NFC()),
}


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_byte_level_ids_are_those_of_the_original(pre: str) -> None:
    splitter, normalizer = BYTE_LEVEL[pre]
    original = train_byte_level(splitter, ignore_merges=pre == "llama-bpe")
    if normalizer is not None:
        original.normalizer = normalizer
    tokenizer = rebuilt(byte_level_keys(original, pre) | {"tokenizer.ggml.add_bos_token": False})
    special = "Hi<|im_end|>\nthere<|endoftext|>"
    for text in (*TEXTS, special):
        ids = original.encode(text).ids
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == original.decode(
            ids, skip_special_tokens=False
        )
    assert tokenizer.decode(tokenizer.encode(special).ids) == "Hi\nthere"
    assert len(tokenizer.encode(CORPUS[0])) < len(CORPUS[0]) * 0.7  # merges are in use


def test_smollm_splits_every_digit() -> None:
    digits = byte_level_keys(train_byte_level(GPT2), "smollm")
    assert len(rebuilt(digits | {"tokenizer.ggml.pre": "gpt-2"}).encode("12345")) < 5
    assert rebuilt(digits).encode("12345").tokens == list("12345")


def test_ignored_merges_take_a_word_whole() -> None:
    original = train_byte_level(split_by(CL100K))
    keys = byte_level_keys(original, "dbrx")
    keys["tokenizer.ggml.tokens"].append("zqzq")  # no merge leads there
    keys["tokenizer.ggml.token_type"].append(1)
    assert len(rebuilt(keys).encode("zqzq")) > 1
    llama = rebuilt(keys | {"tokenizer.ggml.pre": "llama-bpe"})
    assert llama.encode("zqzq", add_special_tokens=False).tokens == ["zqzq"]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_is_lossless(pre: str) -> None:
    tokenizer = rebuilt(byte_level_keys(train_byte_level(GPT2), pre))
    for text in TEXTS:
        expected = normalizers.NFC().normalize_str(text) if PRE_TOKENIZERS[pre].nfc else text
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


SPLITS = {  # "IT'LL" tells contractions, "12345" numbers, "HelloWorld" cases, "/\n" punctuation
    "gpt-2": ["HelloWorld", "Ġ12345", "Ġ", "ĠIT", "'", "LL", "Ġa", "/", "Ċ"],
    "smollm": ["HelloWorld", "Ġ", "1", "2", "3", "4", "5", "Ġ", "ĠIT", "'", "LL", "Ġa", "/", "Ċ"],
    "llama-bpe": ["HelloWorld", "Ġ", "123", "45", "Ġ", "ĠIT", "'LL", "Ġa", "/Ċ"],
    "qwen2": ["HelloWorld", "Ġ", "1", "2", "3", "4", "5", "Ġ", "ĠIT", "'LL", "Ġa", "/Ċ"],
    "tekken": ["Hello", "World", "Ġ", *"12345", "Ġ", "ĠIT", "'LL", "Ġa", "/Ċ"],
    "gpt-4o": ["Hello", "World", "Ġ", "123", "45", "Ġ", "ĠIT'LL", "Ġa", "/Ċ"],
    "deepseek-llm": ["HelloWorld", "Ġ", *"12345", "Ġ", "ĠIT", "'", "LL", "Ġa", "/", "Ċ"],
    "deepseek-v3": ["HelloWorld", "Ġ", "123", "45", "Ġ", "ĠIT", "'LL", "Ġa", "/Ċ"],
    "default": ["HelloWorld", "Ġ", "123", "45", "Ġ", "ĠIT", "'", "LL", "Ġa", "/", "Ċ"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_words_are_split_as_the_name_says(pre: str) -> None:
    words = PRE_TOKENIZERS[pre].build().pre_tokenize_str("HelloWorld 12345  IT'LL a/\n")
    assert [word for word, _ in words] == SPLITS[pre]


def test_pre_tokenizer_names_are_required_and_checked() -> None:
    keys = byte_level_keys(train_byte_level(GPT2), "made-up")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre made-up") as caught:
        rebuild(keys)
    assert "llama-bpe, " in str(caught.value.hint)
    del keys["tokenizer.ggml.pre"]
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre is missing"):
        rebuild(keys | {"general.architecture": "llama"})
    text = "1234 IT'LL"
    qwen = rebuilt(keys | {"tokenizer.ggml.pre": "qwen2"}).encode(text).ids
    assert rebuilt(keys | {"general.architecture": "qwen3"}).encode(text).ids == qwen


def test_unused_tokens_at_the_end_are_dropped_and_user_tokens_are_kept() -> None:
    keys = byte_level_keys(train_byte_level(GPT2), "gpt-2")
    count = len(keys["tokenizer.ggml.tokens"])
    keys["tokenizer.ggml.tokens"] += ["<tool> x", "[PAD1]", "[PAD2]"]
    keys["tokenizer.ggml.token_type"] += [4, 5, 5]
    tokenizer = rebuilt(keys)
    assert tokenizer.get_vocab_size() == count + 1
    ids = tokenizer.encode("a<tool> xb").ids
    assert ids[1] == count
    assert tokenizer.decode(ids) == "a<tool> xb"  # it is no special token
    kept = rebuilt(keys | {"tokenizer.ggml.padding_token_id": count + 1})
    assert kept.get_vocab_size() == count + 2


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
@pytest.mark.parametrize("bos", [None, True, False])
@pytest.mark.parametrize("eos", [None, True])
def test_first_and_last_tokens(pre: str, bos: bool | None, eos: bool | None) -> None:
    keys = byte_level_keys(train_byte_level(GPT2), pre) | {
        "tokenizer.ggml.add_bos_token": bos,
        "tokenizer.ggml.add_eos_token": eos,
    }
    expect_bos = pre == "llama-bpe" if bos is None else bos
    encoding = rebuilt(keys).encode("The")
    body = rebuilt(keys).encode("The", add_special_tokens=False).ids
    assert encoding.ids == [0] * expect_bos + body + [1] * bool(eos)
    pair = rebuilt(keys).encode("The", "dog")
    assert pair.ids.count(0) == 2 * expect_bos
    config = json.loads(rebuild(keys)["tokenizer_config.json"])
    assert (config["add_bos_token"], config["add_eos_token"]) == (expect_bos, bool(eos))
    del keys["tokenizer.ggml.bos_token_id"]
    assert 0 not in rebuilt(keys).encode("The").ids


# SentencePiece ---------------------------------------------------------------------------------


def sentencepiece_keys() -> dict[str, Any]:
    """A vocabulary with scores, as SentencePiece trains it: characters, then merged pieces."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3] + [6] * 256
    text = " ".join(CORPUS[:2] + CORPUS[3:]).replace(" ", "▁")
    pieces = sorted({text[at : at + size] for size in (2, 3, 4) for at in range(len(text) - 4)})
    rng = np.random.default_rng(1)
    pieces = [pieces[index] for index in rng.permutation(len(pieces))]
    characters = sorted(set(text))
    scores = [0.0] * len(tokens) + [float(-rank) for rank in range(len(pieces) + len(characters))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + pieces + characters,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds + [1] * (len(pieces) + len(characters)),
    }


def sentencepiece_encode(keys: dict[str, Any], text: str, *, prefix: bool = True) -> list[int]:
    """SentencePiece's BPE: join the neighbours with the best score, the first among equals."""
    tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    ids = {token: index for index, token in enumerate(tokens)}
    score = {
        token: keys["tokenizer.ggml.scores"][index]
        for index, token in enumerate(tokens)
        if kinds[index] == 1
    }
    symbols = list(("▁" if prefix and text else "") + text.replace(" ", "▁"))
    while True:
        pairs = [(symbols[at] + symbols[at + 1], at) for at in range(len(symbols) - 1)]
        known = [(-score[joined], at) for joined, at in pairs if joined in score]
        if not known:
            break
        at = min(known)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    found = []
    for symbol in symbols:
        if symbol in score:
            found.append(ids[symbol])
        else:
            found += [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


SPM_KEYS = sentencepiece_keys()
SPM = rebuilt(SPM_KEYS)


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_ids(text: str) -> None:
    ids = SPM.encode(text, add_special_tokens=False).ids
    assert ids == sentencepiece_encode(SPM_KEYS, text)
    assert SPM.decode(ids) == text
    assert SPM.encode(text).ids == [1, *ids]  # a first token unless the file says otherwise


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(alphabet=" \n\tTheqickbrown fxs12'é中🎉", max_size=40))
def test_sentencepiece_ids_of_any_text(text: str) -> None:
    ids = SPM.encode(text, add_special_tokens=False).ids
    assert ids == sentencepiece_encode(SPM_KEYS, text)
    assert SPM.decode(ids) == text


def test_sentencepiece_without_space_prefix() -> None:
    tokenizer = rebuilt(SPM_KEYS | {"tokenizer.ggml.add_space_prefix": False})
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == sentencepiece_encode(SPM_KEYS, text, prefix=False)
        assert tokenizer.decode(ids) == text


def test_sentencepiece_with_merges_uses_them() -> None:
    tokens = SPM_KEYS["tokenizer.ggml.tokens"]
    pair = next(token for token in tokens[259:] if len(token) == 2 and "▁" not in token)
    keys = {key: value for key, value in SPM_KEYS.items() if not key.endswith("scores")}
    tokenizer = rebuilt(keys | {"tokenizer.ggml.merges": [" ".join(pair)]})
    assert tokenizer.encode(pair, add_special_tokens=False).tokens == ["▁", pair]


def test_sentencepiece_user_tokens_match_typed_spaces() -> None:
    keys = dict(SPM_KEYS)
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], "<a▁b>", "<c>"]
    keys["tokenizer.ggml.token_type"] = [*keys["tokenizer.ggml.token_type"], 4, 3]
    keys["tokenizer.ggml.scores"] = [*keys["tokenizer.ggml.scores"], 0.0, 0.0]
    count = len(keys["tokenizer.ggml.tokens"])
    tokenizer = rebuilt(keys)
    ids = tokenizer.encode("x<a b><c>", add_special_tokens=False).ids
    assert ids[-2:] == [count - 2, count - 1]
    assert tokenizer.decode(ids) == "x<a b>"


# Files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "pre"),
    [
        ("llama", "smollm"),
        ("llama", "llama-bpe"),
        ("llama", None),  # SentencePiece
        ("mistral", None),
        ("mistral", "tekken"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen2"),
        ("gpt2", "gpt-2"),
    ],
)
def test_transformers_loads_what_was_written(
    tmp_path: Path, model_type: str, pre: str | None
) -> None:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}é\n{% endfor %}"
    keys = SPM_KEYS if pre is None else byte_level_keys(train_byte_level(GPT2), pre)
    keys = llama_keys() | keys | {"tokenizer.chat_template": template}
    keys |= {"tokenizer.chat_template.tool_use": "named", "tokenizer.chat_template.../x": "no"}
    tensors = llama_tensors()
    tensors["token_embd.weight"] = np.zeros((len(keys["tokenizer.ggml.tokens"]), 256), np.float32)
    source = GGUFSource(write(tmp_path / "m.gguf", keys, as_f32(tensors)))
    directory = tmp_path / "model"
    for name, content in source.files.items():
        assert isinstance(content, bytes)
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert {path.name for path in directory.rglob("*.*")} == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "tool_use.jinja",
    }
    loaded = AutoTokenizer.from_pretrained(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert loaded(text).input_ids == ids
        expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert loaded.decode(ids, skip_special_tokens=True) == expected
    assert loaded.eos_token_id == source.config["eos_token_id"]
    assert loaded.bos_token_id == source.config["bos_token_id"]
    turns = [{"role": "user", "content": "hi"}]
    assert loaded.apply_chat_template(turns, tokenize=False) == "user: hié\n"


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
    "no model": ({"tokenizer.ggml.model": None}, r"tokenizer\.ggml\.model is missing"),
    "no merges": ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges is missing"),
    "twice": ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "tokens 0 and 2 are both 'a'"),
    "types": ({"tokenizer.ggml.token_type": [1, 1]}, "but 2 token types"),
    "type of types": ({"tokenizer.ggml.token_type": ["x"]}, "expected an array of numbers"),
    "unspaced merge": ({"tokenizer.ggml.merges": ["ab"]}, "merge 0 of .* 'ab'"),
    "unknown piece": ({"tokenizer.ggml.merges": ["a €"]}, "does not join two tokens"),
    "unknown union": ({"tokenizer.ggml.merges": ["! !"]}, "does not join two tokens"),
    "too many": ({"tokenizer.ggml.tokens": ["x"] * 1_000_001}, "embedding has 1000000 rows"),
    "scores": (SPM_KEYS | {"tokenizer.ggml.scores": [0.5]}, "but 1 scores"),
    "no scores": (SPM_KEYS | {"tokenizer.ggml.scores": None}, r"tokenizer\.ggml\.scores is miss"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_vocabularies_are_named(case: str) -> None:
    changes, message = BROKEN[case]
    keys = byte_level_keys(train_byte_level(GPT2), "gpt-2")
    if changes.get("tokenizer.ggml.model") == "llama":
        del keys["tokenizer.ggml.merges"]
    with pytest.raises(CheckpointError, match=message):
        rebuild(keys | changes)


@pytest.mark.parametrize("model", ["t5", "bert", "rwkv", "none"])
def test_other_kinds_of_tokenizers_are_named(model: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"model {model} is not supported"):
        rebuild(SPM_KEYS | {"tokenizer.ggml.model": model})
