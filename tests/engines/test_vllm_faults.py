"""vLLM servers over a transport with switches: dropped bytes, held transfers, a stopped producer."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from kvx.config import Options, bounds
from kvx.core.model import Mode
from kvx.core.wire import parse_ticket

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LENGTHS = [2, 3, 5, 8, 16, 30, 31, 32, 33, 34, 63, 64, 65, 96, 97, 100, 128, 200, 257, 700]
MODES = [Mode.PULL, Mode.PUSH]


@frozen
class Trio:
    """A producer and two consumers; the second one's memory cannot be protected (region access, no fence)."""

    prefill: Any
    decode: Any
    exposed: Any
    folder: Path

    def turn(self, name: str, what: str, *, on: bool) -> None:
        path = self.folder / f"{name}.{what}"
        if on:
            path.touch()
        else:
            path.unlink(missing_ok=True)

    def trace(self, name: str, transfer: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.folder / f"{name}.trace").read_text().splitlines()]
        return [line for line in lines if line["transfer"] == transfer]


@pytest.fixture(scope="module")
def trio(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    folder = tmp_path_factory.mktemp("switches")

    def start(name: str, *, region: bool = False) -> Any:
        transport = "switch:switch"
        return bench.start(
            name,
            "--no-enable-prefix-caching",  # garbage of a control must not be found again
            env={"PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))},
            transports=[transport],
            **{transport: {"switch": str(folder / name), "region": region}},
        )

    made = Trio(start("prefill"), start("decode"), start("exposed", region=True), folder)
    bench.cluster.wait_ready(timeout_s=480)
    yield made
    for instance in (made.prefill, made.decode, made.exposed):
        assert bench.until(lambda instance=instance: not instance.status()["open"], 60), instance.status()


@pytest.fixture(autouse=True)
def _switches_are_off(trio: Trio) -> Iterator[None]:
    yield
    trio.prefill.child.signal(signal.SIGCONT)
    for name in ("prefill", "decode", "exposed"):
        for what in ("drop", "hold", "mute"):
            trio.turn(name, what, on=False)


def states(instance: Any, transfer: str) -> list[str]:
    legs: list[str] = instance.status()["open"].get(transfer, [])
    return legs


@pytest.mark.parametrize("mode", MODES)
def test_the_control_with_dropped_bytes_has_other_tokens(bench: Any, trio: Trio, keep: Any, mode: Mode) -> None:
    """Without it, equal tokens would prove nothing: the same harness, the same servers, no bytes."""
    initiator = "prefill" if mode is Mode.PUSH else "decode"
    rows = []
    work = [bench.completion(prompt, 16) for prompt in bench.prompts(21 if mode is Mode.PULL else 31, LENGTHS)]
    wanted = [trio.prefill.post(body).tokens for body in work]
    # The control comes first: afterwards the decode server's blocks may hold the right bytes from before.
    trio.turn(initiator, "drop", on=True)
    empty = [bench.serve(trio.prefill, trio.decode, body, mode).decode for body in work]
    trio.turn(initiator, "drop", on=False)
    whole = [bench.serve(trio.prefill, trio.decode, body, mode).decode for body in work]
    for length, tokens, without, answer in zip(LENGTHS, wanted, empty, whole, strict=True):
        rows.append(
            {
                "tokens": length,
                "equal": answer.tokens == tokens,
                "ok": answer.kvx["ok"],
                "control_equal": without.tokens == tokens,
                "control_ok": without.kvx["ok"],
            }
        )
    keep(f"vllm_control_{mode.value}", rows)
    assert [row["tokens"] for row in rows if not row["equal"] or not row["ok"]] == []
    assert [row["tokens"] for row in rows if row["control_equal"] or not row["control_ok"]] == []


def test_of_two_readers_of_one_ticket_exactly_one_succeeds(bench: Any, trio: Trio, keep: Any) -> None:
    rows = []
    for prompt in bench.prompts(22, [100, 700, 33, 257, 64]):
        body = bench.completion(prompt)
        wanted = trio.prefill.post(body).tokens
        first = trio.prefill.post(bench.dialect.prefill_leg(body, Mode.PULL, ""))
        leg = bench.dialect.decode_leg(body, Mode.PULL, "", prefill_answer=first.body)
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda reader: reader.post(leg), (trio.decode, trio.exposed)))  # noqa: B023
        rows.append([{"equal": answer.tokens == wanted, **answer.kvx} for answer in answers])
    keep("vllm_two_readers", rows)
    for readers in rows:
        assert sorted(reader["ok"] for reader in readers) == [False, True]
        assert all(reader["equal"] for reader in readers)


