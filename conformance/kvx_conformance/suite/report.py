"""A run as JSON, which is the report, and as JUnit. The page for a person is `kvx_conformance.suite.page`."""

from __future__ import annotations

import datetime as dt
import hashlib
import importlib.metadata
import json
import shlex
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from attrs import asdict

from kvx import plugins, report
from kvx.core import wire
from kvx.core.errors import ConfigError
from kvx_conformance import rules
from kvx_conformance.suite import standard
from kvx_conformance.suite.case import CASES, Verdict
from kvx_conformance.suite.result import BAD, Result
from kvx_conformance.suite.runner import SUITE, Run
from kvx_conformance.suite.selection import Selection, area
from kvx_conformance.suite.subject import OPEN_INSTANCE, Subject

_MASK = "(not shown)"


def document(run: Run, selection: Selection, *, jobs: int, seconds: float) -> dict[str, Any]:
    """The whole report; `digest` is the SHA-256 of all else in it, so that a changed report shows."""
    results = sorted(run.results.values(), key=lambda result: result.id)
    listed = standard.load()
    fields = {
        "suite": standard.VERSION,
        "protocol": wire.VERSION,
        "date": dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds"),
        "target": _target(run.subject),
        "declared": _declared(run),
        "holds": run.holds,
        "partial": bool(selection.only or run.not_reached),
        "verdicts": count(results),
        "by_level": _grouped(results, lambda result: CASES[result.id].level.value),
        "by_area": _grouped(results, lambda result: area(CASES[result.id])),
        "cases": [_case(result, listed) for result in results],
        "profile": selection.profile.value,
        "strict": selection.strict,
        "only": list(selection.only),
        "exempt": [{"id": name, "reason": reason} for name, reason in sorted(selection.exempt.items())],
        "not_reached": sorted(run.not_reached),
        "seed": run.seed,
        "pace": run.pace,
        "jobs": jobs,
        "seconds": round(seconds, 3),
        "reproduce": reproduce(run, selection),
    }
    content = report.document("conformance", fields)
    return {**content, "digest": digest(content)}


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 over a report without its digest, as JSON with sorted keys and no spaces."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def count(results: Iterable[Result]) -> dict[str, int]:
    """How often each verdict came, all six of them."""
    found = Counter(result.verdict for result in results)
    return {verdict.value: found[verdict] for verdict in Verdict}


def reproduce(run: Run, selection: Selection) -> str:
    """The command that does the same again."""
    subject = run.subject
    words = ["kvx", "conformance", "run"]
    if subject.engine:
        words += ["--adapter", subject.engine]
    words += ["--transport", subject.transport]
    for key, value in subject.options.items():
        words += ["--option", f"{key}={_MASK if _secret(key) else json.dumps(value)}"]
    if subject.instance != OPEN_INSTANCE:
        words += ["--instance", subject.instance]
    words += ["--profile", selection.profile.value, *(["--strict"] if selection.strict else [])]
    for text in selection.only:
        words += ["--only", text]
    for name, reason in sorted(selection.exempt.items()):
        words += ["--exempt", f"{name}={reason}"]
    for module in run.modules[len(SUITE) :]:
        words += ["--cases", module]
    words += ["--seed", str(run.seed), *(["--pace", f"{run.pace:g}"] if run.pace != 1 else [])]
    return shlex.join(words)


def junit(content: Mapping[str, Any]) -> str:
    """The report as JUnit XML: one test suite for each area, one test for each case."""
    root = ET.Element("testsuites", name=f"kvx conformance {content['target']['transport']}")
    titles = rules.load()[0]
    for letters in content["by_area"]:
        cases = [case for case in content["cases"] if case["area"] == letters]
        found = Counter(case["verdict"] for case in cases)
        suite = ET.SubElement(
            root,
            "testsuite",
            name=f"KVX-{letters} {titles[letters]}",
            tests=str(len(cases)),
            failures=str(found["fail"] + found["not_exercised"]),
            errors=str(found["error"]),
            skipped=str(found["skip_undeclared"] + found["disabled"]),
            time=f"{sum(case['seconds'] for case in cases):.3f}",
        )
        for case in cases:
            _test(suite, case)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def write_text(option: str, target: str, text: str) -> None:
    """Raises ConfigError where it cannot be written."""
    try:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {target} cannot be written: {error.strerror}") from error


