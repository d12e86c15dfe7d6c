import errno
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http as hub_http

from qinfer.checkpoint import hub
from qinfer.checkpoint.hub import HubRef
from qinfer.errors import CheckpointError

COMMIT = "c0ffee" + "0" * 34
OTHER = "decade" + "0" * 34
INDEX = {
    "weight_map": {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
        "c": "model-00001-of-00002.safetensors",
    }
}
COMMON = {"config.json": b"{}", "tokenizer.json": b'{"x": 1}', "README.md": b"#"}
SHARDED = COMMON | {
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
    "model.safetensors": b"both",
    "consolidated.safetensors": b"all",
    "pytorch_model.bin": b"pickle",
    "onnx/model.onnx": b"onnx",
}
SINGLE = COMMON | {
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"all",
    "chat_template.jinja": b"hi",
}
PICKLED = COMMON | {"pytorch_model.bin": b"pickle"}
GGUF = {"README.md": b"#", "a.Q4_0.gguf": b"four", "sub/b.gguf": b"eight"}
REPOSITORIES = {
    "org/sharded": SHARDED,
    "org/single": SINGLE,
    "org/pickled": PICKLED,
    "org/gguf": GGUF,
    "org/empty": {"README.md": b"#"},
}


class FakeHub(http.server.BaseHTTPRequestHandler):
    """The few endpoints of the Hub that a download needs."""

    repositories: dict[str, dict[str, bytes]]
    requested: list[str]
    status: int | None
    error_code: str | None

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, *, body: bool = True) -> None:
        path = unquote(self.path.partition("?")[0]).lstrip("/")
        self.requested.append(path)
        if self.status is not None:
            return self.answer(self.status, b"", {"X-Error-Code": self.error_code or ""}, body)
        if path.startswith("api/models/"):
            repo_id, _, revision = path.removeprefix("api/models/").partition("/revision/")
            return self.answer_api(repo_id, revision or "main", body)
        repo_id, _, rest = path.partition("/resolve/")
        commit, _, name = rest.partition("/")
        content = self.repositories[repo_id].get(name) if commit == COMMIT else None
        if content is None:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
        etag = hashlib.sha1(content).hexdigest()
        return self.answer(200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}, body)

    def answer_api(self, repo_id: str, revision: str, body: bool) -> None:
        if repo_id not in self.repositories:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        if revision not in ("main", "refs/pr/1", COMMIT):
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
        files = [
            {"rfilename": name, "size": len(content)}
            for name, content in self.repositories[repo_id].items()
        ]
        info = {"id": repo_id, "sha": COMMIT, "siblings": files, "private": False, "tags": []}
        return self.answer(200, json.dumps(info).encode(), {}, body)

    def answer(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return tmp_path / "hub"


@pytest.fixture
def server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeHub]]:
    class Handler(FakeHub):
        status = None
        error_code = None

    Handler.repositories = {name: dict(files) for name, files in REPOSITORIES.items()}
    Handler.requested = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        use_endpoint(monkeypatch, f"http://127.0.0.1:{running.server_port}")
        yield Handler
        hub_http.close_session()
        running.shutdown()
        thread.join()


def use_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    hub_http.close_session()


def fill_cache(cache: Path, repo_id: str, files: dict[str, bytes], ref: str = "main") -> Path:
    folder = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    for name, content in files.items():
        path = snapshot / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(COMMIT)
    return snapshot


def names(directory: Path) -> set[str]:
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubRef("org/name")),
        ("Qwen/Qwen2.5-0.5B", HubRef("Qwen/Qwen2.5-0.5B")),
        ("org/name@v1.0", HubRef("org/name", "v1.0")),
        ("org/name@refs/pr/1", HubRef("org/name", "refs/pr/1")),
        ("org/name:m.Q4_0.gguf", HubRef("org/name", None, "m.Q4_0.gguf")),
        ("org/name:sub/m.GGUF", HubRef("org/name", None, "sub/m.GGUF")),
        ("org/name@v1:m.gguf", HubRef("org/name", "v1", "m.gguf")),
    ],
)
def test_references(text: str, expected: HubRef) -> None:
    assert hub.parse(text) == expected
    assert str(expected) == text
    assert hub.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "name", "a/b/c", "/a/b", "./a", "../a", "~/a", "a/", "a//b", "a/..", "a/b..c"),
        *("org/na me", "org/name@", "org/name:", "org/name:x.bin", "org/name:../x.gguf"),
        *("org/name:/x.gguf", "org/name:a\\x.gguf", "models/x.gguf", "models/x.safetensors"),
        *("org/-name", "org/name-", "a--b/c", "https://huggingface.co/org/name", "org/name\n"),
    ],
)
def test_what_is_no_reference(text: str) -> None:
    assert hub.parse(text) is None


