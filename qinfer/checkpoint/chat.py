"""Chat templates: a conversation in, prompt ids out.

Templates are found and rendered as transformers does it, and the ids are the same, with one
difference: a message that spells a control token cannot forge it. Which ids belong to which text is
`tokenizer.py`'s business; the model's answer is parsed by nobody here.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qinfer.checkpoint.tokenizer import (
    Tokenizer,
    named_tokens,
    read_tokenizer_config,
    unused_characters,
)
from qinfer.errors import CheckpointError, PromptError

if TYPE_CHECKING:
    import jinja2
    import jinja2.sandbox

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

# What code inside a template can raise besides jinja's own errors.
_TEMPLATE_FAULTS = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    MemoryError,
)
_RAW_HINT = "Complete the text without the chat template (--raw), or correct the template."


class ChatTemplate:
    """The template that turns a list of messages into the model's prompt.

    Args:
        source: The Jinja template.
        variables: What the template sees besides the messages: `bos_token`, `eos_token`, ….
        name: Where the template came from, for error messages.

    Raises:
        CheckpointError: The template does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, str], *, name: str) -> None:
        import jinja2

        self.name = name
        self._source = source
        self._variables = dict(variables)
        try:
            self._template = _environment().from_string(source)
        except RecursionError as error:
            raise CheckpointError(
                f"{name}: the chat template is nested too deeply", hint=_RAW_HINT
            ) from error
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{name}: the chat template has a syntax error in line {error.lineno}: {error}",
                hint=_RAW_HINT,
            ) from error

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate | None":
        """Find a checkpoint's template: `chat_template.jinja`, else in `tokenizer_config.json`.

        Returns:
            The template, or None if the checkpoint has none.

        Raises:
            CheckpointError: The file or the template is malformed.
        """
        config = read_tokenizer_config(directory)
        path = directory / "chat_template.jinja"
        if path.is_file():
            try:
                source = path.read_text(encoding="utf-8")
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be read: {error.strerror}", hint=_RAW_HINT
                ) from error
            except UnicodeDecodeError as error:
                raise CheckpointError(
                    f"{path} is not UTF-8 text: {error}", hint=_RAW_HINT
                ) from error
            return cls(source, named_tokens(config), name=str(path))
        path = directory / "tokenizer_config.json"
        inline = _default_template(config.get("chat_template"), path)
        return None if inline is None else cls(inline, named_tokens(config), name=str(path))

    def render(self, messages: Sequence[Message]) -> str:
        """Render the prompt that asks for the assistant's next message, as text.

        Raises:
            PromptError: The messages are malformed, or the template refuses them.
        """
        return self._render(_checked(messages))

    def render_ids(self, tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
        """Render the prompt and encode it.

        Only what the template itself writes becomes control tokens. A control token spelled in a
        message is encoded as the letters that it consists of.

        Raises:
            PromptError: The messages are malformed, or the template refuses them.
        """
        checked = _checked(messages)
        control = _pattern(tokenizer.special_token_strings)
        strings = [text for message in checked for text in _strings(message)]
        if not any(control.search(text) for text in strings):
            return tokenizer.encode(self._render(checked), add_special_tokens=False)
        # Marks that survive the template's string operations, and that no message can contain.
        start, end = unused_characters("".join([self._source, *strings]))
        marked = [_mark(message, control, rf"{start}\g<0>{end}") for message in checked]
        text, literals = _unmark(self._render(marked), control, start, end)
        return tokenizer.encode_with_literals(text, literals)

    def _render(self, messages: Sequence[Message]) -> str:
        text = self._rendered(messages)
        system = [message for message in messages if message["role"] == "system"]
        if not all(message["content"].strip() in text for message in system):
            others = [message for message in messages if message["role"] != "system"]
            if others and self._rendered(others) == text:
                raise self._no_system_role()
        return text

    def _rendered(self, messages: Sequence[Message]) -> str:
        import jinja2

        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._variables,
            )
        except jinja2.exceptions.SecurityError as error:
            message = f"{self.name}: the chat template does something unsafe: {error}"
            raise CheckpointError(message, hint=_RAW_HINT) from error
        except jinja2.UndefinedError as error:
            raise PromptError(
                f"The chat template needs something that the messages do not have: {error}",
                hint=_RAW_HINT,
            ) from error
        except jinja2.TemplateError as error:
            others = [message for message in messages if message["role"] != "system"]
            if others and len(others) < len(messages) and self._accepts(others):
                raise self._no_system_role() from error
            raise PromptError(
                f"The chat template refuses these messages: {error}",
                hint="Most templates want user and assistant messages in turn, the user first.",
            ) from error
        except _TEMPLATE_FAULTS as error:
            message = f"{self.name}: the chat template fails: {type(error).__name__}: {error}"
            raise CheckpointError(message, hint=_RAW_HINT) from error

    def _accepts(self, messages: Sequence[Message]) -> bool:
        try:
            self._rendered(messages)
        except (PromptError, CheckpointError):
            return False
        return True

    def _no_system_role(self) -> PromptError:
        return PromptError(
            "This model's chat template does not support a system message",
            hint="Leave the system prompt out, or put its text at the start of the user message.",
        )


