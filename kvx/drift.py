"""What an adapter needs of its engine, and whether a release has it.

Most of it is read from the adapter's own sources, so that it cannot fall behind them: which names it
imports, which classes it derives from, which methods it overrides, and how it calls the engine. Objects
that the engine hands in have no class in the adapter's sources; what is used of them is declared.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from attrs import frozen

from kvx import interface
from kvx.core.errors import ConfigError
from kvx.interface import Interface, Member, Release, members, statements, syntax
from kvx.tested import is_tested

_CALLABLE = ("method", "classmethod", "staticmethod", "function")
_BOUND = ("method", "classmethod")
_HANDED_IN = "used of what the engine hands in"


@frozen
class Adapter:
    """An adapter to `engine`, whose modules are below the package `package`.

    `sources` is the folder of the adapter's own modules, `records` that of the recorded interfaces, and
    `tested` the pattern of the versions it is tested with. `handed_in`: for each class whose objects the
    engine hands in, what is used of them: `name`, or `name(argument, key=value)` for a call; for a function its own
    name in a call, and for a constant its value.
    `spared`: what may be absent or different, with the reason why that does no harm.
    """

    engine: str
    package: str
    tested: str
    sources: Path
    records: Path
    handed_in: Mapping[str, tuple[str, ...]]
    spared: Mapping[str, str]

    def recorded(self) -> list[Interface]:
        """All recorded interfaces, the oldest release first."""
        found = [interface.load(path) for path in self.records.glob("*.json")]
        return sorted(found, key=lambda one: [int(word) for word in one.version.split(".") if word.isdecimal()])

    def reference(self) -> Interface:
        """The newest recorded interface of a tested version. Raises ConfigError where there is none."""
        tested = [one for one in self.recorded() if is_tested(one.version, self.tested)]
        if not tested:
            raise ConfigError(f"no interface of {self.engine} {self.tested} is recorded in {self.records}")
        return tested[-1]

    def extract(self, release: Release) -> Interface:
        """What a release has of all that this adapter looks at. Raises ConfigError."""
        return interface.extract(self.engine, self.package, release, needs(self).paths)


@frozen
class Use:
    """The adapter needs `name` of one of `owners`, or the owner itself; `where` says why.

    `call` is how it calls it, `value` what it has to be.
    """

    owners: tuple[str, ...]
    name: str
    where: str
    call: ast.Call | None = None
    value: str = ""


@frozen
class Derived:
    """A class of the adapter, the engine's classes that it derives from, and its own members."""

    name: str
    bases: tuple[str, ...]
    members: Mapping[str, Member]
    where: str


@frozen
class Needs:
    uses: tuple[Use, ...]
    derived: tuple[Derived, ...]

    @property
    def paths(self) -> set[str]:
        return {owner for use in self.uses for owner in use.owners} | {b for one in self.derived for b in one.bases}


@frozen
class Difference:
    """`change` is new, gone or changed; `breaks`: the adapter does not work with it."""

    name: str
    change: str
    detail: str
    breaks: bool


@frozen
class Verdict:
    """Whether a release fits: nothing in it breaks the adapter. `reference` is the version it was compared with."""

    engine: str
    version: str
    tested: str
    is_tested: bool
    reference: str
    differences: tuple[Difference, ...]

    @property
    def fits(self) -> bool:
        return not any(one.breaks for one in self.differences)


def judge(adapter: Adapter, found: Interface) -> Verdict:
    """Compare with the newest recorded interface of a tested version. Raises ConfigError."""
    reference = adapter.reference()
    differences = tuple(compare(adapter, found, reference))
    tested = is_tested(found.version, adapter.tested)
    return Verdict(adapter.engine, found.version, adapter.tested, tested, reference.version, differences)


def examine(adapters: Iterable[Adapter], place: str) -> Verdict:
    """A wheel, an unpacked folder or what is installed, by the adapter to its engine. Raises ConfigError."""
    known = sorted(adapters, key=lambda adapter: adapter.engine)
    with interface.release(place) as release:
        for adapter in known:
            if release.holds(adapter.package):
                return judge(adapter, adapter.extract(release))
    raise ConfigError(f"{place} holds none of the engines that are known here: {', '.join(a.engine for a in known)}")


def needs(adapter: Adapter) -> Needs:
    """Read the adapter's sources. Raises ConfigError where one cannot be parsed."""
    uses: list[Use] = []
    derived: list[Derived] = []
    for path in sorted(adapter.sources.glob("*.py")):
        found = _Source(adapter.package, path.name, syntax(path.read_bytes(), str(path)))
        uses += found.uses()
        derived += found.derived()
    for owner, texts in adapter.handed_in.items():
        uses += [Use((owner,), "", _HANDED_IN), *(_declared(owner, text) for text in texts)]
    return Needs(tuple(uses), tuple(derived))


