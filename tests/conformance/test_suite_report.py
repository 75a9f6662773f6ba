"""What is asked for, and what is told: selection, JSON, JUnit, the page, and the command line's own refusals."""

from __future__ import annotations

import html.parser
import importlib.metadata
import json
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from typing import Any

import pytest

import kvx
from kvx import cli
from kvx.core.errors import ConfigError
from kvx.core.model import Access, Capabilities, FenceScope, Op
from kvx_conformance.suite import markdown, page, report, standard
from kvx_conformance.suite.case import CASES, Case, Context, Profile, Verdict
from kvx_conformance.suite.result import Result
from kvx_conformance.suite.runner import Run, Work
from kvx_conformance.suite.selection import Selection
from kvx_conformance.suite.subject import Feature, Subject, features
from kvx_conformance.suite.worker import Order

MUST, SHOULD = "KVX-ENV-001", "KVX-GRT-900"
WRITES = Capabilities(frozenset({Op.WRITE}), Access.REGION, FenceScope.NONE, cancel=False)
ALL = Capabilities(frozenset({Op.READ, Op.WRITE}), Access.GRANT, FenceScope.PEER, cancel=True)


def nothing(context: Context) -> None:
    context.check(True, "")


def made(rule: str, name: str, profile: Profile = Profile.CORE, **features: Feature) -> Case:
    sets = {key: frozenset([features[key]]) if key in features else frozenset() for key in ("needs", "lacks")}
    return Case(rule, name, f"A `case` that is <{name}>.", profile, nothing, limit_s=1.0, **sets)


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> dict[str, Case]:
    """Nothing but these: the registry is the suite's one table, and the commands read it."""
    should = next(name for name, rule in _rules().items() if "MUST" not in rule)
    found = [
        made(MUST, "plain"),
        made(MUST, "other"),
        made(MUST, "fenced", needs=Feature.FENCE),
        made(MUST, "unfenced", lacks=Feature.FENCE),
        made(MUST, "long", Profile.SOAK),
        made(should, "nice"),
        made("KVX-TRN-001", "moves"),
    ]
    for name in list(CASES):
        monkeypatch.delitem(CASES, name)
    for case in found:
        monkeypatch.setitem(CASES, case.id, case)
    return {case.name: case for case in found}


def _rules() -> dict[str, str]:
    from kvx_conformance import rules

    return {rule.id: rule.text for rule in rules.load()[1]}


def orders(selection: Selection, declared: Capabilities) -> set[str]:
    return {order.case.partition(".")[2] for order in selection.divide(features(declared, Subject("other"))).orders}


def test_what_is_asked_for_is_run(cases: Mapping[str, Case]) -> None:
    assert orders(Selection(), ALL) == {"plain", "other", "fenced", "moves"}
    assert orders(Selection(), WRITES) == {"plain", "other", "unfenced", "moves"}
    assert orders(Selection(strict=True), ALL) == {"plain", "other", "fenced", "moves", "nice"}
    assert orders(Selection(profile=Profile.SOAK), ALL) == {"plain", "other", "fenced", "moves", "long"}
    assert orders(Selection(only=("TRN", "other")), ALL) == {"moves", "other"}


