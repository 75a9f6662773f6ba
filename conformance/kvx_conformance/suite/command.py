"""`kvx conformance`: the suite on the command line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kvx import plugins
from kvx import report as output
from kvx.core.errors import ConfigError, PluginError
from kvx_conformance.suite import interop, markdown, page, report, self_test, standard
from kvx_conformance.suite.case import CASES, Case, Profile
from kvx_conformance.suite.progress import Progress
from kvx_conformance.suite.runner import SUITE, Run, ends_on_term, perform
from kvx_conformance.suite.selection import Selection
from kvx_conformance.suite.subject import OPEN_INSTANCE, Subject

_ABOUT = """\
Does it keep the promises of the kvx protocol? Each case tries to break one sentence of docs/protocol.md
and says, with the sentence's id, how it was broken. Nothing needs a model, a GPU or a network.
"""
_EXAMPLES = """\
examples:
  kvx conformance run --transport tcp
  kvx conformance run --transport yourpkg.transport:make --option streams=4 --html report.html
  kvx conformance run --transport tcp --only KVX-TRN --verbose
  kvx conformance run --adapter reference --junit report.xml
  kvx conformance list --profile soak --strict
  kvx conformance interop vllm reference --same-model
  kvx conformance self-test

exit status: 0 it holds, 1 a case fails, breaks or was not exercised, 2 usage or configuration, 130 interrupted
How to read a report, and what the verdicts mean: docs/conformance.md.
"""
_RUN = """\
Runs the cases on a transport (and on kvx's instance over it), or on an engine's servers, and reports.
A transport is named as the configuration names it, or by its factory `package.module:function`, which
has to be importable: installed, or in a folder of PYTHONPATH.
"""
_FORM = argparse.RawDescriptionHelpFormatter


def conformance(argv: list[str]) -> int:
    """One command. Exit status as the help has it; raises ConfigError and PluginError for status 2."""
    options = _parser().parse_args(argv)
    call: Callable[[argparse.Namespace], int] = options.call
    with ends_on_term():
        return call(options)


def _run(options: argparse.Namespace) -> int:
    if not options.transport and not options.adapter:
        raise ConfigError("say what to test: --transport NAME, or --adapter NAME (`kvx doctor` shows what is here)")
    exempt, values = _exempt(options.exempt), _values(options.option)
    modules = _load(options.cases, exempt)
    selection = Selection(
        profile=Profile(options.profile),
        strict=options.strict,
        only=tuple(options.only),
        exempt=exempt,
        adapter=bool(options.adapter),
        pace=options.pace,
    )
    subject = Subject(options.transport or "tcp", values, options.instance, options.adapter or "")
    run = Run(subject, selection.divide, modules, options.seed, options.pace, standard.provisional())
    started = time.monotonic()
    interrupted = False
    with Progress(len(selection.cases()), verbose=options.verbose) as progress:
        try:
            perform([run], options.jobs, progress.told)
        except KeyboardInterrupt:
            interrupted = True
    if run.refused:
        raise PluginError(f"this cannot be tested: {run.refused}")
    if run.declared is None:
        return 130
    content = report.document(run, selection, jobs=options.jobs, seconds=time.monotonic() - started)
    if options.junit:
        report.write_text("--junit", options.junit, report.junit(content))
    if options.html:
        report.write_text("--html", options.html, page.render(content))
    if options.markdown:
        report.write_text("--markdown", options.markdown, markdown.render(content))
    _emit(options.json, content, report.lines(content))
    return 130 if interrupted else int(not run.holds or not content["cases"])


def _list(options: argparse.Namespace) -> int:
    _load(options.cases, _exempt(options.exempt))
    cases = Selection(Profile(options.profile), options.strict, tuple(options.only), adapter=None).cases()
    rows = [
        {
            "id": case.id,
            "level": case.level.value,
            "profile": case.profile.value,
            "needs": sorted(feature.value for feature in case.needs),
            "title": case.title,
            "sentence": case.sentence,
        }
        for case in cases
    ]
    width = max(len(case.id) for case in cases)
    lines = [_line(case, width) for case in cases]
    must = sum(row["level"] == "MUST" for row in rows)
    lines.append(f"{len(rows)} cases, {must} of them MUST")
    content = output.document("conformance.list", {"suite": standard.VERSION, "cases": rows})
    _emit(options.json, content, lines)
    return 0


def _self_test(options: argparse.Namespace) -> int:
    _load(options.cases, _exempt(options.exempt))
    kinds = [self_test.Kind(kind) for kind in options.kind] or self_test.Kind
    subjects = self_test.subjects(tuple(options.only), frozenset(kinds))
    columns = None if options.whole else self_test.columns()
    started = time.monotonic()
    try:
        matrix = self_test.perform_all(subjects, options.jobs, _say if options.verbose else _ignore, columns=columns)
    except KeyboardInterrupt:
        return 130
    content = output.document(
        "conformance.self-test",
        {"suite": standard.VERSION, **matrix.fields(), "seconds": round(time.monotonic() - started, 3)},
    )
    if options.html:
        report.write_text("--html", options.html, page.matrix(content))
    _emit(options.json, content, self_test.lines(content))
    return int(not content["holds"])


def _interop(options: argparse.Namespace) -> int:
    started = time.monotonic()
    cells = interop.perform(options.engines, options.seed, _say, same_model=options.same_model)
    content = output.document(
        "conformance.interop",
        {
            "suite": standard.VERSION,
            "seed": options.seed,
            "same_model": options.same_model,
            "engines": {name: plugins.load().driver(name).installed() for name in options.engines},
            "holds": all(cell.holds for cell in cells),
            "pairs": [cell.fields() for cell in cells],
            "seconds": round(time.monotonic() - started, 3),
        },
    )
    _emit(options.json, content, [interop.line(cell) for cell in cells])
    return int(not content["holds"])


def _load(modules: Sequence[str], exempt: Collection[str]) -> tuple[str, ...]:
    """Define all cases, and look that the standard ones are what they were. Raises PluginError and ConfigError."""
    every = (*SUITE, *modules)
    for module in every:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise PluginError(f"--cases {module} cannot be imported: {type(error).__name__}: {error}") from error
    found = standard.problems(CASES, exempt)
    if found:
        more = f", and {len(found) - 1} more of this kind" if len(found) > 1 else ""
        raise ConfigError(f"{found[0]}{more}; leave a case out with --exempt ID=REASON, which the report shows")
    return every


def _exempt(texts: Sequence[str]) -> dict[str, str]:
    return {name: reason for name, _, reason in (text.partition("=") for text in texts)}


def _values(texts: Sequence[str]) -> Mapping[str, Any]:
    """`KEY=VALUE` with a TOML value; what is none is taken as text."""
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigError(f"--option {text}: KEY=VALUE is meant")
        try:
            values[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            values[key] = value
    return values


def _line(case: Case, width: int) -> str:
    needs = ",".join(sorted(feature.value for feature in case.needs)) or "-"
    return f"{case.id:<{width}}  {case.level.value:<6}  {case.profile.value:<10}  {needs:<12}  {case.title}"


def _emit(target: str | None, content: Mapping[str, Any], lines: Sequence[str]) -> None:
    """The object where `--json` asks for it, and lines for a person unless it goes to stdout."""
    if target is not None:
        output.write(target, content)
    if target != "-":
        sys.stdout.write("\n".join(lines) + "\n")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _ignore(line: str) -> None:
    """Say nothing."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("kvx conformance", description=_ABOUT, epilog=_EXAMPLES, formatter_class=_FORM)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    run = commands.add_parser(
        "run",
        help="test a transport, or an engine's servers",
        description=_RUN,
        epilog=_EXAMPLES,
        formatter_class=_FORM,
    )
    run.set_defaults(call=_run)
    run.add_argument("--transport", metavar="NAME|PKG:FACTORY", help="what to test (with --adapter: its transport)")
    run.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="of the transport's section; a TOML value"
    )
    run.add_argument(
        "--adapter", metavar="NAME|PKG:FACTORY", help="an engine's driver: start its servers and test them"
    )
    run.add_argument(
        "--instance", default=OPEN_INSTANCE, metavar="PKG:FUNCTION", help=f"who speaks the protocol ({OPEN_INSTANCE})"
    )
    run.add_argument("--seed", type=int, default=1, metavar="N", help="of the cases' data and chance (default 1)")
    run.add_argument(
        "--pace", type=_pace, default=1.0, metavar="X", help="stretch every time limit, on a busy machine (default 1)"
    )
    run.add_argument("--junit", metavar="FILE", help="write JUnit XML")
    run.add_argument("--html", metavar="FILE", help="write one page for a person")
    run.add_argument("--markdown", metavar="FILE", help="write the same shorter, as Markdown")

    shown = commands.add_parser("list", help="show the cases without running them")
    shown.set_defaults(call=_list)

    pairs = commands.add_parser(
        "interop",
        help="let engines' servers prefill for one another: which take over, which refuse, and why",
        description=interop.__doc__,
        epilog="example:\n  kvx conformance interop vllm reference --same-model --json interop.json",
        formatter_class=_FORM,
    )
    pairs.set_defaults(call=_interop)
    pairs.add_argument("engines", nargs="+", metavar="ENGINE", help="as `kvx doctor` shows them")
    pairs.add_argument(
        "--same-model",
        action="store_true",
        help="all serve the small model of the first engine (default: each its own)",
    )
    pairs.add_argument("--seed", type=int, default=1, metavar="N", help="of the prompts (default 1)")
    output.add_json_argument(pairs)

    proof = commands.add_parser(
        "self-test",
        help="run the suite on subjects that are broken on purpose: does it find each of them?",
        description="Runs the cases on shipped broken transports and instances, and on correct ones.\n"
        "Each broken one has to be found by a case that names its cause, a correct one by none.",
        formatter_class=_FORM,
    )
    proof.set_defaults(call=_self_test)
    proof.add_argument("--whole", action="store_true", help="all core cases on each, in two minutes")
    proof.add_argument(
        "--kind",
        action="append",
        default=[],
        choices=[kind.value for kind in self_test.Kind],
        help="of this kind of subjects (default: of all; may be given again)",
    )
    proof.add_argument("--html", metavar="FILE", help="write the matrix as a page")

    for one in (run, shown):
        one.add_argument(
            "--profile",
            choices=[profile.value for profile in Profile],
            default=Profile.CORE.value,
            help="how much is asked; each contains those before it (default core)",
        )
        one.add_argument("--strict", action="store_true", help="the SHOULD cases too")
    for one in (run, proof):
        one.add_argument(
            "--jobs", type=_jobs, default=len(os.sched_getaffinity(0)), metavar="N", help="workers (default: all cores)"
        )
        one.add_argument("--verbose", action="store_true", help="a line on stderr for each case")
    for one in (run, shown, proof):
        what = "subjects whose name" if one is proof else "cases whose id"
        one.add_argument("--only", action="append", default=[], metavar="TEXT", help=f"{what} contains TEXT")
        one.add_argument(
            "--exempt", action="append", default=[], metavar="ID=REASON", help="leave a case out; the report shows it"
        )
        one.add_argument("--cases", action="append", default=[], metavar="MODULE", help="define further cases too")
        output.add_json_argument(one)
    return parser


def _jobs(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 256:
        raise argparse.ArgumentTypeError("between 1 and 256")
    return number


def _pace(text: str) -> float:
    number = float(text)
    if not 1 <= number <= 100:
        raise argparse.ArgumentTypeError("between 1 and 100")
    return number
