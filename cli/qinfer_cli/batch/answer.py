"""Giving requests to the model, and what comes of their choices."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qinfer.errors import QInferError
from qinfer.sampling import SamplingParams, resolve_params
from qinfer_cli.generate import fit_prompt

if TYPE_CHECKING:
    from qinfer.generation import Completion, LanguageModel
    from qinfer_cli.batch.request import Request

_SEEDS = 2**32


@dataclass(frozen=True, slots=True)
class Choice:
    """What came of a choice, and what it took.

    Attributes:
        reused_tokens: Tokens of the prompt that were found in the cache.
    """

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int
    seed: int

    @classmethod
    def of(cls, completion: Completion) -> Choice:
        """Take over a completion that has ended well."""
        usage = completion.usage
        return cls(
            text=completion.text,
            finish_reason=completion.finish_reason,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            reused_tokens=usage.reused_tokens,
            seed=completion.seed,
        )


class Answerer:
    """Gives requests to a model; what a request leaves open is as the command line says.

    Args:
        model: The model.
        options: Of `qinfer generate`.

    Attributes:
        params: How requests that say nothing are sampled.

    Raises:
        CheckpointError: The model's generation_config.json is invalid.
    """

    def __init__(self, model: LanguageModel, options: dict[str, Any]) -> None:
        self._model = model
        self._options = options
        self.params = self._resolve({})

    def submit(
        self, request: Request, indices: Iterable[int]
    ) -> Iterator[tuple[int, Completion | QInferError]]:
        """Queue some of a request's choices, one by one; choice i is drawn with the seed plus i.

        Expected failures are yielded, not raised: they concern this request only.
        """
        params = self._resolve(request.sampling)
        if params.seed is None and request.n > 1:
            params = dataclasses.replace(params, seed=secrets.randbits(32))
        ids: list[int] = []
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

    def _complete(self, request: Request, ids: list[int], params: SamplingParams) -> Completion:
        return self._model.complete(
            ids,
            params,
            max_tokens=self._max_tokens(request),
            stop=self._options["stop"] if request.stop is None else request.stop,
            continues=self._is_raw(request) or self._model.chat_template is None,
        )