def test_what_is_not_run_says_why(cases: Mapping[str, Case]) -> None:
    work = Selection(exempt={cases["other"].id: "known"}).divide(features(WRITES, Subject("other")))
    assert {(one.id, one.verdict, one.detail) for one in work.settled} == {
        (cases["other"].id, Verdict.DISABLED, "known"),
        (cases["fenced"].id, Verdict.SKIP_UNDECLARED, "Needs fence, which is not declared."),
    }


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"exempt": {"KVX-ENV-001.nothing": "why"}}, "there is no such case"),
        ({"exempt": {"KVX-ENV-001.plain": "  "}}, "needs a reason"),
        ({"only": ("nothing like it",)}, "no case is asked for"),
        ({"adapter": True}, "no case is asked for"),
    ],
    ids=["unknown", "no-reason", "only", "adapter"],
)
@pytest.mark.usefixtures("cases")
def test_a_selection_of_nothing_is_refused(wrong: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Selection(**wrong)


def run(*results: Result, ordered: int | None = None, provisional: frozenset[str] = frozenset()) -> Run:
    subject = Subject("tcp", {"streams": 4, "secret": "hush hush", "name": "two words"})
    one = Run(subject, lambda present: Work(()), provisional=provisional)
    one.begin(WRITES)
    count = len(results) if ordered is None else ordered
    names = list(dict.fromkeys([*(result.id for result in results), *CASES]))[:count]
    one.work = Work(tuple(Order(name, 1.0) for name in names))
    one.results = {result.id: result for result in results}
    return one


def document(one: Run, selection: Selection | None = None) -> dict[str, Any]:
    return report.document(one, selection or Selection(), jobs=2, seconds=1.5)


@pytest.mark.usefixtures("cases")
def test_the_report_holds_the_facts() -> None:
    selection = Selection(exempt={f"{MUST}.other": "it's known"})
    content = document(
        run(
            Result(f"{MUST}.plain", Verdict.FAIL, "two bytes differ", 0.25, 7, "trace", "output"),
            Result("KVX-TRN-001.moves", Verdict.PASS, "", 0.5, 3),
            Result(f"{MUST}.other", Verdict.DISABLED, "it's known"),
        ),
        selection,
    )
    assert content["schema"] == "kvx.conformance/1"
    assert (content["suite"], content["protocol"]) == (standard.VERSION, 1)
    counts = {name: number for name, number in content["verdicts"].items() if number}
    assert counts == {"pass": 1, "fail": 1, "disabled": 1}
    assert content["verdicts"].keys() == {verdict.value for verdict in Verdict}
    assert content["by_area"]["TRN"]["pass"] == content["by_level"]["MUST"]["pass"] == 1
    assert content["declared"]["ops"] == ["write"]
    assert content["target"]["options"] == {"streams": 4, "secret": "(not shown)", "name": "two words"}
    assert content["target"]["distribution"].startswith("kvx ")
    assert (content["target"]["name"], content["target"]["version"]) == ("tcp", kvx.__version__)
    assert content["target"]["engine"] is content["target"]["adapter_distribution"] is None
    assert content["target"]["libraries"].items() >= {
        (name, importlib.metadata.version(name)) for name in ("attrs", "msgspec", "numpy", "pluggy")
    }
    assert content["provisional"] == dict.fromkeys(content["verdicts"], 0)
    assert "hush" not in json.dumps(content)
    (bad,) = [case for case in content["cases"] if case["verdict"] == "fail"]
    assert (bad["detail"], bad["checks"], bad["trace"], bad["output"]) == ("two bytes differ", 7, "trace", "output")
    assert bad["sentence"] == CASES[bad["id"]].sentence
    assert not content["holds"]
    for word in ("--transport tcp", "--option streams=4", "'name=\"two words\"'", "--seed 1", "it'\"'\"'s known"):
        assert word in content["reproduce"]


@pytest.mark.usefixtures("cases")
def test_a_changed_report_does_not_have_its_digest() -> None:
    content = json.loads(json.dumps(document(run(Result(f"{MUST}.plain", Verdict.FAIL, "it differs")))))
    assert report.digest(content) == content["digest"]
    content["verdicts"]["fail"] = 0
    assert report.digest(content) != content["digest"]


@pytest.mark.parametrize("verdict", Verdict)
@pytest.mark.usefixtures("cases")
def test_a_run_holds_only_without_bad_verdicts(verdict: Verdict) -> None:
    one = run(Result(f"{MUST}.plain", verdict))
    good = verdict in (Verdict.PASS, Verdict.SKIP_UNDECLARED, Verdict.DISABLED)
    assert one.holds is document(one)["holds"] is good
    assert ("NOT" in report.verdict(document(one))) is not good


@pytest.mark.usefixtures("cases")
def test_a_run_that_is_not_whole_does_not_say_that_it_holds() -> None:
    cut = document(run(Result(f"{MUST}.plain", Verdict.PASS), ordered=3))
    assert (cut["holds"], cut["partial"], len(cut["not_reached"])) == (False, True, 2)
    assert "Nothing is said" in report.verdict(cut)
    some = document(run(Result(f"{MUST}.plain", Verdict.PASS)), Selection(only=("plain",)))
    assert (some["holds"], some["partial"]) == (True, True)
    assert "nothing of the others" in report.verdict(some)


@pytest.mark.usefixtures("cases")
def test_an_engines_report_names_its_release_and_what_it_is_tested_with() -> None:
    one = run(Result(f"{MUST}.plain", Verdict.PASS))
    one.subject = Subject("tcp", engine="reference")
    target = document(one)["target"]
    assert (target["name"], target["adapter_distribution"]) == ("reference", f"kvx {kvx.__version__}")
    assert target["engine"] == {"name": "reference", "version": kvx.__version__, "tested": kvx.__version__}
    assert "aiohttp" in target["libraries"]  # of the extra that is called like the engine
    assert "pytest" not in target["libraries"]  # of another one
    assert f"reference {kvx.__version__}" in markdown.render(document(one))


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.ERROR, Verdict.NOT_EXERCISED])
@pytest.mark.usefixtures("cases")
def test_a_provisional_case_is_reported_and_not_counted(verdict: Verdict) -> None:
    new = f"{MUST}.plain"
    results = (Result(new, verdict, "two bytes differ"), Result(f"{MUST}.other", Verdict.PASS))
    one = run(*results, provisional=frozenset([new]))
    content = document(one)
    assert one.holds is content["holds"] is True
    assert (sum(content["verdicts"].values()), content["verdicts"]["pass"]) == (1, 1)
    assert (sum(content["provisional"].values()), content["provisional"][verdict.value]) == (1, 1)
    assert sum(content["by_area"]["ENV"].values()) == sum(content["by_level"]["MUST"].values()) == 1
    assert [case["id"] for case in content["cases"] if case["provisional"]] == [new]
    told = "\n".join(report.lines(content))
    assert f"{verdict.value.upper()} (provisional, not counted) {new}: two bytes differ" in told
    assert "keeps the protocol" in told
    suite = ET.fromstring(report.junit(content).encode())[0]  # noqa: S314 - our own text
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors"), suite.get("skipped")) == (
        "2",
        "0",
        "0",
        "1",
    )
    seen = _Page()
    seen.feed(page.render(content))
    for text in (seen.text, markdown.render(content)):
        assert "two bytes differ" in text
        assert "not count" in text
    assert not document(run(*results))["holds"]


