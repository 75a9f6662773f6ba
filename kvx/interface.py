"""An engine's own interface, read from its sources: a wheel, an unpacked folder, or what is installed.

Nothing of the engine is imported or run, so that a release can be looked at that is not installed, or
cannot be. What was read is kept as a small JSON file: one thing a name (a class with its members, or a
function), each in one line that says how it is used. Types are left out, as Python does not check them.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import warnings
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from kvx.core.errors import ConfigError

MAX_FILE_BYTES = 8 << 20
"""The largest source that is read; SGLang's largest module has half a megabyte."""
_MAX_VALUE = 60
_KINDS = {
    *("module", "class", "function", "value"),
    *("method", "classmethod", "staticmethod", "property", "field", "attribute"),
}
_OUTSIDE = {"ABC", "Enum", "Generic", "NamedTuple", "Protocol", "object", "str"}
_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


@frozen
class Member:
    """How a name is used. `detail`: a callable's parameters, a class's bases, or a value, as Python text."""

    kind: str
    detail: str = ""
    abstract: bool = False

    def __str__(self) -> str:
        return " ".join(word for word in ("abstract" * self.abstract, self.kind, self.detail) if word)

    @classmethod
    def parse(cls, text: str) -> Member:
        """Raises ConfigError for what is not the text of a Member."""
        rest = text.removeprefix("abstract ")
        kind, _, detail = rest.partition(" ")
        if kind not in _KINDS:
            raise ConfigError(f"an interface holds {text!r}, and {kind!r} is no kind of member")
        return cls(kind, detail, rest != text)


@frozen
class Thing:
    """A class with its own members and the classes that it inherits from, or anything else that has a name."""

    what: Member
    bases: tuple[str, ...] = ()
    members: Mapping[str, Member] = {}


@frozen
class Interface:
    """Things of one release by their dotted names; None: it was looked for, and this release has none."""

    engine: str
    version: str
    things: Mapping[str, Thing | None]

    def owner(self, path: str) -> str:
        """The thing that `path` names or is a member of. Raises ConfigError where it was never looked for."""
        name = path
        while name and name not in self.things:
            name = name.rpartition(".")[0]
        thing = self.things.get(name)
        if not name or (name != path and thing is not None and thing.what.kind == "module"):
            raise ConfigError(
                f"{path} is not in the recorded interface of {self.engine} {self.version}: run make interfaces"
            )
        return name

    def lineage(self, path: str) -> Iterator[tuple[str, Thing]]:
        """A class and what it inherits from, nearest first."""
        waiting, seen = [path], set[str]()
        while waiting:
            name = waiting.pop(0)
            thing = self.things.get(name)
            if thing is not None and name not in seen:
                seen.add(name)
                waiting = [*thing.bases, *waiting]
                yield name, thing

    def member(self, path: str, name: str) -> Member | None:
        """A class's own or inherited member."""
        return next((thing.members[name] for _, thing in self.lineage(path) if name in thing.members), None)

    def members(self, path: str) -> dict[str, Member]:
        """All of a class's members, inherited ones included."""
        found: dict[str, Member] = {}
        for _, thing in self.lineage(path):
            found = {**thing.members, **found}
        return found

    def is_open(self, path: str) -> bool:
        """Whether it has members that are unknown here: no class, or one that inherits from outside of the engine."""
        return any(
            thing.what.kind != "class"
            or any(base not in self.things and base.rpartition(".")[2] not in _OUTSIDE for base in thing.bases)
            for _, thing in self.lineage(path)
        )

    def dump(self) -> str:
        """As JSON, the same for the same interface."""
        things: dict[str, Any] = {}
        for path, thing in sorted(self.things.items()):
            if thing is None or thing.what.kind != "class":
                things[path] = None if thing is None else str(thing.what)
            else:
                members = {name: str(member) for name, member in sorted(thing.members.items())}
                things[path] = {"bases": list(thing.bases), "members": members}
        return json.dumps({"engine": self.engine, "version": self.version, "things": things}, indent=1) + "\n"