@pytest.mark.parametrize("late", ["decode", "prefill"])
def test_pushed_bytes_stand_in_the_decode_server_before_prefill_ends(
    bench: Any, trio: Trio, keep: Any, late: str
) -> None:
    """One clock for both: the machine's. The last blocks are posted when the last chunk is computed."""
    rows: list[dict[str, Any]] = []
    overlapped = 0
    for prompt in bench.prompts(23 if late == "decode" else 24, [700] * 12):
        body, transfer = bench.completion(prompt), secrets.token_hex(8)
        delay = {f"{late}_delay_s": 0.02}
        wanted = trio.prefill.post(body).tokens
        served = bench.serve(trio.prefill, trio.decode, body, Mode.PUSH, transfer=transfer, **delay)
        trace = trio.trace("prefill", transfer)
        first_done = min(line["at"] for line in trace if line["what"] == "OpDone")
        last_post = max(line["at"] for line in trace if line["what"] == "post")
        rows.append(
            {
                "late": late,
                "equal": served.decode.tokens == wanted,
                "first_bytes_in_decode_s": first_done - served.prefill.started,
                "last_chunk_computed_s": last_post - served.prefill.started,
                "bytes_in_decode_by_then": sum(
                    line["bytes"] for line in trace if line["what"] == "OpDone" and line["at"] < last_post
                ),
                "bytes": served.decode.kvx["bytes"],
            }
        )
        overlapped += first_done < last_post
        if overlapped == 5:
            break
    keep(f"vllm_push_overlap_{late}_late", rows)
    assert all(row["equal"] for row in rows)
    assert overlapped == 5


@pytest.mark.parametrize("state", ["exposed", "moving", "settling"])
def test_a_client_that_leaves_in_each_state_of_the_leg(bench: Any, trio: Trio, keep: Any, state: str) -> None:
    """The decode server's leg is held in the state, then its client leaves; both pools are full afterwards."""
    rows = []
    for prompt in bench.prompts({"exposed": 25, "moving": 26, "settling": 27}[state], [300] * 5):
        body, transfer = bench.completion(prompt, 40), secrets.token_hex(8)
        hold = {"exposed": hold_exposed, "moving": hold_moving, "settling": hold_settling}[state]
        with ThreadPoolExecutor(2) as pool:
            transfer = hold(bench, trio, pool, body, transfer)
            assert bench.until(lambda: state in states(trio.decode, transfer), 10), trio.decode.status()  # noqa: B023
            seen = states(trio.decode, transfer)
            trio.decode.leave()
            time.sleep(0.2)
            after = states(trio.decode, transfer)
            _switches_off(trio)
        done = bench.until(lambda: not trio.decode.status()["open"] and not trio.prefill.status()["open"], 20)
        outcome = trio.decode.outcomes().get(transfer)
        rows.append({"state_when_the_client_left": seen, "0.2_s_later": after, "over": done, "outcome": outcome})
        assert done, (trio.decode.status(), trio.prefill.status())
    keep(f"vllm_abort_{state}", rows)
    for instance in (trio.prefill, trio.decode):
        assert instance.blocks() == {"total": 64, "free": 64, "held": 0}
    (prompt,) = bench.prompts(28, [100])
    wanted = trio.prefill.post(bench.completion(prompt)).tokens
    assert bench.serve(trio.prefill, trio.decode, bench.completion(prompt), Mode.PUSH).decode.tokens == wanted


