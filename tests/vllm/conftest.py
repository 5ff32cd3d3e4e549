"""Fixtures of the tests that run vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models_folder() -> Path:
    """The folder that tiny models are built in; kept between runs."""
    return Path(__file__).resolve().parents[2] / "build" / "models"
