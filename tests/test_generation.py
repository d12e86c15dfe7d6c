"""A model directory as a whole: prompts to tokens, tokens to text, ends, seeds and figures."""

import itertools
import json
import shutil

import pytest
import torch

from qinfer.errors import CheckpointError, PromptError, QInferError, UnsupportedModelError
from qinfer.generation import LanguageModel, Usage
from qinfer.sampling import SamplingParams
from tests import tiny_models

GREEDY = SamplingParams(temperature=0)
BOS, IM_START, IM_END = 256, 257, 258


def write_tokenizer(directory, **options):
    """The tiny tokenizer, its special tokens at the ids that they declare: 256 to 258."""
    tiny_models.write_tokenizer(directory, **options)
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text())
    for i, token in enumerate(data["added_tokens"]):
        token["id"] = data["model"]["vocab"][token["content"]] = BOS + i
    path.write_text(json.dumps(data))


@pytest.fixture
def directory(tiny_model, tmp_path):
    """A model of the test's own."""
    path = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), path)
    write_tokenizer(path)
    return path


def edit(path, **changes):
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(value | changes))


def replace_logits(model, logits):
    """Have all logits computed by a function."""
    model.engine.decoder.logits = logits
    model.engine.decode_with(None)


def script(model, ids):
    """Make the model say these tokens, whatever it is asked."""
    remaining = iter(ids)

    def logits(hidden):
        out = torch.zeros(len(hidden), model.config.vocab_size)
        out[-1, next(remaining)] = 50
        return out

    replace_logits(model, logits)


def say(model, text, *, stop=(), end=(IM_END,), **options):
    """Complete any prompt with the tokens of `text` and `end`; return pieces and completion."""
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    script(model, [*ids, *end])
    completion = model.complete([1, 2, 3], GREEDY, stop=stop, **options)
    return list(completion), completion


@pytest.mark.parametrize(
    ("generation", "config", "named", "expected"),
    [
        (None, None, None, set()),
        (5, None, None, {5}),
        ([5, 6], None, None, {5, 6}),
        (None, 7, None, {7}),
        (None, [7, 8], None, {7, 8}),
        (None, None, "<|im_end|>", {IM_END}),
        ([5, 6], [6, 7], "<|im_end|>", {5, 6, 7, IM_END}),
        (0, 0, None, {0}),
        (-1, -1, None, set()),
    ],
)
def test_it_ends_at_what_any_of_the_three_files_calls_the_end(
    directory, generation, config, named, expected
):
    if generation is not None:
        edit(directory / "generation_config.json", eos_token_id=generation)
    edit(directory / "config.json", eos_token_id=config)
    edit(directory / "tokenizer_config.json", eos_token=named)
    model = LanguageModel(directory, device="cpu")
    assert model.engine.stop_ids == expected
    for token in expected:
        script(model, [40, 41, token, 42])
        completion = model.complete([1], GREEDY, max_tokens=10)
        assert "".join(completion) == model.tokenizer.decode([40, 41])
        assert completion.finish_reason == "stop"
        assert completion.token_ids == [40, 41, token]


def test_a_tokenizer_larger_than_the_vocabulary_is_an_error(directory):
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text())
    for extra, accepted in ((319, True), (320, False)):
        data["model"]["vocab"]["unused"] = extra
        path.write_text(json.dumps(data))
        if accepted:
            assert LanguageModel(directory, device="cpu").engine.vocab_size == 320
            continue
        with pytest.raises(CheckpointError, match=r"321 tokens.*only 320") as caught:
            LanguageModel(directory, device="cpu")
        assert caught.value.hint


def test_ids_past_the_tokenizers_vocabulary_are_never_sampled(tiny_model):
    model = LanguageModel(tiny_model("llama"), device="cpu")
    assert model.tokenizer.vocab_size == 264 < model.config.vocab_size
    model.engine.stop_ids = frozenset()
    hot = SamplingParams(temperature=100.0, top_p=None, seed=0)
    completion = model.complete([1], hot, max_tokens=200)
    list(completion)
    assert len(completion.token_ids) == 200
    assert max(completion.token_ids) < 264


