"""Model files from the Hugging Face hub: naming them, choosing one of a repository's, and fetching it resumably.

huggingface_hub (extra `pull`) speaks to the server: tokens, endpoints, redirects, retries. The file on disk is ours: an
interrupted download stays beside its target and is continued by the next `pull` of the same content, which
huggingface_hub's own cache does not do across processes. Invariants: nothing is written outside the directory; a file
under its final name is complete; every failure is a `DownloadError` in one line. Imports huggingface_hub on first use.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import importlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ggml_engine.errors import DownloadError, EngineError, InputError

Progress = Callable[[int, int | None], None]

PREFERRED_QUANT = "Q4_K_M"
_REPO = re.compile(r"(?:https?://)?(?:(?:www\.)?(?:huggingface\.co|hf\.co)/)?([^/:\s]+(?:/[^/:\s]+)?)")
_REPO_PART = re.compile(r"(?!.*(?:\.\.|--))[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
# A name that means the same file on every system; neither hidden, nor a device, nor ending in what Windows drops.
_NAME_PART = re.compile(
    r"(?![. ])(?!(?:CON|PRN|AUX|NUL|COM\d|LPT\d)(?:\.|$))[^\\/:*?\"<>|\x00-\x1f\x7f]{1,200}(?<![. ])", re.IGNORECASE
)
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_LOG_IN = "log in (hf auth login, or HF_TOKEN)"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Reference:
    """`REPO[:FILE]`: a repository, and a file in it, a quant name such as `Q4_K_M`, or None for the usual choice."""

    repo: str
    file: str | None


def parse_reference(text: str) -> Reference:
    """Reads `REPO[:FILE]`, with or without the hub's address before it.

    Raises InputError for anything else, and for a FILE that would lead out of the repository.
    """
    match = re.fullmatch(rf"{_REPO.pattern}(?::(.+))?", text.strip())
    if match is None or not all(_REPO_PART.fullmatch(part) for part in match[1].split("/")):
        raise InputError(f"{text!r:.120} is not a repository's name; OWNER/NAME or OWNER/NAME:FILE is meant")
    if match[2] is not None and not _is_safe(match[2]):
        raise InputError(f"{match[2]!r:.120} is not the name of a file in a repository")
    return Reference(match[1], match[2])


def default_directory() -> Path:
    """Where pulled models go: `$GGML_ENGINE_MODELS`, else `ggml-engine/models` in the user's cache directory."""
    if chosen := os.environ.get("GGML_ENGINE_MODELS"):
        return Path(chosen)
    cache = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "ggml-engine" / "models"


def choose_files(names: Iterable[str], wanted: str | None, repo: str = "the repository") -> list[str]:
    """The file to fetch among a repository's `names`, with all its parts if it is split, in order.

    `wanted` is a name, a quant (`Q4_K_M`, in any case), or None: then the only model, or the `Q4_K_M` one. Raises
    DownloadError, listing what is there, when that does not name exactly one complete model.
    """
    models = _models(names)
    if not models:
        raise DownloadError(f"{repo} holds no .gguf file")
    if wanted is not None and wanted.lower().endswith(".gguf"):
        found = [parts for parts in models.values() if wanted in parts]
        problem = f"{repo} has no file {wanted}"
    else:
        # Projectors and importance matrices are .gguf files, too, but no models.
        usable = {key: parts for key, parts in models.items() if not re.search(r"mmproj|imatrix", key, re.IGNORECASE)}
        found = list(usable.values())
        problem = f"{repo} has no single model"
        if wanted is not None or len(found) > 1:
            found = [parts for key, parts in usable.items() if _has_quant(key, wanted or PREFERRED_QUANT)]
            problem = f"{repo} has {len(found) or 'no'} files of {wanted or PREFERRED_QUANT}; name one"
    if len(found) != 1:
        raise DownloadError(f"{problem}: {_listed(models)}")
    return _complete(found[0], repo)


