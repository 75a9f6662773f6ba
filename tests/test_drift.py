"""A small engine and an adapter to it: what of the engine may change, and what may not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from kvx import cli, drift, interface, plugins
from kvx.core.errors import ConfigError
from kvx.drift import Adapter, Difference

ENGINE = {
    "engine/__init__.py": "",
    "engine/base.py": """
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

class Root(ABC):
    def __init__(self, config):
        self._config = config
    @abstractmethod
    def load(self, request, blocks): ...
    def save(self, layer, tensor, last=False, **more): ...
    def ask(self, request, tokens=0): ...
    @classmethod
    def build(cls, data=None): ...

class Connector(Root):
    def stop(self): ...

class Other:
    def unrelated(self): ...
""",
    "engine/types.py": """
from dataclasses import dataclass
from enum import Enum

class Kind(Enum):
    PLAIN = 1

@dataclass
class Result:
    sent: set
    failed: set = None

class Request:
    def __init__(self):
        self.tokens = []
    def blocks(self, group): ...

def group(): ...
def pick(kind): ...
GROUP = "engine.plugins"
""",
    "engine/factory.py": """
class Factory:
    _known = {}
    @classmethod
    def register(cls, name, module): ...
""",
}
ADAPTER = {
    "connector.py": """
from engine.base import Connector
from engine.types import Kind, Result

class Mine(Connector):
    def __init__(self, config):
        super().__init__(config)
        self._own = Kind.PLAIN
    def load(self, request, blocks):
        self._helper(self._own, self._config)
        self.ask(request, tokens=3)
        return Result(sent=set())
    def save(self, layer, tensor, last=False, **more):
        super().stop()
    @classmethod
    def build(cls, data=None): ...
    def _helper(self, *words): ...
""",
    "plugin.py": """
def register():
    from engine import types
    from engine.factory import Factory

    if "mine" not in Factory._known:
        Factory.register("mine", "adapter")
    return types.group()