class TestPrompt:
    def test_is_rendered_in_the_models_template(self, directory):
        write_tokenizer(directory, chat=True)
        model = LanguageModel(directory, device="cpu")
        text = model.tokenizer.encode
        user = [IM_START, *text("user\nhi the"), IM_END, *text("\n")]
        answer = [IM_START, *text("assistant\n")]
        assert model.prompt_ids("hi the") == [*user, *answer]
        system = [IM_START, *text("system\nBe kind."), IM_END, *text("\n")]
        assert model.prompt_ids("hi the", system="Be kind.") == [*system, *user, *answer]

    def test_stays_as_it_is_when_raw_or_without_template(self, directory, tiny_model):
        plain = LanguageModel(tiny_model("llama"), device="cpu")
        assert plain.prompt_ids("hi the") == plain.tokenizer.encode("hi the")
        write_tokenizer(directory, chat=True)
        chat = LanguageModel(directory, device="cpu")
        assert chat.prompt_ids("hi the", raw=True) == plain.prompt_ids("hi the")

    def test_gets_the_bos_that_the_tokenizer_adds_once(self, directory):
        write_tokenizer(directory, chat=True, bos=True)
        model = LanguageModel(directory, device="cpu")
        hi = model.tokenizer.encode("hi", add_special_tokens=False)
        assert model.prompt_ids("hi", raw=True) == [BOS, *hi]
        assert model.prompt_ids("<s>hi", raw=True) == [BOS, *hi]
        assert BOS not in model.prompt_ids("hi")  # this template writes none

    @pytest.mark.parametrize(("chat", "raw"), [(False, False), (True, True)])
    def test_with_a_system_message_needs_a_template(self, directory, chat, raw):
        write_tokenizer(directory, chat=chat)
        model = LanguageModel(directory, device="cpu")
        with pytest.raises(PromptError, match="system prompt has no place") as caught:
            model.prompt_ids("hi", system="Be kind.", raw=raw)
        assert caught.value.hint

    def test_of_messages_is_what_the_template_makes_of_all_of_them(self, directory):
        write_tokenizer(directory, chat=True)
        model = LanguageModel(directory, device="cpu")
        system = {"role": "system", "content": "Be kind."}
        user = {"role": "user", "content": "hi"}
        assert model.prompt_ids([user]) == model.prompt_ids("hi")
        alone = model.prompt_ids("hi", system="Be kind.")
        assert model.prompt_ids([system, user]) == alone
        assert model.prompt_ids([user], system="Be kind.") == alone
        longer = model.prompt_ids([user, {"role": "assistant", "content": "yes"}, user])
        assert len(longer) > len(alone)

    @pytest.mark.parametrize(("chat", "raw"), [(False, False), (True, True)])
    def test_of_messages_needs_a_template(self, directory, chat, raw):
        write_tokenizer(directory, chat=chat)
        model = LanguageModel(directory, device="cpu")
        with pytest.raises(PromptError, match="messages have no place"):
            model.prompt_ids([{"role": "user", "content": "hi"}], raw=raw)

    def test_that_is_empty_is_the_bos(self, directory):
        write_tokenizer(directory, bos=True)
        assert LanguageModel(directory, device="cpu").prompt_ids("") == [BOS]

    def test_that_is_empty_is_the_bos_also_where_the_tokenizer_adds_none(self, directory):
        edit(directory / "tokenizer_config.json", bos_token="<s>")
        assert LanguageModel(directory, device="cpu").prompt_ids("") == [BOS]

    def test_that_is_empty_is_an_error_without_a_bos(self, tiny_model):
        model = LanguageModel(tiny_model("llama"), device="cpu")
        with pytest.raises(PromptError, match=r"empty.*no beginning-of-sequence") as caught:
            model.prompt_ids("")
        assert caught.value.hint

    def test_that_is_empty_is_an_empty_message_in_a_template(self, directory):
        write_tokenizer(directory, chat=True)
        model = LanguageModel(directory, device="cpu")
        assert model.prompt_ids("")[:2] == [IM_START, model.tokenizer.encode("u")[0]]

    def test_that_a_template_makes_empty_is_an_error_that_names_the_template(self, directory):
        (directory / "chat_template.jinja").write_bytes(b"")
        model = LanguageModel(directory, device="cpu")
        with pytest.raises(PromptError, match=r"chat_template\.jinja.*empty prompt") as caught:
            model.prompt_ids("hi")
        assert "--raw" in caught.value.hint
        assert model.prompt_ids("hi", raw=True)


TEXTS = [
    "the thing in an inn",
    "naïve café 日本語\n 👍🏽 the 👩‍👩‍👧",
    " leading and trailing ",
    "a\x1b[31mred\tand\0zero",
]


@pytest.fixture
def model(directory):
    return LanguageModel(directory, device="cpu")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("continues", [False, True])
def test_the_pieces_joined_are_the_decoded_tokens(model, text, continues):
    pieces, completion = say(model, text, continues=continues)
    assert "".join(pieces) == text == model.tokenizer.decode(completion.token_ids)
    assert all(pieces)  # no empty ones
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert len(pieces) > 2  # it did stream
    assert completion.finish_reason == "stop"


