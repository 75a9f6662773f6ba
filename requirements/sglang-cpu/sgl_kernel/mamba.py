"""The kernels of state-space layers: the same absence."""

from __future__ import annotations

from sgl_kernel import __getattr__  # noqa: F401 - this module's own, too
