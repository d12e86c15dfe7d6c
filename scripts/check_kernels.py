"""How far the CPU kernels' results lie from the reference operations', on the same weights.

    python scripts/check_kernels.py MODEL --text TEXT.txt

Prints the KL divergence of the next token over a text, and for how many prompts, beginnings of its
paragraphs, both write the same tokens greedily.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from qinfer import quality
from qinfer.engine import evaluation
from qinfer.engine.evaluation import Subject
from qinfer.generation import LanguageModel
from qinfer.ops.cpu import kernels
from qinfer.sampling import SamplingParams

PROMPT_TOKENS, WINDOW_TOKENS, SEQUENCES = 24, 1024, 16


def open_model(directory: Path, *, reference: bool) -> LanguageModel:
    """A model on a CPU, with the kernels or as on a machine for which they were not compiled."""
    library = kernels.library
    if library() is None:
        raise SystemExit("Error: the kernels are not compiled here; qinfer doctor says why.")
    kernels.library = (lambda: None) if reference else library
    try:
        return LanguageModel(
            directory, device="cpu", context_tokens=WINDOW_TOKENS, max_sequences=SEQUENCES
        )
    finally:
        kernels.library = library


def prompts_of(model: LanguageModel, text: str, count: int) -> list[list[int]]:
    """Token ids of the beginnings of paragraphs."""
    encoded = (model.tokenizer.encode(line) for line in text.splitlines() if len(line) > 200)
    return [ids[:PROMPT_TOKENS] for _, ids in zip(range(count), encoded, strict=False)]


def greedy_texts(
    model: LanguageModel, prompts: list[list[int]], new_tokens: int
) -> list[list[int]]:
    """What a model writes behind prompts."""
    engine = model.engine
    engine.stop_ids = frozenset()
    running = [engine.add(ids, SamplingParams(temperature=0), new_tokens) for ids in prompts]
    while any(sequence.finish_reason is None for sequence in running):
        engine.step()
    return [list(sequence.token_ids) for sequence in running]


def subject(model: LanguageModel) -> Subject:
    """A model as evaluation takes it."""
    engine = model.engine
    return Subject(engine.decoder, engine.cache.layout.formats, engine.vocab_size)


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="a model directory")
    parser.add_argument("--text", type=Path, required=True, help="a file")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text")
    parser.add_argument("--prompts", type=int, default=100, help="of the text")
    parser.add_argument("--new-tokens", type=int, default=64, help="behind each prompt")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()

    models = [open_model(given.model, reference=reference) for reference in (False, True)]
    text = given.text.read_text(encoding="utf-8")
    windows = quality.windows_of(models[0], text, tokens=given.tokens)
    (found,) = evaluation.compare([subject(models[0])], subject(models[1]), windows)
    prompts = prompts_of(models[0], text, given.prompts)
    texts = [greedy_texts(model, prompts, given.new_tokens) for model in models]
    same = sum(a == b for a, b in zip(*texts, strict=True))
    if given.json:
        facts = {"kl_mean": found.kl_mean, "kl_max": found.kl_max, "tokens": found.tokens}
        print(json.dumps(facts | {"prompts": len(prompts), "same_texts": same}))
        return
    print(f"KL divergence     {found.kl_mean:.2e} nats, at most {found.kl_max:.2e}", end=" ")
    print(f"({found.tokens:,} tokens)")
    print(f"same most likely  {found.top1_agreement:.2%} of tokens")
    print(f"same greedy text  {same} of {len(prompts)} prompts, {given.new_tokens} tokens each")


if __name__ == "__main__":
    main()
