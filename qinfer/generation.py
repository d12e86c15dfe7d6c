"""Text in, text out: a model directory with its tokenizer, chat template and engine joined."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qinfer import ops
from qinfer.checkpoint.chat import ChatTemplate, Message
from qinfer.checkpoint.safetensors import Checkpoint
from qinfer.checkpoint.streaming import TextStream
from qinfer.checkpoint.tokenizer import Tokenizer
from qinfer.config import ModelConfig, read_json, token_ids
from qinfer.engine.assembly import ContextPolicy, EngineOptions, build_engine
from qinfer.engine.engine import EngineStats
from qinfer.engine.sequence import FinishReason, Sequence
from qinfer.errors import PromptError, QInferError, UnsupportedModelError
from qinfer.quant.kv import KVFormat
from qinfer.sampling import SamplingParams

_READABLE_METHODS = ("compressed-tensors", "bitsandbytes")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a completion took.

    Attributes:
        prompt_tokens: Tokens of the prompt, template included.
        completion_tokens: Tokens sampled, an end-of-sequence token included.
        ttft_s: From the start of prefill to the first token.
        decode_s: From the first token to the last.
        reused_tokens: Tokens of the prompt that were in the cache already.
    """

    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    decode_s: float
    reused_tokens: int = 0

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        steps = self.completion_tokens - 1
        return self.decode_s / steps if steps > 0 else None

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens by the time to the first token."""
        return self.prompt_tokens / self.ttft_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Output tokens after the first, by their time."""
        return 1 / self.tpot_s if self.tpot_s else None


class Completion:
    """A completion as it comes: iterate for text, or let `LanguageModel.step` run it.

    Attributes:
        sequence: In the engine.
        seed: That reproduces it.
        text: All that is final so far.
        finish_reason: None while it runs.
        error: What went wrong where the reason is `error`.
    """

    def __init__(self, model: LanguageModel, sequence: Sequence, stream: TextStream) -> None:
        self._model = model
        self.sequence = sequence
        self._stream = stream
        self.seed = sequence.sampler.seed
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.error: QInferError | None = None

    @property
    def token_ids(self) -> list[int]:
        """Tokens sampled so far, an end-of-sequence token included."""
        return self.sequence.token_ids[self.sequence.prompt_tokens :]

    @property
    def usage(self) -> Usage:
        """What it took; known when it has ended."""
        its = self.sequence
        if self.finish_reason is None or its.last_token_s is None or its.first_token_s is None:
            raise RuntimeError("the completion has not ended")
        started_s = its.first_token_s if its.started_s is None else its.started_s
        return Usage(
            prompt_tokens=its.prompt_tokens,
            completion_tokens=its.new_tokens,
            ttft_s=its.first_token_s - started_s,
            decode_s=its.last_token_s - its.first_token_s,
            reused_tokens=its.reused_tokens,
        )

    def __iter__(self) -> Iterator[str]:
        """Yield text as it becomes final; others that are queued go on meanwhile.

        Ends where it is cancelled.
        """
        sent = 0
        while self._model.holds(self) or sent < len(self.text):
            if sent < len(self.text):
                piece, sent = self.text[sent:], len(self.text)
                yield piece
            else:
                self._model.step()

    def advance(self, stop_ids: Collection[int]) -> None:
        """Take in the token that its sequence has got, or its end."""
        sequence, stream = self.sequence, self._stream
        token = sequence.token_ids[-1]
        if sequence.finish_reason != "error" and token not in stop_ids:
            self.text += stream.push(token)
        if sequence.finish_reason is not None or stream.stopped:
            self.text += stream.finish()
            self.finish_reason = "stop" if stream.stopped else sequence.finish_reason
            self.error = sequence.error