def _test(suite: ET.Element, case: Mapping[str, Any]) -> None:
    test = ET.SubElement(suite, "testcase", classname=case["rule"], name=case["id"], time=f"{case['seconds']:.3f}")
    kinds = {"fail": "failure", "not_exercised": "failure", "error": "error"}
    if case["verdict"] in ("skip_undeclared", "disabled"):
        ET.SubElement(test, "skipped", message=_printable(case["detail"]))
    elif case["verdict"] != "pass":
        bad = ET.SubElement(test, kinds[case["verdict"]], type=case["verdict"], message=_printable(case["detail"]))
        bad.text = _printable(f"{case['sentence']}\n\n{case['trace']}")
        ET.SubElement(test, "system-err").text = _printable(case["output"])


def _printable(text: str) -> str:
    """XML has no place for most control characters, and a subject may print any."""
    return "".join(sign if sign in "\n\t" or sign.isprintable() else f"\\x{ord(sign):02x}" for sign in text)


def _case(result: Result, listed: Collection[str]) -> dict[str, Any]:
    case = CASES[result.id]
    return {
        "id": case.id,
        "rule": case.rule,
        "area": area(case),
        "level": case.level.value,
        "profile": case.profile.value,
        "standard": case.id in listed,
        "sentence": case.sentence,
        "title": case.title,
        "needs": sorted(feature.value for feature in case.needs),
        **asdict(result, filter=lambda field, _: field.name != "id"),
        "verdict": result.verdict.value,
    }


def _grouped(results: Iterable[Result], key: Callable[[Result], str]) -> dict[str, dict[str, int]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return {name: count(found) for name, found in groups.items()}


def _declared(run: Run) -> dict[str, Any]:
    plain = msgspec.to_builtins(run.declared).items()
    return {key: sorted(value) if isinstance(value, list) else value for key, value in plain}


def _target(subject: Subject) -> dict[str, Any]:
    return {
        "transport": subject.transport,
        "options": {key: _MASK if _secret(key) else value for key, value in subject.options.items()},
        "instance": subject.instance,
        "adapter": subject.engine or None,
        "distribution": distribution(subject.transport, plugins.GROUP),
    }


def _secret(key: str) -> bool:
    return any(word in key.lower() for word in ("secret", "password", "token", "key"))


def distribution(name: str, group: str) -> str | None:
    """The installed distribution that provides it, with its version; None: it is not from one."""
    if ":" in name:
        package = name.partition(":")[0].partition(".")[0]
        found = importlib.metadata.packages_distributions().get(package, [])
    else:
        entries = [entry for entry in importlib.metadata.entry_points(group=group) if name.split("-")[0] == entry.name]
        found = [entry.dist.name for entry in entries if entry.dist is not None]
    return f"{found[0]} {importlib.metadata.version(found[0])}" if found else None


def lines(content: Mapping[str, Any]) -> list[str]:
    """What a person reads on a terminal."""
    counts = content["verdicts"]
    found = []
    for case in content["cases"]:
        if case["verdict"] in {verdict.value for verdict in BAD}:
            found += [f"{case['verdict'].upper()} {case['id']}: {case['detail']}", f"    {case['sentence']}", ""]
    said = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
    levels = ", ".join(f"{sum(one.values())} {level}" for level, one in sorted(content["by_level"].items()))
    found.append(f"{len(content['cases'])} cases ({levels}) in {content['seconds']:.1f} s: {said}")
    return [*found, verdict(content), f"again: {content['reproduce']}"]


def verdict(content: Mapping[str, Any]) -> str:
    """The whole in one sentence."""
    name = content["target"]["adapter"] or content["target"]["transport"]
    bad = sum(content["verdicts"][verdict.value] for verdict in BAD)
    profile = f"profile {content['profile']}{', strict' if content['strict'] else ''}"
    if bad:
        return f"{name} does NOT keep the protocol: {bad} of {len(content['cases'])} cases are bad ({profile})."
    if content["not_reached"]:
        return f"Nothing is said of {name}: the run ended before {len(content['not_reached'])} cases were reached."
    if not content["cases"]:
        return f"Nothing is said of {name}: no case that was asked for applies to what it declares."
    exempt = f", {len(content['exempt'])} cases left out on request" if content["exempt"] else ""
    if content["only"]:
        return f"{name} keeps what these cases ask; this says nothing of the others ({profile}{exempt})."
    return f"{name} keeps the protocol ({profile}{exempt})."