def test_blocks_of_a_client_that_left_stay_until_the_writer_has_stopped(bench: Any, trio: Trio, keep: Any) -> None:
    """Nothing but the writer's word protects this server's memory, and the writer cannot speak."""
    consumer = trio.exposed
    (prompt,) = bench.prompts(36, [640])
    body, transfer = bench.completion(prompt), secrets.token_hex(8)
    trio.turn("prefill", "hold", on=True)
    with ThreadPoolExecutor(1) as pool:
        consumer.enter(bench.dialect.decode_leg(body, Mode.PUSH, transfer, prefill_address=trio.prefill.control))
        pool.submit(trio.prefill.post, bench.dialect.prefill_leg(body, Mode.PUSH, transfer))
        assert bench.until(lambda: states(trio.prefill, transfer) == ["moving"], 10), trio.prefill.status()
        trio.prefill.child.signal(signal.SIGSTOP)
        consumer.leave()
        assert bench.until(lambda: states(consumer, transfer) == ["revoking"], 10), consumer.status()
        held = consumer.blocks()["held"]
        trio.turn("prefill", "hold", on=False)
        trio.prefill.child.signal(signal.SIGCONT)
    over = bench.until(lambda: not consumer.status()["open"], 30)
    keep("vllm_abort_before_the_writer_stopped", {"held": held, "outcome": consumer.outcomes().get(transfer)})
    assert held == 20
    assert over, consumer.status()
    assert consumer.blocks() == {"total": 64, "free": 64, "held": 0}


def _switches_off(trio: Trio) -> None:
    trio.prefill.child.signal(signal.SIGCONT)
    for what in ("hold", "mute"):
        trio.turn("prefill", what, on=False)
        trio.turn("decode", what, on=False)


def hold_exposed(bench: Any, trio: Trio, pool: ThreadPoolExecutor, body: Any, transfer: str) -> str:
    """Push; the producer's engine never gets its leg."""
    trio.decode.enter(bench.dialect.decode_leg(body, Mode.PUSH, transfer, prefill_address=trio.prefill.control))
    return transfer


def hold_moving(bench: Any, trio: Trio, pool: ThreadPoolExecutor, body: Any, transfer: str) -> str:
    """Pull; the reader's completions are held back."""
    trio.turn("decode", "mute", on=True)
    return _enter_pull(bench, trio, body)


def hold_settling(bench: Any, trio: Trio, pool: ThreadPoolExecutor, body: Any, transfer: str) -> str:
    """Pull; all bytes are there, and the producer is stopped before it can answer Done."""
    whole = bench.serve(trio.prefill, trio.decode, body, Mode.PULL).decode.kvx["bytes"]
    transfer = hold_moving(bench, trio, pool, body, transfer)
    assert bench.until(lambda: landed(trio, transfer) == whole, 10), trio.trace("decode", transfer)
    trio.prefill.child.signal(signal.SIGSTOP)
    trio.turn("decode", "mute", on=False)
    return transfer


def landed(trio: Trio, transfer: str) -> int:
    """Bytes of the transfer that have reached the decode server, whether or not it was told."""
    return sum(line["bytes"] for line in trio.trace("decode", transfer) if line["what"] == "OpDone")


def _enter_pull(bench: Any, trio: Trio, body: Any) -> str:
    first = trio.prefill.post(bench.dialect.prefill_leg(body, Mode.PULL, ""))
    trio.decode.enter(bench.dialect.decode_leg(body, Mode.PULL, "", prefill_answer=first.body))
    return parse_ticket(first.kvx["ticket"]).grant.transfer


