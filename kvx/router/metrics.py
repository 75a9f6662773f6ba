"""The router's figures in the text format that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Samples = Iterable[tuple[Mapping[str, str], float]]


def render(families: Iterable[tuple[str, str, str, Samples]]) -> str:
    """One text of (name, type, help, samples)."""
    lines: list[str] = []
    for name, kind, text, samples in families:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for labels, value in samples:
            told = ",".join(f'{label}="{_escaped(content)}"' for label, content in labels.items())
            lines.append(f"{name}{{{told}}} {value:g}" if told else f"{name} {value:g}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
