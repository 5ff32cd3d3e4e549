"""Paged KV memory: huge pages for tensors in host memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.logger import init_logger
from vllm.platforms import current_platform

from kvpool.errors import KVPoolError
from kvpool.native import Arena

# A name below vLLM's: its logging configuration covers nothing else.
logger = init_logger(f"vllm.{__name__}")

# Arenas live as long as the KV tensors over them: as long as the process.
_ARENAS: list[Arena] = []


class _HugePageAllocation(TorchFunctionMode):
    """Answers the KV cache's one `torch.zeros` from an arena aligned to 2 MiB."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.zeros and options.get("dtype") is torch.int8 and isinstance(args[0], int):
            try:
                arena = Arena(args[0])
            except KVPoolError as error:
                logger.warning("kvpool: KV tensors stay on ordinary pages: %s", error)
            else:
                _ARENAS.append(arena)
                logger.info("kvpool: KV tensors lie on %s pages", arena.page_type.value)
                return torch.frombuffer(arena.array, dtype=torch.int8)[: args[0]]
        return func(*args, **options)


def huge_page_allocation() -> AbstractContextManager[Any] | None:
    """Return a context in which KV tensors are allocated on huge pages; None on an accelerator."""
    return _HugePageAllocation() if current_platform.is_cpu() else None
