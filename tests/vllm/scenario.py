"""Scenarios that run one engine each in a process of their own: `python -m tests.vllm.scenario`.

Prints one line of JSON, the answers, as its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from bench.models import MODEL_HINTS
from kvpool.cost import Take
from tests.vllm.engine import Engine, Tokens, random_prompt
from tests.vllm.lengths import prompt_lengths
from tests.vllm.spies import PageSpy, hits_in_part, misdirected_loads, slow_modules

ANSWER_TOKENS = 8
# Some thirty times as slow to load as to compute: far on the same side on a busy machine too.
SLOW_READ_BYTES_S = 1 << 19
SLOW_PROMPT_TOKENS = 1000
LEARNING_PROMPTS = 9
CHAT_TOKENS = 140  # more than a chunk, so that answers are stored


def make_prompts(model: str, blocks_per_chunk: int) -> list[Tokens]:
    """Return one random prompt of each length."""
    block = MODEL_HINTS[model]["block_tokens"]
    return [random_prompt(n, 11) for n in prompt_lengths(block, block * blocks_per_chunk)]


def answer_all(engine: Engine, prompts: list[Tokens]) -> dict[str, Any]:
    """Answer the prompts one by one, all at once, and a chat of three turns."""
    alone = []
    for prompt in prompts:
        alone += engine.generate([prompt], ANSWER_TOKENS)
        engine.drain()
    engine.forget()
    together = engine.generate(prompts, ANSWER_TOKENS)
    engine.forget()
    chat, hits = [], []
    history = random_prompt(300, 13)
    for turn in range(3):
        before = engine.metric("kvpool_hit_tokens_total")
        (answer,) = engine.generate([history], CHAT_TOKENS)
        hits.append(engine.metric("kvpool_hit_tokens_total") - before)
        chat.append(answer)
        history = history + answer + random_prompt(50, 17 + turn)
        engine.forget()
    return {"alone": alone, "together": together, "chat": chat, "chat_hits": hits}


def plain(arguments: argparse.Namespace) -> dict[str, Any]:
    """The answers of vLLM without the pool."""
    engine = start(arguments, None)
    return answer_all(engine, make_prompts(arguments.model, arguments.blocks_per_chunk))


def pool(arguments: argparse.Namespace) -> dict[str, Any]:
    """The answers when all that was computed comes back from the pool, and with a wrong block."""
    engine = start(arguments, pool_config(arguments))
    free = engine.free_blocks()
    prompts = make_prompts(arguments.model, arguments.blocks_per_chunk)
    first = answer_all(engine, prompts)
    alone, hits = [], []
    for prompt in prompts:
        engine.forget()
        before = engine.metric("kvpool_hit_tokens_total")
        alone += engine.generate([prompt], ANSWER_TOKENS)
        hits.append(engine.metric("kvpool_hit_tokens_total") - before)
    engine.forget()
    before = engine.metric("kvpool_hit_tokens_total")
    together = engine.generate(prompts, ANSWER_TOKENS)
    result = {
        "first": first,
        "alone": alone,
        "hits": hits,
        "together": together,
        "together_hits": engine.metric("kvpool_hit_tokens_total") - before,
        "chat_hits": first["chat_hits"],
        "checksum_failures": engine.metric("kvpool_checksum_failures_total"),
    }
    if arguments.tensor_parallel_size == 1:
        result["wrong_block"] = [
            with_wrong_block(engine, prompts, group)
            for group in range(MODEL_HINTS[arguments.model]["kv_groups"])
        ]
    engine.check_nothing_left(free)
    return result


def broken(arguments: argparse.Namespace) -> dict[str, Any]:
    """The answers while the container that holds most of the chunks is cut off under the engine.

    `--broken-file` names a file that is truncated to nothing after the first answers: a device file
    itself, or the backing of a loop device.
    """
    engine = start(arguments, pool_config(arguments))
    free = engine.free_blocks()
    prompts = make_prompts(arguments.model, arguments.blocks_per_chunk)
    before = [engine.generate([prompt], ANSWER_TOKENS)[0] for prompt in prompts]
    engine.forget()
    os.truncate(arguments.broken_file, 0)
    rounds = []
    for _ in range(2):
        rounds.append([engine.generate([prompt], ANSWER_TOKENS)[0] for prompt in prompts])
        engine.forget()
    rounds.append(engine.generate(prompts, ANSWER_TOKENS))
    engine.check_nothing_left(free)
    return {
        "before": before,
        "rounds": rounds,
        "failures": engine.metric("kvpool_read_failures_total")
        + engine.metric("kvpool_checksum_failures_total"),
        "hits": engine.metric("kvpool_hit_tokens_total"),
    }


def corrupted(arguments: argparse.Namespace) -> dict[str, Any]:
    """The answers after a round in which no chunk verified, and all requests ended with errors."""
    engine = start(arguments, pool_config(arguments))
    prompts = [random_prompt(length, 4) for length in (500, 1000, 1344)]
    before = [engine.generate([prompt], ANSWER_TOKENS)[0] for prompt in prompts]
    engine.forget()
    with arguments.broken_file.open("r+b") as file:
        file.seek(5 << 20)
        # Random bits hold NaNs and infinities, which masks do not keep out.
        file.write(random.Random(1).randbytes(os.path.getsize(arguments.broken_file) - (5 << 20)))
        file.flush()
        os.fsync(file.fileno())
    failed = engine.generate(prompts, ANSWER_TOKENS)
    engine.forget()
    return {"before": before, "failed": failed, "after": engine.generate(prompts, ANSWER_TOKENS)}


def reset_running(arguments: argparse.Namespace) -> dict[str, Any]:
    """The answer of a request whose KV is reset while it runs and its prefix is in the pool."""
    engine = start(arguments, pool_config(arguments))
    prompt = random_prompt(1000, 1)
    before = engine.generate([prompt], 20)[0]
    engine.forget()
    request = engine.submit(prompt, 20)
    while not engine.core.scheduler.running:
        engine.llm.llm_engine.step()
    for _ in range(2):
        engine.llm.llm_engine.step()
    engine.llm.reset_prefix_cache(reset_running_requests=True)
    after = engine.finish(request)
    hits = engine.metric("kvpool_hit_tokens_total")
    engine.drain()
    return {"before": before, "after": after, "hits": hits}


def slow(arguments: argparse.Namespace) -> dict[str, Any]:
    """The answer of a prompt whose hit takes longer to load than to compute, device shaped so.

    `--cost-model` is on, off, or without: no pool at all.
    """
    prompts = [random_prompt(SLOW_PROMPT_TOKENS, seed) for seed in range(LEARNING_PROMPTS)]
    settings = None
    if arguments.cost_model != "without":
        settings = pool_config(arguments) | {"cost_model": arguments.cost_model == "on"}
    with slow_modules(SLOW_READ_BYTES_S):
        engine = start(arguments, settings)
        free = engine.free_blocks()
        first = [engine.generate([prompt], ANSWER_TOKENS)[0] for prompt in prompts]
        engine.forget()
        before = engine.metric("kvpool_hit_tokens_total")
        again = engine.generate(prompts[:1], ANSWER_TOKENS)[0]
        if settings is not None:
            engine.check_nothing_left(free)
    return {
        "first": first[0],
        "again": again,
        "hit_tokens": engine.metric("kvpool_hit_tokens_total") - before,
        "misses": engine.metric("kvpool_miss_tokens_total"),
        "decisions": decisions(engine),
        "declined_tokens": engine.metric("kvpool_declined_tokens_total"),
    }


def part(arguments: argparse.Namespace) -> dict[str, Any]:
    """The answers, alone and together, when of each hit half is taken at most, or nothing.

    Windows are stored where a prompt ends: so each prompt comes after its first half.
    """
    engine = start(arguments, pool_config(arguments))
    free = engine.free_blocks()
    prompts = make_prompts(arguments.model, arguments.blocks_per_chunk)
    for prompt in prompts:
        engine.generate([prompt[: max(len(prompt) // 2, 1)]], 1)
    engine.forget()
    before = [engine.generate([prompt], ANSWER_TOKENS)[0] for prompt in prompts]
    result: dict[str, Any] = {"before": before, "alone": [], "hit_tokens": []}
    for divisor in (2, 1 << 20):
        with hits_in_part(divisor):
            engine.forget()
            hits = engine.metric("kvpool_hit_tokens_total")
            alone = []
            for prompt in prompts:
                alone += engine.generate([prompt], ANSWER_TOKENS)
                engine.forget()
            together = engine.generate(prompts, ANSWER_TOKENS)
            engine.drain()
        result["alone"] += [alone, together]
        result["hit_tokens"].append(engine.metric("kvpool_hit_tokens_total") - hits)
        result[f"decisions_{divisor}"] = decisions(engine)
    with hits_in_part(2):
        result["wrong_block"] = [
            with_wrong_block(engine, prompts, group)
            for group in range(MODEL_HINTS[arguments.model]["kv_groups"])
        ]
    engine.check_nothing_left(free)
    return result


def decisions(engine: Engine) -> dict[str, float]:
    """Return how many hits were taken in which way."""
    name = "kvpool_hit_decisions_total"
    return {take.value: engine.metric(name, decision=take.value) for take in Take}


def with_wrong_block(engine: Engine, prompts: list[Tokens], group: int) -> list[Tokens]:
    """Answer the prompts while the last chunk of `group` in each load is another chunk's."""
    answers = []
    with misdirected_loads(group):
        for prompt in prompts:
            engine.forget()
            answers += engine.generate([prompt], ANSWER_TOKENS)
    return answers


