"""Scenarios of the gates that need an engine: `python -m tests.vllm.gate_scenarios NAME`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.connectors.vllm import namespace
from kvpool.container import Container
from kvpool.dataplane import DataPlane
from tests.vllm.engine import Engine, random_prompt

ANSWER_TOKENS = 6
NEEDLES = 40
NEEDLE_TOKENS = 400
SHARING = 50


def start(arguments: argparse.Namespace, **options: Any) -> Engine:
    """Start an engine, with a pool where devices are named."""
    settings = {"devices": arguments.devices.split(","), "blocks_per_chunk": 2}
    ranks = arguments.tensor_parallel_size
    return Engine(
        "llama",
        arguments.models,
        settings if arguments.devices else None,
        tensor_parallel_size=ranks,
        seed=0,
        **options,
    )


def hits(engine: Engine) -> float:
    """Return the tokens that came from the pool."""
    return engine.metric("kvpool_hit_tokens_total")


def needles(arguments: argparse.Namespace) -> dict[str, Any]:
    """The answers about 40 contexts, one after the other, then an orderly stop.

    Without the guard, weights are no part of what names the bytes.
    """
    if arguments.guard == "off":
        namespace._weights = lambda *_: "any"  # type: ignore[assignment]
    engine = start(arguments)
    prompts = [random_prompt(NEEDLE_TOKENS, seed) for seed in range(NEEDLES)]
    answers = [engine.generate([prompt], ANSWER_TOKENS)[0] for prompt in prompts]
    engine.drain()
    result = {"answers": answers, "hit_tokens": hits(engine)}
    if arguments.reset:
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        before = hits(engine)
        engine.generate(prompts[:4], ANSWER_TOKENS)
        result["hit_tokens_after_reset"] = hits(engine) - before
    result["stored_chunks"] = engine.metric("kvpool_stored_chunks_total")
    engine.close()
    return result


def salted(arguments: argparse.Namespace) -> dict[str, Any]:
    """The hits of one prompt under two tenants' salts."""
    engine = start(arguments)
    prompt = random_prompt(600, 1)
    found = []
    for salt in arguments.salts.split(","):
        before = hits(engine)
        engine.generate([prompt], 1, cache_salt=salt)
        engine.forget()
        found.append(hits(engine) - before)
    return {"hits": found}


def shared(arguments: argparse.Namespace) -> dict[str, Any]:
    """50 requests at once that share a prefix which only the pool holds."""
    engine = start(arguments)
    prefix = random_prompt(1024, 2)
    prompts = [prefix + random_prompt(30, 100 + i) for i in range(SHARING)]
    alone = []
    for prompt in prompts[:: SHARING // 5]:
        alone += engine.generate([prompt], ANSWER_TOKENS)
    engine.forget()
    scheduler = engine.core.scheduler.connector.connector_scheduler
    if arguments.guard == "off":
        scheduler._chunks_being_loaded = None
    loads, submit_load = [], DataPlane.submit_load

    def count(plane: DataPlane, job: int, *rest: Any, **more: Any) -> None:
        loads.append(job)
        submit_load(plane, job, *rest, **more)

    DataPlane.submit_load = count  # type: ignore[method-assign]
    started_s = time.monotonic()
    together = engine.generate(prompts, ANSWER_TOKENS)
    return {
        "loads": len(loads),
        "alone": alone,
        "together": together[:: SHARING // 5],
        "seconds": time.monotonic() - started_s,
    }


def preempted(arguments: argparse.Namespace) -> dict[str, Any]:
    """Twelve long answers in a KV space for a few of them; twice, the second time from the pool."""
    engine = start(arguments, num_gpu_blocks_override=20, max_model_len=1024)
    free = engine.free_blocks()
    lengths = np.random.default_rng(3).integers(60, 150, 12).tolist()
    prompts = [random_prompt(length, 50 + i) for i, length in enumerate(lengths)]
    rounds = []
    for _ in range(2):
        rounds.append(engine.generate_with_leads(prompts, 260))
        engine.forget()
    engine.check_nothing_left(free) if arguments.devices else None
    return {
        "rounds": rounds,
        "preemptions": engine.metric("vllm:num_preemptions_total"),
        "hit_tokens": hits(engine),
        "longest_s": engine.longest_s,
    }


def one_rank_damaged(arguments: argparse.Namespace) -> dict[str, Any]:
    """The answers before and after all that one rank stored was overwritten."""
    engine = start(arguments)
    prompts = [random_prompt(length, 4) for length in (500, 900, 1344)]
    before = [engine.generate([prompt], ANSWER_TOKENS)[0] for prompt in prompts]
    engine.forget()
    container = Container.open(arguments.broken_file.parent, create=False)
    leases = {entry.rank: entry for entry, _ in container.leases()}
    container.close()
    assert set(leases) == {0, 1}
    noise = np.random.default_rng(1).integers(0, 256, leases[1].length, np.uint8)
    with arguments.broken_file.open("r+b", buffering=0) as file:
        file.seek(leases[1].start)
        file.write(noise.tobytes())
    after = [engine.generate([prompt], ANSWER_TOKENS)[0] for prompt in prompts]
    engine.drain()
    return {
        "before": before,
        "after": after,
        "failures": [
            engine.metric("kvpool_checksum_failures_total", rank=str(rank)) for rank in (0, 1)
        ],
    }


SCENARIOS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "needles": needles,
    "salted": salted,
    "shared": shared,
    "preempted": preempted,
    "one_rank_damaged": one_rank_damaged,
}


def main() -> None:
    """Run one scenario."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--devices", default="")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--broken-file", type=Path)
    parser.add_argument("--salts", default="")
    parser.add_argument("--guard", default="on")
    parser.add_argument("--reset", type=int, default=0)
    arguments = parser.parse_args()
    print(json.dumps(SCENARIOS[arguments.scenario](arguments)), flush=True)


if __name__ == "__main__":
    main()
