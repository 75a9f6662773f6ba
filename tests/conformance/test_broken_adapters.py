"""The broken adapters: each is the shipped one but for its bend, and the cases that are named for it exist."""

from __future__ import annotations

import sys

import pytest

from kvx import plugins
from kvx.core.errors import PluginError
from kvx.driver import Server
from kvx_conformance.suite.all import CASES
from kvx_conformance.suite.broken_adapters import BROKEN_ADAPTERS, CORRECT_ADAPTERS, ENGINE, ROLES
from kvx_conformance.suite.broken_server import BENDS
from kvx_conformance.suite.selection import ADAPTER, area
from kvx_conformance.suite.self_test import Kind, Specimen
from kvx_conformance.suite.subject import CountsBlocks, CutsOtherwise, ReadsCache, Subject

MODULE = "kvx_conformance.suite.broken_adapters"
SUBJECTS = {**CORRECT_ADAPTERS, **BROKEN_ADAPTERS}


def test_each_bend_is_a_subject() -> None:
    assert {name.removesuffix(ROLES) for name in SUBJECTS} == BENDS.keys() | {ENGINE}


def test_each_case_of_an_adapter_is_found_by_a_broken_one() -> None:
    named = {
        case.id
        for one in BROKEN_ADAPTERS.values()
        for case in CASES.values()
        if case.id in one.proves or case.id.startswith(one.found_by)
    }
    assert {case.id for case in CASES.values() if area(case) == ADAPTER} == named


@pytest.mark.parametrize("name", SUBJECTS)
def test_servers_have_roles_where_the_name_says_so(name: str) -> None:
    subject = {ENGINE: CORRECT_ADAPTERS[ENGINE]}.get(name) or Subject("tcp", engine=f"{MODULE}:{name}")
    assert subject.driver().has_roles is name.endswith(ROLES)


@pytest.mark.parametrize("name", BROKEN_ADAPTERS)
def test_only_a_server_with_kvx_is_bent(name: str) -> None:
    driver, own = BROKEN_ADAPTERS[name].subject.driver(), plugins.load().driver(ENGINE)
    for options in ({"listen": "127.0.0.1:5712"}, None):
        server = Server("folder", 8123, options=options)
        bent, plain = driver.launch(server).command, own.launch(server).command
        between = ("kvx_conformance.suite.broken_server", name.removesuffix(ROLES)) if options else ()
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
    for begin in (*one.found_by, *one.proves):
        found = [case for case in CASES.values() if case.id.startswith(begin)]
        assert found and all(specimen.own(case) for case in found)


def test_there_is_no_other_bend() -> None:
    with pytest.raises(PluginError):
        Subject("tcp", engine=f"{MODULE}:nothing").driver()