class LanguageModel:
    """A model directory, ready to complete text.

    Attributes:
        directory: The directory.
        config: Its configuration.
        generation_config: Its `generation_config.json`, empty if there is none.
        tokenizer: Its tokenizer.
        chat_template: Its chat template, None if there is none.
        kv_format: Of the key-value cache.
        device_options: How the device is used.
        engine: The engine over its decoder.
    """

    def __init__(
        self,
        directory: Path,
        *,
        device: str = "auto",
        context_tokens: int | None = None,
        context_policy: ContextPolicy = "stop",
        kv_format: KVFormat | None = None,
        memory_bytes: int | None = None,
        max_sequences: int | None = None,
        device_options: ops.DeviceOptions = ops.DEFAULT,
    ) -> None:
        """Open a Hugging Face directory; weights are mapped, not read.

        Args:
            directory: Of 16-bit weights, or quantized as `qinfer convert` does.
            device: `auto`, `cpu` or `cuda`.
            context_tokens: Most tokens of prompt and output; None is what the model and the memory
                allow.
            context_policy: What happens there.
            kv_format: Of the key-value cache; None is the directory's default.
            memory_bytes: For weights, cache and activations; None is what is free, less a margin.
            max_sequences: Most that run at once; None is what the memory allows.
            device_options: How the device is used.

        Raises:
            CheckpointError: Something is missing, damaged or does not fit together.
            UnsupportedModelError: Architecture or weight format is not covered.
        """
        self.directory = directory
        self.device_options = device_options
        raw = read_json(directory / "config.json")
        self.config = ModelConfig.from_dict(raw, origin=str(directory / "config.json"))
        check_quantization(raw, directory)
        path = directory / "generation_config.json"
        self.generation_config: Mapping[str, Any] = read_json(path) if path.exists() else {}
        self.tokenizer = Tokenizer.load(directory)
        self.tokenizer.require_vocabulary(self.config.vocab_size, directory)
        self.chat_template = ChatTemplate.load(directory)
        self.kv_format = kv_format or KVFormat.stored(directory)
        self.engine = build_engine(
            Checkpoint(directory),
            self.config,
            ops.select(device, device_options),
            EngineOptions(
                vocab_size=self.tokenizer.vocab_size,
                stop_ids=frozenset(self._stop_ids()),
                formats=(self.kv_format,) * self.config.num_hidden_layers,
                context_tokens=context_tokens,
                context_policy=context_policy,
                memory_bytes=memory_bytes,
                max_sequences=max_sequences,
                graphs=device_options.graphs,
            ),
        )
        self._completions: dict[Sequence, Completion] = {}

    @property
    def max_sequences(self) -> int:
        """Most sequences that run at once."""
        return self.engine.scheduler.max_sequences

    @property
    def context_tokens(self) -> int:
        """Most tokens of a sequence, prompt and output together."""
        return self.engine.context_tokens

    @property
    def stats(self) -> EngineStats:
        """Where the engine stands."""
        return self.engine.stats

    def warn_with(self, warn: Callable[[str], None]) -> None:
        """Say what had to give way by calling this with a sentence."""
        self.engine.warn = warn

    def _stop_ids(self) -> set[int]:
        """The union of what generation config, model config and tokenizer call the end."""
        origin = "generation_config.json"
        declared = token_ids(self.generation_config, "eos_token_id", origin=origin)
        of_tokenizer = self.tokenizer.eos_token_id
        found = {*declared, *self.config.eos_token_ids}
        return found if of_tokenizer is None else found | {of_tokenizer}

    def prompt_ids(
        self, prompt: str | SequenceOf[Message], *, system: str | None = None, raw: bool = False
    ) -> list[int]:
        """Tokens of a prompt, in the model's chat template if it has one.

        Args:
            prompt: A user's message, or with `raw` the text to continue; or the messages of a
                conversation, each with `role` and `content`, which need a chat template.
            system: A system message in front of them; needs a chat template.
            raw: Leave the template out.

        Raises:
            PromptError: Nothing to run: no text, and no beginning-of-sequence token either; or
                messages that the template does not take.
        """
        if self.chat_template is not None and not raw:
            messages: list[Message] = []
            if system is not None:
                messages.append({"role": "system", "content": system})
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages.extend(prompt)
            ids = self.chat_template.render_ids(self.tokenizer, messages)
            if not ids:
                raise PromptError(
                    f"{self.chat_template.name} makes an empty prompt of this message",
                    hint="Complete the text without the chat template: --raw.",
                )
            return ids
        return self._text_ids(prompt, system, "with --raw" if raw else "without a chat template")

    def _text_ids(
        self, prompt: str | SequenceOf[Message], system: str | None, why: str
    ) -> list[int]:
        """Tokens of a text that goes without a chat template; `why` it does, for messages."""
        if not isinstance(prompt, str):
            raise PromptError(
                f"messages have no place {why}", hint="Give one text to continue instead."
            )
        if system is not None:
            raise PromptError(
                f"a system prompt has no place {why}", hint="Put it in front of the prompt."
            )
        ids = self.tokenizer.encode(prompt)
        if not ids and self.tokenizer.bos_token_id is not None:
            return [self.tokenizer.bos_token_id]
        if not ids:
            raise PromptError(
                "the prompt is empty and the model has no beginning-of-sequence token",
                hint="Give at least one character.",
            )
        return ids

    def complete(
        self,
        prompt_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        max_tokens: int | None = None,
        stop: SequenceOf[str] = (),
        continues: bool = False,
    ) -> Completion:
        """Queue a completion; `step` or iterating over it runs it.

        Args:
            prompt_ids: From `prompt_ids`.
            params: How to sample.
            max_tokens: Bound on new tokens; None is up to the end of the context.
            stop: Strings that end it; they are not part of the text.
            continues: The text goes on where the prompt ends, so a leading space counts.

        Raises:
            PromptError: The prompt is empty or leaves no room in the context.
        """
        before = prompt_ids if continues else ()
        stream = TextStream(self.tokenizer, prompt_ids=before, stop=stop)
        sequence = self.engine.add(prompt_ids, params, max_tokens)
        completion = self._completions[sequence] = Completion(self, sequence, stream)
        return completion

    def step(self) -> list[Completion]:
        """Run one batch of what is queued.

        Returns:
            The completions that have ended in it.
        """
        ended = []
        for sequence in self.engine.step():
            completion = self._completions[sequence]
            completion.advance(self.engine.stop_ids)
            if completion.finish_reason is not None:
                self.cancel(completion)
                ended.append(completion)
        return ended

    def holds(self, completion: Completion) -> bool:
        """Whether a completion is queued or running."""
        return completion.sequence in self._completions

    def cancel(self, completion: Completion) -> None:
        """Drop a completion, queued or running."""
        sequence = completion.sequence
        self.engine.cancel(sequence)
        self._completions.pop(sequence, None)


def check_quantization(raw: Mapping[str, Any], directory: Path) -> None:
    """Refuse a model whose `config.json` declares a quantization that cannot be read.

    Raises:
        UnsupportedModelError: It does.
    """
    declared = raw.get("quantization_config")
    method = declared.get("quant_method") if isinstance(declared, dict) else declared
    if method is not None and method not in _READABLE_METHODS:
        raise UnsupportedModelError(
            f"{directory} is quantized with {method}, which is not supported",
            hint=f"Supported: {', '.join(_READABLE_METHODS)}, and 16-bit weights; "
            "qinfer convert SOURCE OUT quantizes those.",
        )
