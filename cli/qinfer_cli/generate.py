"""`qinfer generate`: one prompt to stdout. Files of prompts are in `qinfer_cli.batch`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qinfer.errors import PromptError
from qinfer.sampling import SamplingParams, resolve_params
from qinfer_cli.loading import load_model, warn
from qinfer_cli.options import (
    context_policy_option,
    device_options,
    json_option,
    kv_options,
    memory_option,
    quiet_option,
    sampling_options,
    threads_option,
)

if TYPE_CHECKING:
    from qinfer.generation import Completion, LanguageModel

_STARTING = ("resume", "retry_errors", "force")  # options about how a batch starts
_OF_BATCHES = (*_STARTING, "ordered", "batch_size")


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("-p", "--prompt", "prompt_option", help="The prompt, as an option.")
@click.option(
    "-f",
    "--prompt-file",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Read the prompt from a file; a final newline is left out.",
)
@click.option(
    "-i",
    "--input-file",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Many prompts: .txt (one a line) or .jsonl, also with .gz; - is stdin. Needs -o.",
)
@click.option(
    "-o",
    "--output-file",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Where -i's results go, one JSON object a line; .gz compresses, - is stdout.",
)
@click.option("--resume", is_flag=True, help="Continue -o: answer what has no result in it.")
@click.option(
    "--retry-errors", is_flag=True, help="With --resume, answer again what failed before."
)
@click.option(
    "--force",
    is_flag=True,
    help="Replace what -o holds; with --resume, continue although input or settings changed.",
)
@click.option("--ordered", is_flag=True, help="Results in the order of -i, not as they are done.")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help="Most prompts of -i to run at once. Default: what memory allows.",
)
@click.option("--system-prompt", help="System message, for models with a chat template.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without chat template.")
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Most tokens to generate.",
)
@click.option("--stop", multiple=True, help="End at this text; repeatable. It is not printed.")
@sampling_options
@click.option(
    "--ctx-size",
    type=click.IntRange(1),
    help="Most tokens of prompt and output together. Default: what the model allows.",
)
@click.option(
    "--truncate-prompt",
    type=click.Choice(["left"]),
    help="Cut a prompt that is too long for the context at its beginning.",
)
@context_policy_option
@kv_options
@memory_option
@device_options
@threads_option
@json_option
@quiet_option
def generate(**options: Any) -> None:
    """Complete PROMPT with MODEL, a directory or a hub id.

    The text goes to stdout as it comes, figures go to stderr. PROMPT may be - for stdin. Sampling
    defaults come from the model's generation_config.json, else temperature 0.7 and top-p 0.9.

    \b
    qinfer generate smol-int4 "What is the capital of France?"
    qinfer generate smol-int4 --temperature 0 --max-tokens 64 --json "Hi"
    git diff | qinfer generate smol-int4 --system-prompt "Summarize this." -
    qinfer generate smol-int4 -i prompts.txt -o answers.jsonl
    """
    prompt = _prompt(options)
    _check_batch_options(options, is_batch=prompt is None)
    if options["stop"] and "" in options["stop"]:
        raise click.UsageError("--stop must not be empty.")
    from qinfer.checkpoint.opening import find_model

    model = load_model(
        find_model(options["model"], progress=not options["quiet"]),
        options,
        context_tokens=options["ctx_size"],
        context_policy=options["context_policy"],
        memory_bytes=options["memory"],
        max_sequences=options["batch_size"] if prompt is None else 1,
    )
    if prompt is None:
        from qinfer_cli.batch.run import run_batch

        run_batch(model, options, resume_command=_resume_command(click.get_current_context()))
        return
    ids = model.prompt_ids(prompt, system=options["system_prompt"], raw=options["raw"])
    completion = model.complete(
        fit_prompt(ids, model, options, max_tokens=options["max_tokens"]),
        merged_params(options, model),
        max_tokens=options["max_tokens"],
        stop=options["stop"],
        continues=options["raw"] or model.chat_template is None,
    )
    _show(completion, options)


def _prompt(options: dict[str, Any]) -> str | None:
    """The one prompt of this call, or None where there is a file of them."""
    given = [n for n in ("prompt", "prompt_option", "prompt_file") if options[n] is not None]
    if options["input_file"] is not None or options["output_file"] is not None:
        if given or options["input_file"] is None or options["output_file"] is None:
            raise click.UsageError("-i and -o go together, without another prompt.")
        return None
    if len(given) > 1:
        raise click.UsageError("Give one prompt: an argument, -p, or -f.")
    if options["prompt_option"] is not None:
        return str(options["prompt_option"])
    if options["prompt_file"] is not None and str(options["prompt_file"]) != "-":
        return _decode(_read(options["prompt_file"]), str(options["prompt_file"]))
    if options["prompt"] not in (None, "-"):
        return str(options["prompt"])
    if sys.stdin is None or (not given and sys.stdin.isatty()):  # None: closed by the shell
        raise click.UsageError("Give a prompt: an argument, -p, -f FILE, or - for stdin.")
    text = _decode(sys.stdin.buffer.read(), "stdin")
    if not given and not text:
        raise click.UsageError("Give a prompt: an argument, -p, -f FILE, or - for stdin.")
    return text


def _check_batch_options(options: dict[str, Any], *, is_batch: bool) -> None:
    if not is_batch and any(options[name] for name in _OF_BATCHES):
        raise click.UsageError(
            "--resume, --retry-errors, --force, --ordered and --batch-size go with -i and -o."
        )
    if options["retry_errors"] and not options["resume"]:
        raise click.UsageError("--retry-errors goes with --resume.")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from None


def _decode(data: bytes, origin: str) -> str:
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{origin} is not UTF-8 text: byte {error.start} is invalid",
            hint="Convert it, for example with iconv -t UTF-8.",
        ) from None


def merged_params(options: dict[str, Any], model: LanguageModel) -> SamplingParams:
    """The sampling parameters of this call, with the model's own as defaults."""
    return resolve_params(options["sampling"], options["preset"], model.generation_config)