def start(arguments: argparse.Namespace, pool_settings: dict[str, Any] | None) -> Engine:
    """Start the scenario's engine."""
    return Engine(
        arguments.model,
        arguments.models,
        pool_settings,
        failure_policy=arguments.failure_policy,
        tensor_parallel_size=arguments.tensor_parallel_size,
        seed=0,
    )


def pool_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the connector's extra config."""
    return {
        "devices": arguments.devices.split(","),
        "blocks_per_chunk": arguments.blocks_per_chunk,
    }


def page_bytes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Whether the bytes of loaded pages are those that were stored, chunk by chunk."""
    with PageSpy.installed() as spy:
        engine = start(arguments, pool_config(arguments))
        prompts = make_prompts(arguments.model, arguments.blocks_per_chunk)
        for _ in range(2):
            for prompt in prompts:
                engine.generate([prompt], ANSWER_TOKENS)
                engine.forget()
        engine.generate(prompts, ANSWER_TOKENS)
        engine.drain()
    return {"stored": len(spy.stored), "equal": spy.equal, "different": spy.different}


def metrics(arguments: argparse.Namespace) -> dict[str, Any]:
    """The pool's metrics after a workload whose numbers can be told beforehand."""
    engine = start(arguments, pool_config(arguments))
    prompt = random_prompt(1000, 3)
    engine.generate([prompt], 1)
    engine.forget()
    engine.generate([prompt], 1)
    engine.drain()
    return {
        "samples": [
            [sample.name, sample.labels, sample.value]
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name.startswith("kvpool_")
        ]
    }


