"""The leak check and the seeds must be able to fail a test, and to tell."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"


def test_an_open_file_and_a_thread_are_seen(snapshot_resources) -> None:
    before = snapshot_resources()
    reader, writer = os.pipe()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left-over")
    thread.start()
    during = snapshot_resources().beyond(before)
    end.set()
    thread.join()
    os.close(reader)
    os.close(writer)
    assert sum("file descriptor" in line for line in during) == 2
    assert sum("left-over" in line for line in during) == 1


@pytest.mark.usefixtures("no_leaks")
def test_what_is_given_back_is_no_leak() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)


BAD = """
import os, pytest
@pytest.mark.usefixtures("no_leaks")
def test_leaks():
    os.pipe()
def test_needs_a_seed(seed, rng):
    assert rng.random() > 1
"""


def test_failures_tell_the_leak_and_the_seed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text().replace("= 5.0", "= 0.1"))
    (tmp_path / "test_bad.py").write_text(BAD)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "KVPOOL_TEST_SEED": "4711"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "left behind: file descriptor" in done.stdout
    assert "KVPOOL_TEST_SEED=4711" in done.stdout
