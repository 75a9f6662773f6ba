"""The tables of states: complete, without dead ends, and nothing leaves an end."""

from __future__ import annotations

import pytest

from kvx.core import machine
from kvx.core.errors import LocalProtocolError
from kvx.core.machine import SETTLED, TERMINAL, Cause, State, Table, step

TABLES: dict[str, Table] = {
    "initiator": machine.INITIATOR,
    "read target": machine.TARGET_READ,
    "write target": machine.TARGET_WRITE,
    "write target that can forbid": machine.TARGET_WRITE_FORBIDDABLE,
}
FIRST = {"initiator": State.NEW}

every_table = pytest.mark.parametrize("name", TABLES)


def reached(table: Table, start: State) -> set[State]:
    found, look = {start}, [start]
    while look:
        for following in table.get(look.pop(), {}).values():
            if following not in found:
                found.add(following)
                look.append(following)
    return found


@every_table
def test_every_state_is_reached_and_every_reached_state_is_there(name: str) -> None:
    table = TABLES[name]
    assert reached(table, FIRST.get(name, State.EXPOSED)) == set(table) | TERMINAL


@every_table
def test_nothing_leaves_an_end(name: str) -> None:
    assert not TERMINAL & set(TABLES[name])
    for state in TERMINAL:
        for cause in Cause:
            with pytest.raises(LocalProtocolError, match=f"from {state.value} by {cause.value}"):
                step(TABLES[name], state, cause)


@every_table
def test_every_state_can_fail(name: str) -> None:
    table = TABLES[name]
    for state in table:
        assert State.FAILED in reached(table, state)


@every_table
def test_loss_and_abort_and_the_end_of_a_wait_are_handled_everywhere(name: str) -> None:
    for state, causes in TABLES[name].items():
        assert {Cause.LOST, Cause.ABORT, Cause.OVERDUE} <= set(causes), state


@every_table
def test_a_failing_leg_is_never_done(name: str) -> None:
    for state in (State.DRAINING, State.REVOKING, State.FENCING):
        assert State.DONE not in reached(TABLES[name], state)


@every_table
def test_time_alone_never_frees_what_may_still_be_written(name: str) -> None:
    """R1: out of a quarantine there is only proof, never the end of a wait."""
    table = TABLES[name]
    waits = (Cause.OVERDUE, Cause.LEASE, Cause.PATIENCE, Cause.LOST, Cause.ABORT)
    for state in (State.DRAINING, State.FENCING, State.REVOKING):
        for cause in waits:
            assert table.get(state, {}).get(cause) is not State.FAILED, (state, cause)


def test_a_read_target_never_waits_for_its_reader() -> None:
    assert set(machine.TARGET_READ) == {State.EXPOSED}
    assert set(machine.TARGET_READ[State.EXPOSED].values()) == {State.EXPOSED, State.DONE, State.FAILED}


def test_only_done_ends_well_at_a_target_and_only_an_ack_at_an_initiator() -> None:
    for name, table in TABLES.items():
        wanted = Cause.ACK if name == "initiator" else Cause.DONE
        assert {cause for row in table.values() for cause, state in row.items() if state is State.DONE} == {wanted}


def test_what_a_transport_can_forbid_is_freed_without_the_peer() -> None:
    table = machine.TARGET_WRITE_FORBIDDABLE
    for state in (State.REVOKING, State.FENCING):
        assert step(table, state, Cause.FORBIDDEN) is State.FAILED
        with pytest.raises(LocalProtocolError):
            step(machine.TARGET_WRITE, state, Cause.FORBIDDEN)


def test_an_outcome_waits_for_draining_and_revoking_only() -> None:
    assert {State.DONE, State.FAILED, State.FENCING} == SETTLED