def _default_template(value: object, path: Path) -> str | None:
    if isinstance(value, list):
        try:
            value = {entry["name"]: entry["template"] for entry in value}
        except (TypeError, KeyError) as error:
            raise CheckpointError(
                f"{path}: an entry of chat_template lacks a name or a template", hint=_RAW_HINT
            ) from error
    if isinstance(value, dict):
        if "default" not in value:
            names = ", ".join(map(str, value)) or "none"
            raise CheckpointError(
                f"{path}: no chat template is named 'default' (found: {names})",
                hint="Save the one you want as chat_template.jinja in the same directory.",
            )
        value = value["default"]
    if value is not None and not isinstance(value, str):
        raise CheckpointError(
            f"{path}: chat_template is a {type(value).__name__}, expected text", hint=_RAW_HINT
        )
    return value


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Check roles and contents, and leave out fields that are None, as transformers does."""
    if not messages:
        raise PromptError("There are no messages to answer", hint="Give at least a user message.")
    checked = []
    for number, message in enumerate(messages, start=1):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise PromptError(
                f"Message {number} has the role {role!r}", hint=f"Roles are: {', '.join(ROLES)}."
            )
        if not isinstance(content, str):
            raise PromptError(
                f"Message {number} has a content of type {type(content).__name__}, expected text",
                hint="Only text can be sent to this kind of model; join the parts into one string.",
            )
        checked.append({key: value for key, value in message.items() if value is not None})
    return checked


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _mark(value: Any, control: re.Pattern[str], replacement: str) -> Any:
    if isinstance(value, str):
        return control.sub(replacement, value)
    if isinstance(value, Mapping):
        return {key: _mark(item, control, replacement) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mark(item, control, replacement) for item in value]
    return value


def _unmark(
    marked: str, control: re.Pattern[str], start: str, end: str
) -> tuple[str, list[tuple[int, int]]]:
    """Take the marks out; return the text and the spans that spell a control token.

    A template can cut a message between two marks. A mark left alone still breaks the text: what
    joins over it is no control token either.
    """
    parts: list[str] = []
    forged: set[tuple[int, int]] = set()
    breaks: list[int] = []
    at = 0
    for piece in re.split(f"({start}(?:{control.pattern}){end}|[{start}{end}])", marked):
        plain = piece.strip(start + end)
        if piece != plain:
            forged.add((at, at + len(plain)))
            breaks += [at, at + len(plain)]
        parts.append(plain)
        at += len(plain)
    text = "".join(parts)
    spans = [match.span() for match in control.finditer(text)]
    return text, [span for span in spans if span in forged or _is_broken(span, breaks)]


def _is_broken(span: tuple[int, int], breaks: Sequence[int]) -> bool:
    index = bisect_right(breaks, span[0])
    return index < len(breaks) and breaks[index] < span[1]


@lru_cache(maxsize=4)
def _pattern(tokens: frozenset[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


@lru_cache(maxsize=1)
def _environment() -> "jinja2.sandbox.ImmutableSandboxedEnvironment":
    """Make the environment that transformers renders chat templates in.

    Templates are untrusted: the sandbox keeps them from Python's internals.
    """
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """The block `{% generation %}`, which only marks what the assistant wrote."""

        tags = {"generation"}  # noqa: RUF012  (jinja declares it as an instance variable)

        def parse(self, parser: "jinja2.parser.Parser") -> "jinja2.nodes.Node":
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_render")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _render(self, caller: "jinja2.runtime.Macro") -> str:
            return str(caller())

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(  # the signature that templates use
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment
