"""The pool at work on one machine: a long prompt computed, from the pool, from vLLM's own cache.

    python -m bench.demo --context 32768 --devices "" --json build/demo.json

Serves a tiny model, so no hub and no accelerator. Exit code: 0, 1 where the pool delivered nothing
or other tokens came out, 2 for options that cannot be used.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table

from bench.figures import write_json
from bench.serve import (
    BUILD_FOLDER,
    CHUNK_TOKENS,
    DRAM_SHARE,
    LOGPROB_TOLERANCE,
    Answer,
    Metrics,
    OneLineParser,
    Server,
    ServerError,
    Traffic,
    both_deliver,
    check_context,
    check_devices,
    make_console,
    make_prompt,
    reads_between,
    stored_bytes,
    waiting,
)
from kvpool.errors import ConfigurationError
from kvpool.units import format_bytes, format_rate

BAR_WIDTH = 50


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt three times, and what the pool's devices read for the second one."""

    computed: Answer
    pool: Answer
    in_engine: Answer
    traffic: list[Traffic]
    metrics: Metrics

    @property
    def tokens_equal(self) -> bool:
        """Whether all three answers are the same."""
        return self.computed.tokens == self.pool.tokens == self.in_engine.tokens

    @property
    def logprob_difference(self) -> float:
        """How far the log-probabilities of the answers are apart; infinite where tokens differ."""
        return max(answer.difference(self.computed) for answer in (self.pool, self.in_engine))

    @property
    def pool_bytes(self) -> int:
        """Payload bytes that came from the pool."""
        return sum(item.bytes for item in self.traffic)


def run_demo(server: Server, prompt: Sequence[int], console: Console) -> Run:
    """Send `prompt` three times. Raises ServerError."""
    with waiting(console, f"computing the prefill of {len(prompt):,} tokens"):
        computed = server.complete(prompt)
    with waiting(console, "waiting until the pool has written its chunks"):
        before = server.settled_metrics()
    server.reset_prefix_cache()
    with waiting(console, "the same prompt from the pool"):
        pool = server.complete(prompt)
    after = server.settled_metrics()
    with waiting(console, "the same prompt from vLLM's own cache"):
        in_engine = server.complete(prompt)
    return Run(computed, pool, in_engine, reads_between(before, after), server.metrics())


def show(run: Run, context_tokens: int, console: Console) -> None:
    """Print times, devices, metrics and the verdict on the tokens."""
    console.print(_ttft_chart(run))
    console.print(_device_table(run.traffic))
    console.print("kvpool_ lines of /metrics:", markup=False)
    for line in run.metrics.lines("kvpool_"):
        if "_bucket{" not in line and "_created" not in line:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    whole = stored_bytes(context_tokens)
    console.print(
        f"from the pool: {format_bytes(run.pool_bytes)} of {format_bytes(whole)};"
        f" tokens {'the same' if run.tokens_equal else 'DIFFER'}:"
        f" {' '.join(map(str, run.pool.tokens))}; log-probabilities differ by"
        f" {run.logprob_difference:.1g} at most",
        highlight=False,
    )


def verdict(run: Run) -> str:
    """Return what is wrong with the run in one line; "" where nothing is."""
    if not run.pool_bytes:
        return "nothing came from the pool"
    if not run.tokens_equal:
        return (
            f"the tokens differ: computed {run.computed.tokens}, from the pool {run.pool.tokens},"
            f" from vLLM's own cache {run.in_engine.tokens}"
        )
    if run.logprob_difference > LOGPROB_TOLERANCE:
        return (
            f"the log-probabilities differ by {run.logprob_difference:.1g}, allowed are"
            f" {LOGPROB_TOLERANCE}: the KV is not the same"
        )
    return ""


def describe(run: Run) -> dict[str, Any]:
    """Return the run as JSON keys."""
    return {
        "ttft_s": {
            "computed": run.computed.ttft_s,
            "pool": run.pool.ttft_s,
            "in_engine": run.in_engine.ttft_s,
        },
        "tokens_equal": run.tokens_equal,
        "tokens": list(run.pool.tokens),
        "logprob_difference": run.logprob_difference if run.tokens_equal else None,
        "pool_bytes": run.pool_bytes,
        "devices": [
            {
                "name": item.device,
                "bytes": item.bytes,
                "busy_s": item.busy_s,
                "bandwidth_bytes_s": item.bandwidth_bytes_s,
            }
            for item in run.traffic
        ],
        "metrics": run.metrics.lines("kvpool_"),
    }


