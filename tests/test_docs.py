"""What the README and docs/ say of the command line is all of it, and true."""

import re
import shlex
from pathlib import Path

import click
import pytest

from qinfer.quant.spec import SCHEMES
from qinfer.sampling import PRESETS
from qinfer_cli.main import cli
from tests.test_cli import JSON_KEYS

ROOT = Path(__file__).parents[1]
PAGES = {p.relative_to(ROOT).as_posix(): p for p in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
EVERYTHING = "\n".join(TEXTS.values())


def options_of(command):
    return [p for p in command.params if isinstance(p, click.Option)]


def mentions(text, name):
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) is not None


def section_of(name):
    """The text under headings that name this command, their subsections included."""
    found, level = [], 0
    for line in EVERYTHING.splitlines():
        heading = re.match("(#+) ", line)
        if heading and (not level or len(heading[1]) <= level):
            level = len(heading[1]) if re.search(rf"\bqinfer {name}\b", line) else 0
        if level:
            found.append(line)
    return "\n".join(found)


def code_lines(text):
    """Lines of fenced and of indented code blocks."""
    fenced = False
    for line in text.splitlines():
        if re.match(r"\s*(```|~~~)", line):
            fenced = not fenced
        elif fenced or re.match(r" {4}\S", line):
            yield line.strip().removeprefix("$ ")


def examples():
    """Every call of qinfer in a code block or a help text, as (where, arguments)."""
    helps = {f"qinfer {name} --help": c.help for name, c in cli.commands.items()}
    for where, text in {**TEXTS, "qinfer --help": cli.help, **helps}.items():
        lines = code_lines(text) if where in TEXTS else text.splitlines()
        for line in lines:
            words = (
                shlex.split(line, comments=True) if re.search(r"(^|[|;&] ?)qinfer ", line) else []
            )
            while words:
                end = next((i for i, w in enumerate(words) if w in ("|", ";", "&&", ">")), None)
                call, words = words[:end], [] if end is None else words[end + 1 :]
                if call[:1] == ["qinfer"]:
                    yield pytest.param(call[1:], id=f"{where}: {' '.join(call)}")


EXAMPLES = list(examples())


@pytest.mark.parametrize("arguments", EXAMPLES)
def test_every_example_is_a_call_that_qinfer_understands(arguments):
    command = cli
    while isinstance(command, click.Group) and arguments and arguments[0] in command.commands:
        command, arguments = command.commands[arguments[0]], arguments[1:]
    assert command is not cli or arguments, "names no command"
    parent = None if command is cli else click.Context(cli, **cli.context_settings)
    command.make_context("qinfer", list(arguments), parent=parent)  # raises, and runs nothing


@pytest.mark.parametrize("name", cli.commands)
def test_every_command_has_a_section_and_an_example_in_the_readme(name):
    assert section_of(name)
    readme = [p.values[0] for p in EXAMPLES if p.id.startswith("README.md: ")]
    assert name in {arguments[0] for arguments in readme}


@pytest.mark.parametrize(
    ("name", "option"),
    [
        pytest.param(name, opt, id=f"{name} {opt}")
        for name, command in cli.commands.items()
        for option in options_of(command)
        for opt in (*option.opts, *option.secondary_opts)
    ],
)
def test_every_option_name_is_in_the_section_of_its_command(name, option):
    assert mentions(section_of(name), option)


@pytest.mark.parametrize(
    ("name", "option", "choice"),
    [
        (name, option.opts[-1], choice)
        for name, command in cli.commands.items()
        for option in options_of(command)
        if isinstance(option.type, click.Choice)
        for choice in option.type.choices
    ],
)
def test_every_choice_is_in_the_section_of_its_command(name, option, choice):
    assert mentions(section_of(name), choice)


@pytest.mark.parametrize("option", [o for p in options_of(cli) for o in p.opts])
def test_options_of_qinfer_itself_are_documented(option):
    assert mentions(EVERYTHING, option)


@pytest.mark.parametrize("name", cli.commands)
def test_no_section_has_an_option_that_is_not_there(name):
    known = {o for c in (cli, *cli.commands.values()) for p in options_of(c) for o in p.opts}
    mentioned = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*(?![\w-])", section_of(name)))
    assert mentioned <= known | {"-h", "--help"}


@pytest.mark.parametrize("key", sorted(JSON_KEYS))
def test_every_key_of_json_is_documented(key):
    assert f"`{key}`" in section_of("generate")


@pytest.mark.parametrize("code", [0, 1, 2, 3, 130])
def test_every_exit_code_is_documented(code):
    assert re.search(rf"^\| {code} \| \w", EVERYTHING, re.MULTILINE)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_values_of_every_preset_are_documented(preset):
    values = PRESETS[preset]
    text = f"{values['temperature']}/{values['top_p']}/{values['top_k']}"
    assert mentions(section_of("generate"), text)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_in_the_readme(scheme):
    assert re.search(rf"^\| `{scheme}`.*\|", TEXTS["README.md"], re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "target"),
    [
        (name, target)
        for name, text in TEXTS.items()
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", text)
    ],
)
def test_links_to_files_lead_somewhere(page, target):
    assert (PAGES[page].parent / target).exists()


def test_no_placeholder_is_left():
    assert not re.search(r"@[A-Z]+@|TODO|FIXME", EVERYTHING)