def _declared(owner: str, text: str) -> Use:
    match ast.parse(text, mode="eval").body:
        case ast.Call(func=ast.Name(id=name)) as call:
            return Use((owner,), "" if owner.endswith(f".{name}") else name, _HANDED_IN, call)
        case ast.Name(id=name):
            return Use((owner,), name, _HANDED_IN)
        case ast.Constant():
            return Use((owner,), "", _HANDED_IN, value=text)
        case _:
            raise ConfigError(f"{text!r} of {owner} is neither a name nor a call nor a value")


class _Source:
    """One module of the adapter."""

    def __init__(self, package: str, file: str, tree: ast.Module) -> None:
        self._file, self._tree = file, tree
        self._imported: dict[str, str] = {}
        self._imports: list[Use] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == package for alias in node.names):
                raise ConfigError(f"{file}:{node.lineno} has to say `from`: else nobody sees what of {package} it uses")
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == package:
                for alias in node.names:
                    path = f"{node.module}.{alias.name}"
                    self._imported[alias.asname or alias.name] = path
                    self._imports.append(Use((path,), "", self._where(node)))

    def _where(self, node: ast.stmt | ast.expr) -> str:
        return f"used in {self._file}:{node.lineno}"

    def _path(self, node: ast.expr) -> str:
        """The engine's dotted name that an expression stands for, or nothing."""
        match node:
            case ast.Name(id=name):
                return self._imported.get(name, "")
            case ast.Attribute(value=value, attr=name):
                path = self._path(value)
                return f"{path}.{name}" if path else ""
            case _:
                return ""

    def uses(self) -> Iterator[Use]:
        """Of imported names and what hangs on them, and of what classes inherit."""
        yield from self._imports
        calls = {id(node.func): node for node in ast.walk(self._tree) if isinstance(node, ast.Call)}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute | ast.Name) and (path := self._path(node)):
                yield Use((path,), "", self._where(node), calls.get(id(node)))
        for one, bases in self._classes():
            own = members(one)
            for node in ast.walk(one):
                if isinstance(node, ast.Attribute) and _is_inherited(node, own):
                    yield Use(bases, node.attr, self._where(node), calls.get(id(node)))

    def derived(self) -> Iterator[Derived]:
        for node, bases in self._classes():
            own = {name: member for name, member in members(node).items() if member.kind != "attribute"}
            yield Derived(node.name, bases, own, self._where(node))

    def _classes(self) -> Iterator[tuple[ast.ClassDef, tuple[str, ...]]]:
        for node in statements(self._tree.body):
            if isinstance(node, ast.ClassDef):
                bases = tuple(path for base in node.bases if (path := self._path(base)))
                if bases:
                    yield node, bases


def _is_inherited(node: ast.Attribute, own: Mapping[str, Member]) -> bool:
    match node.value:
        case ast.Name(id="self" | "cls"):
            return node.attr not in own
        case ast.Call(func=ast.Name(id="super")):
            return True
        case _:
            return False


# ---------------------------------------------------------------- comparing


def compare(adapter: Adapter, found: Interface, reference: Interface) -> list[Difference]:
    """What in `found` breaks the adapter, and what else is not as in `reference`; the worst first.

    Raises ConfigError where `found` was recorded before the adapter began to need something; `reference` may be so.
    """
    wanted = needs(adapter)
    breaks = [*_unmet(wanted.uses, found), *_unfit(wanted.derived, found, reference)]
    kept: dict[str, Difference] = {}
    for one in breaks:
        if one.name not in adapter.spared:
            kept.setdefault(one.name, one)
    notes = [one for one in _news(wanted.derived, found, reference) if one.name not in kept]
    return [*kept.values(), *notes]


def _unmet(uses: Iterable[Use], found: Interface) -> Iterator[Difference]:
    for use in uses:
        owners = [(found.owner(path), path) for path in use.owners]
        there = [(owner, path) for owner, path in owners if found.things[owner] is not None]
        full = ".".join(word for word in (use.owners[0], use.name) if word)
        if not there:
            yield Difference(owners[0][0], "gone", use.where, True)
            continue
        if full.endswith("_") and full.rpartition(".")[2].startswith("_"):
            continue  # Python's own, as every Enum has
        for owner, path in there:
            name = use.name or path[len(owner) + 1 :].partition(".")[0]
            member = _callee(found, owner, name)
            if member is not None:
                if use.call is not None and (why := _refusal(member, use.call)):
                    yield Difference(full, "changed", f"{member}: {why}; {use.where}", True)
                if use.value and member.detail != f"= {use.value}":
                    yield Difference(full, "changed", f"{member}, and not {use.value}", True)
                break
        else:
            if not any(found.is_open(owner) for owner, _ in there):
                yield Difference(full, "gone", use.where, True)


def _callee(found: Interface, owner: str, name: str) -> Member | None:
    """The member, or where no name is asked for what stands for the thing itself when it is called."""
    thing = found.things[owner]
    if name or thing is None:
        return found.member(owner, name)
    if thing.what.kind != "class":
        return thing.what
    if found.is_open(owner) or any(base.rpartition(".")[2] == "Enum" for base in thing.bases):
        return Member("class")
    return found.member(owner, "__init__") or _made_from_fields(found.members(owner))


