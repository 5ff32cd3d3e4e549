"""What `bench.crash` kills: a pool, or vLLM over one, that restores, checks, then never rests.

Facts go to a ledger that outlives the process, one line each, written before what they tell of.
Reports go to the parent through a pipe, one line each: a word and, mostly, JSON.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool import native
from kvpool.config import from_mapping
from kvpool.dataplane import DataPlane
from kvpool.devices import open_device
from kvpool.jobs import FinishedJob
from kvpool.orchestrator import Orchestrator, RequestState
from kvpool.types import Geometry, GroupGeometry, GroupKind, Key, Outcome, Profile

FILE_DEVICES = ("a", "b")
LEDGER_NAME = "ledger"
NAMESPACE = hashlib.sha256(b"kvpool crash harness").digest()

CHUNK_TOKENS = 256
SLOT_BYTES = 32 << 10
# 560 chunks in all for a pool of about 430: something has to go all the time.
FAMILIES, BRANCHES, STEM_CHUNKS, LONGEST_CHUNKS = 10, 3, 8, 24
JOBS_AT_A_TIME = 6
LOAD_SHARE = 0.3
RESETTING_SHARE, RESET_SHARE = 0.3, 0.01  # of the processes; of what such a process does
PROFILE = Profile(1e9, 1e9, 1e-4, 1e9)

# Distinct chunks of all needles: about 160. On the files there is room for about 90.
NEEDLES, QUESTIONS, ANSWER_TOKENS = 48, 16, 8
HAYSTACKS, HAYSTACK_TOKENS, NEEDLE_TOKENS = 4, 700, 12
BLOCK_TOKENS, BLOCKS_PER_CHUNK = 64, 2
# One process, so that a kill ends all of it; one thread that sleeps where it waits.
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

Bytes = npt.NDArray[np.uint8]


class Reports:
    """The pipe to the parent."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, word: str, **facts: Any) -> None:
        """Write one line, whole."""
        os.write(self._descriptor, f"{word} {json.dumps(facts)}\n".encode())


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `length` chunks of one branch; the branches of a family share their stem."""

    family: int
    branch: int
    length: int = LONGEST_CHUNKS

    def chunk_keys(self) -> list[Key]:
        """Return the keys of its chunks."""
        return _branch_keys(self.family, self.branch)[: self.length]


@functools.cache
def _branch_keys(family: int, branch: int) -> list[Key]:
    names = [
        f"{family} {0 if index < STEM_CHUNKS else branch} {index}"
        for index in range(LONGEST_CHUNKS)
    ]
    return [hashlib.sha256(name.encode()).digest() + bytes(4) for name in names]


@functools.lru_cache(maxsize=2048)
def content(key: Key, generation: int) -> Bytes:
    """Return the SLOT_BYTES bytes of a chunk; after each reset the same key means others."""
    seed = [generation, int.from_bytes(key[:16], "little")]
    return np.frombuffer(np.random.Generator(np.random.SFC64(seed)).bytes(SLOT_BYTES), np.uint8)


class Ledger:
    """What may be in the pool: lines that are only ever appended.

    `store F B N` (begun), `stored N` chunks (accepted), `resetting` (begun), `reset` (durable).
    """

    def __init__(self, path: Path) -> None:
        """Read what is there and open it for more."""
        self.generation = 0
        self.begun: set[Key] = set()  # of this generation
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        with open(path, encoding="ascii") as lines:
            for line in lines:
                self._learn(line.split())

    def note(self, *words: object) -> None:
        """Append a line."""
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())
        self._learn([str(word) for word in words])

    def _learn(self, words: Sequence[str]) -> None:
        if words[0] == "store":
            self.begun.update(Prefix(*map(int, words[1:])).chunk_keys())
        elif words[0] == "reset":
            self.generation += 1
            self.begun.clear()

    def judge(self, key: Key, page: Bytes) -> str:
        """Return "" where `page` may be what `key` loads, else "wrong" or "phantom"."""
        if key in self.begun and np.array_equal(page, content(key, self.generation)):
            return ""
        known = any(np.array_equal(page, content(key, old)) for old in range(self.generation + 1))
        return "phantom" if known else "wrong"

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


@dataclass(slots=True)
class Findings:
    """What loads delivered. Lies are the keys, in hexadecimal."""

    loaded: int = 0
    missed: int = 0  # hits that did not load: a miss found out late
    wrong: set[str] = field(default_factory=set)
    phantom: set[str] = field(default_factory=set)

    def facts(self) -> dict[str, Any]:
        """Return it as JSON keys."""
        lies = {"wrong": sorted(self.wrong), "phantom": sorted(self.phantom)}
        return {"loaded": self.loaded, "missed": self.missed, **lies}


@dataclass(slots=True)
class Task:
    """A job under way in one lane of pages; of a load: what is expected where."""

    lane: int
    request: RequestState
    keys: list[Key] = field(default_factory=list)
    generation: int = 0
    begun: frozenset[Key] = frozenset()


def device_strings(folder: Path) -> list[str]:
    """Return the pool's devices: less memory than chunks, and two files."""
    return ["dram:2MiB", *(f"file:{folder / name}?size=11MiB&depth=4" for name in FILE_DEVICES)]


