"""How well a model directory predicts a text, and what a compact KV cache changes about that.

Texts become windows of tokens here; the numbers come from `qinfer.engine.evaluation`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from pathlib import Path

from qinfer.config import ModelConfig
from qinfer.engine.evaluation import Comparison, Progress, Subject, Window, compare, perplexity
from qinfer.errors import PromptError, QInferError
from qinfer.generation import LanguageModel
from qinfer.quant.kv import BLOCK_TOKENS, KVFormat

WINDOW_TOKENS = 1024
TRIAL_TOKENS = 512

KL_LIMIT_NATS = 0.05
"""From here on a cache hurts: the loss rises by about the mean divergence, perplexity by 5%."""

TOP1_LIMIT = 0.9
"""Below it hurts: more than one greedy token in ten is another, and the text goes another way."""

_HALF = KVFormat(16, 16)
_LEAST_TOKENS = BLOCK_TOKENS + 2
"""The first token that sees a quantized block has to have one behind it to predict."""


def probe_text() -> str:
    """The built-in text: prose, dialogue, code, tables, numbers and a few languages."""
    return Path(__file__).with_name("probe.txt").read_text(encoding="utf-8")


def default_window(directory: Path, *, most: int = WINDOW_TOKENS) -> int:
    """Tokens of a window where nothing else is asked for: `most`, or what the model allows.

    Raises:
        QInferError: The directory holds no model that is covered.
    """
    return min(most, ModelConfig.read(directory).max_position_embeddings)


def windows_of(
    model: LanguageModel, text: str, *, tokens: int, origin: str = "the text"
) -> list[list[int]]:
    """Cut a text into windows as long as the context that a model was opened with.

    A beginning-of-sequence token that the tokenizer puts in front begins every window.

    Args:
        model: Gives tokenizer and context.
        text: To cut.
        tokens: Of the text, at most; the first ones.
        origin: What to call the text in errors.

    Raises:
        PromptError: It is too short to predict anything.
    """
    ids = model.tokenizer.encode(text)
    bos = ids[:1] if ids[:1] == [model.tokenizer.bos_token_id] else []
    ids, room = ids[len(bos) :][:tokens], model.context_tokens - len(bos)
    cut = [[*bos, *ids[start : start + room]] for start in range(0, len(ids), max(room, 1))]
    windows = [window for window in cut if len(window) > 1]
    if not windows:
        raise PromptError(
            f"{origin} is too short: {len(ids)} token(s), and one cannot be predicted from itself",
            hint="Give a longer text, or a larger --tokens.",
        )
    return windows


def perplexity_of(
    model: LanguageModel, windows: SequenceOf[Window], *, progress: Progress = lambda _: None
) -> float:
    """Perplexity of a model with its KV cache."""
    return perplexity(_subject(model, model.kv_format), windows, progress=progress)


def against_16_bit_kv(
    model: LanguageModel, windows: SequenceOf[Window], *, progress: Progress = lambda _: None
) -> Comparison:
    """What a model's KV cache changes.

    Raises:
        PromptError: The windows are too short for that to be seen.
    """
    _require_stored_blocks(windows)
    subject, reference = _subject(model, model.kv_format), _subject(model, _HALF)
    return compare([subject], reference, windows, progress=progress)[0]


def layer_by_layer(
    model: LanguageModel, windows: SequenceOf[Window], *, progress: Progress = lambda _: None
) -> list[Comparison]:
    """Per layer, what a model's KV cache changes if the other layers keep 16 bits.

    Raises:
        PromptError: The windows are too short for that to be seen.
    """
    _require_stored_blocks(windows)
    layers = range(model.config.num_hidden_layers)
    subjects = [
        _subject(model, *(model.kv_format if i == layer else _HALF for i in layers))
        for layer in layers
    ]
    return compare(subjects, _subject(model, _HALF), windows, progress=progress)


def require_same_tokenizer(model: LanguageModel, other: LanguageModel) -> None:
    """Refuse models whose predictions are not about the same tokens.

    Raises:
        QInferError: They are not.
    """
    ours, theirs = (m.tokenizer.backend.get_vocab(with_added_tokens=True) for m in (model, other))
    if ours != theirs:
        raise QInferError(
            f"{model.directory} and {other.directory} have different tokenizers, so their "
            "predictions cannot be compared",
            hint="Give --against the model that this one was converted from.",
        )


def against(
    model: LanguageModel,
    other: LanguageModel,
    windows: SequenceOf[Window],
    *,
    progress: Progress = lambda _: None,
) -> Comparison:
    """What a model with its KV cache predicts otherwise than another with a 16-bit one.

    Raises:
        QInferError: They do not have the same tokenizer.
    """
    require_same_tokenizer(model, other)
    subject, reference = _subject(model, model.kv_format), _subject(other, _HALF)
    return compare([subject], reference, windows, progress=progress)[0]


def try_kv_format(
    directory: Path, kv_format: KVFormat, *, progress: Progress = lambda _: None
) -> Comparison:
    """Try a KV cache on the first tokens of the built-in text.

    Raises:
        QInferError: The model cannot be run, or its context is too short for that to be seen.
    """
    model = LanguageModel(
        directory,
        context_tokens=default_window(directory, most=TRIAL_TOKENS),
        kv_format=kv_format,
        max_sequences=1,
    )
    windows = windows_of(model, probe_text(), tokens=TRIAL_TOKENS)
    return against_16_bit_kv(model, windows, progress=progress)


def hurts(comparison: Comparison) -> bool:
    """Whether a KV cache changes a model more than it should."""
    return comparison.kl_mean > KL_LIMIT_NATS or comparison.top1_agreement < TOP1_LIMIT


def _subject(model: LanguageModel, *formats: KVFormat) -> Subject:
    """A model with a KV cache of these formats per layer, or of one in all layers."""
    per_layer = formats * model.config.num_hidden_layers if len(formats) == 1 else formats
    return Subject(model.engine.decoder, per_layer, model.tokenizer.vocab_size)


def _require_stored_blocks(windows: SequenceOf[Window]) -> None:
    longest = max(map(len, windows))
    if longest < _LEAST_TOKENS:
        raise PromptError(
            f"windows of {longest} tokens show nothing of a KV cache: each token sees the "
            f"{BLOCK_TOKENS} of its own block in 16 bits",
            hint=f"Use a longer text, or a larger --tokens or --ctx-size; {_LEAST_TOKENS} is the "
            "least.",
        )
