"""Weights are told apart by what their files hold, and read once."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpool import weights
from kvpool.errors import ConfigurationError
from kvpool.weights import content_digest, hub_snapshot

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with two shards of weights, a configuration and a note."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in (
        ("a.safetensors", b"a" * 1000),
        ("b.safetensors", b"b" * 1000),
        ("config.json", b"{}"),
        ("README.md", b"hello"),
    ):
        (folder / name).write_bytes(content)
    return folder


def digest(model: Path, cache: Path) -> str:
    found = content_digest(model, lambda line: None, cache)
    assert found is not None
    return found


@contextmanager
def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Note the files that are read, and take all files for settled."""
    read, names = weights._read, list[str]()

    def note(file: weights._File) -> str:
        names.append(file.name)
        return read(file)

    with monkeypatch.context() as patch:
        patch.setattr(weights, "_read", note)
        patch.setattr(weights, "_SETTLED_NS", -(10**12))
        yield names


# ---- what counts ----------------------------------------------------------------------------


def test_a_copy_has_the_same_digest_wherever_it_lies(model: Path, cache: Path) -> None:
    copy = model.parent / "elsewhere" / "another-name"
    shutil.copytree(model, copy)
    assert digest(copy, cache) == digest(model, cache)


def test_weights_swapped_in_place_have_another(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same path, size, inode and time of change: what is remembered must not be taken."""
    file = model / "a.safetensors"
    with counted_reads(monkeypatch):
        before = digest(model, cache)
        facts = os.stat(file)
        while os.stat(file).st_ctime_ns == facts.st_ctime_ns:  # until the clock has ticked
            with open(file, "r+b") as opened:
                opened.write(b"x")
            os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        now = os.stat(file)
        assert (now.st_size, now.st_mtime_ns, now.st_ino) == (1000, facts.st_mtime_ns, facts.st_ino)
        assert digest(model, cache) != before
        file.write_bytes(b"a" * 1000)
    assert digest(model, cache / "new") == before


@pytest.mark.parametrize("name", ["config.json", "b.safetensors", "modeling_new.py"])
def test_every_file_that_matters_counts(model: Path, cache: Path, name: str) -> None:
    before = digest(model, cache)
    (model / name).write_bytes(b"changed")
    assert digest(model, cache) != before


def test_names_of_shards_count_and_notes_do_not(model: Path, cache: Path) -> None:
    before = digest(model, cache)
    (model / "README.md").write_bytes(b"other")
    (model / ".hidden.json").write_bytes(b"other")
    assert digest(model, cache) == before
    (model / "a.safetensors").rename(model / "c.safetensors")
    assert digest(model, cache) != before


def test_what_lies_deeper_counts_and_links_lead_in_no_circle(model: Path, cache: Path) -> None:
    before = digest(model, cache)
    (model / "loop").symlink_to(model)
    assert digest(model, cache) == before
    (model / "deeper").mkdir()
    (model / "deeper" / "adapter.bin").write_bytes(b"1")
    assert digest(model, cache) != before


def test_a_single_file_is_a_model(model: Path, cache: Path) -> None:
    one, other = model / "one.gguf", model / "other.gguf"
    one.write_bytes(b"weights")
    other.write_bytes(b"weights")
    assert digest(one, cache) == digest(other, cache)
    other.write_bytes(b"WEIGHTS")
    assert digest(one, cache) != digest(other, cache)


def test_without_weights_there_is_no_digest(model: Path, cache: Path) -> None:
    for path in model.glob("*.safetensors"):
        path.unlink()
    assert content_digest(model, lambda line: None, cache) is None


# ---- what is refused ------------------------------------------------------------------------


def test_a_file_that_vanished_is_named(model: Path, cache: Path) -> None:
    (model / "a.safetensors").unlink()
    (model / "a.safetensors").symlink_to(model / "nowhere")
    with pytest.raises(ConfigurationError, match=r"a\.safetensors.*can be read"):
        digest(model, cache)
    with pytest.raises(ConfigurationError, match=r"none.*No such file"):
        digest(model / "none", cache)


def test_a_file_that_cannot_be_read_is_named(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "a.safetensors").unlink()
    # Opens, and fails to be read, even for root.
    (model / "a.safetensors").symlink_to("/proc/self/mem")
    with pytest.raises(ConfigurationError, match=r"a\.safetensors"):
        digest(model, cache)


def test_a_file_that_changes_meanwhile_is_refused(model: Path, cache: Path) -> None:
    (file,) = (file for file in weights._survey(model) if file.name == "a.safetensors")
    with open(model / "a.safetensors", "ab") as opened:
        opened.write(b"more")
    with pytest.raises(ConfigurationError, match="do not change"):
        weights._read(file)


# ---- read once ------------------------------------------------------------------------------


def test_files_are_read_once(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted_reads(monkeypatch) as read:
        before = digest(model, cache)
        assert sorted(read) == ["a.safetensors", "b.safetensors", "config.json"]
        read.clear()
        assert digest(model, cache) == before and read == []
        (model / "a.safetensors").write_bytes(b"A" * 1001)
        assert digest(model, cache) != before and read == ["a.safetensors"]


def test_a_file_changed_just_now_is_not_remembered(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted_reads(monkeypatch) as read:
        monkeypatch.setattr(weights, "_SETTLED_NS", 10**15)
        digest(model, cache)
        digest(model, cache)
        assert len(read) == 6


def test_the_memory_is_private(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    previous = os.umask(0)
    try:
        digest(model, cache)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(os.stat(cache).st_mode) == 0o700
    names = sorted(path.suffix for path in cache.iterdir())
    assert names == [".json", ".lock"], "nothing half-written is left"
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in cache.iterdir()} == {0o600}


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b'"x"', b"null", b"[" * 100000, b"\xff\xfe", b'{"a.safetensors": 1}'],
)
def test_a_damaged_memory_is_read_past(model: Path, cache: Path, damage: bytes) -> None:
    before = digest(model, cache)
    (memory,) = cache.glob("*.json")
    memory.write_bytes(damage)
    assert digest(model, cache) == before


def test_lines_of_another_shape_are_read_past(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted_reads(monkeypatch) as read:
        before = digest(model, cache)
        (memory,) = cache.glob("*.json")
        lines = json.loads(memory.read_text())
        for wrong in ("z" * 64, 7, None, [], "", "a" * 63):
            lines["a.safetensors"][-1] = wrong
            memory.write_text(json.dumps(lines))
            read.clear()
            assert digest(model, cache) == before and read == ["a.safetensors"]


def test_without_a_place_to_remember_it_works_all_the_same(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert digest(model, tmp_path / "file" / "cache") == digest(model, tmp_path / "cache")


def test_the_cache_folder_is_the_users(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    content_digest(model, lambda line: None)
    assert list((tmp_path / "xdg" / "kvpool").glob("weights-*.json"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    content_digest(model, lambda line: None)
    assert list((tmp_path / "home" / ".cache" / "kvpool").glob("weights-*.json"))


def test_who_comes_second_waits_and_reads_nothing(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted_reads(monkeypatch) as read:
        expected = digest(model, cache)
        (memory,), (lock,) = cache.glob("*.json"), cache.glob("*.lock")
        kept = memory.read_bytes()
        memory.unlink()
        read.clear()
        found: list[str] = []
        with open(lock) as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # as another rank that is reading
            second = threading.Thread(target=lambda: found.append(digest(model, cache)))
            second.start()
            inode = f":{os.fstat(held.fileno()).st_ino} "
            while not any(
                "->" in line and inode in line
                for line in Path("/proc/locks").read_text().splitlines()
            ):
                second.join(0.01)
                assert second.is_alive()
            memory.write_bytes(kept)
        second.join()
        assert found == [expected] and read == []


def test_one_line_says_that_much_is_read(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    with counted_reads(monkeypatch):
        content_digest(model, lines.append, cache)
        assert lines == []
        (model / "a.safetensors").write_bytes(b"A" * 1001)
        monkeypatch.setattr(weights, "ANNOUNCED_BYTES", 1000)
        for _ in range(2):
            content_digest(model, lines.append, cache)
    assert len(lines) == 1 and str(model) in lines[0]


# ---- the hub --------------------------------------------------------------------------------


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot as huggingface_hub lays it out."""
    repository = tmp_path / "hub" / "models--org--a-name"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name in ("model.safetensors", "config.json"):
        (repository / "blobs" / f"blob-{name}").write_bytes(name.encode())
        (folder / name).symlink_to(f"../../blobs/blob-{name}")
    return folder


def test_a_snapshot_of_the_hub_is_known_by_its_commit(snapshot: Path) -> None:
    assert hub_snapshot(snapshot) == f"org/a-name@{COMMIT}"


def test_a_snapshot_that_somebody_changed_is_not(snapshot: Path, model: Path) -> None:
    assert hub_snapshot(model) is None
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").write_bytes(b"mine")
    assert hub_snapshot(snapshot) is None


def test_a_folder_that_is_only_called_so_is_not(snapshot: Path) -> None:
    assert hub_snapshot(snapshot.rename(snapshot.parent / "main")) is None
