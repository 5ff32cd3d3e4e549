"""A vLLM engine inside this process, stepped and inspected by scenarios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import REGISTRY
from vllm import LLM, RequestOutput, SamplingParams

from bench.models import MODEL_HINTS, build_model

Tokens = list[int]


class Engine:
    """`LLM` with or without the pool; prompts are token ids, answers too, always greedy."""

    def __init__(
        self,
        model: str,
        models_folder: Path,
        pool: dict[str, Any] | None,
        *,
        failure_policy: str = "recompute",
        **options: Any,
    ) -> None:
        hints = MODEL_HINTS[model]
        arguments: dict[str, Any] = {
            "dtype": hints["dtype"],
            "block_size": 64,
            "max_num_batched_tokens": hints["max_num_batched_tokens"],
            "enable_prefix_caching": hints["enable_prefix_caching"],
            "num_gpu_blocks_override": 25600 // hints["block_tokens"],
            "max_model_len": 8192,
        } | options
        if pool is not None:
            arguments["kv_transfer_config"] = {
                "kv_connector": "KVPoolConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": failure_policy,
                "kv_connector_extra_config": pool,
            }
        # Heads are shared out over ranks.
        ranks = int(options.get("tensor_parallel_size", 1))
        overrides = {"num_key_value_heads": 2} if ranks == 2 else {}
        self.llm = LLM(
            str(build_model(model, models_folder, **overrides)),
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=False,
            **arguments,
        )
        self._requests = 0
        self.longest_s = 0.0  # from a request's arrival to its end
        self.core = self.llm.llm_engine.engine_core.engine_core

    def generate(
        self, prompts: Sequence[Tokens], max_tokens: int = 8, cache_salt: str | None = None
    ) -> list[Tokens]:
        """Answer all prompts at once."""
        salt = {} if cache_salt is None else {"cache_salt": cache_salt}
        parameters = SamplingParams(
            max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt, **salt} for prompt in prompts],
            parameters,
            use_tqdm=False,
        )
        for output in outputs:
            self._note_time(output)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def generate_with_leads(
        self, prompts: Sequence[Tokens], max_tokens: int
    ) -> list[dict[str, list[float]]]:
        """Answer all prompts at once; `leads` is how far each token is ahead of the next best."""
        parameters = SamplingParams(
            max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True, logprobs=2
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False
        )
        answers = []
        for output in outputs:
            self._note_time(output)
            chosen = output.outputs[0]
            best = [sorted(p.logprob for p in place.values()) for place in chosen.logprobs or []]
            leads = [logprobs[-1] - logprobs[-2] for logprobs in best]
            answers.append({"tokens": list(chosen.token_ids), "leads": leads})
        return answers

    def _note_time(self, output: RequestOutput) -> None:
        if output.metrics is not None:
            took_s = output.metrics.last_token_ts - output.metrics.queued_ts
            self.longest_s = max(self.longest_s, took_s)

    def submit(self, prompt: Tokens, max_tokens: int) -> str:
        """Add a request without stepping; return its id."""
        parameters = SamplingParams(
            max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        self._requests += 1
        name = f"request-{self._requests}"
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        return name

    def finish(self, request: str) -> Tokens:
        """Step until a submitted request has ended; return its answer."""
        while True:
            for output in self.llm.llm_engine.step():
                if output.request_id == request and output.finished:
                    return list(output.outputs[0].token_ids)

    def drain(self) -> None:
        """Step until every store, write and spill is acknowledged."""
        while self.core.scheduler.has_requests():
            self.llm.llm_engine.step()

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, so that a hit can only come from the pool."""
        self.drain()
        assert self.llm.reset_prefix_cache()

    def close(self) -> None:
        """Stop the engine in an orderly way."""
        self.llm.llm_engine.engine_core.shutdown()

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum over the samples of a metric with these labels, as `/metrics` has them."""
        return sum(
            sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def free_blocks(self) -> int:
        """Return how many KV blocks vLLM could hand out now."""
        pool = self.core.scheduler.kv_cache_manager.block_pool
        return int(pool.get_num_free_blocks())

    def check_nothing_left(self, free_blocks: int) -> None:
        """Assert that no job, pin or KV block is left behind."""
        self.drain()
        assert self.free_blocks() == free_blocks
        assert not self.core.scheduler.connector.connector_scheduler._jobs
        assert not self.core.scheduler.connector.has_pending_push_work()


def random_prompt(length: int, seed: int) -> Tokens:
    """Return `length` token ids, the same for the same arguments."""
    return [int(token) for token in np.random.default_rng([seed, length]).integers(3, 590, length)]