def _models(names: Iterable[str]) -> dict[str, list[str]]:
    """The .gguf files by model: a split one's parts together, under the name without the part's number."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf"):
            split = _SPLIT.fullmatch(name)
            models.setdefault(f"{split['stem']}.gguf" if split else name, []).append(name)
    return models


def _has_quant(name: str, quant: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?![A-Za-z0-9_])", name, re.IGNORECASE) is not None


def _listed(models: dict[str, list[str]]) -> str:
    names = list(models)
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _complete(parts: list[str], repo: str) -> list[str]:
    split = _SPLIT.fullmatch(parts[0])
    if split is None:
        return parts
    count = int(split["count"])
    expected = [f"{split['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, len(parts) + 1)]
    if len(parts) != count or [part.lower() for part in parts] != [name.lower() for name in expected]:
        raise DownloadError(f"{repo} has {len(parts)} of the {count} parts of {split['stem']}")
    return parts


def _is_safe(name: str) -> bool:
    return len(name) <= 1000 and all(_NAME_PART.fullmatch(part) for part in name.split("/"))


# --- fetching


def pull(
    repo: str,
    file: str | None = None,
    *,
    progress: Progress | None = None,
    directory: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    endpoint: str | None = None,
    token: str | None = None,
) -> Path:
    """Fetches a model file (all parts of a split one) and returns the path of its first part.

    `file` is as in `choose_files`. `progress(done, total)` is told bytes over all parts, those of an earlier attempt
    included; it may raise to stop, and what was fetched stays for the next call. Files go to `directory`/`repo`/name
    (`default_directory()`); one that is there with the same content is not fetched again. `endpoint` and `token`
    default to huggingface_hub's own (`HF_ENDPOINT`, `HF_TOKEN` or a stored login). Raises DownloadError, and
    InputError for a name that cannot be one.
    """
    reference = parse_reference(f"{repo}:{file}" if file is not None else repo)
    hub = _import_hub()
    root = Path(directory) if directory is not None else default_directory()
    with _explained(reference.repo, revision):
        info = hub.HfApi(endpoint=endpoint, token=token).model_info(reference.repo, revision=revision)
        names = [sibling.rfilename for sibling in info.siblings or ()]
        chosen = choose_files(names, reference.file, reference.repo)
        # All parts from one commit, also when somebody pushes meanwhile.
        commit = info.sha or revision
        parts = [_Part.found(hub, reference.repo, name, commit, endpoint, token, root) for name in chosen]
    bar = _Bar(progress, sum(part.n_bytes for part in parts) if all(part.n_bytes for part in parts) else None)
    for part in parts:
        with _explained(reference.repo, revision, bar):
            part.fetch(bar)
    return parts[0].path


def _import_hub() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise DownloadError("pulling needs huggingface_hub: pip install 'ggml-engine[pull]'") from error


class _Bar:
    """Takes the place of huggingface_hub's progress bar, and reports bytes over all parts."""

    def __init__(self, report: Progress | None, n_total: int | None) -> None:
        self._report = report
        self._n_total = n_total
        self._n_done = 0
        self.error: Exception | None = None  # what the caller's function raised

    def update(self, n_bytes: float | None = 1) -> None:
        self._n_done += int(n_bytes or 0)
        if self._report is not None:
            try:
                self._report(self._n_done, self._n_total)
            except Exception as error:
                self.error = error
                raise