def test_text_of_a_random_model_is_its_decoded_tokens(model):
    """Random bytes; only a character cut off at the very end is left out."""
    model.engine.stop_ids = frozenset()
    for seed in range(3):
        completion = model.complete([seed], SamplingParams(seed=seed), max_tokens=30)
        text = "".join(completion)
        expected = model.tokenizer.decode(completion.token_ids)
        assert expected in (text, text + "\N{REPLACEMENT CHARACTER}")
        assert len(text) > 3


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["END"], "one "),
        (["E"], "one "),
        (["two", "END"], "one "),
        (["ENDx"], "one END two"),
        (["o"], ""),
        (["two!"], "one END two"),
        (["日"], "one END two"),
        (["END two", "ND"], "one "),
        (["D t", "ne E"], "o"),
        ([], "one END two"),
    ],
)
def test_a_stop_string_ends_the_text_and_is_never_half_printed(model, stop, expected):
    pieces, completion = say(model, "one END two", stop=stop)
    assert "".join(pieces) == expected
    shown = ""
    for piece in pieces:
        shown += piece
        assert expected.startswith(shown)
    assert completion.finish_reason == "stop"
    whole = model.tokenizer.encode("one END two")
    stopped_early = expected != "one END two"
    assert (len(completion.token_ids) < len(whole) + 1) == stopped_early


def test_text_held_back_for_a_stop_string_is_shown_at_the_token_limit(model):
    pieces, completion = say(model, "one END two", stop=["END!"], max_tokens=7)
    assert "".join(pieces) == "one END"
    assert completion.finish_reason == "length"


def test_a_stop_string_in_the_prompt_does_not_end_it(model):
    ids = model.tokenizer.encode("one END")
    script(model, [*model.tokenizer.encode("!!"), IM_END])
    completion = model.complete(ids, GREEDY, stop=["END", "D!"], continues=True)
    assert "".join(completion) == "!!"


def complete(model, **sampling):
    completion = model.complete([1, 2, 3], SamplingParams(**sampling), max_tokens=20)
    list(completion)
    return completion


def test_a_seed_repeats_a_completion(model):
    first = complete(model, temperature=2.0, seed=7)
    assert first.seed == 7
    assert complete(model, temperature=2.0, seed=7).token_ids == first.token_ids
    assert complete(model, temperature=2.0, seed=8).token_ids != first.token_ids


def test_without_a_seed_runs_differ_and_the_one_used_is_told(model):
    first, second = complete(model, temperature=2.0), complete(model, temperature=2.0)
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    assert complete(model, temperature=2.0, seed=first.seed).token_ids == first.token_ids


class Clock:
    """Each look at it finds the next of these times."""

    def __init__(self, *times):
        self.times = list(times)

    def perf_counter(self):
        return self.times.pop(0)


def test_times_run_from_the_start_to_the_first_token_and_from_there_to_the_last(model, monkeypatch):
    steps = [10.0, 12.0], [12.1, 12.5], [12.6, 13.0], [13.1, 15.0]  # begin and end
    monkeypatch.setattr("qinfer.engine.engine.time", Clock(*itertools.chain(*steps)))
    _, completion = say(model, "abc")
    usage = completion.usage
    assert usage == Usage(prompt_tokens=3, completion_tokens=4, ttft_s=2.0, decode_s=3.0)
    assert usage.tpot_s == 1.0
    assert usage.decode_tokens_per_s == 1.0
    assert usage.prefill_tokens_per_s == 1.5


def test_a_single_token_has_no_time_per_output_token(model, monkeypatch):
    monkeypatch.setattr("qinfer.engine.engine.time", Clock(10.0, 12.0))
    _, completion = say(model, "abc", max_tokens=1)
    assert completion.usage == Usage(3, 1, ttft_s=2.0, decode_s=0.0)
    assert completion.usage.tpot_s is None
    assert completion.usage.decode_tokens_per_s is None


def test_usage_is_not_known_before_the_end(model):
    completion = model.complete([1], GREEDY, max_tokens=3)
    with pytest.raises(RuntimeError, match="not ended"):
        _ = completion.usage
    list(completion)
    assert completion.usage.completion_tokens == 3


def test_the_time_in_the_queue_is_not_that_to_the_first_token(model, monkeypatch):
    times = [10.0, 12.0], [20.0, 21.0]
    monkeypatch.setattr("qinfer.engine.engine.time", Clock(*itertools.chain(*times)))
    model.engine.scheduler.max_sequences = 1
    first, second = (model.complete(ids, GREEDY, max_tokens=1) for ids in ([1], [2]))
    list(second)
    assert (first.usage.ttft_s, second.usage.ttft_s) == (2.0, 1.0)


