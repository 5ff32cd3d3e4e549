"""The demo: refusals, verdicts, and one real run at toy size."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import demo
from bench.serve import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    LOGPROB_TOLERANCE,
    TAIL_TOKENS,
    Answer,
    Traffic,
    make_prompt,
    parse_metrics,
    reads_between,
    stored_bytes,
)

ROOT = Path(__file__).parents[2]
BEFORE = """\
# TYPE kvpool_capacity_bytes gauge
kvpool_capacity_bytes{device="dram",engine="0"} 4096.0
kvpool_capacity_bytes{device="file:/p",engine="0"} 8192.0
# TYPE kvpool_read_bytes counter
kvpool_read_bytes_total{device="dram",rank="0"} 10.0
kvpool_read_bytes_total{device="dram",rank="1"} 20.0
"""
AFTER = """\
# TYPE kvpool_capacity_bytes gauge
kvpool_capacity_bytes{device="dram",engine="0"} 4096.0
kvpool_capacity_bytes{device="file:/p",engine="0"} 8192.0
# TYPE kvpool_read_bytes counter
kvpool_read_bytes_total{device="dram",rank="0"} 110.0
kvpool_read_bytes_total{device="dram",rank="1"} 20.0
kvpool_read_bytes_total{device="file:/p",rank="0"} 7.0
# TYPE kvpool_read_busy_seconds counter
kvpool_read_busy_seconds_total{device="dram",rank="0"} 0.5
"""


def run_of(pool: tuple[int, ...], logprob: float, size_bytes: int) -> demo.Run:
    answer = Answer((1, 2), (-0.5, -0.5), 1.0, 2.0)
    return demo.Run(
        computed=answer,
        pool=replace(answer, tokens=pool, logprobs=(-0.5, logprob)),
        in_engine=answer,
        traffic=[Traffic("dram", size_bytes, 0.1)],
        metrics=parse_metrics(AFTER),
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--context", "2047"],
        ["--context", "131073"],
        ["--context", "many"],
        ["--devices", "dram:2GiB,floppy:/dev/fd0"],
        ["--devices", "dram:plenty"],
        ["--devices", "file:relative?size=1GiB"],
        ["--devices", "dram:64MiB,,dram:64MiB"],
        ["--no-such-option"],
    ],
)
def test_bad_input_is_refused_with_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = demo.main(words)
    except SystemExit as error:  # argparse
        code = int(error.code or 0)
    refusal = capsys.readouterr().err
    assert code == 2
    assert refusal.startswith(("demo: ", "bench.demo: "))
    assert refusal.count("\n") == 1


def test_verdict_names_what_is_wrong() -> None:
    assert demo.verdict(run_of((1, 2), -0.500001, 1)) == ""
    assert "the tokens differ" in demo.verdict(run_of((1, 3), -0.5, 1))
    assert "log-probabilities differ by 0.3" in demo.verdict(run_of((1, 2), -0.8, 1))
    assert "nothing came from the pool" in demo.verdict(run_of((1, 2), -0.5, 0))


def test_reads_between_two_readings_are_summed_over_ranks() -> None:
    dram, file = reads_between(parse_metrics(BEFORE), parse_metrics(AFTER))
    assert (dram.device, dram.bytes, dram.bandwidth_bytes_s) == ("dram", 100, 200.0)
    assert (file.device, file.bytes, file.bandwidth_bytes_s) == ("file:/p", 7, 0.0)


@pytest.mark.parametrize("context", [2048, 2559, 131072])
def test_prompt_is_whole_chunks_and_a_tail(context: int) -> None:
    prompt = make_prompt(context, seed=1)
    chunks, tail = divmod(len(prompt), CHUNK_TOKENS)
    assert (chunks, tail) == (context // CHUNK_TOKENS, TAIL_TOKENS)
    assert stored_bytes(len(prompt)) == chunks * CHUNK_BYTES
    assert prompt == make_prompt(context, seed=1) != make_prompt(context, seed=2)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_demo_runs(tmp_path: Path) -> None:
    result = tmp_path / "demo.json"
    words = ["--context", "2048", "--json", str(result)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.demo", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(result.read_text())
    assert content["tokens_equal"] is True
    assert content["logprob_difference"] <= LOGPROB_TOLERANCE
    assert content["pool_bytes"] == stored_bytes(2048)
    assert [device["bytes"] > 0 for device in content["devices"]] == [True, True]
    assert set(content["ttft_s"]) == {"computed", "pool", "in_engine"}
    assert all(value > 0 for value in content["ttft_s"].values())
    for text in ("from the pool", "kvpool_read_bytes_total", "tokens the same", "dram"):
        assert text in done.stdout
