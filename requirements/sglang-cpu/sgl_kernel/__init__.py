"""Stands in for SGLang's compiled kernels, whose released wheel needs CUDA.

With SGLANG_USE_CPU_ENGINE=1 SGLang imports functions named `*_cpu` from here and, with attention backend
torch_native and a Llama, calls none of them. Every other name is absent, so that SGLang's own fallbacks work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU build in this environment")

    return missing