@pytest.mark.parametrize("reader", ["decode", "exposed"])
def test_a_producer_that_stops_in_mid_write(bench: Any, trio: Trio, keep: Any, reader: str) -> None:
    """kvx_tcp forbids: the blocks are free with the outcome. Without a fence they wait in quarantine."""
    consumer = getattr(trio, reader)
    prompt, small, large = bench.prompts(29, [640, 1200, 1900])
    wanted = {len(p): trio.prefill.post(bench.completion(p)).tokens for p in (prompt, small, large)}
    transfer = secrets.token_hex(8)
    limit = bounds(Options.load(consumer.server.options, env={}))["the peer dies or stops in mid-transfer"]
    trio.turn("prefill", "hold", on=True)
    with ThreadPoolExecutor(3) as pool:
        body = bench.completion(prompt)
        decode_leg = bench.dialect.decode_leg(body, Mode.PUSH, transfer, prefill_address=trio.prefill.control)
        failed: Future[Any] = pool.submit(consumer.post, decode_leg)
        pool.submit(trio.prefill.post, bench.dialect.prefill_leg(body, Mode.PUSH, transfer))
        moving: Callable[[], bool] = lambda: states(trio.prefill, transfer) == ["moving"]  # noqa: E731
        assert bench.until(moving, 10), trio.prefill.status()
        assert bench.until(lambda: len(trio.trace("prefill", transfer)) > 3, 10)
        trio.prefill.child.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        answer = failed.result(60)
        answered = time.monotonic()
        row = {
            "reader": reader,
            "bound_s": limit,
            "outcome": consumer.outcomes()[transfer],
            "answered_after_s": answered - stopped,
            "state_after_outcome": states(consumer, transfer),
            "blocks_after_outcome": consumer.blocks(),
        }
        assert answer.kvx["ok"] is False
        assert answer.tokens == wanted[640]
        # What fits into the free blocks is served now; what needs every block has to wait for the release.
        one = consumer.post(bench.completion(small))
        assert one.tokens == wanted[1200]
        all_blocks: Future[Any] = pool.submit(consumer.post, bench.completion(large))
        waited = not bench.until(all_blocks.done, 3)
        trio.turn("prefill", "hold", on=False)
        trio.prefill.child.signal(signal.SIGCONT)
        continued = time.monotonic()
        whole = all_blocks.result(60)
        released = time.monotonic()
    row |= {
        "needs_every_block_waited": waited,
        "needs_every_block_equal": whole.tokens == wanted[1900],
        "answered_after_continue_s": released - continued,
        "seconds_from_stop_to_outcome": row["outcome"]["seconds"],
    }
    keep(f"vllm_stopped_producer_{reader}", row)
    assert answered - stopped < limit + 5  # the bound of the outcome, and the recompute
    assert whole.tokens == wanted[1900]
    if reader == "decode":
        assert row["blocks_after_outcome"] == {"total": 64, "free": 64, "held": 0}
    else:
        assert row["blocks_after_outcome"]["held"] == 20
        assert waited
    assert bench.until(lambda: not consumer.status()["open"], 30), consumer.status()
    assert consumer.blocks() == {"total": 64, "free": 64, "held": 0}


def test_blocks_in_quarantine_come_back_when_the_writers_death_is_proven(bench: Any, trio: Trio, keep: Any) -> None:
    """Nobody can say that the killed producer's bytes are over, until another start of it answers."""
    consumer = trio.exposed
    (prompt,) = bench.prompts(30, [640])
    body, transfer = bench.completion(prompt), secrets.token_hex(8)
    wanted = trio.prefill.post(body).tokens
    trio.turn("prefill", "hold", on=True)
    with ThreadPoolExecutor(2) as pool:
        leg = bench.dialect.decode_leg(body, Mode.PUSH, transfer, prefill_address=trio.prefill.control)
        failed = pool.submit(consumer.post, leg)
        pool.submit(trio.prefill.post, bench.dialect.prefill_leg(body, Mode.PUSH, transfer))  # it will not be answered
        assert bench.until(lambda: states(trio.prefill, transfer) == ["moving"], 10), trio.prefill.status()
        trio.prefill.child.signal(signal.SIGKILL)
        killed = time.monotonic()
        answer = failed.result(60)
        answered = time.monotonic()
    assert answer.tokens == wanted
    assert answer.kvx["ok"] is False
    held = consumer.blocks()["held"]
    trio.turn("prefill", "hold", on=False)
    bench.restart("prefill")
    freed = bench.until(lambda: consumer.blocks()["held"] == 0, 60)
    free = time.monotonic()
    keep(
        "vllm_quarantine_ends_with_proof",
        {
            "outcome": consumer.outcomes()[transfer],
            "answered_after_s": answered - killed,
            "held_before_the_restart": held,
            "free_after_s": free - killed,
        },
    )
    assert held == 20
    assert freed, consumer.status()
    assert consumer.blocks() == {"total": 64, "free": 64, "held": 0}
    assert bench.serve(trio.prefill, consumer, body, Mode.PUSH).decode.kvx["ok"] is True


