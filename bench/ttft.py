"""Time to first token in vLLM, end to end: computed, its own cache, the pool, each device alone.

    python -m bench.ttft --context 131072 --devices dram:640MiB,file:/mnt/ssd/kvpool?size=2GiB

Each configuration has a server and containers of its own. Hits in vLLM's cache, hits in the pool
and the devices' ceiling take turns, so that the machine's moods strike all of them. A hit computes
the same few tokens in both caches: what it takes longer from the pool is the load.

What would prove the figures wrong: a hit that read fewer bytes than the prompt's chunks hold (the
run fails), tokens or log-probabilities other than computed (`tokens_equal`, `logprob_difference`),
an answer that does not depend on the KV (`control_differs`), a ceiling that was not measured next
to the hits.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import ceilings
from bench.emulate import EmulationError, emulated_ssds
from bench.figures import Figure, as_dict, chart, summarize, table, write_json
from bench.serve import (
    BUILD_FOLDER,
    CHUNK_BYTES,
    CHUNK_TOKENS,
    CONTAINER_MARGIN_BYTES,
    LOGPROB_TOLERANCE,
    MAX_CONTEXT_TOKENS,
    TAIL_TOKENS,
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
from kvpool.device_config import DeviceConfig
from kvpool.devices.dram import default_threads
from kvpool.errors import ConfigurationError
from kvpool.host import Host
from kvpool.medium import FILE_NAME
from kvpool.units import format_bytes

READ_OFFSET_BYTES = 5 << 20  # what follows in a container has been written: measurements, chunks
COPY_BUFFER_BYTES = 256 << 20  # larger than the processor's caches
TARGET_RATIO, AIM_RATIO = 1.5, 1.1


@dataclass(slots=True)
class Samples:
    """Repeated hits of one configuration; the lists run in parallel, one entry a repetition.

    With several prompts at once a TTFT is their mean in `pool_s` and `in_engine_s`; `ttft_s` has
    each of them. `ceiling_s`: in which the devices alone deliver the same bytes, all at once.
    """

    computed: list[Answer]
    ttft_s: list[float] = field(default_factory=list)
    in_engine_ttft_s: list[float] = field(default_factory=list)
    pool_s: list[float] = field(default_factory=list)
    in_engine_s: list[float] = field(default_factory=list)
    ceiling_s: list[float] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    logprob_difference: float = 0.0  # of any hit from what was computed

    @property
    def tokens_equal(self) -> bool:
        """Whether every hit answered with the computed tokens."""
        return self.logprob_difference < math.inf

    @property
    def bytes(self) -> int:
        """Payload bytes of one repetition."""
        return sum(item.bytes for item in self.traffic)

    @property
    def overhead_ratios(self) -> list[float]:
        """What a hit takes longer from the pool, over the devices' own time for its bytes."""
        rows = zip(self.pool_s, self.in_engine_s, self.ceiling_s, strict=True)
        return [(pool - in_engine) / ceiling for pool, in_engine, ceiling in rows]


class Devices:
    """A configuration's devices by short name: what the pool read of them, what they can do."""

    def __init__(self, devices: Mapping[str, DeviceConfig]) -> None:
        self._devices = devices
        self._mapped: dict[str, tuple[ceilings.UInt8, ceilings.UInt8]] = {}

    def reads_between(self, before: Metrics, after: Metrics) -> list[Traffic]:
        """Return what was read of each device, by short name, where anything was."""
        names = {device.name: name for name, device in self._devices.items()}
        return [
            replace(item, device=names[item.device])
            for item in reads_between(before, after)
            if item.bytes
        ]

    def ceiling_s(self, traffic: Sequence[Traffic]) -> float:
        """Return how long the devices take for these bytes without kvpool.

        Copies in memory and O_DIRECT reads of the containers run at once; the last one counts.
        """
        works = [self._work(self._devices[item.device], item.bytes) for item in traffic]
        measured = ceilings.measure(works)
        assert [part.bytes for part in measured] == [item.bytes for item in traffic]
        return max(part.seconds for part in measured)

    def _work(self, device: DeviceConfig, size_bytes: int) -> ceilings.CopyWork | ceilings.ReadWork:
        if device.kind == "dram":
            source, destination = self._buffers(device.name, size_bytes)
            threads = device.threads or default_threads(Host().cpus(device.numa))
            return ceilings.CopyWork(source, destination, bytes=size_bytes, threads=threads)
        path = Path(device.path) / (FILE_NAME if device.kind == "file" else "")
        ends = range(READ_OFFSET_BYTES, READ_OFFSET_BYTES + size_bytes, CHUNK_BYTES)
        return ceilings.ReadWork(path, [(offset, CHUNK_BYTES) for offset in ends])

    def _buffers(self, name: str, size_bytes: int) -> tuple[ceilings.UInt8, ceilings.UInt8]:
        size_bytes = min(size_bytes, COPY_BUFFER_BYTES)
        if name not in self._mapped:
            source, destination = (ceilings.map_buffer(COPY_BUFFER_BYTES).memory for _ in range(2))
            self._mapped[name] = source, destination
        source, destination = self._mapped[name]
        return source[:size_bytes], destination[:size_bytes]


