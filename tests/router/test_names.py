"""DNS names in the pools: whoever they lead to serves, and a lookup that fails changes nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

from kvx.cluster import free_ports
from kvx.core.errors import ConfigError
from kvx.core.model import Mode
from kvx.router.names import MAX_ADDRESSES, Name, at
from kvx.router.settings import Listing


@define
class Zone:
    """What each name has: addresses, or the error of its lookup."""

    names: dict[str, Sequence[str] | OSError] = field(factory=dict)
    asked: dict[str, int] = field(factory=dict)

    async def resolve(self, host: str) -> Sequence[str]:
        self.asked[host] = self.asked.get(host, 0) + 1
        answer = self.names[host]
        if isinstance(answer, OSError):
            raise answer
        return answer


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Zone:
    made = Zone()
    monkeypatch.setattr("kvx.router.pools.Name", lambda url: Name(url, resolve=made.resolve))
    monkeypatch.setattr("kvx.router.names.LOOKUP_S", 0.02)
    monkeypatch.setattr("kvx.router.pools.FILE_S", 0.02)
    return made


def listing(port: int) -> Listing:
    return Listing([f"http+dns://p.test:{port}"], [f"http+dns://d.test:{port}"])


async def start(port: int, **fakes: Any) -> None:
    """Each at a loopback address of its own, all at one port, as behind a headless service."""
    for number, one in enumerate(fakes.values(), start=2):
        await one.start(port, f"127.0.0.{number}")


async def stop(*fakes: Any) -> None:
    for one in fakes:
        await one.stop()


def test_whoever_a_name_leads_to_serves(world: Any, fake: Any, zone: Zone) -> None:
    async def scenario() -> None:
        (port,) = free_ports(1)
        p, d0, d1 = fake("p"), fake("d0"), fake("d1")
        await start(port, p=p, d0=d0, d1=d1)
        zone.names = {"p.test": ["127.0.0.2"], "d.test": ["127.0.0.3"]}
        try:
            async with world(Mode.PUSH, [], [], listing=listing(port)) as w:
                pools = w.router.dispatcher.pools
                await w.until(lambda: len(pools.instances) == 2 and all(one.up for one in pools.instances))
                assert (await w.complete())[1]["choices"][0]["text"] == "d0"
                # push: nobody has said P's control address, so P itself has
                assert d0.bodies[0]["kv_transfer_params"]["kvx"]["from"] == p.address
                (kept,) = pools.prefill

                zone.names["d.test"] = ["127.0.0.4", "127.0.0.4"]
                await w.until(lambda: [one.url for one in pools.decode] == [f"http://127.0.0.4:{port}"])
                await w.until(lambda: pools.decode[0].up)
                assert (await w.complete())[1]["choices"][0]["text"] == "d1"
                assert pools.prefill[0] is kept  # who stays is not asked anew who it is
                assert (await w.status())["dns"] == [
                    {"pool": pool, "url": f"http+dns://{pool[0]}.test:{port}", "addresses": [address], "error": ""}
                    for pool, address in (("prefill", "127.0.0.2"), ("decode", "127.0.0.4"))
                ]
        finally:
            await stop(p, d0, d1)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), "Temporary failure"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        ((), "the name has no address"),
        (("fe80::1%eth0", "no-address"), "the name has no address"),
        ([f"10.0.{n // 256}.{n % 256}" for n in range(MAX_ADDRESSES + 1)], "more than 1024"),
        (["127.0.0.2"], "stands in both pools"),  # another pod's old address
    ],
)
def test_a_failed_lookup_changes_nothing_and_says_why(
    world: Any, fake: Any, zone: Zone, answer: Sequence[str] | OSError, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        (port,) = free_ports(1)
        p, d = fake("p"), fake("d")
        await start(port, p=p, d=d)
        zone.names = {"p.test": ["127.0.0.2"], "d.test": ["127.0.0.3"]}
        url = f"http+dns://d.test:{port}"
        try:
            async with world(Mode.PULL, [], [], listing=listing(port)) as w:
                pools = w.router.dispatcher.pools
                await w.until(lambda: len(pools.instances) == 2 and all(one.up for one in pools.instances))
                zone.names["d.test"] = answer
                await w.until(lambda: said in pools.names[url].error)
                asked = zone.asked["d.test"]
                await w.until(lambda: zone.asked["d.test"] > asked + 1)  # it goes on asking
                _, told = (await w.status())["dns"]
                assert (told["addresses"], said in told["error"]) == (["127.0.0.3"], True)
                async with w.client.get(f"{w.url}/metrics") as metrics:
                    assert f'kvx_router_dns_ok{{pool="decode",url="{url}"}} 0\n' in await metrics.text()
                assert (await w.complete())[0] == 200
                zone.names["d.test"] = ["127.0.0.3"]
                await w.until(lambda: not pools.names[url].error)
        finally:
            await stop(p, d)

    asyncio.run(scenario())
    assert caplog.text.count("stay the 1 known ones") == 1  # not once for each lookup


def test_a_router_starts_before_its_names_are_known(world: Any, fake: Any, zone: Zone) -> None:
    async def scenario() -> None:
        (port,) = free_ports(1)
        unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        zone.names = {"p.test": unknown, "d.test": unknown}
        async with world(Mode.PUSH, [], [], listing=listing(port)) as w:
            status, told = await w.complete()
            assert (status, told["error"]["type"]) == (503, "no_instance")
            assert "none is known" in told["error"]["message"]
            async with w.client.get(f"{w.url}/health") as answer:
                assert (answer.status, await answer.json()) == (503, {"prefill": 0, "decode": 0})

    asyncio.run(scenario())


def test_a_lookup_that_hangs_is_told_and_not_doubled(
    world: Any, fake: Any, zone: Zone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvx.router.names.LIMIT_S", 0.05)

    async def scenario() -> None:
        go_on, asked = asyncio.Event(), []

        async def hangs(host: str) -> Sequence[str]:
            asked.append(host)
            if host == "d.test" and len(asked) > 2:
                await go_on.wait()
            return {"p.test": ["127.0.0.2"], "d.test": ["127.0.0.3"]}[host]

        monkeypatch.setattr("kvx.router.pools.Name", lambda url: Name(url, resolve=hangs))
        (port,) = free_ports(1)
        async with world(Mode.PULL, [], [], listing=listing(port), wait=False) as w:
            hung = w.router.dispatcher.pools.names[f"http+dns://d.test:{port}"]
            await w.until(lambda: hung.addresses and "no answer in 0.05 s" in hung.error)
            before = asked.count("d.test")
            after = len(asked) + 5
            await w.until(lambda: len(asked) >= after)  # the other name is looked up all the while
            assert asked.count("d.test") == before
            go_on.set()
            await w.until(lambda: not hung.error)

    asyncio.run(scenario())


def test_names_come_and_go_with_the_pool_file(world: Any, fake: Any, zone: Zone, tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "pools.toml"
        zone.names = {"p.test": ["127.0.0.1"], "other.test": ["127.0.0.1"]}
        async with world(Mode.PULL, [fake("p")], [fake("d")], pool_file=path) as w:
            pools = w.router.dispatcher.pools
            port = w.prefill[0].url.rpartition(":")[2]
            for host in ("p.test", "other.test"):
                path.write_text(f'prefill = ["http+dns://{host}:{port}/"]\ndecode = ["{w.decode[0].url}"]\n')
                await w.until(lambda host=host: [*pools.names] == [f"http+dns://{host}:{port}"])
                await w.until(lambda: [one.url for one in pools.prefill] == [w.prefill[0].url] and pools.prefill[0].up)
                assert (await w.complete())[0] == 200
            known = zone.asked["p.test"]
            after = zone.asked["other.test"] + 3
            await w.until(lambda: zone.asked["other.test"] >= after)
            assert zone.asked["p.test"] == known  # nobody asks for a name that is gone
            w.write_pools(w.prefill, w.decode)
            await w.until(lambda: not pools.names)
            assert (await w.complete())[0] == 200
            assert (await w.status())["dns"] == []

    asyncio.run(scenario())


def test_a_real_name(world: Any, fake: Any) -> None:
    """localhost has 127.0.0.1 everywhere, and ::1 in some places."""

    async def scenario() -> None:
        p, d = fake("p"), fake("d")
        await p.start()
        await d.start()
        ports = [one.url.rpartition(":")[2] for one in (p, d)]
        try:
            where = Listing(*([f"http+dns://localhost:{port}"] for port in ports))
            async with world(Mode.PUSH, [], [], listing=where) as w:
                pools = w.router.dispatcher.pools

                def serving() -> set[str]:
                    return {one.url for one in pools.instances if one.up}

                await w.until(lambda: {p.url, d.url} <= serving())
                assert (await w.complete())[1]["choices"][0]["text"] == "d"
                assert all("127.0.0.1" in one["addresses"] and not one["error"] for one in (await w.status())["dns"])
        finally:
            await stop(p, d)

    asyncio.run(scenario())


def test_a_name_and_its_addresses_are_written_as_urls() -> None:
    assert at("http+dns://p.test:8100", "10.0.0.1") == "http://10.0.0.1:8100"
    assert at("http+dns://p.test/a", "fd00::1") == "http://[fd00::1]:80/a"
    both = Listing(["http+dns://p.test:8100", "http://10.0.0.1:8100=10.0.0.1:5700"], ["http+dns://d.test:8200/"])
    assert both.names == {"http+dns://p.test:8100": "prefill", "http+dns://d.test:8200": "decode"}
    prefill, decode = both.instances(None, {"http+dns://p.test:8100": ["10.0.0.1", "10.0.0.2"]})
    assert [(one.url, one.address) for one in prefill] == [
        ("http://10.0.0.1:8100", "10.0.0.1:5700"),  # who is written down as well is one instance
        ("http://10.0.0.2:8100", None),
    ]
    assert decode == []


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        (["http+dns://p:1=10.0.0.1:5700"], ["http://d"], "cannot be that of all instances"),
        (["http+dns://x:1"], ["http+dns://x:1"], "x:1 stands in both pools"),
        (["http+dns://x:1", "http+dns://x:1/"], ["http://d"], "two prefill instances have the same URL"),
        (["https+dns://x:1"], ["http://d"], "is not a URL"),
        (["http+dns://:1"], ["http://d"], "is not a URL"),
    ],
)
def test_names_that_cannot_work_are_refused(prefill: list[str], decode: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Listing(prefill, decode)