def _ttft_chart(run: Run) -> Table:
    view = Table(title="time to first token", title_justify="left", box=None)
    rows = (
        ("computed", run.computed),
        ("from the pool", run.pool),
        ("from vLLM's own cache", run.in_engine),
    )
    longest_s = max(answer.ttft_s for _, answer in rows)
    for column in ("", "seconds", "", "faster"):
        view.add_column(column, justify="right" if column else "left")
    for name, answer in rows:
        bar = ProgressBar(total=longest_s, completed=answer.ttft_s, width=BAR_WIDTH)
        faster = f"{run.computed.ttft_s / answer.ttft_s:.0f}x"
        view.add_row(name, f"{answer.ttft_s:.3f}", bar, faster)
    return view


def _device_table(traffic: Sequence[Traffic]) -> Table:
    view = Table(title="what the pool's devices delivered", title_justify="left")
    for column in ("device", "bytes", "share", "busy ms", "rate while busy"):
        view.add_column(column, justify="left" if column == "device" else "right")
    whole = sum(item.bytes for item in traffic) or 1
    for item in traffic:
        view.add_row(
            item.device,
            format_bytes(item.bytes),
            f"{item.bytes / whole:.0%}",
            f"{item.busy_s * 1000:.1f}",
            format_rate(item.bandwidth_bytes_s),
        )
    return view


@contextmanager
def _devices(text: str, context_tokens: int, console: Console) -> Iterator[list[str]]:
    """Yield the device strings of `text`, or of the default, whose file goes away at the end."""
    if text.strip():
        yield [str(device) for device in check_devices(text.split(","))]
        return
    (BUILD_FOLDER / "pool").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="demo-", dir=BUILD_FOLDER / "pool") as folder:
        devices = both_deliver(context_tokens, Path(folder))
        size = format_bytes(stored_bytes(context_tokens))
        console.print(
            f"the context's KV is {size}: a DRAM module for about {DRAM_SHARE:.0%} of it and"
            f" a file for the rest, so that both deliver\n  " + "\n  ".join(devices),
            markup=False,
            highlight=False,
        )
        yield devices


def check_output(path: Path) -> None:
    """Raise ConfigurationError unless a file can be written at `path`; makes its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(path.parent, os.W_OK) and not path.is_dir()
    except OSError:
        writable = False
    if not writable:
        raise ConfigurationError("json", str(path), "a file in a folder that can be written to")


def _parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="bench.demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--context", type=int, default=32768, metavar="TOKENS")
    parser.add_argument(
        "--devices", default="", help="device strings, a comma between them; empty: DRAM and a file"
    )
    parser.add_argument("--json", type=Path, default=BUILD_FOLDER / "demo.json", metavar="FILE")
    parser.add_argument("--seed", type=int, help="of the prompt; a new one each time if absent")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit code."""
    arguments = _parse_arguments(words)
    console = make_console()
    # A prompt of an earlier run could still be in the pool, and would not be computed.
    seed = int.from_bytes(os.urandom(4)) if arguments.seed is None else arguments.seed
    try:
        check_context(arguments.context)
        check_output(arguments.json)
        prompt = make_prompt(arguments.context, seed)
        with _devices(arguments.devices, arguments.context, console) as devices:
            console.print(
                f"prompt: {len(prompt):,} random tokens of seed {seed}, in chunks of {CHUNK_TOKENS}"
            )
            log = BUILD_FOLDER / "demo-server.log"
            with Server(arguments.context, devices, BUILD_FOLDER, log) as server:
                with waiting(console, f"starting vLLM and measuring the devices (log: {log})"):
                    server.wait_ready()
                run = run_demo(server, prompt, console)
    except ConfigurationError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except ServerError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    show(run, arguments.context, console)
    facts = {"context": arguments.context, "prompt_tokens": len(prompt), "seed": seed}
    write_json(arguments.json, {**facts, "device_strings": devices, **describe(run)})
    if problem := verdict(run):
        print(f"demo: {problem}", file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