""",
}


def made(folder: Path, version: str, files: dict[str, str]) -> str:
    root = folder / version
    described = {f"engine-{version}.dist-info/METADATA": f"Name: engine\nVersion: {version}\n"}
    for name, text in {**described, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


@pytest.fixture
def adapter(tmp_path: Path) -> Adapter:
    """Made for 1.0, whose interface is recorded."""
    for name, text in ADAPTER.items():
        (tmp_path / "adapter").mkdir(exist_ok=True)
        (tmp_path / "adapter" / name).write_text(text)
    (tmp_path / "records").mkdir()
    handed_in = {
        "engine.types.Request": ("tokens", "blocks(group)"),
        "engine.types.GROUP": ("'engine.plugins'",),
        "engine.types.pick": ("pick(kind)",),
    }
    mine = Adapter("engine", "engine", "1.0", tmp_path / "adapter", tmp_path / "records", handed_in, {})
    with interface.release(made(tmp_path, "1.0", ENGINE)) as release:
        (tmp_path / "records/1.0.json").write_text(mine.extract(release).dump())
    return mine


Changed = Callable[[str, str, str], list[Difference]]


@pytest.fixture
def changed(tmp_path: Path, adapter: Adapter) -> Changed:
    """What is said of release 1.1, which is 1.0 with one text in place of another."""

    def change(file: str, old: str, new: str) -> list[Difference]:
        assert ENGINE[file].count(old) == 1
        place = made(tmp_path, "1.1", {**ENGINE, file: ENGINE[file].replace(old, new)})
        return list(drift.examine([adapter], place).differences)

    return change


def test_an_unchanged_release_fits(tmp_path: Path, adapter: Adapter) -> None:
    verdict = drift.examine([adapter], made(tmp_path, "1.1", ENGINE))
    assert (verdict.fits, verdict.differences, verdict.is_tested) == (True, (), False)
    assert (verdict.version, verdict.reference) == ("1.1", "1.0")
    assert drift.examine([adapter], made(tmp_path, "1.0", ENGINE)).is_tested


BASE, TYPES, FACTORY = "engine/base.py", "engine/types.py", "engine/factory.py"


@pytest.mark.parametrize(
    ("file", "old", "new", "told", "said"),
    [
        (BASE, "class Connector(", "class Konnector(", "gone base.Connector", "used in connector.py:2"),
        (BASE, "load(self, request,", "load(self, request, group,", "changed base.Connector.load", "too many"),
        (BASE, "load(self, request,", "load(self, req,", "changed base.Connector.load", "missing a required"),
        (BASE, "load(self, request, blocks", "load(self, request", "changed base.Connector.load", "missing"),
        (BASE, "request, blocks)", "request, blocks, *, x)", "changed base.Connector.load", "unexpected"),
        (BASE, "layer, tensor,", "layer, tensor=None,", "changed base.Connector.save", "missing"),
        (BASE, "def save(", "def store(", "gone base.Connector.save", "nothing asks for it"),
        (BASE, "def ask(self, request, tokens", "def ask(self, request, n", "changed base.Connector.ask", "'tokens'"),
        (BASE, "def ask(", "def query(", "gone base.Connector.ask", "used in connector.py:11"),
        (BASE, "def stop(", "def halt(", "gone base.Connector.stop", "used in connector.py:14"),
        (BASE, "def stop(self", "def stop(self, why", "changed base.Connector.stop", "missing"),
        (BASE, "self._config =", "self._settings =", "gone base.Connector._config", "used in connector.py:10"),
        (BASE, "(self, config", "(self, config, role", "changed base.Connector.__init__", "role"),
        (
            BASE,
            "@classmethod\n    def build(cls,",
            "def build(self,",
            "changed base.Connector.build",
            "called otherwise",
        ),
        (BASE, "def stop(", "@abstractmethod\n    def stop(", "new base.Connector.stop", "does not implement it"),
        (TYPES, "PLAIN = 1", "SIMPLE = 1", "gone types.Kind.PLAIN", "used in connector.py:8"),
        (TYPES, "sent: set", "done: set", "changed types.Result", "'done'"),
        (TYPES, "failed: set = None", "failed: set", "changed types.Result", "missing a required argument: 'failed'"),
        (TYPES, "self.tokens", "self.ids", "gone types.Request.tokens", "hands in"),
        (TYPES, "blocks(self, group", "blocks(self, group, layer", "changed types.Request.blocks", "'layer'"),
        (TYPES, "class Request", "class Call", "gone types.Request", "hands in"),
        (TYPES, "def group()", "def group(name)", "changed types.group", "'name'"),
        (TYPES, "def group()", "def groups()", "gone types.group", "used in plugin.py:8"),
        (TYPES, "GROUP =", "PLUGINS =", "gone types.GROUP", "hands in"),
        (TYPES, "engine.plugins", "engine.add_ons", "changed types.GROUP", "and not 'engine.plugins'"),
        (TYPES, "def pick(kind)", "def pick(kind, role)", "changed types.pick", "'role'"),
        (FACTORY, "_known", "_names", "gone factory.Factory._known", "used in plugin.py:6"),
        (FACTORY, "name, module", "name, module, kind", "changed factory.Factory.register", "'kind'"),
        (FACTORY, "class Factory", "class Maker", "gone factory.Factory", "used in plugin.py:4"),
    ],
)
def test_what_the_adapter_needs_may_not_change(
    changed: Changed, file: str, old: str, new: str, told: str, said: str
) -> None:
    (found,) = [one for one in changed(file, old, new) if one.breaks]
    assert f"{found.change} {found.name}" == told.replace(" ", " engine.")
    assert said in found.detail


def test_a_new_abstract_method_breaks_it(changed: Changed) -> None:
    new = "class Connector(Root):\n    @abstractmethod\n    def wake(self): ..."
    (found,) = changed(BASE, "class Connector(Root):", new)
    assert (found.name, found.change, found.breaks) == ("engine.base.Connector.wake", "new", True)


@pytest.mark.parametrize(
    ("file", "old", "new", "name", "change"),
    [
        (BASE, "def stop(", "def wake(self): ...\n    def stop(", "base.Connector.wake", "new"),
        (BASE, "def ask(self, request,", "def ask(self, request, *,", "base.Connector.ask", "changed"),
        (BASE, "last=False", "last=None", "base.Connector.save", "changed"),
    ],
)
def test_other_changes_of_what_it_derives_from_are_told(
    changed: Changed, file: str, old: str, new: str, name: str, change: str
) -> None:
    assert [(one.name, one.change, one.breaks) for one in changed(file, old, new)] == [
        (f"engine.{name}", change, False)
    ]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (BASE, "def unrelated", "def other"),
        (BASE, "class Connector(Root):", "class Connector(Root):\n    '''Words.'''"),
        (TYPES, "def blocks(self, group", "def blocks(self, group, layer=None"),
        (TYPES, "self.tokens = []", "self.tokens = ()"),
    ],
)
def test_nothing_is_said_of_the_rest(changed: Changed, file: str, old: str, new: str) -> None:
    assert changed(file, old, new) == []


def test_what_comes_from_outside_the_engine_is_not_missed(changed: Changed) -> None:
    """The attribute may come from the foreign base class, which nobody has read."""
    new = "class Root(Foreign, ABC):\n    def __init__(self, config):\n        self._settings = config"
    old = "class Root(ABC):\n    def __init__(self, config):\n        self._config = config"
    assert not [one for one in changed(BASE, old, new) if one.breaks]


def test_what_is_made_at_run_time_is_not_missed(tmp_path: Path, adapter: Adapter) -> None:
    (adapter.sources / "more.py").write_text("from engine.types import settings\nprint(settings.anything)\n")
    place = made(tmp_path, "1.1", {**ENGINE, TYPES: ENGINE[TYPES] + "settings = load()\n"})
    assert drift.examine([adapter], place).fits
    assert not drift.examine([adapter], made(tmp_path, "1.2", ENGINE)).fits


def test_what_is_spared_does_not_count(tmp_path: Path, adapter: Adapter) -> None:
    place = made(tmp_path, "1.1", {**ENGINE, BASE: ENGINE[BASE].replace("def save(", "def store(")})
    assert not drift.examine([adapter], place).fits
    spared = evolve(adapter, spared={"engine.base.Connector.save": "a later version asks no more"})
    verdict = drift.examine([spared], place)
    assert verdict.fits
    assert [one.name for one in verdict.differences] == ["engine.base.Connector.save", "engine.base.Connector.store"]


def test_an_adapter_that_needs_more_than_is_recorded_says_so(adapter: Adapter) -> None:
    (adapter.sources / "more.py").write_text("from engine.news import Feature\n")
    with pytest.raises(ConfigError, match=r"engine\.news\.Feature is not in the recorded interface of engine 1\.0"):
        drift.judge(adapter, adapter.reference())


def test_an_import_that_hides_what_is_used_is_refused(adapter: Adapter) -> None:
    (adapter.sources / "more.py").write_text("import engine.types\n")
    with pytest.raises(ConfigError, match=r"more\.py:1 has to say `from`"):
        drift.needs(adapter)


def test_there_has_to_be_a_record_of_a_tested_version(adapter: Adapter) -> None:
    with pytest.raises(ConfigError, match=r"no interface of engine 2\.\* is recorded"):
        evolve(adapter, tested="2.*").reference()


def test_a_declaration_is_a_name_or_a_call(adapter: Adapter) -> None:
    with pytest.raises(ConfigError, match="neither a name nor a call nor a value"):
        drift.needs(evolve(adapter, handed_in={"engine.types.Request": ("a.b",)}))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, adapter: Adapter) -> None:
    def load() -> plugins.Plugins:
        found = plugins.Plugins()
        found.add("engine", _Plugin(adapter))
        return found

    monkeypatch.setattr(plugins, "load", load)


class _Plugin:
    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    @plugins.hookspecs.hookimpl
    def kvx_interfaces(self) -> dict[str, Adapter]:
        return {"engine": self._adapter}


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("old", "new", "status", "said"),
    [
        ("def unrelated", "def other", 0, ["The adapter fits."]),
        ("def stop(", "def halt(", 1, ["BAD  gone     engine.base.Connector.stop", "The adapter does not fit."]),
    ],
)
def test_the_command_says_it_and_its_status_is_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, status: int, said: list[str]
) -> None:
    place = made(tmp_path, "1.1", {**ENGINE, BASE: ENGINE[BASE].replace(old, new)})
    assert cli.main(["doctor", "--engine-interface", place]) == status
    printed = capsys.readouterr().out
    assert printed.startswith("engine 1.1 (not tested: kvx is made for 1.0), compared with 1.0\n")
    assert all(line in printed.splitlines() for line in said)
    assert cli.main(["doctor", "--engine-interface", place, "--json"]) == status
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["version"], told["fits"]) == ("kvx.doctor.interface/1", "1.1", status == 0)
    assert {"name", "change", "detail", "breaks"} == {key for one in told["differences"] for key in one} or status == 0


@pytest.mark.usefixtures("known")
def test_what_is_no_release_of_a_known_engine_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.whl").write_text("no wheel")
    for place, said in (
        ("pluggy", "holds none of the engines that are known here: engine"),
        ("nothing", "is no wheel"),
    ):
        assert cli.main(["doctor", "--engine-interface", place]) == 2
        assert said in capsys.readouterr().err