def bound(instance: Any, what: str) -> float:
    return bounds(Options.load(instance.server.options, env={}))[what]


DIES = "the peer dies or stops in mid-transfer"


def test_a_producer_killed_before_during_and_after_transfers(bench: Any, trio: Trio, keep: Any) -> None:
    """One kill meets transfers of both modes in each phase; the decode server answers all of them, and lives on."""
    prefill, decode = trio.prefill, trio.decode
    prompts = dict(zip(("after", "push", "pull", "late pull", "late push"), bench.prompts(32, [100] * 5), strict=True))
    prompts["push"] = bench.prompts(33, [640])[0]
    bodies = {name: bench.completion(prompt, 8) for name, prompt in prompts.items()}
    bodies["after"]["max_tokens"] = 400
    wanted = {name: prefill.post(body).tokens for name, body in bodies.items()}

    def pushed(name: str) -> tuple[str, Any]:
        transfer = secrets.token_hex(8)
        return transfer, bench.dialect.decode_leg(bodies[name], Mode.PUSH, transfer, prefill_address=prefill.control)

    def pulled(name: str) -> Any:
        first = prefill.post(bench.dialect.prefill_leg(bodies[name], Mode.PULL, ""))
        return bench.dialect.decode_leg(bodies[name], Mode.PULL, "", prefill_answer=first.body)

    with ThreadPoolExecutor(6) as pool:
        late_pull = pulled("late pull")
        leg = pulled("after")
        answers = {"after": pool.submit(decode.post, leg)}
        pull = parse_ticket(leg["kv_transfer_params"]["kvx"]["ticket"]).grant.transfer
        assert bench.until(lambda: decode.outcomes().get(pull, {}).get("ok"), 10), decode.status()
        trio.turn("prefill", "hold", on=True)
        transfer, leg = pushed("push")
        answers["push"] = pool.submit(decode.post, leg)
        pool.submit(prefill.post, bench.dialect.prefill_leg(bodies["push"], Mode.PUSH, transfer))  # never answered
        assert bench.until(lambda: states(prefill, transfer) == ["moving"], 10), prefill.status()
        trio.turn("decode", "mute", on=True)
        answers["pull"] = pool.submit(decode.post, pulled("pull"))
        assert bench.until(lambda: ["moving"] in decode.status()["open"].values(), 10), decode.status()
        prefill.child.signal(signal.SIGKILL)
        killed = time.monotonic()
        trio.turn("decode", "mute", on=False)
        trio.turn("prefill", "hold", on=False)
        answers["late pull"] = pool.submit(decode.post, late_pull)
        answers["late push"] = pool.submit(decode.post, pushed("late push")[1])
        rows = {
            name: {"answered_after_s": answer.result(120).ended - killed, **answer.result().kvx}
            for name, answer in answers.items()
        }
    equal = {name: answer.result().tokens == wanted[name] for name, answer in answers.items()}
    bench.restart("prefill")
    served = {mode: bench.serve(prefill, decode, bodies["push"], mode).decode for mode in MODES}
    keep("vllm_killed_producer_phases", {"rows": rows, "equal": equal, "bound_s": bound(decode, DIES)})
    assert equal == dict.fromkeys(rows, True)
    assert {name: row["ok"] for name, row in rows.items()} == {name: name == "after" for name in rows}
    assert {rows[name]["reason"] for name in rows if name != "after"} <= {
        "peer_lost",
        "lease_ended",
        "epoch",
        "transport",
    }
    for name in ("push", "pull", "late pull", "late push"):
        assert rows[name]["seconds"] < bound(decode, DIES) + 5
    assert all(one.tokens == wanted["push"] and one.kvx["ok"] for one in served.values())
    assert bench.until(lambda: decode.blocks() == {"total": 64, "free": 64, "held": 0}, 20)


