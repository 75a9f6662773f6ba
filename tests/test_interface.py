from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvx import interface
from kvx.core.errors import ConfigError
from kvx.interface import Interface, Member, Thing

METADATA = {"engine-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: engine\nVersion: 1.2\n"}
BASE = """
import abc
from abc import ABC, abstractmethod
from typing import overload
from engine.other import Root

class Connector(Root, ABC):
    ready: bool
    limit: int = 3
    kind = "plain"
    def __init__(self, config: "Config", *, role=None):
        self._config = config
    @abstractmethod
    def save(self, layer: str, /, tensor, *rest: int, last: bool = False, **more): ...
    @classmethod
    def build(cls, data: dict | None = None): ...
    @staticmethod
    def name() -> str: ...
    @property
    @abc.abstractmethod
    def size(self) -> int: ...
    @overload
    def pick(self, one: int) -> int: ...
    @overload
    def pick(self, one: str) -> str: ...
    def pick(self, one, default=None): ...

def make(kind: str = "plain") -> Connector: ...

GROUP = "engine.plugins"
"""


def wheel(folder: Path, files: Mapping[str, str | bytes], name: str = "engine.whl") -> str:
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return str(folder / name)


def read(place: str, *paths: str) -> Interface:
    with interface.release(place) as release:
        return interface.extract("engine", "engine", release, paths)


@pytest.fixture
def files() -> dict[str, str | bytes]:
    return {
        **METADATA,
        "engine/__init__.py": "from .base import Connector as Face\nfrom engine.star import *\n",
        "engine/base.py": BASE,
        "engine/other.py": "class Root:\n    def close(self): ...\n    def save(self): ...\n",
        "engine/star.py": "from . import base\nclass Deep(base.Connector): ...\n",
    }


def test_a_class_is_told_in_one_line_a_member(tmp_path: Path, files: dict[str, str | bytes]) -> None:
    found = read(wheel(tmp_path, files), "engine.base.Connector")
    assert found.version == "1.2"
    assert {name: str(member) for name, member in found.members("engine.base.Connector").items()} == {
        "ready": "field",
        "limit": "field = 3",
        "kind": "value = 'plain'",
        "__init__": "method (self, config, *, role=None)",
        "_config": "attribute",
        "save": "abstract method (self, layer, /, tensor, *rest, last=False, **more)",
        "build": "classmethod (cls, data=None)",
        "name": "staticmethod ()",
        "size": "abstract property",
        "pick": "method (self, one, default=None)",
        "close": "method (self)",
    }


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("engine.base.make", "function (kind='plain')"),
        ("engine.base.GROUP", "value = 'engine.plugins'"),
        ("engine.base", "module"),
        ("engine.Face", "class"),
        ("engine.Deep", "class"),
    ],
)
def test_other_things_and_names_that_come_from_elsewhere(
    tmp_path: Path, files: dict[str, str | bytes], path: str, told: str
) -> None:
    thing = read(wheel(tmp_path, files), path).things[path]
    assert thing is not None
    assert str(thing.what) == told


def test_bases_are_followed_through_modules(tmp_path: Path, files: dict[str, str | bytes]) -> None:
    found = read(wheel(tmp_path, files), "engine.Deep.close")
    assert found.owner("engine.Deep.close") == "engine.Deep"
    assert [path for path, _ in found.lineage("engine.Deep")] == [
        "engine.Deep",
        "engine.base.Connector",
        "engine.other.Root",
    ]
    assert found.member("engine.Deep", "close") == Member("method", "(self)")
    assert not found.is_open("engine.Deep")


def test_what_was_looked_for_and_is_not_there_is_told_from_what_was_not_looked_for(
    tmp_path: Path, files: dict[str, str | bytes]
) -> None:
    found = read(wheel(tmp_path, files), "engine.base.Gone", "engine.none.Gone", "engine.base")
    assert {path: thing for path, thing in found.things.items() if thing is None} == {
        "engine.base.Gone": None,
        "engine.none": None,
    }
    with pytest.raises(ConfigError, match=r"base\.make is not in the recorded interface of engine 1\.2: run make"):
        found.owner("engine.base.make")


def test_what_replaces_a_failed_import_does_not_hide_it(tmp_path: Path) -> None:
    module = "try:\n    from engine.real import Thing\nexcept ImportError:\n    Thing = None\n"
    place = wheel(tmp_path, {**METADATA, "engine/a.py": module, "engine/real.py": "class Thing: ...\n"})
    assert read(place, "engine.a.Thing").things["engine.a.Thing"] == Thing(Member("class"))


