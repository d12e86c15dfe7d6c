"""Choosing the next token of a sequence from its logits.

Here live the parameters and how they are resolved, one pure function per filter, and the sampler
that applies them to one sequence. Nothing here knows text, stop conditions or other sequences.
Importing it does not load torch. What this defines, `qinfer.ops.draws` does where the logits are,
but for the penalties, which look back: a filter belongs here and there.

Filters take and return fp32 logits on the CPU, of which each row must have a finite value; removed
tokens are -inf. The penalties work on one sequence, `[vocab]`; the others on any leading axes,
`[..., vocab]`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from qinfer.errors import CheckpointError, NumericsError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

_NEG_INF = float("-inf")
_MIN_DIVISOR = 1e-30  # representable in fp32; far below any difference between two logits
_REACHES = (6, 8, 10, 12, 16, 24)  # how far below the peak to look before all are sorted
_ROUNDING = 1e-6  # of a sum of fp32 probabilities


def _option(kind: type, default: Any, help: str, **metadata: Any) -> Any:
    """Declare a parameter; `off` lists the values that mean off, and allows None."""
    return field(default=default, metadata={"kind": kind, "help": help, **metadata})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. Every field is an option of the command line; None is off.

    Values by which other tools mean off (`top_k` 0 or -1, `top_p` 1, …) are accepted and become
    None here and nowhere else. The generator reads 32 bits of seed, so no more are accepted: two
    seeds never stand for the same draws.

    Raises:
        ValueError: If a value has the wrong type or is out of range; names the field.
    """

    temperature: float = _option(
        float, 0.7, "Divide the logits by this before sampling; 0 is greedy.", min=0.0, max=100.0
    )
    top_k: int | None = _option(
        int, None, "Keep the k most likely tokens; 0 keeps all.", min=-1, off=(0, -1)
    )
    top_p: float | None = _option(
        float,
        0.9,
        "Keep the fewest tokens that together have this probability; 1 keeps all.",
        min=0.0,
        max=1.0,
        off=(1,),
    )
    min_p: float | None = _option(
        float,
        None,
        "Drop tokens less likely than this fraction of the most likely one; 0 keeps all.",
        min=0.0,
        max=1.0,
        off=(0,),
    )
    repetition_penalty: float | None = _option(
        float,
        None,
        "Make tokens that already occurred (also in the prompt) less likely; 1 is off.",
        min=0.01,
        max=100.0,
        off=(1,),
    )
    no_repeat_ngram_size: int | None = _option(
        int, None, "Never repeat a run of this many tokens; 0 is off.", min=0, off=(0,)
    )
    seed: int | None = _option(
        int, None, "Seed of the random draws; random if not given.", min=0, max=2**32 - 1, off=()
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            value = _checked(option, getattr(self, option.name))
            object.__setattr__(self, option.name, value)


def _checked(option: Field[Any], value: Any) -> Any:
    """Return `value` as its field stores it, or raise ValueError naming the field."""
    meta = option.metadata
    if value is None and "off" in meta:
        return None
    kind, low, high = meta["kind"], meta["min"], meta.get("max", math.inf)
    types = (int, float) if kind is float else (int,)
    is_number = isinstance(value, types) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # NaN is in no range
        noun = "an integer" if kind is int else "a number"
        limits = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"{option.name} must be {noun} {limits}, got {value!r}")
    return None if value in meta.get("off", ()) else kind(value)


