"""Reports as a page for a person: one file, no script, nothing from elsewhere, light or dark as the reader has it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from kvx_conformance import rules
from kvx_conformance.suite import report, self_test
from kvx_conformance.suite.case import Verdict

_WORDS = {
    Verdict.PASS: ("pass", "the case tried to break its sentence, and could not"),
    Verdict.FAIL: ("FAIL", "the sentence was broken; the detail says how"),
    Verdict.ERROR: ("ERROR", "the suite itself broke; this says nothing of what was tested"),
    Verdict.NOT_EXERCISED: ("NOT EXERCISED", "the case ran, but what it is about did not happen; counts as bad"),
    Verdict.SKIP_UNDECLARED: ("not declared", "needs a feature that what was tested does not declare"),
    Verdict.DISABLED: ("left out", "by whoever ran the suite, for the reason given"),
}
_INTRODUCTION = (
    "kvx moves the KV cache of LLM requests between instances; each case below tries to break one sentence of its "
    "protocol, docs/protocol.md."
)
_LEGEND = (
    '<b class="named">●</b> found by a case that names the cause, <span class="other">○</span> found by another, '
    '<span class="other">h</span> it hangs there, · not found; empty: not run'
)
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5c6670; --line: #d9dee3; --back: #fff; --card: #f5f7f9;
  --good: #0b6b3a; --bad: #b3261e; --none: #5c6670; --odd: #8a5a00; --goodback: #e4f4ea; --badback: #fce8e6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #9aa5b0; --line: #343b43; --back: #15191d;
  --card: #1d2329; --good: #6fd39b; --bad: #ff8a80; --none: #9aa5b0; --odd: #e6b45c; --goodback: #173324;
  --badback: #3d1c1a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 78rem; padding: 2rem 1.5rem 4rem; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); }
code, pre { font: 13px/1.45 ui-monospace, monospace; } pre { overflow-x: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .7rem; }
.verdict { border-radius: 8px; padding: .8rem 1.1rem; margin: 1rem 0; font-size: 1.1rem; font-weight: 600; }
.verdict.good { background: var(--goodback); color: var(--good); }
.verdict.bad { background: var(--badback); color: var(--bad); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; margin: .8rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; } .scroll { overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: .45rem .6rem; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; font-size: 13px; }
td.id { width: 19rem; min-width: 11rem; overflow-wrap: anywhere; }
td.word { width: 8rem; } td.time, th.time { text-align: right; white-space: nowrap; }
td.word { white-space: nowrap; font-weight: 600; } .cases { table-layout: fixed; }
.cases th:nth-child(1) { width: 19rem; } .cases th:nth-child(2) { width: 5.5rem; }
.cases th:nth-child(4) { width: 8.5rem; } .cases th:nth-child(5) { width: 6rem; }
.pass { color: var(--good); } .fail, .error, .not_exercised { color: var(--bad); }
.skip_undeclared { color: var(--none); } .disabled { color: var(--odd); }
.card { border: 1px solid var(--line); border-left: 4px solid var(--bad);
  border-radius: 6px; padding: .7rem 1rem; margin: .8rem 0; }
.card h3 { margin: 0; font-size: 1rem; } summary { cursor: pointer; color: var(--soft); }
body:has(.matrix) { max-width: none; } .matrix { width: auto; font-size: 13px; } .subject { min-width: 21rem; }
.matrix td, .matrix th { padding: .15rem .1rem; } .matrix td:nth-child(2), .subject { padding: .15rem .6rem; }
 .matrix td.mark { text-align: center; font-weight: 700; }
.matrix th.case { writing-mode: vertical-rl; transform: rotate(180deg); font: 12px ui-monospace, monospace;
  vertical-align: bottom; } .named { color: var(--good); } .other { color: var(--soft); }
@media (max-width: 52rem) { body { padding: 1rem .8rem 3rem; } th, td { padding: .35rem .4rem; }
  td.word { width: auto; white-space: normal; } .cases, .cases tbody, .cases tr, .cases td { display: block;
  width: auto; } .cases th { display: none; } .cases tr { padding: .5rem 0; border-bottom: 1px solid var(--line); }
  .cases td { border: 0; padding: .05rem 0; text-align: left; } .cases td:empty { display: none; }
  .subject { min-width: 12rem; } }
"""


def render(content: Mapping[str, Any]) -> str:
    """The page of `kvx conformance run`."""
    target = content["target"]
    name = target["adapter"] or target["transport"]
    good = content["holds"] and not content["partial"]
    bad = [case for case in content["cases"] if report.is_bad(case) and not case["provisional"]]
    new = [case for case in content["cases"] if report.uncounted(case)]
    parts = [
        f"<h1>{escape(name)}: kvx conformance</h1>",
        f'<p class="soft">{escape(report.about(target))}. {_INTRODUCTION}</p>',
        f'<div class="verdict {"good" if good else "bad"}">{escape(report.verdict(content))}</div>',
        _facts(content),
        "<h2>In numbers</h2>",
        _numbers(content),
    ]
    if bad:
        parts += ["<h2>What is bad, and why</h2>", *map(_card, bad)]
    if new:
        parts += ["<h2>Bad in provisional cases, which do not count yet</h2>", *map(_card, new)]
    titles = rules.load()[0]
    for letters in content["by_area"]:
        parts += [f"<h2>{escape(titles[letters])} <span class=soft>KVX-{letters}</span></h2>", _table(content, letters)]
    parts += ["<h2>Reproduce</h2>", f"<pre>{escape(content['reproduce'])}</pre>", _foot(content)]
    return _page(f"{name}: kvx conformance", parts)


