"""Gates that need an engine; see tests/gates for the others. Each has a control that proves that
the check can fail."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bench.models import build_model
from bench.serve import Server, make_prompt
from kvpool.container import Container
from tests.vllm.gate_scenarios import NEEDLES, SHARING
from tests.vllm.process import run_scenario

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

MODELS = Path(__file__).resolve().parents[2] / "build" / "models"
DEVICES = "dram:16MiB,file:{}/kvpool?size=256MiB"


def run(name: str, models: Path, **options: Any) -> dict[str, Any]:
    return run_scenario(name, module="gate_scenarios", models=models, **options)


# ---- 2 and 19: restarts ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_models(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models in a folder where their weights may be swapped."""
    build_model("llama", models_folder)
    folder = tmp_path_factory.mktemp("models") / "models"
    shutil.copytree(models_folder, folder)
    return folder


@pytest.fixture(scope="module")
def restarts(own_models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """40 contexts without a pool; stored; asked again after a restart; after other weights came."""
    pool = {"devices": DEVICES.format(tmp_path_factory.mktemp("pool"))}
    results = {"plain": run("needles", own_models)}
    results["stored"] = run("needles", own_models, **pool)
    results["again"] = run("needles", own_models, reset=1, **pool)
    results["after_reset"] = run("needles", own_models, **pool)
    unguarded = {"devices": DEVICES.format(tmp_path_factory.mktemp("pool")), "guard": "off"}
    run("needles", own_models, **unguarded)
    for weights in own_models.rglob("*.safetensors"):
        size = weights.stat().st_size
        tensors = load_file(weights)
        heavier = {name: tensor * 1.1 for name, tensor in tensors.items()}
        save_file(heavier, weights, metadata={"format": "pt"})
        assert weights.stat().st_size == size, "in place, of the same size"
    results["swapped"] = run("needles", own_models, **pool)
    results["swapped_plain"] = run("needles", own_models)
    results["unguarded"] = run("needles", own_models, **unguarded)
    return results


def test_gate_02_needles_after_a_restart(restarts: dict[str, Any]) -> None:
    assert len(restarts["plain"]["answers"]) == NEEDLES
    assert restarts["stored"]["answers"] == restarts["plain"]["answers"]
    assert restarts["stored"]["hit_tokens"] == 0
    assert restarts["again"]["answers"] == restarts["plain"]["answers"]
    stored_tokens = restarts["stored"]["stored_chunks"] * 128
    assert restarts["again"]["hit_tokens"] > 0.9 * stored_tokens


def test_gate_19_other_weights_in_place_hit_nothing(restarts: dict[str, Any]) -> None:
    assert restarts["swapped"]["hit_tokens"] == 0
    assert restarts["swapped"]["answers"] == restarts["swapped_plain"]["answers"]
    assert restarts["swapped"]["answers"] != restarts["plain"]["answers"], "the swap shows"


def test_gate_19_without_the_guard(restarts: dict[str, Any]) -> None:
    assert restarts["unguarded"]["hit_tokens"] > 0
    assert restarts["unguarded"]["answers"] != restarts["swapped_plain"]["answers"]


def test_gate_19_a_reset_in_the_running_engine(restarts: dict[str, Any]) -> None:
    assert restarts["again"]["hit_tokens"] > 0 == restarts["again"]["hit_tokens_after_reset"]
    assert restarts["after_reset"]["answers"] == restarts["plain"]["answers"]
    assert restarts["after_reset"]["hit_tokens"] == 0


# ---- 5: preemption --------------------------------------------------------------------------

TIE = 1e-4
"""Log-probabilities: what is computed in other batches differs by a tenth of that."""


def assert_same_unless_tied(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    """Up to the first place at which the two best tokens are as good as equal."""
    pairs = zip(answer["tokens"], expected["tokens"], expected["leads"], strict=True)
    first = next(((i, lead) for i, (a, b, lead) in enumerate(pairs) if a != b), None)
    assert first is None or first[1] < TIE, first


def test_gate_05_a_preemption_storm(models_folder: Path, tmp_path: Path) -> None:
    plain = run("preempted", models_folder)
    pool = run("preempted", models_folder, devices=DEVICES.format(tmp_path))
    assert min(plain["preemptions"], pool["preemptions"]) > 0, "no storm"
    assert pool["hit_tokens"] > 0
    for mine, others in zip(pool["rounds"], plain["rounds"], strict=True):
        for answer, expected in zip(mine, others, strict=True):
            assert_same_unless_tied(answer, expected)
    assert pool["longest_s"] < 60


# ---- 6: one load for many -------------------------------------------------------------------


@pytest.mark.parametrize("guard", ["on", "off"])
def test_gate_06_fifty_requests_share_one_load(models_folder: Path, guard: str) -> None:
    shared = run("shared", models_folder, devices="dram:256MiB", guard=guard)
    assert shared["together"] == shared["alone"]
    assert shared["loads"] == 1 if guard == "on" else 1 < shared["loads"] <= SHARING


# ---- 10: ranks agree ------------------------------------------------------------------------


def test_gate_10_one_ranks_chunks_are_damaged(models_folder: Path, tmp_path: Path) -> None:
    damaged = run(
        "one_rank_damaged",
        models_folder,
        **{
            "devices": f"file:{tmp_path}/kvpool?size=256MiB",
            "tensor-parallel-size": 2,
            "broken-file": tmp_path / "kvpool" / "container.kvpool",
        },
    )
    assert damaged["failures"][0] == 0 < damaged["failures"][1], "only one rank's"
    assert damaged["after"] == damaged["before"]


# ---- 18: tenants ----------------------------------------------------------------------------


def test_gate_18_no_hit_across_salts(models_folder: Path) -> None:
    hits = run("salted", models_folder, devices="dram:64MiB", salts="a,b,a,b")["hits"]
    assert hits[:2] == [0, 0] and min(hits[2:]) > 0


def test_gate_18_without_the_guard(models_folder: Path) -> None:
    assert run("salted", models_folder, devices="dram:64MiB", salts="a,a")["hits"][1] > 0


# ---- 17: the end ----------------------------------------------------------------------------


def test_gate_17_sigterm_ends_it_and_nothing_is_left(tmp_path: Path) -> None:
    """Nothing but the container, whose leases are free; no shared memory, no process."""
    memory = set(os.listdir("/dev/shm"))
    devices = ["dram:64MiB", f"file:{tmp_path}/kvpool?size=64MiB"]
    server = Server(4096, devices, MODELS.parent, tmp_path / "log")
    with server:
        server.wait_ready()
        server.complete(make_prompt(3000, 1))
        assert not server.ends_within(0.5), "the control: it does not end by itself"
        server.terminate()
        assert server.ends_within(10.0)
    assert sorted(os.listdir(tmp_path)) == ["kvpool", "log"]
    assert os.listdir(tmp_path / "kvpool") == ["container.kvpool"]
    assert set(os.listdir("/dev/shm")) <= memory
    container = Container.open(tmp_path / "kvpool", create=False)
    leases = container.leases()
    container.close()
    assert leases and not any(in_use for _, in_use in leases)
