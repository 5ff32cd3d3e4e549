"""Which weights a model has: told by the content of its files, not by their names or times.

Reading 100 GiB takes a minute, so what was read is remembered in the user's cache folder, and is
trusted as long as a file has the same path, size, times and inode. Ranks that start together wait
for the first one rather than read everything themselves.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvpool.errors import ConfigurationError
from kvpool.units import format_bytes

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
OTHER_SUFFIXES = (".json", ".model", ".py")  # configuration, tokenizer, code of the model
ANNOUNCED_BYTES = 1 << 30
_READERS = 4
# A file may change again within one tick of its file system's clock, and nothing shows it.
_SETTLED_NS = 2_000_000_000

Facts = tuple[int, int, int, int]  # size, time of change of content and of inode (ns), inode


@dataclass(frozen=True, slots=True)
class _File:
    name: str  # relative to the model's folder
    path: Path
    facts: Facts


def hub_snapshot(folder: Path) -> str | None:
    """Return "ORGANISATION/NAME@COMMIT" where `folder` is a snapshot in the hub's cache, else None.

    Its files must be links to the hub's blobs: others may have been changed where they lie.
    """
    folder = Path(os.path.abspath(folder))
    repository = folder.parent.parent
    if folder.parent.name != "snapshots" or not repository.name.startswith("models--"):
        return None
    if not re.fullmatch(r"[0-9a-f]{40}", folder.name):
        return None
    blobs = os.path.realpath(repository / "blobs")
    try:
        files = list(_relevant(folder))
    except OSError:
        return None  # reading it will say why
    if not files or any(os.path.dirname(os.path.realpath(path)) != blobs for _, path in files):
        return None
    return f"{repository.name.removeprefix('models--').replace('--', '/')}@{folder.name}"


def content_digest(
    model: Path, announce: Callable[[str], None], cache_folder: Path | None = None
) -> str | None:
    """Return the digest (hex) of a model's files; None where there are no weights among them.

    `model` is a folder or a single file. Its path is no part of the digest. `announce` gets one
    line where much is to be read; `cache_folder` is the user's unless given. Raises
    ConfigurationError where a file cannot be read, or changes while it is.
    """
    files = _survey(model)
    if not any(file.path.suffix in WEIGHT_SUFFIXES for file in files):
        return None
    memory = _Memory(cache_folder or _user_cache_folder(), model)
    digests = memory.recall(files)
    if len(digests) < len(files):
        with memory.locked():
            digests = memory.recall(files)  # of who held the lock before
            missing = [file for file in files if file.name not in digests]
            _announce(missing, model, announce)
            with ThreadPoolExecutor(_READERS) as readers:
                read = readers.map(_read, missing)
                digests.update((file.name, it) for file, it in zip(missing, read, strict=True))
            memory.keep(files, digests)
    lines = [[file.name, file.facts[0], digests[file.name]] for file in files]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def _announce(missing: list[_File], model: Path, announce: Callable[[str], None]) -> None:
    size = sum(file.facts[0] for file in missing)
    if size >= ANNOUNCED_BYTES:
        announce(
            f"reading {format_bytes(size)} of {model} once, so that what is stored of these weights"
            " is never taken for that of others"
        )


# ---- files ----------------------------------------------------------------------------------


def _relevant(model: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of the files that count, in an order of names alone."""
    if not model.is_dir():
        yield "", model
        return
    pending, seen = [model], set[str]()
    while pending:
        folder = pending.pop()
        if (real := os.path.realpath(folder)) in seen:
            continue  # links can lead in a circle
        seen.add(real)
        for path in sorted(folder.iterdir()):
            if path.name.startswith("."):
                continue
            if path.is_dir():
                pending.append(path)
            elif path.suffix in (*WEIGHT_SUFFIXES, *OTHER_SUFFIXES):
                yield str(path.relative_to(model)), path


def _survey(model: Path) -> list[_File]:
    path = model
    try:
        files = []
        for name, path in _relevant(model):
            files.append(_File(name, path, _facts(os.stat(path))))
        return files
    except OSError as error:
        raise _unreadable(Path(error.filename or path), error) from None


def _read(file: _File) -> str:
    """Return the digest of a file's content."""
    try:
        with open(file.path, "rb") as opened:
            before = _facts(os.fstat(opened.fileno()))
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
            after = _facts(os.fstat(opened.fileno()))
    except OSError as error:
        raise _unreadable(file.path, error) from None
    if not before == after == file.facts:
        allowed = "files that do not change while the model is loaded; start again"
        raise ConfigurationError("model", str(file.path), allowed)
    return digest


def _facts(status: os.stat_result) -> Facts:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _unreadable(path: Path, error: OSError) -> ConfigurationError:
    allowed = f"files that can be read, to tell these weights from others ({error.strerror})"
    return ConfigurationError("model", str(path), allowed)


# ---- what was read before -------------------------------------------------------------------


class _Memory:
    """Digests of one model's files, in a file of its own. What cannot be kept is read again."""

    def __init__(self, folder: Path | None, model: Path) -> None:
        name = hashlib.sha256(os.path.realpath(model).encode(errors="surrogateescape")).hexdigest()
        self._folder = folder
        self._path = None if folder is None else folder / f"weights-{name[:16]}.json"

    def recall(self, files: list[_File]) -> dict[str, str]:
        """Return the digests, by name, of the files that are as they were."""
        if self._path is None:
            return {}
        try:
            stored = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(stored, dict):
            return {}
        wanted = {file.name: list(file.facts) for file in files}
        return {
            name: line[-1]
            for name, line in stored.items()
            if isinstance(line, list)
            and line[:-1] == wanted.get(name)
            and isinstance(line[-1], str)
            and re.fullmatch(r"[0-9a-f]{64}", line[-1])
        }

    def keep(self, files: list[_File], digests: dict[str, str]) -> None:
        """Remember the digests, of files that have not been changed just now."""
        if self._folder is None or self._path is None:
            return
        settled_ns = time.time_ns() - _SETTLED_NS
        lines = {
            file.name: [*file.facts, digests[file.name]]
            for file in files
            if max(file.facts[1:3]) < settled_ns
        }
        with contextlib.suppress(OSError):
            fd, name = tempfile.mkstemp(prefix=".weights-", dir=self._folder)  # mode 0600
            try:
                with open(fd, "w", encoding="utf-8", errors="surrogateescape") as opened:
                    json.dump(lines, opened)
                os.replace(name, self._path)
            except BaseException:
                os.unlink(name)
                raise

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Have this model's files read by one process at a time, where locks are to be had."""
        with contextlib.ExitStack() as opened:
            if self._folder is not None and self._path is not None:
                with contextlib.suppress(OSError):
                    self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                    fd = os.open(self._path.with_suffix(".lock"), flags, 0o600)
                    opened.callback(os.close, fd)
                    fcntl.flock(fd, fcntl.LOCK_EX)
            yield


def _user_cache_folder() -> Path | None:
    """Return kvpool's folder below the user's cache folder, None where the user has no home."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(configured):
        return Path(configured) / "kvpool"
    try:
        return Path.home() / ".cache" / "kvpool"
    except RuntimeError:
        return None