def fit_prompt(
    ids: list[int], model: LanguageModel, options: dict[str, Any], *, max_tokens: int
) -> list[int]:
    """Cut a prompt on the left to what the context leaves beside `max_tokens`, if asked to."""
    if options["truncate_prompt"] is None:
        return ids
    context = model.engine.context_tokens
    room = max(context - max_tokens, context // 2, 1)
    if len(ids) <= room or len(ids) < context:
        return ids
    if not options["quiet"]:
        warn(f"cut {len(ids) - room:,} tokens off the prompt's start.")
    return ids[-room:]


def _resume_command(context: click.Context) -> str:
    """The command line of this call, for a shell, made to continue it."""
    words = [*context.command_path.split(), str(context.params["model"])]
    for option in context.command.params:
        name = option.name or ""
        given = context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE
        if not isinstance(option, click.Option) or not given or name in _STARTING:
            continue
        flag, value = max(option.opts, key=len), context.params[name]
        if option.is_flag:
            words.append(flag)
            continue
        for item in value if option.multiple else [value]:
            words += [flag, str(item)]
    return shlex.join([*words, "--resume"])


def _show(completion: Completion, options: dict[str, Any]) -> None:
    text = ""
    for piece in completion:
        text += piece
        if not options["as_json"]:
            click.echo(piece, nl=False, color=True)  # True: escape sequences are text like any
            sys.stdout.flush()
    if options["as_json"]:
        click.echo(json.dumps({"text": text} | report(completion), ensure_ascii=False))
    elif text or completion.error is None:
        if not text.endswith("\n"):
            click.echo()
        if not options["quiet"]:
            click.echo(_figures(completion), err=True)
    if completion.error is not None:
        raise completion.error


def report(completion: Completion) -> dict[str, Any]:
    """What `--json` says of an ended completion beside its text."""
    from qinfer.engine.memory import peak_bytes

    usage = completion.usage
    return {
        "finish_reason": completion.finish_reason,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "token_ids": completion.token_ids,
        "seed": completion.seed,
        "ttft_s": usage.ttft_s,
        "tpot_s": usage.tpot_s,
        "prefill_tokens_per_s": usage.prefill_tokens_per_s,
        "decode_tokens_per_s": usage.decode_tokens_per_s,
        "peak_memory_bytes": peak_bytes(),
    }


def _figures(completion: Completion) -> str:
    figures = report(completion)
    speed = figures["decode_tokens_per_s"]
    decode = f"{figures['tpot_s'] * 1e3:.1f} ms TPOT, {speed:.1f} tok/s decode, " if speed else ""
    return (
        f"{figures['prompt_tokens']} prompt tokens, {figures['completion_tokens']} new "
        f"({figures['finish_reason']}): {figures['ttft_s'] * 1e3:.0f} ms TTFT, "
        f"{figures['prefill_tokens_per_s']:.1f} tok/s prefill, {decode}"
        f"{figures['peak_memory_bytes'] / 1e6:.0f} MB peak, seed {figures['seed']}"
    )