def measure_hits(
    server: Server, prompts: Sequence[Sequence[int]], repeat: int, devices: Devices
) -> Samples:
    """Compute `prompts`, all at once, then hit them `repeat` times in each cache, in turn.

    Raises ServerError where a hit reads fewer bytes than the prompts' chunks hold.
    """
    samples = Samples(_ask(server, prompts))
    metrics = server.settled_metrics()
    expected = sum(stored_bytes(len(prompt)) for prompt in prompts)
    for _ in range(repeat):
        in_engine = _ask(server, prompts)
        server.reset_prefix_cache()
        pool = _ask(server, prompts)
        before, metrics = metrics, server.settled_metrics()
        samples.traffic = devices.reads_between(before, metrics)
        if samples.bytes < expected:
            raise ServerError(f"a hit read {samples.bytes} of {expected} bytes from the pool")
        samples.ceiling_s.append(devices.ceiling_s(samples.traffic))
        for answers, all_s, mean_s in (
            (pool, samples.ttft_s, samples.pool_s),
            (in_engine, samples.in_engine_ttft_s, samples.in_engine_s),
        ):
            all_s += [answer.ttft_s for answer in answers]
            mean_s.append(sum(answer.ttft_s for answer in answers) / len(answers))
            for answer, computed in zip(answers, samples.computed, strict=True):
                apart = answer.difference(computed)
                samples.logprob_difference = max(samples.logprob_difference, apart)
    return samples


def control_differs(server: Server, prompt: Sequence[int], computed: Answer, seed: int) -> bool:
    """Return whether another last chunk changes the answer: equal ones mean nothing if not."""
    start = len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS - CHUNK_TOKENS
    other = make_prompt(CHUNK_TOKENS, seed + 1)[:CHUNK_TOKENS]
    changed = [*prompt[:start], *other, *prompt[start + CHUNK_TOKENS :]]
    return server.complete(changed).difference(computed) > LOGPROB_TOLERANCE


def _ask(server: Server, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(server.complete, prompts))


# ---- configurations ----


@contextmanager
def private_devices(devices: Mapping[str, DeviceConfig]) -> Iterator[dict[str, DeviceConfig]]:
    """Yield the devices with each file in a folder of its own that goes away at the end.

    Raises ConfigurationError where a folder cannot be made.
    """
    with ExitStack() as stack:
        placed = {}
        for name, device in devices.items():
            if device.kind == "file":
                try:
                    device.rank_path(0).mkdir(exist_ok=True)
                    folder = tempfile.mkdtemp(prefix="ttft-", dir=device.rank_path(0))
                except OSError as error:
                    raise ConfigurationError("devices", str(device), str(error)) from None
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                device = replace(device, path=folder)
            placed[name] = device
        yield placed


def short_names(devices: Sequence[DeviceConfig]) -> dict[str, DeviceConfig]:
    """Return the devices by their kind where that is unique, else with the end of the address."""
    kinds = [device.kind for device in devices]
    return {
        device.kind
        if kinds.count(device.kind) == 1
        else f"{device.kind} {Path(device.path).name or device.name}": device
        for device in devices
    }


def alone(device: DeviceConfig, size_bytes: int) -> DeviceConfig:
    """Return the device, made large enough to hold `size_bytes` of chunks; a block device as is."""
    if device.kind == "block" or device.size_bytes is None:
        return device
    return replace(device, size_bytes=max(device.size_bytes, size_bytes + CONTAINER_MARGIN_BYTES))


def check_capacity(devices: Sequence[DeviceConfig], context_tokens: int) -> None:
    """Raise ConfigurationError where the devices cannot hold the context."""
    sizes = [device.size_bytes for device in devices]
    needed = stored_bytes(context_tokens)
    total = sum(size or 0 for size in sizes)
    if None not in sizes and total < needed:
        allowed = f"at least {format_bytes(needed)} in all, the KV of {context_tokens} tokens"
        raise ConfigurationError("devices", format_bytes(total), allowed)


