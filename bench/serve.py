"""`vllm serve` over the pool as a child process, and the few calls that benchmarks need."""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench.models import bench_llama
from kvpool import config
from kvpool.device_config import DeviceConfig
from kvpool.errors import ConfigurationError

BUILD_FOLDER = Path("build")
HOST = "127.0.0.1"
BLOCK_TOKENS = 64
BLOCKS_PER_CHUNK = 8
CHUNK_TOKENS = BLOCKS_PER_CHUNK * BLOCK_TOKENS
KV_BYTES_PER_TOKEN = 8192  # so a chunk is 4 MiB
CHUNK_BYTES = CHUNK_TOKENS * KV_BYTES_PER_TOKEN
# A prompt ends this far past a chunk, off the block boundary: a hit in vLLM's own cache and one in
# the pool then compute the same few tokens, and what differs is the load.
TAIL_TOKENS = 35
ANSWER_TOKENS = 8
# Over a long context a model of random weights says the same tokens whatever a block holds; the
# log-probabilities tell: a hit repeats them to 1e-5, another block moves them by 1e-2 or more.
LOGPROB_TOLERANCE = 1e-3
MIN_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS = 4 * CHUNK_TOKENS, 131072
DRAM_SHARE = 0.6
CONTAINER_MARGIN_BYTES = 128 << 20  # metadata, the area for measurements, a few chunks