def test_local_paths_are_no_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub.parse("org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not hub.parse("org/name")


@pytest.mark.parametrize(
    ("repo_id", "expected"),
    [
        (
            "org/sharded",
            {
                *("config.json", "tokenizer.json", "model.safetensors.index.json"),
                *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
            },
        ),
        (
            "org/single",
            {"config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"},
        ),
    ],
)
def test_only_needed_files_are_downloaded(
    server: type[FakeHub], repo_id: str, expected: set[str]
) -> None:
    ref = HubRef(repo_id)
    path = hub.download(ref, progress=False)
    assert names(path) == expected
    for name in expected:
        assert (path / name).read_bytes() == REPOSITORIES[repo_id][name]
    record = {"repo_id": repo_id, "revision": "main", "commit": COMMIT}
    assert hub.describe(ref, path) == record


def test_second_download_takes_everything_from_the_cache(server: type[FakeHub]) -> None:
    first = hub.download_checkpoint(HubRef("org/single"))
    server.requested.clear()
    assert hub.download_checkpoint(HubRef("org/single", "refs/pr/1")) == first
    assert server.requested == ["api/models/org/single/revision/refs/pr/1"]


def test_interrupted_download_continues(server: type[FakeHub]) -> None:
    name = "model-00002-of-00002.safetensors"
    content = server.repositories["org/sharded"][name]
    server.repositories["org/sharded"][name] = b""
    files = hub.download_checkpoint(HubRef("org/sharded"))
    (files / name).unlink()
    server.repositories["org/sharded"][name] = content
    server.requested.clear()
    assert hub.download_checkpoint(HubRef("org/sharded")) == files
    assert {path for path in server.requested if "/resolve/" in path} == {
        f"org/sharded/resolve/{COMMIT}/{name}"
    }


def test_progress_goes_to_stderr_or_nowhere(
    server: type[FakeHub], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQDM_POSITION", "-1")  # show bars even though stderr is no terminal
    hub.download_checkpoint(HubRef("org/single"), progress=False)
    assert capfd.readouterr() == ("", "")
    hub.download_checkpoint(HubRef("org/sharded"))
    out, err = capfd.readouterr()
    assert out == ""
    assert "model-00002-of-00002.safetensors" in err


def test_gguf_file(server: type[FakeHub]) -> None:
    ref = HubRef("org/gguf", None, "sub/b.gguf")
    path = hub.download(ref)
    assert path.read_bytes() == b"eight"
    assert hub.describe(ref, path) == {
        "repo_id": "org/gguf",
        "revision": "main",
        "commit": COMMIT,
        "filename": "sub/b.gguf",
    }
    assert not any("a.Q4_0" in path for path in server.requested)


@pytest.mark.parametrize(
    ("ref", "message", "hint"),
    [
        (HubRef("org/pickled"), r"pickle files \(pytorch_model\.bin\)", "safetensors version"),
        (HubRef("org/gguf"), "only GGUF files", "org/gguf:a.Q4_0.gguf, org/gguf:sub/b.gguf"),
        (HubRef("org/gguf", "main"), "only GGUF", "org/gguf@main:a.Q4_0.gguf"),
        (HubRef("org/gguf", None, "c.gguf"), "it has no c.gguf", "org/gguf:a.Q4_0.gguf"),
        (HubRef("org/single", None, "c.gguf"), "it has no c.gguf", "no GGUF file"),
        (HubRef("org/empty"), r"it has no config\.json", "Check the name"),
        (HubRef("org/nothing"), "org/nothing was not found", "hf auth login"),
        (HubRef("org/single", "v9"), "no revision 'v9'", "tree/main"),
    ],
)
def test_what_cannot_be_downloaded(
    server: type[FakeHub], ref: HubRef, message: str, hint: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        hub.download(ref)
    assert hint in str(caught.value.hint)
    assert "\n" not in str(caught.value)
    assert not [path for path in server.requested if "/resolve/" in path]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"{", "is malformed"),
        (b"[]", "is malformed"),
        (b'{"weight_map": {"a": 3, "b": "x"}}', "is malformed"),
        (b'{"weight_map": {"a": "../../x.safetensors"}}', "not the name of a safetensors file"),
        (b'{"weight_map": {"a": "sub/x.safetensors"}}', "not the name of a safetensors file"),
        (b'{"weight_map": {"a": "pytorch_model.bin"}}', "not the name of a safetensors file"),
        (b'{"weight_map": {"a": "x.safetensors"}}', r"lacks 1 of 1 shards: x\.safetensors"),
    ],
)
def test_bad_index(server: type[FakeHub], index: bytes, message: str) -> None:
    server.repositories["org/sharded"]["model.safetensors.index.json"] = index
    with pytest.raises(CheckpointError, match=message):
        hub.download_checkpoint(HubRef("org/sharded"))
    assert not [path for path in server.requested if path.endswith((".safetensors", ".bin"))]