PRESETS: dict[str, dict[str, float | int]] = {
    "chat": {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
    "code": {"temperature": 0.1, "top_p": 0.95, "top_k": 10},
    "creative": {"temperature": 1.0, "top_p": 0.95, "top_k": 100},
}


def resolve_params(
    explicit: Mapping[str, Any], preset: str | None, generation_config: Mapping[str, Any]
) -> SamplingParams:
    """Merge the sources of parameters: explicit > preset > the model's own > built-in.

    Args:
        explicit: What the user gave, by field name; None is not given.
        preset: A key of `PRESETS`.
        generation_config: The model's generation_config.json. `do_sample: false` is temperature 0.

    Raises:
        ValueError: If the preset is unknown or an explicit value is invalid.
        CheckpointError: If generation_config has an invalid value that nothing overrides.
    """
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    chosen: dict[str, Any] = dict(PRESETS[preset]) if preset is not None else {}
    chosen.update((name, value) for name, value in explicit.items() if value is not None)
    return SamplingParams(**(_from_generation_config(generation_config, skip=chosen) | chosen))


def _from_generation_config(config: Mapping[str, Any], skip: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields that a generation_config.json sets, except those in `skip`."""
    found: dict[str, Any] = {}
    for option in fields(SamplingParams):
        name = option.name
        if name == "seed" or name in skip or config.get(name) is None:
            continue
        try:
            found[name] = _checked(option, config[name])
        except ValueError as error:
            raise CheckpointError(
                f"generation_config.json: {error}",
                hint=f"Correct the file, or override it with --{name.replace('_', '-')}.",
            ) from error
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def repetition_penalty(logits: Tensor, token_ids: Sequence[int] | Tensor, penalty: float) -> Tensor:
    """Divide positive logits of the tokens seen by `penalty`, multiply negative ones by it.

    As in CTRL (arXiv 1909.05858) with the sign fixed as transformers does; counts do not matter.

    Args:
        logits: [vocab].
        token_ids: [seq], prompt included; ids outside the vocabulary are ignored.
        penalty: Above 1 discourages repetition, below 1 encourages it.

    Returns:
        [vocab].
    """
    import torch

    ids = torch.as_tensor(token_ids, dtype=torch.int64, device=logits.device)
    ids = ids[ids < logits.shape[-1]]
    seen = logits[ids]
    return logits.scatter(0, ids, torch.where(seen < 0, seen * penalty, seen / penalty))


def no_repeat_ngram(logits: Tensor, token_ids: Sequence[int], size: int) -> Tensor:
    """Remove every token that would complete an n-gram the sequence already has.

    Args:
        logits: [vocab].
        token_ids: [seq], prompt included; ids outside the vocabulary are ignored.
        size: n, at least 1.

    Returns:
        [vocab].
    """
    history = _History(size)
    history.follow(token_ids)
    return _ban(logits, history.banned(token_ids))


def _ban(logits: Tensor, ids: set[int]) -> Tensor:
    import torch

    inside = [i for i in ids if i < logits.shape[-1]]
    index = torch.tensor(inside, dtype=torch.int64, device=logits.device)
    return logits.index_fill(0, index, _NEG_INF)


def temperature(logits: Tensor, value: float) -> Tensor:
    """Divide by a positive temperature, the row's maximum moved to 0 so that nothing overflows.

    Args:
        logits: [..., vocab].
        value: Above 0; low is sharp. Greedy is a branch of its own in `Sampler`.

    Returns:
        [..., vocab], at most 0.
    """
    return (logits - logits.amax(-1, keepdim=True)) / max(value, _MIN_DIVISOR)


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the `k` largest logits, and any that equal the smallest of them.

    Args:
        logits: [..., vocab].
        k: At least 1.

    Returns:
        [..., vocab].
    """
    smallest = logits.topk(min(k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < smallest, _NEG_INF)


def top_p(logits: Tensor, p: float, log_total: Tensor | None = None) -> Tensor:
    """Keep the most likely tokens up to and including the one whose cumulative mass reaches `p`.

    Nucleus sampling (The Curious Case of Neural Text Degeneration, arXiv 1904.09751). Among equal
    logits the lower id ranks higher.

    Args:
        logits: [..., vocab].
        p: Below 1; 0 keeps one token.
        log_total: [..., 1], fp64, the log of the total mass, where `logits` is only a part of it.

    Returns:
        [..., vocab].
    """
    import torch

    if log_total is None:
        log_total = _log_total(logits)
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    mass = (ranked.double() - log_total).exp().cumsum(-1)
    beyond = torch.nn.functional.pad(mass[..., :-1] >= p, (1, 0))  # reached before this token
    return logits.scatter(-1, order, ranked.masked_fill(beyond, _NEG_INF))


def _log_total(logits: Tensor) -> Tensor:
    """[..., vocab] to [..., 1]: logsumexp summed in fp64, several times faster than all in fp64."""
    import numpy as np
    import torch

    total = _masses(logits, 1).sum(-1, keepdims=True, dtype=np.float64)
    return torch.from_numpy(np.log(total)) + logits.amax(-1, keepdim=True)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Drop tokens whose probability is below `p` times that of the most likely one.

    Turning Up the Heat: Min-p Sampling (arXiv 2407.01082).

    Args:
        logits: [..., vocab].
        p: In (0, 1].

    Returns:
        [..., vocab].
    """
    floor = logits.amax(-1, keepdim=True) + math.log(p)
    return logits.masked_fill(logits < floor, _NEG_INF)


def draw(logits: Tensor, uniform: float) -> int:
    """Invert the cumulative distribution, in the order of the ids, summed in fp64.

    Args:
        logits: [vocab], not necessarily normalized. A token at -inf is never drawn.
        uniform: In [0, 1).

    Returns:
        The first index whose cumulative probability is above `uniform`.
    """
    import numpy as np

    mass = _masses(logits, 1).cumsum(dtype=np.float64)
    return int(mass.searchsorted(mass[-1] * uniform, side="right"))


def _masses(logits: Tensor, divisor: float) -> NDArray[np.float32]:
    """What temperature and exp make of [..., vocab], relative to the likeliest.

    By numpy: torch shares large vocabularies among its threads, which then are in the way of the
    next step's.
    """
    import numpy as np

    values = logits.numpy()
    with np.errstate(over="ignore"):
        masses: NDArray[np.float32] = values - values.max(-1, keepdims=True)
        masses /= max(divisor, _MIN_DIVISOR)
    np.exp(masses, out=masses)
    return masses


class _History:
    """What the penalties must know of a sequence, at a cost per new token, not per token."""

    def __init__(self, ngram_size: int | None) -> None:
        self._ngram_size = ngram_size
        self._restart()

    def _restart(self) -> None:
        import torch

        self._length, self._last = 0, -1
        self._distinct: set[int] = set()
        self._followers: dict[tuple[int, ...], set[int]] = {}
        self.distinct = torch.empty(0, dtype=torch.int64)  # [distinct ids]

    def follow(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that are new since the last call; start over if it was cut back."""
        import torch

        start = self._length
        if len(token_ids) < start or (start and token_ids[start - 1] != self._last):
            self._restart()
            start = 0
        fresh = [i for i in dict.fromkeys(token_ids[start:]) if i not in self._distinct]
        if fresh:
            self._distinct.update(fresh)
            self.distinct = torch.cat((self.distinct, torch.tensor(fresh, dtype=torch.int64)))
        if (n := self._ngram_size) is not None:
            for end in range(max(start, n - 1), len(token_ids)):
                prefix = tuple(token_ids[end + 1 - n : end])
                self._followers.setdefault(prefix, set()).add(token_ids[end])
        self._length = len(token_ids)
        self._last = token_ids[-1] if self._length else -1

    def banned(self, token_ids: Sequence[int]) -> set[int]:
        """Return the ids that followed the last n - 1 tokens before."""
        assert self._ngram_size is not None
        prefix = tuple(token_ids[len(token_ids) + 1 - self._ngram_size :])
        return self._followers.get(prefix, set())  # a prefix still too short is no key


class Sampler:
    """Draws the tokens of one sequence.

    The generator is this sequence's own, on the CPU; a token drawn takes exactly one number from it
    and a greedy one none, so neither neighbours nor padding of the vocabulary change the result.

    Args:
        params: How to sample.
        vocab_size: Size of the tokenizer's vocabulary. Logits beyond it are padding of the model
            and never chosen. None if there is no padding.

    Attributes:
        seed: The seed in use, chosen at random if `params` has none: the same seed and the same
            logits give the same tokens.
    """

    def __init__(self, params: SamplingParams, *, vocab_size: int | None) -> None:
        import torch

        self.params = params
        self.vocab_size = vocab_size
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self._generator = torch.Generator().manual_seed(self.seed)
        self._uniforms: list[float] = []  # drawn from it, and not used yet
        self._history = _History(params.no_repeat_ngram_size)

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the likeliest token, whatever came before."""
        return self.is_memoryless and self.params.temperature == 0

    @property
    def is_memoryless(self) -> bool:
        """Whether a choice depends on nothing but the logits and the next of `upcoming`."""
        return (self.params.repetition_penalty, self.params.no_repeat_ngram_size) == (None, None)

    def upcoming(self, count: int) -> list[float]:
        """The numbers in [0, 1) that the next draws will take, for who draws in its place."""
        import torch

        if (missing := count - len(self._uniforms)) > 0:
            fresh = torch.rand(missing, dtype=torch.float64, generator=self._generator)
            self._uniforms += fresh.tolist()
        return self._uniforms[:count]

    def take(self) -> float:
        """Use up the next of `upcoming`: a token is drawn with it."""
        (uniform,) = self.upcoming(1)
        del self._uniforms[0]
        return uniform

    def sample(self, logits: Tensor, token_ids: Sequence[int]) -> int:
        """Choose the next token: penalties, temperature, top-k, top-p, min-p, draw.

        Args:
            logits: [vocab], any float dtype and device; read in fp32 on the CPU.
            token_ids: [seq], the whole sequence so far, prompt included. Cheapest if it extends
                that of the call before.

        Returns:
            A token id below `vocab_size`.

        Raises:
            NumericsError: If a logit is NaN or +inf, or none is left to choose from.
        """
        import torch

        if logits.dim() != 1:
            raise ValueError(f"logits must be [vocab], got {list(logits.shape)}")
        scores = logits.detach()[: self.vocab_size].to("cpu", torch.float32)
        if not self.is_greedy:
            _require_finite_peak(scores, "the model's logits")
            scores = self._penalize(scores, token_ids)
        if self.params.temperature == 0:
            token = int(scores.numpy().argmax())  # of a NaN if there is one; torch's is slower
            if not math.isfinite(scores[token]):
                _require_finite_peak(scores, "the model's logits")
            return token
        ids, scores = self._filter(scores)
        index = draw(scores, self.take())
        return index if ids is None else int(ids[index])

    def _penalize(self, scores: Tensor, token_ids: Sequence[int]) -> Tensor:
        penalty, ngram_size = self.params.repetition_penalty, self.params.no_repeat_ngram_size
        if penalty is None and ngram_size is None:
            return scores
        self._history.follow(token_ids)
        if penalty is not None:
            scores = repetition_penalty(scores, self._history.distinct, penalty)
        if ngram_size is not None:
            scores = _ban(scores, self._history.banned(token_ids))
        _require_finite_peak(scores, "the logits after repetition_penalty and no_repeat_ngram_size")
        return scores

    def _filter(self, scores: Tensor) -> tuple[Tensor | None, Tensor]:
        """Apply temperature and filters, where possible to the few tokens they can leave.

        Returns:
            The ids that are left, ascending, [kept], or None for all; and their logits, [kept].
        """
        params, ids, log_total = self.params, None, None
        if params.top_k is not None:  # before the temperature, which does not change the order
            ids = _largest(scores, params.top_k)
        elif params.top_p is not None:
            ids, log_total = _nucleus(scores, params.temperature, params.top_p)
        if ids is not None:
            scores = scores[ids]
        scores = temperature(scores, params.temperature)
        if params.top_p is not None:
            scores = top_p(scores, params.top_p, log_total)
        if params.min_p is not None:
            scores = min_p(scores, params.min_p)
        return ids, scores


def _nucleus(scores: Tensor, temperature: float, p: float) -> tuple[Tensor | None, Tensor]:
    """Return ids that surely have the probability `p`, each likelier than all others.

    Args:
        scores: [vocab].
        temperature: As of `temperature`.
        p: As of `top_p`.

    Returns:
        The ids, ascending, [few], or None if it takes about all of them; and the log of the total
        mass after temperature, [1], fp64.
    """
    import numpy as np
    import torch

    masses = _masses(scores, temperature)
    total = masses.sum(keepdims=True, dtype=np.float64)
    log_total = torch.from_numpy(np.log(total))  # as `_log_total` of all, to the bit
    for reach in _REACHES:
        ids = (masses >= math.exp(-reach)).nonzero()[0]
        if masses[ids].sum(dtype=np.float64) > (p + _ROUNDING) * total[0]:
            return torch.from_numpy(ids), log_total
    return None, log_total


def _largest(scores: Tensor, k: int) -> Tensor:
    """Return the ids of the tokens that `top_k` keeps, ascending: [vocab] to [kept]."""
    import torch

    values = scores.numpy()
    ids = torch.from_numpy((values >= values.max() - _REACHES[0]).nonzero()[0])
    if len(ids) < k:
        ids = torch.arange(len(values))
    kept = scores[ids]
    return ids[kept >= kept.topk(min(k, len(ids))).values[-1]]


def _require_finite_peak(scores: Tensor, what: str) -> None:
    """Raise NumericsError unless the maximum is a number: it is NaN if any value is."""
    peak = float(scores.numpy().max())  # as with `_masses`
    if not math.isfinite(peak):
        problem = "are all -inf" if peak == _NEG_INF else f"contain {peak}"
        raise NumericsError(f"{what} {problem}; there is no token to choose")