@pytest.mark.usefixtures("cases")
def test_a_run_of_provisional_cases_alone_says_nothing() -> None:
    new = f"{MUST}.plain"
    content = document(run(Result(new, Verdict.PASS), provisional=frozenset([new])))
    assert "Nothing is said" in report.verdict(content)


def test_a_case_is_provisional_in_the_version_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {"old": {"since": "1.0"}, "last": {"since": "1.4"}, "new": {"since": "1.5"}}
    monkeypatch.setattr(standard, "load", lambda: listed)
    for version, expected in (("1.0", set()), ("1.4", {"last"}), ("1.5", {"new"}), ("1.6", set())):
        monkeypatch.setattr(standard, "VERSION", version)
        assert standard.provisional() == expected
    rows = [row.split(" | ") for row in standard.versions().splitlines()[2:]]
    assert [(row[0].lstrip("| "), row[2], row[3].rstrip(" |")) for row in rows] == [
        ("1.0", "1", "1.0"),
        ("1.4", "1", "1.5"),
        ("1.5", "1", "1.6"),
        ("1.6", "0", "1.7"),
    ]


NASTY = "<script>alert('x')</script> & \x00\x1b[31m \ud7ff"


@pytest.mark.usefixtures("cases")
def test_junit_is_xml_whatever_a_subject_prints() -> None:
    results = [
        Result(f"{MUST}.plain", Verdict.FAIL, NASTY, 0.25, 1, NASTY, NASTY),
        Result(f"{MUST}.other", Verdict.NOT_EXERCISED, "it ended"),
        Result(f"{MUST}.long", Verdict.ERROR, NASTY),
        Result(f"{MUST}.fenced", Verdict.SKIP_UNDECLARED, "needs fence"),
        Result("KVX-TRN-001.moves", Verdict.PASS),
    ]
    root = ET.fromstring(report.junit(document(run(*results))).encode())  # noqa: S314 - our own text
    suites = {suite.get("name", "")[:7]: suite for suite in root}
    counts = {key: suites["KVX-ENV"].get(key) for key in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "4", "failures": "2", "errors": "1", "skipped": "1"}
    (passed,) = suites["KVX-TRN"].iter("testcase")
    assert list(passed) == []
    assert [bad.get("message", "")[:8] for bad in suites["KVX-ENV"].iter("failure")] == ["it ended", "<script>"]


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.usefixtures("cases")
def test_the_page_is_one_file_without_script_and_shows_the_bad_first() -> None:
    content = document(
        run(
            Result(f"{MUST}.plain", Verdict.PASS, "", 0.5, 3),
            Result("KVX-TRN-001.moves", Verdict.FAIL, NASTY, 0.25, 1, NASTY, "printed"),
            Result(f"{MUST}.fenced", Verdict.SKIP_UNDECLARED, "Needs fence."),
        )
    )
    text = page.render(content)
    seen = _Page()
    seen.feed(text)
    tags = {tag for tag, _ in seen.tags}
    assert not tags & {"script", "link", "img", "iframe"}
    assert not any(name in attributes for _, attributes in seen.tags for name in ("src", "href", "onclick"))
    for word in ("does NOT keep", "alert('x')", "Needs fence.", content["digest"], "kvx conformance run"):
        assert word in seen.text
        assert word in markdown.render(content)
    assert "FAIL" in seen.text
    assert seen.text.index("KVX-TRN-001.moves") < seen.text.index(f"{MUST}.plain")
    assert "hush" not in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run"], "say what to test"),
        (["run", "--transport", "tcp", "--option", "streams"], "KEY=VALUE is meant"),
        (["run", "--transport", "tcp", "--cases", "no.such.module"], "--cases no.such.module cannot be imported"),
        (["run", "--transport", "tcp", "--only", "nothing like it"], "no case is asked for"),
    ],
    ids=["nothing", "option", "cases", "only"],
)
def test_usage_is_refused_with_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["conformance", *words]) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)
