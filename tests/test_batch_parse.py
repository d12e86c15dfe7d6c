"""Lines to requests: every form, every mistake, and never an exception."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer_cli.batch.lines import Line
from qinfer_cli.batch.parse import Parser
from qinfer_cli.batch.request import BadLine, Request


def parse(value, *, number=7, jsonl=True):
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Parser()(Line(number, data), jsonl=jsonl)


def chat(**body):
    messages = [{"role": "user", "content": "hi"}]
    return {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": messages, **body},
    }


def completion(**body):
    return chat() | {"url": "/v1/completions", "body": {"prompt": "hi", **body}}


def test_a_line_of_text_is_a_prompt_as_it_is():
    assert parse(b' {"x" ', jsonl=False) == Request(line=7, id=7, prompt=' {"x" ')


def test_every_native_field_arrives():
    found = parse(
        {
            "id": "a",
            "prompt": "hi",
            "system": "s",
            "max_tokens": 3,
            "stop": "x",
            "n": 2,
            "seed": 5,
            "temperature": 0,
            "top_k": 4,
        }
    )
    sampling = {"seed": 5, "temperature": 0, "top_k": 4}
    assert found == Request(7, "a", "hi", "s", sampling, 3, ("x",), 2)


def test_null_is_the_same_as_absent():
    assert parse({"id": None, "prompt": "hi", "stop": None, "seed": None}) == parse(
        {"prompt": "hi"}
    )


def test_messages_keep_their_texts_and_lose_nulls():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": None}]
    assert parse({"messages": messages}).prompt == [{"role": "user", "content": "ab"}]


def test_an_openai_chat_line():
    found = parse(chat(model="g", max_tokens=9, max_completion_tokens=4, stop=["a", "b"], n=3))
    assert (found.id, found.form, found.model) == ("c", "chat.completion", "g")
    assert (found.max_tokens, found.stop, found.n) == (4, ("a", "b"), 3)
    assert found.prompt == [{"role": "user", "content": "hi"}]


def test_an_openai_completion_line():
    found = parse(completion(temperature=0.5))
    assert (found.form, found.prompt, found.sampling) == (
        "text_completion",
        "hi",
        {"temperature": 0.5},
    )


@pytest.mark.parametrize(
    "body",
    [
        {"user": "u"},
        {"stream": False},
        {"frequency_penalty": 0},
        {"logit_bias": {}},
        {"seed": None},
    ],
)
def test_openai_fields_without_effect_are_ignored(body):
    assert parse(chat(**body)) == parse(chat())


BAD = {
    "stream": (chat(stream=True), '"stream" cannot be true'),
    "penalty": (chat(presence_penalty=0.5), "presence_penalty"),
    "unknown in body": (chat(topk=3), '"topk"'),
    "prompt for chat": (chat(prompt="x"), '"prompt"'),
    "url": (chat() | {"url": "/v1/embeddings"}, '"url"'),
    "no url": ({"custom_id": "c", "body": {}}, '"url"'),
    "method": (chat() | {"method": "GET"}, '"method"'),
    "no body": (chat() | {"body": None}, '"body"'),
    "unknown beside body": (chat() | {"x": 1}, '"x"'),
    "no custom id": (chat() | {"custom_id": None}, '"custom_id"'),
    "both": ({"prompt": "x", "messages": []}, "one of them"),
    "neither": ({"id": 3}, "one of them"),
    "n": ({"prompt": "x", "n": 0}, '"n"'),
    "n true": ({"prompt": "x", "n": True}, '"n"'),
    "max_tokens": ({"prompt": "x", "max_tokens": 1.5}, '"max_tokens"'),
    "stop": ({"prompt": "x", "stop": [""]}, '"stop"'),
    "temperature": ({"prompt": "x", "temperature": -1}, "temperature must be"),
    "temperature text": ({"prompt": "x", "temperature": "1"}, '"temperature"'),
    "id": ({"prompt": "x", "id": [1]}, '"id"'),
    "id true": ({"prompt": "x", "id": True}, '"id"'),
    "system twice": ({"messages": [{"role": "user", "content": ""}], "system": "s"}, '"system"'),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "part that is not text",
    ),
    "tool calls": (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]},
        "tool_calls",
    ),
    "no content": ({"messages": [{"role": "user"}]}, '"content"'),
    "array": ([1], "not a JSON object"),
    "utf-8": (b"\xff", "not UTF-8 text: byte 0"),
    "cut": (b'{"prompt": "x"', "not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_named(name):
    value, message = BAD[name]
    found = parse(value)
    assert isinstance(found, BadLine)
    assert message in str(found.error)
    assert found.line == 7


def test_a_bad_line_has_its_id_where_that_can_be_told():
    assert parse({"id": "a", "prompt": 3}).id == "a"
    assert parse(chat(topk=3)).id == "c"
    assert parse(b"x").id == 7


def test_a_line_that_says_nothing_has_the_form_of_the_one_before():
    parser = Parser()
    assert not parser(Line(1, b"x"), jsonl=True).is_openai
    parser(Line(2, json.dumps(chat()).encode()), jsonl=True)
    assert parser(Line(3, b"x"), jsonl=True).is_openai


NAMES = st.sampled_from(
    ("id", "prompt", "messages", "system", "n", "seed", "top_k", "stop", "max_tokens", "type")
) | st.sampled_from(("temperature", "custom_id", "method", "url", "body", "role", "content"))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["/v1/chat/completions", "/v1/completions", "POST", "user", "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=6),
    max_leaves=12,
)


@given(VALUES | st.dictionaries(NAMES, VALUES, max_size=8))
def test_no_json_value_is_an_exception(value):
    found = parse(value)
    assert isinstance(found, BadLine | Request)
    assert isinstance(found.id, str | int)


@given(st.binary(max_size=40), st.booleans())
def test_no_bytes_are_an_exception(data, jsonl):
    found = parse(data, jsonl=jsonl)
    assert isinstance(found, BadLine | Request)


def test_deep_nesting_is_no_exception():
    deep = b"[" * 900 + b"]" * 900
    for line in (deep, b'{"prompt": ' + deep + b"}", b'{"messages": [' + deep + b"]}"):
        assert isinstance(parse(line), BadLine)