# ---- report ----


def describe(results: Mapping[str, Samples]) -> list[dict[str, Any]]:
    """Return the rows of all configurations as JSON keys; the first one's name is "pool"."""
    rows = []
    for name, samples in results.items():
        suffix = name.removeprefix("pool")
        computed = [answer.ttft_s for answer in samples.computed]
        if name.startswith("pool"):
            rows.append(_row(f"computed{suffix}", computed, 0))
            rows.append(_row(f"in-engine{suffix}", samples.in_engine_ttft_s, 0))
        rows.append(
            _row(name, samples.ttft_s, samples.bytes)
            | {
                "device_bytes": {item.device: item.bytes for item in samples.traffic},
                "device_busy_s": {item.device: item.busy_s for item in samples.traffic},
                "in_engine_s": as_dict(samples.in_engine_s),
                "bytes_over_ceiling_s": as_dict(samples.ceiling_s),
                "overhead_ratio": as_dict(samples.overhead_ratios),
                "tokens_equal": samples.tokens_equal,
            }
        )
    return rows


def figures(results: Mapping[str, Samples]) -> list[Figure]:
    """Return the TTFTs; beside the pool's, a hit in the engine plus the devices' own time."""
    shown = [Figure("in-engine", "s", results["pool"].in_engine_ttft_s)]
    for name, samples in results.items():
        ideal = zip(samples.in_engine_s, samples.ceiling_s, strict=True)
        ceiling = [in_engine + device_s for in_engine, device_s in ideal]
        shown.append(Figure(name, "s", samples.pool_s, ceiling, "a hit that reads fewer bytes"))
    return shown


def _row(name: str, ttft_s: Sequence[float], size_bytes: int) -> dict[str, Any]:
    part = summarize(ttft_s)
    return {
        "name": name,
        "ttft_s_median": part.median,
        "min": part.min,
        "max": part.max,
        "n": part.n,
        "bytes": size_bytes,
    }


# ---- command line ----


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: the pool, several prompts at once, then each device alone."""

    context_tokens: int
    seed: int
    repeat: int
    concurrency: Sequence[int]
    devices: Sequence[DeviceConfig]
    pool_only: bool

    def run(self, console: Console) -> tuple[dict[str, Samples], bool]:
        """Return the samples of each configuration, and whether the control differed."""
        results: dict[str, Samples] = {}
        named, prompt = short_names(self.devices), self._prompts(1)[0]
        with self._server("pool", named, console) as rig:
            results["pool"] = self._hits("pool", rig, [prompt], console)
            differs = control_differs(rig[0], prompt, results["pool"].computed[0], self.seed)
            for count in (count for count in self.concurrency if count > 1):
                name = f"pool, {count} at once"
                results[name] = self._hits(name, rig, self._prompts(count), console)
        single = named if len(named) > 1 and not self.pool_only else {}
        for device_name, device in single.items():
            name = f"{device_name} alone"
            whole = alone(device, stored_bytes(self.context_tokens))
            with self._server(name, {device_name: whole}, console) as rig:
                results[name] = self._hits(name, rig, [prompt], console)
        return results, differs

    def _prompts(self, count: int) -> list[list[int]]:
        length = self.context_tokens // count
        return [make_prompt(length, self.seed + index) for index in range(count)]

    @contextmanager
    def _server(
        self, name: str, devices: Mapping[str, DeviceConfig], console: Console
    ) -> Iterator[tuple[Server, Devices]]:
        log = BUILD_FOLDER / f"ttft-{name.replace(' ', '-')}.log"
        with private_devices(devices) as placed:
            strings = [str(device) for device in placed.values()]
            with Server(self.context_tokens, strings, BUILD_FOLDER, log) as server:
                with waiting(console, f"{name}: starting vLLM (log: {log})"):
                    server.wait_ready()
                yield server, Devices(placed)

    def _hits(
        self,
        name: str,
        rig: tuple[Server, Devices],
        prompts: Sequence[Sequence[int]],
        console: Console,
    ) -> Samples:
        text = f"{name}: computing {len(prompts)} x {len(prompts[0]):,} tokens, then"
        with waiting(console, f"{text} {self.repeat} rounds of hits"):
            return measure_hits(rig[0], prompts, self.repeat, rig[1])


def main(words: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code: 1 for a wrong result, 2 for unusable options."""
    arguments = _parse_arguments(words)
    console = make_console()
    seed = int.from_bytes(os.urandom(4)) if arguments.seed is None else arguments.seed
    try:
        with ExitStack() as stack:
            devices = _devices(arguments, stack)
            plan = Plan(
                context_tokens=arguments.context,
                seed=seed,
                repeat=arguments.repeat,
                concurrency=arguments.concurrency,
                devices=devices,
                pool_only=arguments.pool_only,
            )
            results, differs = plan.run(console)
    except (ConfigurationError, EmulationError) as error:
        print(f"ttft: {error}", file=sys.stderr)
        return 2
    except ServerError as error:
        print(f"ttft: {error}", file=sys.stderr)
        return 1
    return _report(arguments, plan, results, differs, console)