START_TIMEOUT_S = 600.0
REQUEST_TIMEOUT_S = 3600.0
QUIET_TIMEOUT_S = 600.0
END_TIMEOUT_S = 20.0
POLL_S = 0.1
LOG_TAIL_LINES = 15
# Sets PR_SET_PDEATHSIG (1) to SIGTERM (15), so that the server ends with a parent that is killed,
# and becomes the server.
_ENDING_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
)
_SHORT_PROMPT = (5, 6, 7)  # less than a block: neither looked up nor stored
# The first forward passes build kernels, for seconds. Less than a chunk, so nothing is stored.
_WARM_UP_PROMPT = tuple(range(3, CHUNK_TOKENS // 2))

Labels = tuple[tuple[str, str], ...]


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with the options in one line."""

    def error(self, message: str) -> NoReturn:
        """Print `message` and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


class ServerError(RuntimeError):
    """The server did not start, ended, or answered with an error."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion: token ids, their log-probabilities, seconds to the first and to the last."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ttft_s: float
    total_s: float

    def difference(self, other: Answer) -> float:
        """Return the largest difference of log-probabilities; infinite where tokens differ."""
        if self.tokens != other.tokens:
            return math.inf
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(abs(mine - theirs) for mine, theirs in pairs)


@dataclass(frozen=True, slots=True)
class Metrics:
    """One reading of `/metrics`."""

    text: str
    samples: Mapping[tuple[str, Labels], float]

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of sample `name` for each value of `label`."""
        sums: dict[str, float] = {}
        for (sample, labels), value in self.samples.items():
            if sample == name:
                key = dict(labels).get(label, "")
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def total(self, name: str) -> float:
        """Return the sum of all samples called `name`; 0 where there is none."""
        return sum(value for (sample, _), value in self.samples.items() if sample == name)

    def lines(self, prefix: str) -> list[str]:
        """Return the lines of samples whose names start with `prefix`."""
        return [line for line in self.text.splitlines() if line.startswith(prefix)]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one device read between two readings: payload bytes, seconds with a read in flight."""

    device: str
    bytes: int
    busy_s: float

    @property
    def bandwidth_bytes_s(self) -> float:
        """Bytes a busy second; 0 where nothing was read."""
        return self.bytes / self.busy_s if self.busy_s else 0.0


def parse_metrics(text: str) -> Metrics:
    """Return the samples of Prometheus' text format."""
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return Metrics(text, samples)


def reads_between(before: Metrics, after: Metrics) -> list[Traffic]:
    """Return what each device of the pool read between two readings."""
    names = ("kvpool_read_bytes_total", "kvpool_read_busy_seconds_total")
    (bytes_0, busy_0), (bytes_1, busy_1) = (
        [metrics.by_label(name, "device") for name in names] for metrics in (before, after)
    )
    devices = after.by_label("kvpool_capacity_bytes", "device")
    return [
        Traffic(
            device,
            round(bytes_1.get(device, 0.0) - bytes_0.get(device, 0.0)),
            busy_1.get(device, 0.0) - busy_0.get(device, 0.0),
        )
        for device in devices
    ]


def check_context(context_tokens: int) -> None:
    """Raise ConfigurationError unless the bench model and a chunk allow this context."""
    if not MIN_CONTEXT_TOKENS <= context_tokens <= MAX_CONTEXT_TOKENS:
        allowed = f"{MIN_CONTEXT_TOKENS} to {MAX_CONTEXT_TOKENS} tokens"
        raise ConfigurationError("context", context_tokens, allowed)


def make_prompt(context_tokens: int, seed: int) -> list[int]:
    """Return random token ids: the whole chunks of the context and TAIL_TOKENS more."""
    length = context_tokens // CHUNK_TOKENS * CHUNK_TOKENS + TAIL_TOKENS
    return [int(token) for token in np.random.default_rng([seed, length]).integers(3, 590, length)]


def stored_bytes(context_tokens: int) -> int:
    """Return the bytes of the whole chunks in a prompt of `make_prompt`."""
    return context_tokens // CHUNK_TOKENS * CHUNK_BYTES


def both_deliver(context_tokens: int, folder: Path) -> list[str]:
    """Return a DRAM module for about DRAM_SHARE of the context, and a file in `folder` for all."""
    size = stored_bytes(context_tokens)
    # The pool keeps a sixteenth of a module free, and a slot at least.
    dram = (int(DRAM_SHARE * size / (15 / 16)) + 2 * CHUNK_BYTES) >> 20
    return [f"dram:{dram}MiB", f"file:{folder.absolute()}?size={size + CONTAINER_MARGIN_BYTES}"]


def check_devices(strings: Sequence[str]) -> tuple[DeviceConfig, ...]:
    """Return the devices; raise ConfigurationError where this machine cannot have them."""
    pool = config.from_mapping({"devices": list(strings)})
    config.check_environment(pool)
    for device in pool.devices:
        if device.size_bytes is not None and device.size_bytes < 2 * CHUNK_BYTES:
            allowed = f"at least {2 * CHUNK_BYTES} bytes: two chunks of the demo's model"
            raise ConfigurationError("devices", str(device), allowed)
    return pool.devices


def make_console() -> Console:
    """Return a console on stdout, wide enough for the tables where it is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


@contextmanager
def waiting(console: Console, text: str) -> Iterator[None]:
    """Show what is waited for, and for how long so far; afterwards how long it took."""
    started_s = time.monotonic()
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            progress.add_task(text, total=None)
            yield
    else:
        console.print(f"{text} ...", markup=False)
        yield
    took_s = time.monotonic() - started_s
    console.print(f"{text}: {took_s:.1f} s", markup=False, highlight=False)


class Server:
    """A running `vllm serve`, a process group of its own; a context manager that ends it."""

    def __init__(
        self, context_tokens: int, devices: Sequence[str], folder: Path, log: Path
    ) -> None:
        """Start it with the bench model, made under `folder`, and `devices` as the pool."""
        model = bench_llama(
            folder / "models",
            max_position_embeddings=2 * MAX_CONTEXT_TOKENS,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            tokenizer=True,
        )
        self.log, self._port = log, _free_port()
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                _command(model, context_tokens, devices, self._port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_environment(context_tokens)},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until it answers /health, and warm it up.

        Raises ServerError, with the end of its log, where it dies.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self._healthy():
            self._pause(deadline_s, "/health")
        self.complete(_WARM_UP_PROMPT)

    def complete(self, token_ids: Sequence[int], max_tokens: int = ANSWER_TOKENS) -> Answer:
        """Answer a prompt greedily; streamed, so that the first token is seen when it comes."""
        body = json.dumps(
            {
                "prompt": list(token_ids),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                # The answer's token ids too: `return_token_ids` would send the prompt's back.
                "logprobs": 0,
                "return_tokens_as_token_ids": True,
            }
        ).encode()
        connection = http.client.HTTPConnection(HOST, self._port, timeout=REQUEST_TIMEOUT_S)
        started_s = time.perf_counter()
        try:
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                raise ServerError(f"/v1/completions: {response.status} {response.read()[:500]!r}")
            return _read_stream(response, started_s)
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(f"/v1/completions: {error}") from error
        finally:
            connection.close()

    def metrics(self) -> Metrics:
        """Return what /metrics says now; it may lag behind by one step of the engine."""
        return parse_metrics(self._ask("GET", "/metrics").decode())

    def settled_metrics(self) -> Metrics:
        """Wait until all writes are acknowledged and return the metrics then.

        The gauge is told when the engine steps: a short request makes it step. It must say twice
        in a row that nothing is pending, as the last store may start a step late.
        """
        deadline_s, quiet = time.monotonic() + QUIET_TIMEOUT_S, 0
        while True:
            self.complete(_SHORT_PROMPT, 1)
            metrics = self.metrics()
            quiet = quiet + 1 if metrics.total("kvpool_pending_writes") == 0 else 0
            if quiet == 2:
                return metrics
            self._pause(deadline_s, "the pool's writes")

    def reset_prefix_cache(self) -> None:
        """Empty vLLM's own prefix cache, so that a hit can only come from the pool."""
        deadline_s = time.monotonic() + QUIET_TIMEOUT_S
        while not json.loads(self._ask("POST", "/reset_prefix_cache")).get("success"):
            self._pause(deadline_s, "/reset_prefix_cache")

    def close(self) -> None:
        """End it: politely, for it ends its own children, then the whole process group."""
        self.terminate()
        if not self.ends_within(END_TIMEOUT_S):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.ends_within(END_TIMEOUT_S)

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def _healthy(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            return self._call("GET", "/health")[0] == 200
        return False

    def _ask(self, method: str, path: str) -> bytes:
        try:
            status, body = self._call(method, path)
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(f"{path}: {error}") from error
        if status != 200:
            raise ServerError(f"{path}: {status} {body[:500]!r}")
        return body

    def _call(self, method: str, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=QUIET_TIMEOUT_S)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _pause(self, deadline_s: float, waited_for: str) -> None:
        """Wait a moment; raise ServerError past the deadline or where the server has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(POLL_S)
            raise self._failure("it ended")
        if time.monotonic() > deadline_s:
            raise self._failure(f"no end of the wait for {waited_for}")

    def _failure(self, what: str) -> ServerError:
        tail = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        code = self._process.poll()
        state = "" if code is None else f", exit code {code}"
        return ServerError("\n".join([f"vllm serve: {what}{state}; {self.log} ends with", *tail]))

    def ends_within(self, timeout_s: float) -> bool:
        """Wait until it and all its children have ended; False when the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while self._process.poll() is None or _living_members(self._process.pid):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)
        return True


def _command(model: Path, context_tokens: int, devices: Sequence[str], port: int) -> list[str]:
    transfer = {
        "kv_connector": "KVPoolConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "devices": list(devices),
            "blocks_per_chunk": BLOCKS_PER_CHUNK,
        },
    }
    options = {
        "host": HOST,
        "port": str(port),
        "dtype": "float32",  # bfloat16 flips a token now and then, whatever the KV holds
        "block-size": str(BLOCK_TOKENS),
        "max-model-len": str(context_tokens + 2 * BLOCK_TOKENS),
        "max-num-batched-tokens": "8192",
        "kv-transfer-config": json.dumps(transfer),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    program = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    starter = [sys.executable, "-c", _ENDING_WITH_PARENT]
    return [*starter, *program, "--enforce-eager", *words]


def _environment(context_tokens: int) -> dict[str, str]:
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    kv_bytes = context_tokens * KV_BYTES_PER_TOKEN
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # has /reset_prefix_cache
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str((kv_bytes >> 30) + 1),  # GiB: some to spare
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", cores),
        # Threads that spin at barriers would take minutes beside another busy process.
        "OMP_WAIT_POLICY": "passive",
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def _living_members(group: int) -> list[int]:
    """Return the processes of a process group that have not ended."""
    members = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, process_group = entry.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                members.append(int(entry.parent.name))
    return members


def _read_stream(response: http.client.HTTPResponse, started_s: float) -> Answer:
    tokens: list[int] = []
    logprobs: list[float] = []
    ttft_s = 0.0
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event: dict[str, Any] = json.loads(line[len(b"data: ") :])
        if "error" in event:
            raise ServerError(f"/v1/completions: {event['error']}")
        for choice in event["choices"]:
            parts = choice.get("logprobs") or {"tokens": [], "token_logprobs": []}
            if parts["tokens"] and not tokens:
                ttft_s = time.perf_counter() - started_s
            tokens += [int(word.removeprefix("token_id:")) for word in parts["tokens"]]
            logprobs += parts["token_logprobs"]
    if not tokens:
        raise ServerError("/v1/completions: the answer had no tokens")
    return Answer(tuple(tokens), tuple(logprobs), ttft_s, time.perf_counter() - started_s)