@pytest.mark.parametrize(
    ("status", "code", "message", "hint"),
    [
        (403, "GatedRepo", "is gated", "Ask for access at https://huggingface.co/org/single"),
        (401, "RepoNotFound", "was not found", "private"),
        (401, "", "401", "access token"),
        (403, "", "403", "access token"),
        (429, "", "429", "try again"),
        (500, "", "not in the cache .* the Hub answered with status 500", "try again"),
    ],
)
def test_answers_that_are_errors(
    server: type[FakeHub], status: int, code: str, message: str, hint: str
) -> None:
    server.status, server.error_code = status, code
    with pytest.raises(CheckpointError, match=message) as caught:
        hub.download(HubRef("org/single"))
    assert hint in str(caught.value.hint)
    assert "\n" not in str(caught.value)


def test_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_endpoint(monkeypatch, "http://127.0.0.1:9")  # the discard port: nobody listens
    with pytest.raises(CheckpointError, match=r"not in the cache .*cannot be reached") as caught:
        hub.download(HubRef("org/single"))
    assert "network" in str(caught.value.hint)


def test_no_network_but_cached(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    snapshot = fill_cache(cache, "org/single", SINGLE)
    assert hub.download(HubRef("org/single")) == snapshot
    assert "using the copy in the cache" in caplog.text


def test_answer_of_a_captive_portal(server: type[FakeHub], monkeypatch: Any) -> None:
    def portal(self: FakeHub, repo_id: str, revision: str, body: bool) -> None:
        self.answer(200, b"<html>Please log in</html>", {}, body)

    monkeypatch.setattr(server, "answer_api", portal)
    with pytest.raises(CheckpointError, match="answer is not JSON"):
        hub.download(HubRef("org/single"))


@pytest.fixture
def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    return cache


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_offline_from_the_cache(offline: Path, revision: str | None) -> None:
    snapshot = fill_cache(offline, "org/sharded", SHARDED)
    ref = HubRef("org/sharded", revision)
    assert hub.download(ref) == snapshot
    assert hub.describe(ref, snapshot)["commit"] == COMMIT


def test_offline_gguf_from_the_cache(offline: Path) -> None:
    snapshot = fill_cache(offline, "org/gguf", GGUF, ref="refs/pr/1")
    ref = HubRef("org/gguf", "refs/pr/1", "sub/b.gguf")
    assert hub.download(ref) == snapshot / "sub" / "b.gguf"


@pytest.mark.parametrize(
    "ref",
    [
        HubRef("org/other"),
        HubRef("org/single", "v2"),
        HubRef("org/single", OTHER),
        HubRef("org/single", "../refs/main"),
    ],
)
def test_offline_and_not_in_the_cache(offline: Path, ref: HubRef) -> None:
    fill_cache(offline, "org/single", SINGLE)
    with pytest.raises(CheckpointError, match=r"not in the cache .* HF_HUB_OFFLINE is") as caught:
        hub.download(ref)
    assert "\n" not in str(caught.value)
    assert "Unset HF_HUB_OFFLINE" in str(caught.value.hint)


@pytest.mark.parametrize("missing", sorted(["config.json", *INDEX["weight_map"].values()])[:2])
def test_offline_and_incomplete(offline: Path, missing: str) -> None:
    files = {name: content for name, content in SHARDED.items() if name != missing}
    fill_cache(offline, "org/sharded", files)
    with pytest.raises(CheckpointError, match="cached copy") as caught:
        hub.download(HubRef("org/sharded"))
    assert "finish the download" in str(caught.value.hint)


def test_not_enough_space(server: type[FakeHub], monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 10

    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(CheckpointError, match=r"needs .* GB more, but only") as caught:
        hub.download(HubRef("org/single"))
    assert "HF_HOME" in str(caught.value.hint)
    assert not [path for path in server.requested if "/resolve/" in path]


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full", "HF_HOME"),
        (PermissionError(errno.EACCES, "Permission denied"), "download failed", "HF_HOME"),
        (RuntimeError("Data processing error: reset"), "Data processing", "HF_HUB_DISABLE_XET"),
        (ConnectionResetError("reset by peer"), "download failed: reset by peer", "network"),
    ],
)
def test_failure_while_writing(
    server: type[FakeHub],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    message: str,
    hint: str,
) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(CheckpointError, match=message) as caught:
        hub.download(HubRef("org/single"))
    assert hint in str(caught.value.hint)