@pytest.mark.parametrize(
    "module",
    [
        "from engine.a import Thing\n",
        "from engine.b import Thing\n",
        "from engine.a import *\nfrom engine.b import *\n",
        "class Thing(Other): ...\nclass Other(Thing): ...\n",
    ],
)
def test_circles_come_to_an_end(tmp_path: Path, module: str) -> None:
    place = wheel(tmp_path, {**METADATA, "engine/a.py": module, "engine/b.py": "from engine.a import *\n"})
    found = read(place, "engine.a.Thing")
    assert len(list(found.lineage("engine.a.Thing"))) in (0, 2)


def test_a_folder_and_what_is_installed_are_read_as_well(tmp_path: Path, files: dict[str, str | bytes]) -> None:
    with zipfile.ZipFile(wheel(tmp_path, files)) as archive:
        archive.extractall(tmp_path / "unpacked")
    assert read(str(tmp_path / "unpacked"), "engine.Face") == read(str(tmp_path / "engine.whl"), "engine.Face")
    with interface.release("pluggy") as release:
        found = interface.extract("pluggy", "pluggy", release, ["pluggy.PluginManager"])
        assert release.holds("pluggy")
        assert not release.holds("engine")
    assert "register" in found.members("pluggy.PluginManager")


def test_nothing_is_run(tmp_path: Path) -> None:
    module = f"'\\d'\nimport pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nclass Thing: ...\n"
    files = {**METADATA, "engine/__init__.py": module, "engine/a.py": module}
    assert read(wheel(tmp_path, files), "engine.a.Thing").things["engine.a.Thing"] is not None
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"engine/a.py": "class Thing(:\n"}, r"engine/a\.py cannot be parsed"),
        ({"engine/a.py": b"class Thing:\0"}, r"engine/a\.py cannot be parsed"),
        ({"engine/a.py": b"x = '\xff'\n"}, r"engine/a\.py cannot be parsed"),
        ({"engine/a.py": f"class Thing:\n    x = {'+'.join('1' * 900)}\n"}, r"engine\.a\.Thing is nested too deeply"),
        ({"engine/a.py": "x = " + "(" * 5000}, r"engine/a\.py cannot be parsed"),
        ({"engine/a.py": "x = " + "-" * 200_000 + "1"}, r"engine/a\.py cannot be parsed"),
        ({"engine/a.py": b" " * (interface.MAX_FILE_BYTES + 1)}, "that is no source"),
        ({"second-1.dist-info/METADATA": "Name: x"}, "holds 2 distributions"),
        ({"engine-1.2.dist-info/METADATA": "Name: engine\n"}, "does not tell its name and version"),
    ],
)
def test_a_wheel_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, changed: dict[str, str | bytes], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        read(wheel(tmp_path, {**METADATA, "engine/a.py": "", **changed}), "engine.a.Thing")


def test_what_is_no_wheel_at_all(tmp_path: Path, files: dict[str, str | bytes]) -> None:
    (tmp_path / "text.whl").write_text("not a zip")
    whole = Path(wheel(tmp_path, {**files, "engine/base.py": BASE * 50})).read_bytes()
    broken = whole.replace(b"class Connector", b"class Connectar", 1)
    assert broken != whole
    (tmp_path / "broken.whl").write_bytes(broken)
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("text.whl", "is not a wheel"),
        ("broken.whl", "is not a wheel"),
        ("empty", "holds 0 distributions"),
        ("no-such-distribution", "is no wheel, no folder and no installed distribution"),
    ):
        place = name if "such" in name else str(tmp_path / name)
        with pytest.raises(ConfigError, match=said):
            read(place, "engine.base.Connector")


def test_what_is_written_is_read_again(tmp_path: Path, files: dict[str, str | bytes]) -> None:
    found = read(wheel(tmp_path, files), "engine.Deep", "engine.base.make", "engine.base", "engine.base.Gone")
    (tmp_path / "1.2.json").write_text(found.dump(), encoding="utf-8")
    assert interface.load(tmp_path / "1.2.json") == found
    assert interface.load(tmp_path / "1.2.json").dump() == found.dump()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"engine": "e", "version": "1", "things": []}',
        '{"engine": "e", "version": "1", "things": {"a": 3}}',
        '{"engine": "e", "version": "1", "things": {"a": {"bases": []}}}',
        '{"engine": "e", "version": "1", "things": {"a": "method? (self)"}}',
    ],
)
def test_a_record_that_is_none_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "1.json").write_text(text)
    with pytest.raises(ConfigError, match="interface"):
        interface.load(tmp_path / "1.json")
