"""The stress program under AddressSanitizer with UBSan, and under ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
FLAGS = {"address": "-fsanitize=address,undefined", "thread": "-fsanitize=thread"}
# Shows where a report comes from, and makes it the end of the program.
OPTIONS = {
    "ASAN_OPTIONS": "abort_on_error=0:detect_leaks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


def _runtime_is_there(sanitizer: str, directory: Path) -> bool:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return False
    source = directory / "empty.c"
    source.write_text("int main(void) { return 0; }\n")
    program = directory / "empty"
    command = [compiler, FLAGS[sanitizer], str(source), "-o", str(program)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        return False
    return subprocess.run([str(program)], capture_output=True).returncode == 0


def _run(*command: str | Path, timeout_s: float) -> str:
    finished = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        env=os.environ | OPTIONS,
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_stress(sanitizer: str, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake")
    if not _runtime_is_there(sanitizer, tmp_path):
        pytest.skip(f"the compiler has no runtime for {FLAGS[sanitizer]}")
    build = tmp_path / "build"
    options = (f"-DKVIO_SANITIZE={sanitizer}", "-DKVIO_TESTS=ON")
    _run("cmake", "-S", NATIVE, "-B", build, *options, timeout_s=120)
    _run("cmake", "--build", build, timeout_s=300)
    _run("ctest", "--test-dir", build, "--output-on-failure", timeout_s=600)