def matrix(content: Mapping[str, Any]) -> str:
    """The page of `kvx conformance self-test`."""
    good = content["holds"]
    word = f"{content['found']} of {content['broken']} broken subjects are found by a case that names the cause."
    parts = [
        "<h1>Does the suite find what is broken?</h1>",
        '<p class="soft">Each row is a subject, broken on purpose or correct; each column a case that finds one.</p>',
        f'<div class="verdict {"good" if good else "bad"}">{escape(word)}</div>',
        f"<p>{_LEGEND}</p>",
        *(_matrix_table(*half) for half in self_test.halves(content)),
        _foot(content),
    ]
    return _page("kvx conformance self-test", parts)


def _matrix_table(title: str, rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> str:
    heads = "".join(f'<th class="case">{escape(case)}</th>' for case in columns)
    body = "".join(_matrix_row(row, columns) for row in rows)
    head = f'<tr><th></th><th class="subject">subject</th>{heads}</tr>'
    return f'<h2>{title.capitalize()}</h2><div class="scroll"><table class="matrix">{head}{body}</table></div>'


def _matrix_row(row: Mapping[str, Any], columns: Iterable[str]) -> str:
    signs = {
        "#": '<span class="named">●</span>',
        "x": '<span class="other">○</span>',
        ".": '<span class="other">·</span>',
        "h": '<span class="other">h</span>',
    }
    cells = []
    for case in columns:
        title = escape(row["finds"][case]["detail"], quote=True) if case in row["finds"] else ""
        cells.append(f'<td class="mark" title="{title}">{signs.get(self_test.mark(row, case), "")}</td>')
    state = '<span class="pass">ok</span>' if row["holds"] else '<span class="fail">BAD</span>'
    return f"<tr><td>{state}</td><td><b>{escape(row['name'])}</b><br>{_text(row['word'])}</td>{''.join(cells)}</tr>"


def _page(title: str, parts: Iterable[str]) -> str:
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _facts(content: Mapping[str, Any]) -> str:
    facts = report.facts(content).items()
    return "<dl>" + "".join(f"<dt>{title}</dt><dd>{escape(text)}</dd>" for title, text in facts) + "</dl>"


def _numbers(content: Mapping[str, Any]) -> str:
    levels = sorted(content["by_level"])
    new = any(content["provisional"].values())
    rows = []
    for verdict, (word, meaning) in _WORDS.items():
        counts = [content["by_level"][level][verdict.value] for level in levels]
        counts += [content["provisional"][verdict.value]] if new else []
        cells = "".join(f'<td class="time">{count or "-"}</td>' for count in counts)
        rows.append(f'<tr><td class="word {verdict.value}">{word}</td>{cells}<td class="soft">{meaning}</td></tr>')
    columns = [*levels, *(["provisional"] if new else [])]
    heads = "".join(f'<th class="time">{column}</th>' for column in columns)
    return f"<table><tr><th>verdict</th>{heads}<th>means</th></tr>{''.join(rows)}</table>"


def _card(case: Mapping[str, Any]) -> str:
    verdict = Verdict(case["verdict"])
    folded = "".join(
        f"<details><summary>{title}</summary><pre>{escape(case[key])}</pre></details>"
        for key, title in (("trace", "where it happened"), ("output", "what was printed meanwhile"))
        if case[key]
    )
    return (
        f'<div class="card"><h3><span class="{verdict.value}">{_WORDS[verdict][0]}</span> '
        f'<code id="{escape(case["id"])}">{escape(case["id"])}</code></h3>'
        f"<p><b>{escape(case['detail'])}</b></p><p>Promised: {_text(case['sentence'])}</p>"
        f'<p class="soft">Tried: {_text(case["title"])}</p>{folded}</div>'
    )


def _table(content: Mapping[str, Any], letters: str) -> str:
    cases = sorted(
        (case for case in content["cases"] if case["area"] == letters),
        key=lambda case: (not report.is_bad(case), case["id"]),
    )
    rows = []
    for case in cases:
        verdict = Verdict(case["verdict"])
        detail = f'<br><span class="{verdict.value}">{escape(case["detail"])}</span>' if case["detail"] else ""
        beside = "" if case["standard"] else '<br><span class="soft">beside the standard list</span>'
        beside += '<br><span class="soft">provisional: not counted</span>' if case["provisional"] else ""
        rows.append(
            f'<tr><td class="id"><code>{escape(case["id"])}</code>{beside}</td><td>{case["level"]}</td>'
            f'<td>{_text(case["title"])}{detail}<br><span class="soft">{_text(case["sentence"])}</span></td>'
            f'<td class="word {verdict.value}">{_WORDS[verdict][0]}</td>'
            f'<td class="time">{case["seconds"]:.2f} s</td></tr>'
        )
    names = ("id", "level", "what was tried, and the sentence", "verdict")
    head = "<tr>" + "".join(f"<th>{name}</th>" for name in names) + '<th class="time">time</th></tr>'
    return f'<div class="scroll"><table class="cases">{head}{"".join(rows)}</table></div>'


def _text(text: str) -> str:
    """Escaped, with `code` as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _foot(content: Mapping[str, Any]) -> str:
    digest = f" Digest of the JSON report: <code>{content['digest']}</code>." if "digest" in content else ""
    return f'<p class="soft">Written by kvx {escape(content["kvx"])}, suite {escape(content["suite"])}.{digest}</p>'