class Pool:
    """Orchestrator, data plane and devices over pages for JOBS_AT_A_TIME prefixes."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        """Open and restore. Raises what the devices raise."""
        self.ledger = ledger
        group = GroupGeometry(GroupKind.FULL, CHUNK_TOKENS, SLOT_BYTES)
        geometry = Geometry((group,), 1, SLOT_BYTES)
        count = JOBS_AT_A_TIME * LONGEST_CHUNKS
        self.engine = native.Engine(SLOT_BYTES)
        self.memory = native.Arena(count * SLOT_BYTES)
        self.pages = self.memory.array[: count * SLOT_BYTES].reshape(count, SLOT_BYTES)
        self.engine.add_group([self.memory.address], [SLOT_BYTES], [SLOT_BYTES], 1)
        self.devices = [
            open_device(
                device,
                self.engine,
                namespace=NAMESPACE,
                rank=0,
                ranks=1,
                owner=0,
                slot_bytes=SLOT_BYTES,
            )
            for device in from_mapping({"devices": device_strings(folder)}).devices
        ]
        self.plane = DataPlane(self.engine, self.devices, geometry)
        self.orchestrator = Orchestrator(geometry, ranks=1)
        self.restored = self.orchestrator.attach(
            [device.report(PROFILE) for device in self.devices],
            [[device.survivors for device in self.devices]],
        )
        self.lanes = list(range(JOBS_AT_A_TIME))
        self.tasks: dict[int, Task] = {}
        self._next_job = 0

    def held(self, prefix: Prefix) -> list[Key]:
        """Return the first keys of a prefix, as far as they are hits."""
        request = self.orchestrator.begin("look")
        keys = prefix.chunk_keys()
        hits = [self.orchestrator.lookup(key, request) is Outcome.HIT for key in keys]
        self.orchestrator.finish(request)
        return keys[: hits.index(False)] if False in hits else keys

    def store(self, prefix: Prefix) -> None:
        """Begin to store a prefix; a lane must be free."""
        self.ledger.note("store", prefix.family, prefix.branch, prefix.length)
        task, keys = self._task(), prefix.chunk_keys()
        positions = [(index + 1) * CHUNK_TOKENS for index in range(len(keys))]
        plan = self.orchestrator.reserve(keys, positions, task.request)
        first = task.lane * LONGEST_CHUNKS
        blocks = [first + keys.index(key) for key in plan.keys]
        for key, block in zip(plan.keys, blocks, strict=True):
            self.pages[block] = content(key, self.ledger.generation)
        self.plane.submit_store(self._next_job, plan, np.array(blocks, np.int32))
        self.ledger.note("stored", len(blocks))

    def load(self, keys: list[Key]) -> None:
        """Begin to load chunks that are hits; a lane must be free."""
        task = self._task()
        task.keys, task.generation = keys, self.ledger.generation
        first = task.lane * LONGEST_CHUNKS
        self.pages[first : first + len(keys)] = 0
        for key in keys:
            self.orchestrator.lookup(key, task.request)
        plan = self.orchestrator.plan_load(keys, task.request)
        blocks = np.arange(first, first + len(keys), dtype=np.int32)
        self.plane.submit_load(self._next_job, plan, blocks)

    def _task(self) -> Task:
        self._next_job += 1
        task = Task(self.lanes.pop(), self.orchestrator.begin(f"request {self._next_job}"))
        self.tasks[self._next_job] = task
        return task

    def reset(self) -> None:
        """Forget everything, durably. What is under way may still end."""
        self.ledger.note("resetting")
        self.orchestrator.reset()
        self.plane.set_epoch(self.orchestrator.epoch)
        self.ledger.note("reset")

    def step(self, findings: Findings) -> None:
        """Take in what has ended and judge what was loaded."""
        if (moves := self.orchestrator.take_moves()) is not None:
            self.plane.submit_moves(moves)
        self.plane.poll()
        finished = self.plane.take_finished()
        self.orchestrator.acknowledge(self.plane.take_report())
        for job in finished:
            self._end(job, findings)

    def _end(self, job: FinishedJob, findings: Findings) -> None:
        task = self.tasks.pop(job.job_id)
        if job.is_load:
            self.orchestrator.complete_load(task.request)
            # What was a hit before a reset may be delivered after it: to a request of before.
            if task.generation == self.ledger.generation:
                self._judge(task, set(job.failed), findings)
        self.orchestrator.finish(task.request)
        self.lanes.append(task.lane)

    def _judge(self, task: Task, failed: set[int], findings: Findings) -> None:
        findings.missed += len(failed)
        for index, key in enumerate(task.keys):
            if index in failed:
                continue
            findings.loaded += 1
            verdict = self.ledger.judge(key, self.pages[task.lane * LONGEST_CHUNKS + index])
            if verdict:
                getattr(findings, verdict).add(key.hex())

    def finish(self, findings: Findings) -> None:
        """Step until nothing is under way."""
        self.step(findings)
        while self.tasks or self.plane.busy() or self.orchestrator.pending_work():
            self.plane.wait(0.05)
            self.step(findings)

    def close(self) -> None:
        """Close all of it."""
        self.plane.close()
        self.memory.close()
        self.ledger.close()


def check(pool: Pool) -> tuple[int, Findings]:
    """Return how many chunks are hits after a restart, and what loading them delivered."""
    findings, hits = Findings(), set[Key]()
    request = pool.orchestrator.begin("survivors")
    survivors = {key for device in pool.devices for key in device.survivors.keys}
    for key in survivors:
        if pool.orchestrator.lookup(key, request) is Outcome.HIT and key not in pool.ledger.begun:
            findings.phantom.add(key.hex())
    pool.orchestrator.finish(request)
    for family in range(FAMILIES):
        for branch in range(BRANCHES):
            held = pool.held(Prefix(family, branch))
            hits.update(held)
            if held:
                pool.load(held)
            pool.finish(findings)
    return len(hits), findings


def keep_busy(pool: Pool, rng: random.Random, reports: Reports) -> None:
    """Store, load and now and then reset until killed, several jobs at a time."""
    findings, told = Findings(), 0
    reset_share = RESET_SHARE if rng.random() < RESETTING_SHARE else 0.0
    while True:
        pool.step(findings)
        if findings.wrong or findings.phantom or findings.loaded - told >= 500:
            reports.send("live", **findings.facts())
            findings = Findings()
        if not pool.lanes:
            pool.plane.wait(0.05)
            continue
        if rng.random() < reset_share:
            pool.reset()
        length = rng.randrange(1, LONGEST_CHUNKS + 1)
        prefix = Prefix(rng.randrange(FAMILIES), rng.randrange(BRANCHES), length)
        held = pool.held(prefix) if rng.random() < LOAD_SHARE else []
        if held:
            pool.load(held)
        else:
            pool.store(prefix)


def run_plane(arguments: argparse.Namespace, reports: Reports) -> None:
    """Open the pool, check it, and work on it; `--once`: check it and close it."""
    reports.send("begin")
    started_s = time.perf_counter()
    pool = Pool(arguments.folder, Ledger(arguments.folder / LEDGER_NAME))
    restart_s = time.perf_counter() - started_s
    hits, findings = check(pool)
    damaged = sum(device.damaged_headers for device in pool.devices)
    facts = {"restored": sum(pool.restored), "hits": hits, "restart_s": restart_s}
    reports.send("checked", **facts, damaged_headers=damaged, **findings.facts())
    if not arguments.once:
        keep_busy(pool, random.Random(arguments.seed), reports)
    pool.close()


# ---- vLLM -----------------------------------------------------------------------------------


def needle_prompt(number: int) -> list[int]:
    """Return a haystack that others share, with tokens of its own planted somewhere in it."""
    haystack = np.random.default_rng([1, number % HAYSTACKS]).integers(3, 590, HAYSTACK_TOKENS)
    needle = np.random.default_rng([2, number]).integers(3, 590, NEEDLE_TOKENS)
    at = (number // HAYSTACKS * 97 + 31) % (HAYSTACK_TOKENS - 2 * NEEDLE_TOKENS)
    haystack[at : at + NEEDLE_TOKENS] = needle
    return [int(token) for token in haystack]


class Engine:
    """`LLM` in this process, with the tiny model, over the pool in `folder` or over none."""

    def __init__(self, folder: Path | None, models: Path) -> None:
        os.environ.update(VLLM_ENVIRONMENT)  # read when vLLM is imported
        from vllm import LLM, SamplingParams

        from bench.models import MODEL_HINTS, build_model

        transfer: dict[str, Any] = {}
        if folder is not None:
            files = [f"file:{folder / name}?size=32MiB" for name in FILE_DEVICES]
            extra = {
                "devices": ["dram:32MiB", *files],
                "blocks_per_chunk": BLOCKS_PER_CHUNK,
                "cost_model": False,  # every hit is to be loaded
            }
            transfer["kv_transfer_config"] = {
                "kv_connector": "KVPoolConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
        self._llm = LLM(
            str(build_model("llama", models)),
            dtype=MODEL_HINTS["llama"]["dtype"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=False,
            block_size=BLOCK_TOKENS,
            max_model_len=1024,
            max_num_batched_tokens=2048,
            num_gpu_blocks_override=200,
            seed=0,
            **transfer,
        )
        self._parameters = SamplingParams(
            max_tokens=ANSWER_TOKENS, temperature=0, detokenize=False, ignore_eos=True
        )

    def answer(self, numbers: Sequence[int]) -> list[list[int]]:
        """Answer needle prompts, with vLLM's own prefix cache empty."""
        while self._llm.llm_engine.engine_core.engine_core.scheduler.has_requests():
            self._llm.llm_engine.step()
        self._llm.reset_prefix_cache()
        prompts: list[Any] = [{"prompt_token_ids": needle_prompt(number)} for number in numbers]
        outputs = self._llm.generate(prompts, self._parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def metric(name: str) -> int:
    """Return the sum over the samples of a counter so far."""
    from prometheus_client import REGISTRY

    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    return int(sum(sample.value for sample in samples if sample.name == name))


def run_vllm(arguments: argparse.Namespace, reports: Reports) -> None:
    """Start vLLM over the pool, ask needles, then ask on; every answer is compared."""
    reference = json.loads(arguments.reference.read_text())
    rng = random.Random(arguments.seed)
    reports.send("begin")
    started_s = time.perf_counter()
    engine = Engine(arguments.folder, arguments.models)
    restart_s = time.perf_counter() - started_s
    word, extra = "checked", {"restart_s": restart_s}
    while True:
        before, numbers = _outcomes(), rng.sample(range(NEEDLES), QUESTIONS)
        answers = engine.answer(numbers)
        pairs = zip(numbers, answers, strict=True)
        wrong = [str(number) for number, tokens in pairs if tokens != reference[number]]
        hits, missed = (now - then for now, then in zip(_outcomes(), before, strict=True))
        if extra:
            extra |= {"restored": hits, "hits": hits}
        reports.send(word, **extra, loaded=hits, missed=missed, wrong=wrong, phantom=[])
        if arguments.once:
            return
        word, extra = "live", {}


def _outcomes() -> tuple[int, int]:
    """Return the tokens that came from the pool, and the chunks that did not verify."""
    return metric("kvpool_hit_tokens_total"), metric("kvpool_checksum_failures_total")


def run_reference(arguments: argparse.Namespace, reports: Reports) -> None:
    """Write the answers of vLLM without the pool."""
    answers = Engine(None, arguments.models).answer(range(NEEDLES))
    arguments.reference.write_text(json.dumps(answers))
    reports.send("checked")


RUNS = {"plane": run_plane, "vllm": run_vllm, "reference": run_reference}


def main(words: Sequence[str] | None = None) -> int:
    """Run until killed."""
    parser = argparse.ArgumentParser(prog="bench.crash_writer")
    parser.add_argument("engine", choices=RUNS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--once", action="store_true")
    arguments = parser.parse_args(words)
    RUNS[arguments.engine](arguments, Reports(arguments.report_fd))
    return 0


if __name__ == "__main__":
    sys.exit(main())