def load(path: Path) -> Interface:
    """What `dump` wrote. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        things = {name: _thing(value) for name, value in content["things"].items()}
        return Interface(str(content["engine"]), str(content["version"]), things)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a recorded interface: {error}") from error


def _thing(value: Any) -> Thing | None:
    if value is None:
        return None
    if isinstance(value, str):
        return Thing(Member.parse(value))
    members = {str(name): Member.parse(text) for name, text in value["members"].items()}
    return Thing(Member("class"), tuple(map(str, value["bases"])), members)


# ---------------------------------------------------------------- where sources lie


@frozen
class Release:
    """The files of one release. `read` gives a file by its path with slashes; None: there is none."""

    name: str
    version: str
    read: Callable[[str], bytes | None]

    def holds(self, package: str) -> bool:
        return self.read(f"{package}/__init__.py") is not None


@contextmanager
def release(place: str) -> Generator[Release]:
    """A wheel, a folder that one was unpacked into, or an installed distribution by its name. Raises ConfigError."""
    if Path(place).is_file():
        try:
            with zipfile.ZipFile(place) as archive:
                yield _described(place, lambda path: _unzipped(archive, path), archive.namelist())
        except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError) as error:
            raise ConfigError(f"{place} is not a wheel that can be read: {error}") from error
    elif Path(place).is_dir():
        names = (str(path.relative_to(place)) for path in Path(place).glob("*.dist-info/METADATA"))
        yield _described(place, lambda path: _from_disk(Path(place), path), names)
    else:
        try:
            found = importlib.metadata.distribution(place)
        except (importlib.metadata.PackageNotFoundError, ValueError) as error:
            raise ConfigError(f"{place} is no wheel, no folder and no installed distribution") from error
        yield Release(place, found.version, lambda path: _from_disk(Path(str(found.locate_file(""))), path))


def _described(place: str, read: Callable[[str], bytes | None], names: Iterable[str]) -> Release:
    metadata = [name for name in names if _METADATA.fullmatch(name)]
    if len(metadata) != 1:
        raise ConfigError(f"{place} holds {len(metadata)} distributions where one is looked for")
    headers = HeaderParser().parsestr((read(metadata[0]) or b"").decode("utf-8", "replace"))
    if not headers["Name"] or not headers["Version"]:
        raise ConfigError(f"{place} does not tell its name and version")
    return Release(headers["Name"], headers["Version"], read)


def _unzipped(archive: zipfile.ZipFile, path: str) -> bytes | None:
    try:
        with archive.open(path) as file:
            return _bounded(path, file.read(MAX_FILE_BYTES + 1))
    except KeyError:
        return None


def _from_disk(folder: Path, path: str) -> bytes | None:
    try:
        with (folder / path).open("rb") as file:
            return _bounded(path, file.read(MAX_FILE_BYTES + 1))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _bounded(path: str, content: bytes) -> bytes:
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes: that is no source")
    return content


# ---------------------------------------------------------------- what they say


def extract(engine: str, package: str, found: Release, paths: Iterable[str]) -> Interface:
    """The things that `paths` name or are members of, and the classes of `package` that they inherit from."""
    reader = _Reader(package, found.read)
    things: dict[str, Thing | None] = {}
    wanted = sorted(set(paths))
    while wanted:
        path = reader.thing_path(wanted.pop())
        if path not in things:
            try:
                things[path] = thing = reader.thing(path)
            except RecursionError as error:
                raise ConfigError(f"{path} is nested too deeply to be read") from error
            wanted += [base for base in thing.bases if base.startswith(f"{package}.")] if thing else []
    return Interface(engine, found.version, things)


@define(eq=False)
class _Reader:
    package: str
    read: Callable[[str], bytes | None]
    _modules: dict[str, _Module | None] = field(factory=dict)

    def module(self, name: str) -> _Module | None:
        if name not in self._modules:
            path = name.replace(".", "/")
            for file in (f"{path}.py", f"{path}/__init__.py"):
                if (content := self.read(file)) is not None:
                    self._modules[name] = parse(content, file, name)
                    break
            else:
                self._modules[name] = None
        return self._modules[name]

    def thing_path(self, path: str) -> str:
        """The part of `path` that names a thing: a module, or the name behind the longest one."""
        if self.module(path) is not None:
            return path
        words = path.split(".")
        for length in range(len(words) - 1, 0, -1):
            if self.module(".".join(words[:length])) is not None:
                return ".".join(words[: length + 1])
        return path

    def thing(self, path: str) -> Thing | None:
        if self.module(path) is not None:
            return Thing(Member("module"))
        module, _, name = path.rpartition(".")
        place, node = self._find(module, name)
        if node is None:
            return None
        if isinstance(node, ast.ClassDef):
            return Thing(Member("class"), tuple(self._bases(place, node)), members(node))
        return Thing(described(node, inside=False))

    def _find(self, module: str, name: str) -> tuple[str, Definition | None]:
        """The module in which a name is really defined, and how."""
        waiting, seen = [(module, name)], set[tuple[str, str]]()
        while waiting:
            place = waiting.pop(0)
            parsed = None if place in seen else self.module(place[0])
            seen.add(place)
            if parsed is None:
                continue
            if place[1] in parsed.defined:
                return place[0], parsed.defined[place[1]]
            if place[1] in parsed.imported:
                origin, _, original = parsed.imported[place[1]].rpartition(".")
                waiting = [(origin, original)]
            waiting += [(starred, place[1]) for starred in parsed.starred]
        return module, None

    def _bases(self, module: str, node: ast.ClassDef) -> Iterator[str]:
        parsed = self.module(module)
        for base in node.bases:
            text = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            first, _, rest = text.partition(".")
            full = parsed.imported.get(first, first) + (f".{rest}" if rest else "") if parsed else text
            if parsed and first in parsed.defined:
                full = f"{module}.{text}"
            elif full.startswith(f"{self.package}."):
                place, _ = self._find(full.rpartition(".")[0], full.rpartition(".")[2])
                full = f"{place}.{full.rpartition('.')[2]}"
            yield full


@define(eq=False)
class _Module:
    """The names of one module: defined in it, or imported as which dotted name."""

    defined: dict[str, Definition] = field(factory=dict)
    imported: dict[str, str] = field(factory=dict)
    starred: list[str] = field(factory=list)


def parse(content: bytes, file: str, name: str) -> _Module:
    """Raises ConfigError for what Python cannot parse."""
    module = _Module()
    for node in statements(syntax(content, file).body):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if not _decorated(node, "overload"):
                    module.defined[node.name] = node
            case ast.Assign() | ast.AnnAssign():
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        module.defined.setdefault(target.id, node)
            case ast.Import():
                module.imported |= {alias.asname: alias.name for alias in node.names if alias.asname}
            case ast.ImportFrom():
                package = name.split(".") if file.endswith("/__init__.py") else name.split(".")[:-1]
                above = package[: len(package) - (node.level - 1)] if node.level else []
                origin = ".".join([*above, *([node.module] if node.module else [])])
                for alias in node.names:
                    if alias.name == "*":
                        module.starred.append(origin)
                    else:  # what stands in for it when the import fails came first
                        module.defined.pop(alias.asname or alias.name, None)
                        module.imported[alias.asname or alias.name] = f"{origin}.{alias.name}"
            case _:
                pass
    return module


def syntax(content: bytes, file: str) -> ast.Module:
    """Raises ConfigError for what this Python cannot parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an engine's strange escapes are not this reader's
            return ast.parse(content, file)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{file} cannot be parsed: {error}") from error


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or class, also those that run under a condition."""
    for node in body:
        match node:
            case ast.If() | ast.Try():
                handlers = [one for handler in getattr(node, "handlers", []) for one in handler.body]
                yield from statements([*handlers, *node.body, *node.orelse])
            case ast.With():
                yield from statements(node.body)
            case _:
                yield node


def members(node: ast.ClassDef) -> dict[str, Member]:
    """A class's own members, and the attributes that its methods set; of Python's own names only `__init__`."""
    found: dict[str, Member] = {}
    for one in statements(node.body):
        names: list[str] = []
        match one:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if not _decorated(one, "overload", "setter", "deleter"):
                    names = [one.name]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case ast.Assign():
                names = [target.id for target in one.targets if isinstance(target, ast.Name)]
            case _:
                pass
        for name in names:
            if not name.startswith("__") or name == "__init__":
                found[name] = described(one, inside=True)
    for part in ast.walk(node):
        match part:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.setdefault(name, Member("attribute"))
            case _:
                pass
    return found


def described(node: ast.AST, *, inside: bool) -> Member:
    """A function, or an assigned name; `inside` of a class or not."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            abstract = _decorated(node, "abstractmethod", "abstractproperty")
            if _decorated(node, "property", "cached_property", "abstractproperty"):
                return Member("property", "", abstract)
            special = next((kind for kind in ("classmethod", "staticmethod") if _decorated(node, kind)), "method")
            return Member(special if inside else "function", f"({_parameters(node.args)})", abstract)
        case ast.AnnAssign(value=value) if inside:
            return Member("field", f"= {_short(value)}" if value else "")
        case ast.Assign(value=value) | ast.AnnAssign(value=value):
            return Member("value", f"= {_short(value)}" if value else "")
        case _:
            return Member("value")


def _parameters(arguments: ast.arguments) -> str:
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(arguments)


def _short(value: ast.expr) -> str:
    text = ast.unparse(value)
    return text if len(text) <= _MAX_VALUE else "..."


def _decorated(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, *names: str) -> bool:
    words = {ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list}
    return any(word.rpartition(".")[2] in names for word in words)
