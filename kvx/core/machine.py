"""The states of one leg and every transition between them.

A leg is the share of a transfer between one producer rank and one consumer rank. Two rules:
everything that decides which state follows lives in this file, and this file knows neither
time nor bytes nor messages. A pair (state, cause) that a table does not list cannot happen;
`step` says so with LocalProtocolError. What a cause may not change is listed as a stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from kvx.core.errors import LocalProtocolError


class State(Enum):
    """Where a leg stands. The docs' diagrams are generated from the tables below."""

    NEW = "new"  # initiator: has neither grant nor blocks
    GRANTED = "granted"  # initiator: has the grant, waits for its engine's blocks
    STAGED = "staged"  # initiator: has blocks, waits for the grant
    MOVING = "moving"  # initiator: operations run, or more parts are to come
    DRAINING = "draining"  # initiator: failed, operations not yet over
    SETTLING = "settling"  # initiator: every byte is there, waits for the Ack
    EXPOSED = "exposed"  # target: its blocks may be written or read
    REVOKING = "revoking"  # target: failed, waits until nothing can land any more
    FENCING = "fencing"  # both: failed, and what may still land is not known (quarantine)
    DONE = "done"
    FAILED = "failed"


class Cause(Enum):
    """Why a leg moves."""

    GRANT = "grant"
    STAGED = "staged"
    QUIET = "quiet"  # last part staged, all operations done
    BROKEN = "broken"  # an operation failed, or the facts do not fit
    DRAINED = "drained"  # no operation is left
    ACK = "ack"
    NACK = "nack"
    DONE = "done"
    STOPPED = "stopped"
    ABORT = "abort"
    REVOKE = "revoke"
    LEASE = "lease"
    PATIENCE = "patience"
    LOST = "lost"
    OVERDUE = "overdue"
    FORBIDDEN = "forbidden"
    FENCED = "fenced"
    UNSENT = "unsent"  # target: failed before its grant left, so nothing can ever land


TERMINAL = frozenset({State.DONE, State.FAILED})
SETTLED = TERMINAL | {State.FENCING}
"""States in which a leg no longer holds back its transfer's Outcome (R6)."""

Table = Mapping[State, Mapping[Cause, State]]

_ENDS = (Cause.ABORT, Cause.REVOKE, Cause.LEASE, Cause.PATIENCE, Cause.LOST, Cause.OVERDUE, Cause.BROKEN)

INITIATOR: Table = {
    State.NEW: {
        Cause.GRANT: State.GRANTED,
        Cause.STAGED: State.STAGED,
        **dict.fromkeys(_ENDS, State.FAILED),
    },
    State.GRANTED: {
        Cause.STAGED: State.MOVING,
        **dict.fromkeys(_ENDS, State.FAILED),
    },
    State.STAGED: {
        Cause.GRANT: State.MOVING,
        Cause.STAGED: State.STAGED,
        **dict.fromkeys(_ENDS, State.FAILED),
    },
    State.MOVING: {
        Cause.STAGED: State.MOVING,
        Cause.QUIET: State.SETTLING,
        **dict.fromkeys(_ENDS, State.DRAINING),
    },
    State.DRAINING: {
        Cause.DRAINED: State.FAILED,
        **dict.fromkeys(_ENDS, State.DRAINING),
        Cause.OVERDUE: State.FENCING,
    },
    State.FENCING: {
        Cause.FENCED: State.FAILED,
        Cause.DRAINED: State.FAILED,
        **dict.fromkeys(_ENDS, State.FENCING),
    },
    State.SETTLING: {
        Cause.ACK: State.DONE,
        Cause.NACK: State.FAILED,
        Cause.LOST: State.FAILED,
        Cause.OVERDUE: State.FAILED,
        **dict.fromkeys((Cause.ABORT, Cause.REVOKE, Cause.LEASE, Cause.PATIENCE, Cause.BROKEN), State.SETTLING),
    },
}

TARGET_READ: Table = {
    # A late READ cannot hurt: the target ends, and the reader learns it from Ack(ok=false) (R4).
    State.EXPOSED: {
        Cause.DONE: State.DONE,
        Cause.LOST: State.EXPOSED,
        **dict.fromkeys(
            (Cause.STOPPED, Cause.ABORT, Cause.LEASE, Cause.OVERDUE, Cause.BROKEN, Cause.UNSENT), State.FAILED
        ),
    },
}

_WRITE_ENDS = (Cause.ABORT, Cause.LEASE, Cause.OVERDUE, Cause.BROKEN)

TARGET_WRITE: Table = {
    # access = region: only the writer, or a fence, can say that nothing lands any more (R1).
    State.EXPOSED: {
        Cause.DONE: State.DONE,
        Cause.STOPPED: State.FAILED,
        Cause.UNSENT: State.FAILED,
        **dict.fromkeys(_WRITE_ENDS, State.REVOKING),
        Cause.LOST: State.FENCING,
    },
    State.REVOKING: {
        Cause.DONE: State.FAILED,
        Cause.STOPPED: State.FAILED,
        **dict.fromkeys(_WRITE_ENDS, State.REVOKING),
        Cause.LOST: State.FENCING,
        Cause.OVERDUE: State.FENCING,
    },
    State.FENCING: {
        Cause.DONE: State.FAILED,
        Cause.STOPPED: State.FAILED,
        Cause.FENCED: State.FAILED,
        **dict.fromkeys((*_WRITE_ENDS, Cause.LOST), State.FENCING),
    },
}

TARGET_WRITE_FORBIDDABLE: Table = {
    # access = grant: the target's own transport forbids, so REVOKING ends without the peer.
    **TARGET_WRITE,
    State.EXPOSED: {**TARGET_WRITE[State.EXPOSED], Cause.LOST: State.REVOKING},
    State.REVOKING: {**TARGET_WRITE[State.REVOKING], Cause.FORBIDDEN: State.FAILED, Cause.LOST: State.REVOKING},
    State.FENCING: {**TARGET_WRITE[State.FENCING], Cause.FORBIDDEN: State.FAILED},
}


def step(table: Table, state: State, cause: Cause) -> State:
    """The state that follows, or LocalProtocolError for a pair that cannot happen."""
    try:
        return table[state][cause]
    except KeyError:
        raise LocalProtocolError(f"no transition from {state.value} by {cause.value}") from None
