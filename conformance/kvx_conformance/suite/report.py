"""A run as JSON, which is the report, and as JUnit. The page for a person is `kvx_conformance.suite.page`."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import shlex
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from attrs import asdict

from kvx import report
from kvx.core import wire
from kvx.core.errors import ConfigError
from kvx_conformance import rules
from kvx_conformance.suite import standard, versions
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
    counted = [result for result in results if result.id not in run.provisional]
    fields = {
        "suite": standard.VERSION,
        "protocol": wire.VERSION,
        "date": dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds"),
        "target": _target(run.subject),
        "declared": _declared(run),
        "holds": run.holds,
        "partial": bool(selection.only or run.not_reached),
        "verdicts": count(counted),
        "provisional": count(result for result in results if result.id in run.provisional),
        "by_level": _grouped(results, run.provisional, lambda result: CASES[result.id].level.value),
        "by_area": _grouped(results, run.provisional, lambda result: area(CASES[result.id])),
        "cases": [_case(result, listed, run.provisional) for result in results],
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
        found = Counter("disabled" if uncounted(case) else case["verdict"] for case in cases)
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
    if uncounted(case):
        text = f"provisional, not counted: {case['verdict']}: {case['detail']}"
        ET.SubElement(test, "skipped", message=_printable(text))
    elif case["verdict"] in ("skip_undeclared", "disabled"):
        ET.SubElement(test, "skipped", message=_printable(case["detail"]))
    elif case["verdict"] != "pass":
        bad = ET.SubElement(test, kinds[case["verdict"]], type=case["verdict"], message=_printable(case["detail"]))
        bad.text = _printable(f"{case['sentence']}\n\n{case['trace']}")
        ET.SubElement(test, "system-err").text = _printable(case["output"])


def _printable(text: str) -> str:
    """XML has no place for most control characters, and a subject may print any."""
    return "".join(sign if sign in "\n\t" or sign.isprintable() else f"\\x{ord(sign):02x}" for sign in text)


def _case(result: Result, listed: Collection[str], provisional: Collection[str]) -> dict[str, Any]:
    case = CASES[result.id]
    return {
        "id": case.id,
        "rule": case.rule,
        "area": area(case),
        "level": case.level.value,
        "profile": case.profile.value,
        "standard": case.id in listed,
        "provisional": case.id in provisional,
        "sentence": case.sentence,
        "title": case.title,
        "needs": sorted(feature.value for feature in case.needs),
        **asdict(result, filter=lambda field, _: field.name != "id"),
        "verdict": result.verdict.value,
    }


def _grouped(
    results: Iterable[Result], provisional: Collection[str], key: Callable[[Result], str]
) -> dict[str, dict[str, int]]:
    """The counts of each group; one of provisional cases alone has zeros."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result), []).extend([] if result.id in provisional else [result])
    return {name: count(found) for name, found in groups.items()}


def _declared(run: Run) -> dict[str, Any]:
    plain = msgspec.to_builtins(run.declared).items()
    return {key: sorted(value) if isinstance(value, list) else value for key, value in plain}


def _target(subject: Subject) -> dict[str, Any]:
    return {
        **versions.target(subject),
        "transport": subject.transport,
        "options": {key: _MASK if _secret(key) else value for key, value in subject.options.items()},
        "instance": subject.instance,
        "adapter": subject.engine or None,
    }


def _secret(key: str) -> bool:
    return any(word in key.lower() for word in ("secret", "password", "token", "key"))


def is_bad(case: Mapping[str, Any]) -> bool:
    """Of one of a report's `cases`: whether its verdict is bad, be it counted or not."""
    return Verdict(case["verdict"]) in BAD


def uncounted(case: Mapping[str, Any]) -> bool:
    """Whether its verdict is bad and is not counted, since the case is provisional."""
    return bool(case["provisional"]) and is_bad(case)


