"""Models on the Hugging Face Hub: which files of a repository are needed, and getting them.

Everything comes from one commit and goes through huggingface_hub's cache, so its environment
variables (`HF_HOME`, `HF_HUB_OFFLINE`, `HF_ENDPOINT`, `HF_TOKEN`) mean what they mean elsewhere.
What is inside the files is read by other modules.
"""

import errno
import json
import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from qinfer.errors import CheckpointError

_log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.jinja",
    "qinfer.json",
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_LOCAL_SUFFIXES = (".gguf", ".safetensors", ".json", *_PICKLES)

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_REFERENCE = re.compile(
    rf"(?P<repo>{_NAME}/{_NAME})"
    r"(?:@(?P<revision>[^@:\s]+))?"
    r"(?::(?P<file>[^:\\]+\.[gG][gG][uU][fF]))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubRef:
    """A model on the Hub, written `org/name[@revision][:file.gguf]`."""

    repo_id: str
    revision: str | None = None
    filename: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        filename = "" if self.filename is None else f":{self.filename}"
        return f"{self.repo_id}{revision}{filename}"


def parse(text: str) -> HubRef | None:
    """Read `org/name[@revision][:file.gguf]`; None if it is not of that form, or a local path.

    Nothing is asked of the network. Names that end like a model file are taken for local paths.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None or Path(text).exists():
        return None
    repo, filename = match["repo"], match["file"]
    if ".." in repo or "--" in repo or repo.lower().endswith(_LOCAL_SUFFIXES):
        return None
    if filename is not None and not _is_inside(filename):
        return None
    return HubRef(repo, match["revision"], filename)


def download(ref: HubRef, *, progress: bool = True) -> Path:
    """Get a GGUF file if the reference names one, else a checkpoint; see the two functions."""
    if ref.filename is not None:
        return download_gguf(ref, progress=progress)
    return download_checkpoint(ref, progress=progress)


def download_checkpoint(ref: HubRef, *, progress: bool = True) -> Path:
    """Get configuration, tokenizer and safetensors weights of a repository.

    Files already in the cache are not loaded again. Pickled weights are never loaded.

    Args:
        ref: The repository; a file name in it is ignored.
        progress: Show progress bars on stderr.

    Returns:
        The snapshot directory in the cache. Other programs may have put more files there.

    Raises:
        CheckpointError: Not found, no access, no network, or no weights of a kind that can be read.
    """
    with _explained(ref), _progress_bars(progress):
        listing = _list(ref)
        names = [name for name in _SMALL_FILES if name in listing.files]
        if "config.json" not in names:
            raise _no_checkpoint(ref, listing)
        if _INDEX in listing.files:
            index = _fetch(ref, listing, _INDEX)
            names += [_INDEX, *_shards(ref, index, listing)]
        elif _SINGLE in listing.files:
            names.append(_SINGLE)
        else:
            raise _no_checkpoint(ref, listing)
        _check_space(ref, listing, names)
        paths = [_fetch(ref, listing, name) for name in names]
    return paths[0].parent


def download_gguf(ref: HubRef, *, progress: bool = True) -> Path:
    """Get the one GGUF file that a reference names.

    Args:
        ref: The repository and the file in it.
        progress: Show a progress bar on stderr.

    Returns:
        The file in the cache.

    Raises:
        CheckpointError: Not found, no access or no network, or the reference names no file.
    """
    with _explained(ref), _progress_bars(progress):
        listing = _list(ref)
        if ref.filename is None or ref.filename not in listing.files:
            found = "no file is named" if ref.filename is None else f"it has no {ref.filename}"
            raise CheckpointError(
                f"{ref.repo_id}: {found}", hint=_gguf_hint(ref, listing) or "It has no GGUF file."
            )
        _check_space(ref, listing, [ref.filename])
        return _fetch(ref, listing, ref.filename)


def describe(ref: HubRef, path: Path) -> dict[str, str]:
    """Say where downloaded files came from, for the provenance record.

    Args:
        ref: What was asked for.
        path: What `download_checkpoint` or `download_gguf` returned.

    Returns:
        `repo_id`, `revision` as asked for, `commit` as resolved, and `filename` if one was named.
    """
    parts = path.parts
    commit = parts[len(parts) - 1 - parts[::-1].index("snapshots") + 1]
    record = {"repo_id": ref.repo_id, "revision": ref.revision or "main", "commit": commit}
    return record if ref.filename is None else record | {"filename": ref.filename}


@dataclass(frozen=True)
class _Listing:
    """The files of one commit: of the whole repository, or of what the cache holds of it."""

    commit: str
    files: Mapping[str, int | None]  # name to size in bytes, if known
    is_online: bool


def _list(ref: HubRef) -> _Listing:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return _list_cache(ref, "HF_HUB_OFFLINE is set", "Unset HF_HUB_OFFLINE to download it.")
    try:
        info = HfApi().model_info(ref.repo_id, revision=ref.revision, files_metadata=True)
    except HfHubHTTPError as error:
        if error.response is None or error.response.status_code < 500:
            raise
        reason = f"the Hub answered with status {error.response.status_code}"
    except _network_errors() as error:
        reason = f"the Hub cannot be reached ({error or type(error).__name__})"
    else:
        if info.sha is None:
            raise CheckpointError(f"{ref}: the Hub did not say which commit this is")
        files = {file.rfilename: file.size for file in info.siblings or ()}
        return _Listing(info.sha, files, is_online=True)
    listing = _list_cache(ref, reason, "Check the network connection and try again.")
    _log.warning("%s: %s; using the copy in the cache", ref, reason)
    return listing


def _list_cache(ref: HubRef, reason: str, hint: str) -> _Listing:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    folder = cache / f"models--{ref.repo_id.replace('/', '--')}"
    revision = ref.revision or constants.DEFAULT_REVISION
    pointer = folder / "refs" / revision
    commit = revision
    if not _COMMIT.fullmatch(revision) and _is_inside(revision) and pointer.is_file():
        commit = pointer.read_text(encoding="utf-8").strip()
    snapshot = folder / "snapshots" / commit
    if not (_COMMIT.fullmatch(commit) and snapshot.is_dir()):
        raise CheckpointError(f"{ref} is not in the cache {cache}, and {reason}", hint=hint)
    files = {
        path.relative_to(snapshot).as_posix(): path.stat().st_size
        for path in snapshot.rglob("*")
        if path.is_file()
    }
    return _Listing(commit, files, is_online=False)


def _fetch(ref: HubRef, listing: _Listing, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(
            ref.repo_id, name, revision=listing.commit, local_files_only=not listing.is_online
        )
    except RuntimeError as error:  # hf_xet has no classes of its own for failed transfers
        raise CheckpointError(
            f"{ref}: downloading {name} failed: {_first_line(error)}",
            hint="Try again, or set HF_HUB_DISABLE_XET=1 to download over plain HTTP.",
        ) from error
    return Path(path)


def _shards(ref: HubRef, index: Path, listing: _Listing) -> list[str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        names = sorted(set(content["weight_map"].values()))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(
            f"{ref}: {_INDEX} is malformed: {error}", hint="Report it to the model's author."
        ) from error
    for name in names:
        if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise CheckpointError(
                f"{ref}: {_INDEX} lists {name!r}, which is not the name of a safetensors file",
                hint="Report it to the model's author.",
            )
    if missing := [name for name in names if name not in listing.files]:
        place = "repository" if listing.is_online else "cached copy"
        raise CheckpointError(
            f"{ref}: the {place} lacks {len(missing)} of {len(names)} shards: {missing[0]}, …",
            hint=None if listing.is_online else "Connect to the network to finish the download.",
        )
    return names


def _no_checkpoint(ref: HubRef, listing: _Listing) -> CheckpointError:
    if not listing.is_online:
        return CheckpointError(
            f"{ref}: the cached copy is incomplete", hint="Connect to finish the download."
        )
    if hint := _gguf_hint(ref, listing):
        return CheckpointError(f"{ref} has no safetensors weights, only GGUF files", hint=hint)
    pickles = sorted(name for name in listing.files if name.endswith(_PICKLES))
    if pickles:
        return CheckpointError(
            f"{ref} has its weights only as pickle files ({pickles[0]}), which can run any code "
            "when they are opened; nothing was downloaded",
            hint="Look for a safetensors version, or convert a copy you trust with transformers: "
            "from_pretrained(...).save_pretrained(...).",
        )
    missing = "config.json" if "config.json" not in listing.files else _SINGLE
    return CheckpointError(
        f"{ref} is not a language model checkpoint: it has no {missing}",
        hint="Check the name; adapters and datasets cannot be run.",
    )


def _gguf_hint(ref: HubRef, listing: _Listing) -> str | None:
    names = sorted(name for name in listing.files if name.lower().endswith(".gguf"))
    choices = [str(HubRef(ref.repo_id, ref.revision, name)) for name in names]
    return f"Name one of its files: {', '.join(choices)}" if choices else None


def _check_space(ref: HubRef, listing: _Listing, names: Iterable[str]) -> None:
    """Refuse a download that cannot fit, before it begins."""
    from huggingface_hub import constants, try_to_load_from_cache

    if not listing.is_online:
        return
    missing_bytes = sum(
        listing.files[name] or 0
        for name in names
        if not isinstance(try_to_load_from_cache(ref.repo_id, name, revision=listing.commit), str)
    )
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if missing_bytes > free_bytes:
        raise CheckpointError(
            f"{ref} needs {missing_bytes / 1e9:.1f} GB more, but only {free_bytes / 1e9:.1f} GB "
            f"are free in {cache}",
            hint="Free some space, or set HF_HOME to a directory on another disk.",
        )


def _is_inside(name: str) -> bool:
    return not any(part in ("", ".", "..") for part in name.split("/")) and "\\" not in name


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _network_errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import HfHubHTTPError

    # The base class of the HTTP library in use, which has been another one in each major version.
    return (HfHubHTTPError.__bases__[0], ConnectionError, TimeoutError)


@contextmanager
def _explained(ref: HubRef) -> Iterator[None]:
    """Turn what huggingface_hub raises into one line and a hint."""
    from huggingface_hub import errors

    login = "log in with `hf auth login` or set HF_TOKEN"
    network = "Check the network connection and try again; what is complete is kept."
    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{ref.repo_id} is gated, and you have no access to it",
            hint=f"Ask for access at https://huggingface.co/{ref.repo_id}, then {login}.",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{ref.repo_id} was not found on the Hub, and is no local directory either",
            hint=f"Check the name. If the repository is private, {login}.",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{ref.repo_id} has no revision {ref.revision!r}",
            hint=f"See the branches and tags at https://huggingface.co/{ref.repo_id}/tree/main.",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointError(f"{ref}: the Hub cannot be reached", hint=network) from error
    except errors.HfHubHTTPError as error:
        denied = error.response is not None and error.response.status_code in (401, 403)
        hint = f"Check your access token: {login}." if denied else network
        raise CheckpointError(f"{ref}: {_first_line(error)}", hint=hint) from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{ref}: {_first_line(error)}", hint="Check the name.") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{ref}: the Hub's answer is not JSON", hint=network) from error
    except _network_errors() as error:
        raise CheckpointError(
            f"{ref}: download failed: {_first_line(error)}", hint=network
        ) from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise CheckpointError(
            f"{ref}: {'the disk is full' if full else 'download failed'}: {error}",
            hint="Free some space, or set HF_HOME to a directory on another disk."
            if full
            else "Check the network and that the cache can be written; HF_HOME moves it.",
        ) from error


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