def test_a_consumer_killed_in_mid_transfer_and_started_again(bench: Any, trio: Trio, keep: Any) -> None:
    """The producer has its blocks back in the bound, and serves the new start; nobody restarts it."""
    prefill, decode = trio.prefill, trio.decode
    one, other = bench.prompts(34, [640, 300])
    wanted = {len(prompt): prefill.post(bench.completion(prompt)).tokens for prompt in (one, other)}
    transfer, before = secrets.token_hex(8), decode.probe()["epoch"]
    trio.turn("prefill", "hold", on=True)
    trio.turn("decode", "mute", on=True)
    with ThreadPoolExecutor(3) as pool:
        leg = bench.dialect.decode_leg(bench.completion(one), Mode.PUSH, transfer, prefill_address=prefill.control)
        gone = [pool.submit(decode.post, leg)]
        pool.submit(prefill.post, bench.dialect.prefill_leg(bench.completion(one), Mode.PUSH, transfer))
        assert bench.until(lambda: states(prefill, transfer) == ["moving"], 10), prefill.status()
        first = prefill.post(bench.dialect.prefill_leg(bench.completion(other), Mode.PULL, ""))
        leg = bench.dialect.decode_leg(bench.completion(other), Mode.PULL, "", prefill_answer=first.body)
        gone.append(pool.submit(decode.post, leg))
        assert bench.until(lambda: ["moving"] in decode.status()["open"].values(), 10), decode.status()
        decode.child.signal(signal.SIGKILL)
        killed = time.monotonic()
        lost = [type(answer.exception(60)).__name__ for answer in gone]
    trio.turn("prefill", "hold", on=False)
    trio.turn("decode", "mute", on=False)
    limit = max(bound(prefill, DIES), bound(prefill, "the reader of a ticket dies or never comes"))
    over = bench.until(lambda: not prefill.status()["open"], limit + 5)
    seconds = time.monotonic() - killed
    ticket = parse_ticket(first.kvx["ticket"]).grant.transfer
    ends = {"push": prefill.outcomes()[transfer], "pull": prefill.outcomes()[ticket]}
    bench.restart("decode")
    after = decode.probe()["epoch"]
    # Nobody has a connection to the new start: what stops now, stops in the handshake.
    first = prefill.post(bench.dialect.prefill_leg(bench.completion(other), Mode.PULL, ""))
    leg = bench.dialect.decode_leg(bench.completion(other), Mode.PULL, "", prefill_answer=first.body)
    with ThreadPoolExecutor(1) as pool:
        prefill.child.signal(signal.SIGSTOP)
        waiting = pool.submit(decode.post, leg)
        time.sleep(2)
        answered_while_stopped = waiting.done()
        prefill.child.signal(signal.SIGCONT)
        slow = waiting.result(60)
    served = {mode: bench.serve(prefill, decode, bench.completion(one), mode).decode for mode in MODES}
    keep(
        "vllm_killed_consumer",
        {"producer_free_after_s": seconds, "bound_s": limit, "outcomes": ends, "clients": lost, "slow": slow.kvx},
    )
    assert over, prefill.status()
    assert not any(end["ok"] for end in ends.values())
    assert after != before
    assert not answered_while_stopped
    assert (slow.kvx["ok"], slow.tokens) == (True, wanted[300])
    assert all(answer.tokens == wanted[640] and answer.kvx["ok"] for answer in served.values())
    for instance in (prefill, decode):
        assert bench.until(lambda instance=instance: instance.blocks() == {"total": 64, "free": 64, "held": 0}, 20)


def test_a_producer_that_accepts_and_never_speaks(bench: Any, trio: Trio, keep: Any) -> None:
    """Where a handshake can hang for ever, the client waits for ever."""
    (prompt,) = bench.prompts(35, [100])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        leg = bench.dialect.decode_leg(bench.completion(prompt), Mode.PUSH, "silent", prefill_address=address)
        answer = trio.decode.post(leg)
    limit = bound(trio.decode, "nobody answers at the peer's address")
    keep("vllm_silent_producer", {"bound_s": limit, "answered_after_s": answer.ended - answer.started, **answer.kvx})
    assert answer.kvx["ok"] is False
    assert answer.kvx["seconds"] < limit + 5
    assert answer.tokens == trio.prefill.post(bench.completion(prompt)).tokens