def _made_from_fields(all_members: Mapping[str, Member]) -> Member:
    """The constructor that Python writes for a class of fields."""
    fields = [(name, member) for name, member in all_members.items() if member.kind == "field"]
    ordered = sorted(fields, key=lambda one: bool(one[1].detail))
    text = ", ".join(f"{name}=..." if member.detail else name for name, member in ordered)
    return Member("method", f"(self, {text})" if text else "(self)")


def _signature(member: Member) -> inspect.Signature:
    """Of a call from outside: without `self` or `cls`. Raises ConfigError for a text that is none."""
    try:
        made = ast.parse(f"def f{member.detail}: ...").body[0]
    except SyntaxError as error:
        raise ConfigError(f"{member.detail!r} are no parameters: {error}") from error
    assert isinstance(made, ast.FunctionDef)
    given = made.args
    parameters: list[inspect.Parameter] = []
    plain = [*given.posonlyargs, *given.args]
    for index, one in enumerate(plain):
        kind = (
            inspect.Parameter.POSITIONAL_ONLY if one in given.posonlyargs else inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        optional = index >= len(plain) - len(given.defaults)
        parameters.append(inspect.Parameter(one.arg, kind, default=None if optional else inspect.Parameter.empty))
    if given.vararg:
        parameters.append(inspect.Parameter(given.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        empty = inspect.Parameter.empty if default is None else None
        parameters.append(inspect.Parameter(one.arg, inspect.Parameter.KEYWORD_ONLY, default=empty))
    if given.kwarg:
        parameters.append(inspect.Parameter(given.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters[1:] if member.kind in _BOUND and parameters else parameters)


def _refusal(member: Member, call: ast.Call) -> str:
    """Why a callable does not take this call; nothing where it does, or where that cannot be seen."""
    starred = any(isinstance(one, ast.Starred) for one in call.args) or any(key.arg is None for key in call.keywords)
    if member.kind not in _CALLABLE or starred:
        return ""
    return _binding(_signature(member), len(call.args), [key.arg for key in call.keywords if key.arg])


def _binding(signature: inspect.Signature, positional: int, keywords: Iterable[str]) -> str:
    try:
        signature.bind(*range(positional), **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    return ""


def _unfit(derived: Iterable[Derived], found: Interface, reference: Interface) -> Iterator[Difference]:
    for one in derived:
        bases = [base for base in one.bases if found.things[found.owner(base)] is not None]
        for name, own in one.members.items() if bases else ():
            theirs = _inherited(found, bases, name)
            before = _inherited(reference, one.bases, name)
            full = f"{one.bases[0]}.{name}"
            if theirs is None and before is not None:
                yield Difference(full, "gone", f"{one.name} implements it, and nothing asks for it any more", True)
            elif theirs is not None and (why := _cannot_stand_for(own, theirs)):
                yield Difference(full, "changed", f"{theirs}: {one.name} has {own}: {why}", True)
        for base in bases:
            for name, member in found.members(base).items():
                resolved = _inherited(found, bases, name)
                if resolved is not None and resolved.abstract and name not in one.members:
                    yield Difference(f"{base}.{name}", "new", f"{member}: {one.name} does not implement it", True)


def _inherited(found: Interface, bases: Iterable[str], name: str) -> Member | None:
    return next((member for base in bases if (member := found.member(base, name)) is not None), None)


def _cannot_stand_for(own: Member, theirs: Member) -> str:
    """Why `own` cannot be called wherever the engine calls `theirs`; nothing where it can."""
    if theirs.kind in _CALLABLE and own.kind in _CALLABLE:
        if (own.kind == "method") != (theirs.kind == "method"):
            return f"a {theirs.kind} is called otherwise"
        mine = _signature(own)
        parameters = _signature(theirs).parameters.values()
        named = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        first = [one for one in parameters if one.kind is one.POSITIONAL_ONLY]
        only = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
        required = [one.name for one in only if one.default is one.empty]
        least = [one for one in named if one.default is one.empty]
        return (
            _binding(mine, len(first) + len(named), [one.name for one in only])
            or _binding(mine, len(first), [one.name for one in [*named, *only]])
            or _binding(mine, len(first) + len(least), required)
        )
    callables = (own.kind in _CALLABLE, theirs.kind in _CALLABLE)
    return "one is called and the other is not" if callables[0] != callables[1] else ""


def _news(derived: Iterable[Derived], found: Interface, reference: Interface) -> Iterator[Difference]:
    """Differences of the classes that the adapter derives from."""
    for base in dict.fromkeys(base for one in derived for base in one.bases):
        now = found.members(base)
        before = reference.members(base)
        for name in sorted(now.keys() | before.keys()):
            if name not in before:
                yield Difference(f"{base}.{name}", "new", str(now[name]), False)
            elif name not in now:
                yield Difference(f"{base}.{name}", "gone", str(before[name]), False)
            elif now[name] != before[name]:
                yield Difference(f"{base}.{name}", "changed", f"{before[name]} -> {now[name]}", False)
