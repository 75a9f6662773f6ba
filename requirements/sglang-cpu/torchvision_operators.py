"""Lets `import torchvision` work beside a torch for CPUs.

The released torchvision is built for CUDA: its library of operators does not load beside a CPU's torch, and its
Python files then describe operators that nobody has declared. They are declared here, without an implementation,
just before torchvision is imported; a process that never does so does not pay for torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_OPERATORS = ("nms", "qnms")
_declared: list[object] = []  # a library's operators live as long as the object


class _BeforeTorchvision:
    """The first finder: finds nothing, but sees every import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision" and not _declared:
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in _OPERATORS:
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _declared.append(library)
        return None


_finder = _BeforeTorchvision()


def declare_on_import() -> None:
    """Called by sglang_cpu.pth when a process of the environment starts, by some Pythons twice."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