@dataclass(frozen=True, slots=True)
class _Part:
    """One file on the hub and its place here. `n_bytes` is 0 where the server does not tell."""

    name: str
    url: str
    headers: dict[str, str]
    etag: str
    n_bytes: int
    path: Path

    @classmethod
    def found(
        cls, hub: Any, repo: str, name: str, commit: str | None, endpoint: str | None, token: str | None, root: Path
    ) -> _Part:
        if not _is_safe(name):
            raise DownloadError(f"{repo} lists {name!r:.120}, which is not a safe name for a file")
        url = hub.hf_hub_url(repo, name, revision=commit, endpoint=endpoint)
        metadata = hub.get_hf_file_metadata(url, token=token)
        if not metadata.etag:
            raise DownloadError(f"the server tells no ETag for {name}, so that a download could not be checked")
        headers = hub.utils.build_hf_headers(token=token)
        if urlsplit(metadata.location).netloc != urlsplit(url).netloc:
            # A storage host behind a signed address: the hub's token is none of its business.
            headers.pop("authorization", None)
        path = root.joinpath(*repo.split("/"), *name.split("/"))
        return cls(name, metadata.location, headers, metadata.etag, metadata.size or 0, path)

    def fetch(self, bar: _Bar) -> None:
        """Brings the file to `path`, continuing an earlier attempt at the same content."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Beside the file, named after the content: another content starts anew.
        key = hashlib.sha256(self.etag.encode()).hexdigest()[:16]
        partial = self.path.with_name(f".{self.path.name}.{key}.partial")
        stamp = self.path.with_name(f".{self.path.name}.etag")
        with _locked(self.path.with_name(f".{self.path.name}.lock"), self.name):
            if self._is_here(stamp):
                bar.update(self.path.stat().st_size)
                return
            n_there = partial.stat().st_size if partial.exists() else 0
            if self.n_bytes and n_there > self.n_bytes:
                partial.unlink()
                n_there = 0
            self._check_room(n_there)
            bar.update(n_there)
            with partial.open("ab") as stream:
                # `_tqdm_bar` takes whatever has `update`, in every version; without it a bar is drawn on stderr.
                importlib.import_module("huggingface_hub.file_download").http_get(
                    self.url,
                    stream,
                    resume_size=n_there,
                    headers=self.headers,
                    expected_size=self.n_bytes or None,
                    _tqdm_bar=bar,
                )
            if n_there:
                self._verify(partial)
            stamp.unlink(missing_ok=True)
            partial.replace(self.path)
            stamp.write_text(self.etag, encoding="utf-8")
            for stale in self.path.parent.glob(f".{glob.escape(self.path.name)}.*.partial"):
                stale.unlink(missing_ok=True)

    def _is_here(self, stamp: Path) -> bool:
        return (
            self.path.is_file()
            and stamp.is_file()
            and stamp.read_text(encoding="utf-8", errors="replace") == self.etag
            and self.n_bytes in {0, self.path.stat().st_size}
        )

    def _check_room(self, n_there: int) -> None:
        n_free = shutil.disk_usage(self.path.parent).free
        if self.n_bytes - n_there > n_free:
            raise DownloadError(
                f"{self.name} needs {(self.n_bytes - n_there) >> 20} MiB more, {n_free >> 20} MiB are free "
                f"in {self.path.parent}"
            )

    def _verify(self, partial: Path) -> None:
        """Compares the content with the ETag where that is its SHA-256, as it is for large files.

        Only after a resumption: that is where two transfers were put together.
        """
        if not _SHA256.fullmatch(self.etag):
            return
        digest = hashlib.sha256()
        with partial.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != self.etag:
            partial.unlink()
            raise DownloadError(
                f"{self.name} arrived damaged (SHA-256 {digest.hexdigest()[:12]}..., not {self.etag[:12]}...)"
            )


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Holds the lock of one target: two processes must not append to the same partial file."""
    filelock = importlib.import_module("filelock")  # a dependency of huggingface_hub
    lock = filelock.FileLock(str(path))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise DownloadError(f"another process is fetching {name} ({path} is locked)") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _explained(repo: str, revision: str | None, bar: _Bar | None = None) -> Iterator[None]:
    """Turns what huggingface_hub, its HTTP client and the file system raise into a DownloadError in one line."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # the client's own errors differ between versions of huggingface_hub
        if bar is not None and bar.error is error:
            raise
        raise DownloadError(_reason(error, repo, revision)) from error


def _reason(error: Exception, repo: str, revision: str | None) -> str:
    known = _known_reason(error, repo, revision)
    if known is not None:
        return known
    line = " ".join(str(error).split())[:200] or type(error).__name__
    status = _status(error)
    if status in {401, 403}:
        return f"access to {repo} is denied ({status}): {_LOG_IN}"
    if status is not None:
        return f"the server answered {status} for {repo}: {line}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full while fetching {repo}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be written: {error.strerror}"
    return f"fetching {repo} failed: {line} ({type(error).__name__})"


def _status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _known_reason(error: Exception, repo: str, revision: str | None) -> str | None:
    """What huggingface_hub's own errors mean here; the most special first."""
    utils = importlib.import_module("huggingface_hub.utils")
    status = _status(error)
    reasons = (
        (
            utils.GatedRepoError,
            f"{repo} is gated: accept its terms on its page, then log in (hf auth login, or HF_TOKEN)",
        ),
        (
            utils.RepositoryNotFoundError,
            f"there is no repository {repo}, or it is private and no valid token was given",
        ),
        (utils.RevisionNotFoundError, f"{repo} has no revision {revision}"),
        (utils.EntryNotFoundError, f"{repo} lists a file that it does not have"),
    )
    return next((f"{reason} ({status})" for kind, reason in reasons if isinstance(error, kind)), None)
