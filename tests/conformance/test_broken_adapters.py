"""The broken adapters: each is the shipped one but for its bend, and the cases that are named for it exist."""

from __future__ import annotations

import sys

import pytest

from kvx import plugins
from kvx.core.errors import PluginError
from kvx.driver import Server
from kvx_conformance.suite import broken_adapters
from kvx_conformance.suite.all import CASES
from kvx_conformance.suite.broken_adapters import BROKEN_ADAPTERS, ENGINE
from kvx_conformance.suite.broken_server import BENDS
from kvx_conformance.suite.self_test import Kind, Specimen
from kvx_conformance.suite.subject import CountsBlocks, CutsOtherwise, ReadsCache, Subject


def test_each_bend_is_a_subject() -> None:
    assert BROKEN_ADAPTERS.keys() == BENDS.keys()


@pytest.mark.parametrize("name", BROKEN_ADAPTERS)
def test_only_a_server_with_kvx_is_bent(name: str) -> None:
    driver, own = BROKEN_ADAPTERS[name].subject.driver(), plugins.load().driver(ENGINE)
    for options in ({"listen": "127.0.0.1:5712"}, None):
        server = Server("folder", 8123, options=options)
        bent, plain = driver.launch(server).command, own.launch(server).command
        between = ("kvx_conformance.suite.broken_server", name) if options else ()
        assert bent == (sys.executable, "-m", *between, *plain[2:])


@pytest.mark.parametrize("name", BROKEN_ADAPTERS)
def test_it_has_all_that_the_engines_own_driver_has(name: str) -> None:
    driver = BROKEN_ADAPTERS[name].subject.driver()
    assert isinstance(driver, CountsBlocks) and isinstance(driver, ReadsCache) and isinstance(driver, CutsOtherwise)
    assert driver.modes == plugins.load().driver(ENGINE).modes


@pytest.mark.parametrize("name", BROKEN_ADAPTERS)
def test_the_cases_that_have_to_find_it_are_an_adapters(name: str) -> None:
    one = BROKEN_ADAPTERS[name]
    specimen = Specimen(name, one.subject, one.cause, one.found_by, Kind.ADAPTER)
    for begin in one.found_by:
        found = [case for case in CASES.values() if case.id.startswith(begin)]
        assert found and all(specimen.own(case) for case in found)


def test_there_is_no_other_bend() -> None:
    with pytest.raises(PluginError):
        Subject("tcp", engine=f"{broken_adapters.__name__}:nothing").driver()
