import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from qinfer.checkpoint.tokenizer import Tokenizer
from qinfer.errors import CheckpointError, PromptError

CORPUS = ["Hello world, the cat sat on the mat.", "[INST] be nice [/INST] naïve café 👍\n"] * 4
BOS_FIRST = processors.TemplateProcessing(
    single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
)


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def sentencepiece() -> Backend:
    backend = Backend(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<s>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in special]
    return Backend.from_str(json.dumps(state))


def write(directory: Path, backend: Backend, **config: Any) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def reference(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def test_round_trip_and_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, byte_level(), eos_token={"content": "</s>"}))
    text = " naïve 👍\n\nthe  cat"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.special_token_strings == {"<s>", "</s>"}
    assert tokenizer.decode([0, *tokenizer.encode("cat"), 1]) == "cat"


def test_vocab_size_counts_added_tokens(tmp_path: Path) -> None:
    backend = byte_level()
    base = backend.get_vocab_size()
    backend.add_tokens(["<tool>"])
    tokenizer = Tokenizer.load(write(tmp_path, backend))
    assert tokenizer.vocab_size == base + 1
    assert tokenizer.encode("<tool>") == [base]


def test_tokens_absent_from_the_configuration_have_no_id(tmp_path: Path) -> None:
    backend = byte_level()
    tokenizer = Tokenizer.load(write(tmp_path, backend, bos_token=None, eos_token="<nowhere>"))
    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_id is None
    assert tokenizer.vocab_size == backend.get_vocab_size()


def test_special_tokens_map_is_read_for_old_checkpoints(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), bos_token=None, eos_token=None)
    tokens = {"eos_token": {"content": "</s>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    assert Tokenizer.load(tmp_path).eos_token_id == 1


def test_token_that_only_the_configuration_calls_special(tmp_path: Path) -> None:
    backend = byte_level()
    word = backend.encode("the").tokens[0]
    directory = write(tmp_path, backend, pad_token=word)
    ours = Tokenizer.load(directory)
    theirs = reference(directory)
    ids = ours.encode("on the mat")
    assert ids == theirs("on the mat").input_ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) != "on the mat"


@pytest.mark.parametrize("add_bos_token", [True, False, None])
@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizer"])
def test_bos_as_in_transformers(
    tmp_path: Path, add_bos_token: bool | None, in_file: bool, kind: str
) -> None:
    backend = sentencepiece()
    if in_file:
        backend.post_processor = BOS_FIRST
    config = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    directory = write(tmp_path, backend, tokenizer_class=kind, **config)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    ids = Tokenizer.load(directory).encode("the cat")
    assert ids == reference(directory)("the cat").input_ids
    assert (ids[0] == 0) == in_file


def test_bos_in_the_text_is_not_doubled(tmp_path: Path) -> None:
    backend = byte_level()
    backend.post_processor = BOS_FIRST
    tokenizer = Tokenizer.load(write(tmp_path, backend))
    assert tokenizer.encode("<s>cat") == tokenizer.encode("cat")
    assert tokenizer.encode("<s>cat", add_special_tokens=False)[0] == 0
    assert tokenizer.encode("<s><s>", add_special_tokens=False) == [0, 0]


@pytest.mark.parametrize("legacy", [True, False, None])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_spaces_after_special_tokens_as_in_transformers(
    tmp_path: Path, legacy: bool | None, model_type: str
) -> None:
    config = {} if legacy is None else {"legacy": legacy}
    directory = write(tmp_path, sentencepiece(), tokenizer_class="LlamaTokenizer", **config)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours, theirs = Tokenizer.load(directory), reference(directory)
    for text in ("<s>[INST] be</s> nice", " the cat", "the cat", "", "a</s>b"):
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_byte_level_llama_is_left_as_it_is(tmp_path: Path) -> None:
    directory = write(tmp_path, byte_level(), tokenizer_class="LlamaTokenizerFast")
    (directory / "config.json").write_text('{"model_type": "llama"}')
    ids = Tokenizer.load(directory).encode("the cat</s> sat")
    assert ids == byte_level().encode("the cat</s> sat").ids


def test_stored_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=64, pad_token="</s>", pad_id=1)
    tokenizer = Tokenizer.load(write(tmp_path, backend))
    text = "the cat sat on the mat"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert 1 not in tokenizer.encode(text)


def test_literal_span_is_encoded_in_its_context(tmp_path: Path) -> None:
    backend = byte_level()
    tokenizer = Tokenizer.load(write(tmp_path, backend))
    text = "</s>the cat</s> sat</s>"
    ids = tokenizer.encode_with_literals(text, [(11, 15)])
    backend.encode_special_tokens = True
    middle = backend.encode("the cat</s> sat").ids
    assert ids == [1, *middle, 1]
    assert tokenizer.encode(text).count(1) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"{", "not a valid tokenizer"),
        (b'{"model": 3}', "not a valid tokenizer"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not a valid tokenizer"),
    ],
)
def test_broken_tokenizer_file(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)
    assert caught.value.hint is not None


def test_missing_tokenizer_file_says_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"does not exist; found only tokenizer\.model") as e:
        Tokenizer.load(tmp_path)
    assert "save_pretrained" in str(e.value.hint)


@pytest.mark.parametrize(("content", "message"), [("{", "valid JSON"), ("[]", "expected an obj")])
def test_broken_tokenizer_config(tmp_path: Path, content: str, message: str) -> None:
    (write(tmp_path, byte_level()) / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert "tokenizer_config.json" in str(caught.value)


def test_lone_surrogate_is_a_prompt_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, byte_level()))
    with pytest.raises(PromptError, match="character 1 is a lone surrogate"):
        tokenizer.encode("a\udc80")
