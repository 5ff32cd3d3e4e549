"""Fixtures that tests of containers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.container import Container
from tests.pool.containers import SIZE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a container; it does not exist yet."""
    return tmp_path / "pool"


@pytest.fixture
def container(folder: Path) -> Iterator[Container]:
    """A new container of SIZE bytes."""
    opened = Container.open(folder, SIZE)
    yield opened
    opened.close()