def test_completions_run_side_by_side_whichever_is_iterated(model):
    prompts = [[1, 2, 3], [4], [1, 2, 3, 4]]
    alone = []
    for ids in prompts:
        completion = model.complete(ids, GREEDY, max_tokens=20)
        alone.append("".join(completion))
    together = [model.complete(ids, GREEDY, max_tokens=20) for ids in prompts]
    assert "".join(together[1]) == alone[1]
    assert [completion.finish_reason for completion in together] == ["length"] * 3
    assert ["".join(completion) for completion in together] == alone


def test_a_step_tells_which_completions_have_ended_in_it(model):
    short, long = (model.complete([i], GREEDY, max_tokens=n) for i, n in ((1, 2), (2, 4)))
    assert [model.step() for _ in range(5)] == [[], [short], [], [long], []]
    assert model.stats.kv_used == 0


def test_a_stop_string_ends_a_completion_at_once_and_leaves_the_others_alone(model):
    ids = model.tokenizer.encode("abcdef")

    def logits(hidden):
        out = torch.zeros(len(hidden), model.config.vocab_size)
        out[:, ids[model.step_number % 6]] = 50
        model.step_number += 1
        return out

    model.step_number = 0
    replace_logits(model, logits)
    stopped = model.complete([1], GREEDY, stop=["c"], max_tokens=6)
    other = model.complete([2], GREEDY, max_tokens=6)
    assert "".join(other) == "abcdef"
    assert (stopped.text, stopped.finish_reason) == ("ab", "stop")
    assert len(stopped.token_ids) == 3


def test_a_cancelled_completion_ends_with_the_text_that_it_has(model):
    ids = model.tokenizer.encode("abcdef")
    script(model, [*ids])
    completion = model.complete([1, 2, 3], GREEDY, max_tokens=6)
    text = iter(completion)
    assert next(text) == "a"
    model.cancel(completion)
    model.cancel(completion)  # twice is fine
    assert list(text) == []
    assert completion.finish_reason is None
    assert model.stats.running == model.stats.waiting == 0
    assert list(completion) == ["a"]


def test_tokens_found_in_the_cache_are_counted(model):
    ids = [i % 250 for i in range(70)]
    first, second = (model.complete(ids, GREEDY, max_tokens=2) for _ in range(2))
    list(second)
    assert (first.usage.reused_tokens, second.usage.reused_tokens) == (0, 70)
    third = model.complete(ids, GREEDY, max_tokens=2)
    list(third)
    assert third.usage.reused_tokens == 64
    assert third.token_ids == first.token_ids == second.token_ids
    assert model.stats.reused_tokens == 134


@pytest.mark.parametrize("broken_at", [0, 3])
def test_a_model_that_breaks_down_keeps_its_text_and_tells_why(model, broken_at):
    ids = model.tokenizer.encode("abcdef")
    remaining = iter(range(100))

    def logits(hidden):
        out = torch.zeros(1, 320)
        at = next(remaining)
        out[0, ids[at]] = 50 if at < broken_at else float("inf")
        return out

    replace_logits(model, logits)
    completion = model.complete([1], GREEDY, max_tokens=10)
    assert "".join(completion) == "abcdef"[:broken_at]
    assert completion.finish_reason == "error"
    assert "the output head" in str(completion.error)
    assert completion.usage.completion_tokens == broken_at


def test_the_context_can_be_asked_to_be_smaller(tiny_model):
    model = LanguageModel(tiny_model("llama"), device="cpu", context_tokens=10)
    model.engine.stop_ids = frozenset()
    completion = model.complete([1, 2, 3], GREEDY)
    list(completion)
    assert len(completion.token_ids) == 7
    with pytest.raises(PromptError, match="context of 10"):
        model.complete([1] * 10, GREEDY)


def test_a_context_larger_than_the_model_is_an_error(tiny_model):
    LanguageModel(tiny_model("llama"), device="cpu", context_tokens=256)
    with pytest.raises(QInferError, match=r"--ctx-size 257 .* 256 positions"):
        LanguageModel(tiny_model("llama"), device="cpu", context_tokens=257)


def test_a_quantization_method_that_is_not_covered_is_an_error(directory):
    edit(directory / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedModelError, match="quantized with gptq") as caught:
        LanguageModel(directory, device="cpu")
    assert "compressed-tensors" in caught.value.hint


def test_the_file_is_mapped_and_not_changed(directory):
    before = (directory / "model.safetensors").read_bytes()
    model = LanguageModel(directory, device="cpu")
    list(model.complete([1, 2, 3], GREEDY, max_tokens=5))
    assert (directory / "model.safetensors").read_bytes() == before
