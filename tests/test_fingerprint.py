"""A model directory is the one it was, or is not."""

import os

import pytest

from qinfer.checkpoint.fingerprint import fingerprint


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "weights"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"12345678")
    os.utime(path / "model.safetensors", ns=(10, 10))
    return path


def test_is_the_same_until_something_changes(directory):
    found = [fingerprint(directory)]
    assert fingerprint(directory) == found[0]
    for change in (
        lambda: (directory / "config.json").write_text("{ }"),
        lambda: (directory / "chat_template.jinja").write_text("x"),
        lambda: os.utime(directory / "model.safetensors", ns=(11, 11)),
        lambda: (directory / "model.safetensors").write_bytes(b"123456789"),
    ):
        change()
        found.append(fingerprint(directory))
    assert len(set(found)) == 5


def test_of_a_converted_model_does_not_depend_on_times(directory):
    (directory / "qinfer.json").write_text('{"sha256": "…"}')
    before = fingerprint(directory)
    os.utime(directory / "model.safetensors", ns=(11, 11))
    assert fingerprint(directory) == before