def _report(
    arguments: argparse.Namespace,
    plan: Plan,
    results: Mapping[str, Samples],
    differs: bool,
    console: Console,
) -> int:
    pool = results["pool"]
    ratio, ceiling_s = summarize(pool.overhead_ratios), summarize(pool.ceiling_s).median
    computed_s = pool.computed[0].ttft_s
    title = f"TTFT of {plan.context_tokens:,} tokens (computed: {computed_s:.1f} s)"
    apart = max(samples.logprob_difference for samples in results.values())
    console.print(table(title, figures(results)))
    console.print(
        f"pool - in-engine = {ratio.median:.2f} ({ratio.min:.2f}..{ratio.max:.2f}) x the devices'"
        f" {ceiling_s:.4f} s for {format_bytes(pool.bytes)} (target {TARGET_RATIO}, aim"
        f" {AIM_RATIO}); tokens {'equal' if apart < math.inf else 'DIFFER'}, log-probabilities"
        f" within {apart:.1g}, control"
        f" {'differs' if differs else 'DOES NOT DIFFER'}"
    )
    if arguments.json:
        content = {
            "context": plan.context_tokens,
            "prompt_tokens": plan.context_tokens // CHUNK_TOKENS * CHUNK_TOKENS + TAIL_TOKENS,
            "chunk_tokens": CHUNK_TOKENS,
            "seed": plan.seed,
            "devices": [str(device) for device in plan.devices],
            "rows": describe(results),
            "tokens_equal": apart < math.inf,
            "logprob_difference": apart if apart < math.inf else None,
            "control_differs": differs,
            "bytes_over_ceiling_s": ceiling_s,
            "overhead_ratio": ratio.median,
            "overhead_ratio_target": TARGET_RATIO,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.json, content)
    if arguments.chart:
        arguments.chart.parent.mkdir(parents=True, exist_ok=True)
        chart(arguments.chart, title, figures(results))
    return 0 if apart <= LOGPROB_TOLERANCE and differs else 1


def _devices(arguments: argparse.Namespace, stack: ExitStack) -> list[DeviceConfig]:
    """Return the devices that the options name, emulated ones made. Raises ConfigurationError."""
    context = arguments.context
    check_context(context)
    for count in arguments.concurrency:
        most = context // (2 * CHUNK_TOKENS)
        if not 1 <= count <= most:
            allowed = f"1 to {most} prompts, which share the context"
            raise ConfigurationError("concurrency", count, allowed)
    if arguments.repeat < 1:
        raise ConfigurationError("repeat", arguments.repeat, "at least 1")
    strings = arguments.devices.split(",") if arguments.devices.strip() else []
    if not strings and not arguments.emulate:
        strings = both_deliver(context, BUILD_FOLDER / "pool")
    BUILD_FOLDER.mkdir(exist_ok=True)
    devices = list(check_devices(strings)) if strings else []
    if arguments.emulate:
        size = (stored_bytes(context) + CONTAINER_MARGIN_BYTES) >> 20 << 20
        ssds = stack.enter_context(emulated_ssds(arguments.emulate, size, BUILD_FOLDER))
        devices += check_devices([f"block:{path}?size={size}" for path in ssds.devices])
    check_capacity(devices, context)
    return devices


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def _parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="bench.ttft", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--context", type=int, default=MAX_CONTEXT_TOKENS, metavar="TOKENS")
    parser.add_argument(
        "--devices", default="", help="device strings, a comma between them; empty: DRAM and a file"
    )
    parser.add_argument(
        "--emulate", type=_numbers, default=[], metavar="MIB_S", help="more SSDs, with these limits"
    )
    parser.add_argument(
        "--concurrency",
        type=_numbers,
        default=[],
        metavar="K",
        help="also K prompts at once, of context/K tokens each: the same bytes",
    )
    parser.add_argument(
        "--pool-only", action="store_true", help="not each device alone: each computes the prompt"
    )
    parser.add_argument("--repeat", type=int, default=5, metavar="N")
    parser.add_argument("--seed", type=int, help="of the prompts; a new one each time if absent")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="a PNG")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