def facts(content: Mapping[str, Any]) -> dict[str, str]:
    """What a person has to know of a run, in words, by their titles; what does not apply is left out."""
    declared, host, target = content["declared"], content["host"], content["target"]
    fence = "one peer" if declared["fence"] == "peer" else declared["fence"]
    engine = target["engine"]
    found = {
        "declares": f"{' and '.join(declared['ops'])}; access by {declared['access']}; fence: {fence}; "
        f"cancel: {'yes' if declared['cancel'] else 'no'}; memory: {', '.join(declared['memory'])}",
        "asked": f"profile {content['profile']}, {'MUST and SHOULD' if content['strict'] else 'MUST only'}"
        + (f", only {', '.join(content['only'])}" if content["only"] else ""),
        "options": ", ".join(f"{key} = {value!r}" for key, value in target["options"].items()),
        "left out": "; ".join(f"{one['id']}: {one['reason']}" for one in content["exempt"]),
        "not reached": ", ".join(content["not_reached"]),
        "engine": f"{engine['name']} {engine['version']}; adapter tested with {engine['tested']}" if engine else "",
        "versions": f"kvx {content['kvx']}, suite {content['suite']}, protocol {content['protocol']}, "
        f"Python {host['python']}",
        "libraries": ", ".join(f"{name} {version}" for name, version in target["libraries"].items()),
        "machine": f"{host['system']}, {host['cpu'] or host['machine']}, {host['cpus']} cores",
        "run": f"{content['date']}, {content['seconds']:.1f} s, seed {content['seed']}, pace {content['pace']:g}",
    }
    return {title: text for title, text in found.items() if text}


def about(target: Mapping[str, Any]) -> str:
    """What was tested, in one line."""
    what = f"Engine {target['adapter']} over transport" if target["adapter"] else "Transport"
    of = f" of {target['distribution']}" if target["distribution"] else ""
    by = f", adapter of {target['adapter_distribution']}" if target["adapter_distribution"] else ""
    return f"{what} {target['transport']}{of}{by}"


def lines(content: Mapping[str, Any]) -> list[str]:
    """What a person reads on a terminal."""
    found = []
    for case in content["cases"]:
        if is_bad(case):
            word = f"{case['verdict'].upper()}{' (provisional, not counted)' if case['provisional'] else ''}"
            found += [f"{word} {case['id']}: {case['detail']}", f"    {case['sentence']}", ""]
    levels = ", ".join(f"{sum(one.values())} {level}" for level, one in sorted(content["by_level"].items()))
    counted = sum(content["verdicts"].values())
    found.append(f"{counted} cases ({levels}) in {content['seconds']:.1f} s: {_said(content['verdicts'])}")
    if new := sum(content["provisional"].values()):
        found.append(f"{new} provisional cases, which do not count: {_said(content['provisional'])}")
    return [*found, verdict(content), f"again: {content['reproduce']}"]


def _said(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items() if number)


def verdict(content: Mapping[str, Any]) -> str:
    """The whole in one sentence."""
    name = content["target"]["adapter"] or content["target"]["transport"]
    bad = sum(content["verdicts"][verdict.value] for verdict in BAD)
    profile = f"profile {content['profile']}{', strict' if content['strict'] else ''}"
    if bad:
        counted = sum(content["verdicts"].values())
        return f"{name} does NOT keep the protocol: {bad} of {counted} cases are bad ({profile})."
    if content["not_reached"]:
        return f"Nothing is said of {name}: the run ended before {len(content['not_reached'])} cases were reached."
    if not content["cases"]:
        return f"Nothing is said of {name}: no case that was asked for applies to what it declares."
    if not sum(content["verdicts"].values()):
        return f"Nothing is said of {name}: only provisional cases were asked for, which do not count yet."
    exempt = f", {len(content['exempt'])} cases left out on request" if content["exempt"] else ""
    if content["only"]:
        return f"{name} keeps what these cases ask; this says nothing of the others ({profile}{exempt})."
    return f"{name} keeps the protocol ({profile}{exempt})."