def refused(arguments: argparse.Namespace) -> dict[str, Any]:
    """What vLLM's start ends with for each bad configuration; a model is never loaded."""
    from vllm.model_executor.model_loader import base_loader

    def load_model(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was about to be loaded")

    base_loader.BaseModelLoader.load_model = load_model  # type: ignore[method-assign,assignment]
    messages = []
    for settings in json.loads(arguments.extra_configs):
        try:
            start(arguments, settings)
        except Exception as error:
            messages.append(str(error))
        else:
            messages.append("started")
    return {"messages": messages}


SCENARIOS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "plain": plain,
    "pool": pool,
    "broken": broken,
    "corrupted": corrupted,
    "reset_running": reset_running,
    "page_bytes": page_bytes,
    "metrics": metrics,
    "slow": slow,
    "part": part,
    "refused": refused,
}


def main() -> None:
    """Run one scenario."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--model", default="llama")
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--devices", default="dram:256MiB")
    parser.add_argument("--blocks-per-chunk", type=int, default=2)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--failure-policy", default="recompute")
    parser.add_argument("--cost-model", choices=("on", "off", "without"), default="on")
    parser.add_argument("--broken-file", type=Path)
    parser.add_argument("--extra-configs", default="[]")
    arguments = parser.parse_args()
    print(json.dumps(SCENARIOS[arguments.scenario](arguments)), flush=True)


if __name__ == "__main__":
    main()
