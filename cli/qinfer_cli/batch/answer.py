"""Running one request through the model, choice by choice."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qinfer.errors import QInferError
from qinfer.sampling import SamplingParams, resolve_params
from qinfer_cli.generate import fit_prompt

if TYPE_CHECKING:
    from qinfer.generation import LanguageModel
    from qinfer_cli.batch.request import Request

_SEEDS = 2**32


@dataclass(frozen=True, slots=True)
class Choice:
    """What came of a choice, and what it took."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    seed: int
    prefill_s: float
    decode_s: float


class Answerer:
    """Answers requests with a model; what a request leaves open is as the command line says.

    Args:
        model: The model.
        options: Of `qinfer generate`.
        pulse: Called between the pieces of a text.

    Attributes:
        params: How requests that say nothing are sampled.

    Raises:
        CheckpointError: The model's generation_config.json is invalid.
    """

    def __init__(
        self, model: LanguageModel, options: dict[str, Any], pulse: Callable[[], None]
    ) -> None:
        self._model = model
        self._options = options
        self._pulse = pulse
        self.params = self._resolve({})

    def choices(
        self, request: Request, indices: Iterable[int]
    ) -> Iterator[tuple[int, Choice | QInferError]]:
        """Answer some of a request's choices; choice i is drawn with the seed plus i.

        Expected failures are returned, not raised: they concern this request only.
        """
        params = self._resolve(request.sampling)
        if params.seed is None and request.n > 1:
            params = dataclasses.replace(params, seed=secrets.randbits(32))
        ids: list[int] | None = None
        for index in indices:
            seed = None if params.seed is None else (params.seed + index) % _SEEDS
            try:
                ids = ids or self._prompt_ids(request)
                yield index, self._complete(request, ids, dataclasses.replace(params, seed=seed))
            except QInferError as error:
                yield index, error

    def _resolve(self, sampling: Any) -> SamplingParams:
        options = self._options
        explicit = options["sampling"] | dict(sampling)
        return resolve_params(explicit, options["preset"], self._model.generation_config)

    def _is_raw(self, request: Request) -> bool:
        return bool(self._options["raw"]) or request.form == "text_completion"

    def _prompt_ids(self, request: Request) -> list[int]:
        system = request.system
        if system is None and request.form != "text_completion":
            has_own = isinstance(request.prompt, list) and any(
                message["role"] in ("system", "developer") for message in request.prompt
            )
            system = None if has_own else self._options["system_prompt"]
        ids = self._model.prompt_ids(request.prompt, system=system, raw=self._is_raw(request))
        return fit_prompt(ids, self._model, self._options, max_tokens=self._max_tokens(request))

    def _max_tokens(self, request: Request) -> int:
        return request.max_tokens or int(self._options["max_tokens"])

    def _complete(self, request: Request, ids: list[int], params: SamplingParams) -> Choice:
        completion = self._model.complete(
            ids,
            params,
            max_tokens=self._max_tokens(request),
            stop=self._options["stop"] if request.stop is None else request.stop,
            continues=self._is_raw(request) or self._model.chat_template is None,
        )
        pieces = []
        for piece in completion:
            pieces.append(piece)
            self._pulse()
        if completion.error is not None:
            raise completion.error
        usage = completion.usage
        return Choice(
            text="".join(pieces),
            finish_reason=completion.finish_reason,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            seed=completion.seed,
            prefill_s=usage.ttft_s,
            decode_s=usage.decode_s,
        )
