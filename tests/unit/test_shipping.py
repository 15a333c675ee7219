"""The image and docker-compose.yml: what they name exists, and fits what the product says of itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.__main__ import COMMANDS
from gateway.core.config import Config
from gateway.core.settings.checks import one_engine
from gateway.runtime.configfile import load

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
FOLDER = ROOT / "deploy" / "compose"
ENGINES = {"llama-server": 8080, "ollama": 11434, "vllm": 8000}
OURS = ("gateway", "keys", "metrics-key")
KNOWN = {  # of the compose specification, what a service here may have
    "image": str, "build": dict, "profiles": list, "restart": str, "read_only": bool, "cap_drop": list,
    "security_opt": list, "tmpfs": list, "depends_on": (list, dict), "ports": list, "environment": dict,
    "volumes": list, "networks": list, "network_mode": str, "stop_grace_period": str, "ulimits": dict,
    "extra_hosts": list, "entrypoint": list, "command": list, "user": str, "healthcheck": dict,
    "shm_size": str, "deploy": dict,
}  # fmt: skip


def instructions(stage: int) -> list[str]:
    """The lines of one stage of the Dockerfile, continued ones joined, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    stages = re.split(r"^(?=FROM )", text, flags=re.MULTILINE)[1:]
    return [re.sub(r"\s+", " ", line) for line in stages[stage].splitlines() if line.strip()]


def instruction(name: str) -> str:
    (line,) = (line for line in instructions(-1) if line.startswith(f"{name} "))
    return line.removeprefix(f"{name} ")


def volumes(service: str) -> Iterator[tuple[str, str, str]]:
    """Source, target and mode of each mount."""
    for line in SERVICES[service].get("volumes", ()):
        source, target, mode = re.fullmatch(r"((?:\$\{[^}]*\}|[^:])+):([^:]+)(?::(\w+))?", line).groups()  # type: ignore[union-attr]  # fmt: skip
        yield source, target, mode or "rw"


def networks(service: str) -> set[str]:
    return set(SERVICES[service].get("networks", ()))


def config() -> Config:
    return load(FOLDER / "slotgate.yaml", environ={})


def test_the_image_runs_without_root_and_without_what_built_it() -> None:
    last = instructions(-1)
    assert len(re.findall(r"^FROM ", DOCKERFILE, re.MULTILINE)) == 2
    assert instruction("USER") == "10001:10001"
    assert [line for line in last if line.startswith("COPY")] == [
        "COPY --from=build /opt/slotgate /opt/slotgate"
    ]
    assert "pip uninstall" in " ".join(last)
    assert not re.search(r"apt-get|pip install|gcc|curl", " ".join(last))
    assert all("-slim" in line for line in instructions(0) + last if line.startswith("FROM"))


def test_the_image_starts_the_command_with_the_config_where_people_mount_it() -> None:
    assert json.loads(instruction("ENTRYPOINT")) == ["slotgate"]
    assert json.loads(instruction("CMD")) == ["serve"]
    assert set(json.loads(instruction("CMD"))) <= set(COMMANDS)
    assert "SLOTGATE_CONFIG=/etc/slotgate/slotgate.yaml" in instruction("ENV")
    assert instruction("STOPSIGNAL") == "SIGTERM"
    assert int(instruction("EXPOSE")) == Config(backends=()).listen.port


def test_what_is_copied_is_there_and_passes_the_ignore_file() -> None:
    passing = set(re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    copied = set()
    for line in instructions(0):
        if line.startswith("COPY "):
            copied |= set(line.split()[1:-1])
    assert copied == passing
    assert all((ROOT / name).exists() for name in copied)
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*", "all else stays out"


def test_the_wheel_can_be_built_from_what_is_copied(tmp_path: Path) -> None:
    """pyproject.toml names files; one that the image's build does not have would break it."""
    project = (ROOT / "pyproject.toml").read_text()
    for name in re.findall(r'^(?:readme = |license-files = \[)"([^"]+)"', project, re.MULTILINE):
        assert f"!{name}" in (ROOT / ".dockerignore").read_text()


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_has_only_what_compose_knows_and_names_what_is_there(name: str) -> None:
    service = SERVICES[name]
    assert [key for key in service if not isinstance(service[key], KNOWN.get(key, ()))] == []
    assert service["image"]
    assert set(service.get("depends_on", ())) <= SERVICES.keys()
    assert networks(name) <= COMPOSE["networks"].keys()
    assert networks(name) or service.get("network_mode") == "none"
    for source, target, _ in volumes(name):
        assert target.startswith("/")
        if source.startswith("./"):
            assert (ROOT / source).exists(), source
        elif not source.startswith("${"):
            assert source in COMPOSE["volumes"], source


def test_engines_are_reached_by_the_gateway_and_by_nobody_else() -> None:
    for name in ENGINES:
        assert SERVICES[name]["profiles"] == [name], "an engine runs only when it is asked for"
        assert "ports" not in SERVICES[name]
        assert networks(name) == {"engines"}
    on_it = {name for name in SERVICES if "engines" in networks(name)}
    assert on_it == {"gateway", *ENGINES}


def test_only_this_machine_reaches_what_is_published() -> None:
    for name, service in SERVICES.items():
        for port in service.get("ports", ()):
            assert re.fullmatch(r"\$\{[A-Z_]+:-127\.0\.0\.1:\d+\}:\d+", port), name


@pytest.mark.parametrize("name", [*OURS, "redis", "prometheus", "grafana"])
def test_services_have_no_capabilities_and_a_read_only_root(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_the_configuration_is_correct_and_names_the_engines_of_the_profiles() -> None:
    urls = {backend.name: backend.url for backend in config().backends}
    assert urls == {name: f"http://{name}:{port}" for name, port in ENGINES.items()}
    assert len({one_engine(url) for url in urls.values()}) == len(urls)
    told = SERVICES["llama-server"]["environment"]["LLAMA_ARG_PORT"]
    assert int(told) == ENGINES["llama-server"]
    assert SERVICES["ollama"]["environment"]["OLLAMA_HOST"].endswith(str(ENGINES["ollama"]))
    assert str(ENGINES["vllm"]) in SERVICES["vllm"]["command"]
    ollama = next(one for one in config().backends if one.name == "ollama")
    assert SERVICES["ollama"]["environment"]["OLLAMA_NUM_PARALLEL"] == str(ollama.slots)
    redis = config().redis
    assert redis is not None
    assert "redis" in SERVICES
    assert networks("redis") & networks("gateway")


def test_the_gateway_is_published_where_it_listens_and_has_time_to_drain() -> None:
    gateway = SERVICES["gateway"]
    assert gateway["ports"][0].endswith(f":{config().listen.port}")
    assert int(gateway["stop_grace_period"].removesuffix("s")) >= config().drain_s + 10


def test_keys_are_written_by_the_keys_service_and_read_by_the_gateway() -> None:
    keys = Path(config().auth.keys_file or "")
    mounts = {
        name: {target: (source, mode) for source, target, mode in volumes(name)} for name in OURS
    }
    assert mounts["gateway"][str(keys.parent)] == ("state", "ro")
    assert mounts["keys"][str(keys.parent)] == ("state", "rw")
    assert f"/etc/slotgate {keys.parent}" in instruction("RUN"), "the image gives it an owner"
    for name in OURS:
        assert mounts[name]["/etc/slotgate"] == ("./deploy/compose", "ro")
    assert SERVICES["keys"]["entrypoint"] == ["slotgate", "keys"]
    assert SERVICES["keys"]["profiles"] == ["tools"]


def test_prometheus_scrapes_the_gateway_with_the_key_that_was_made_for_it() -> None:
    told = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    plain = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    (job,), (model,) = told["scrape_configs"], plain["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"gateway:{config().listen.port}"]}]
    assert {**job, "static_configs": 0, "authorization": 0} == {**model, "static_configs": 0, "authorization": 0}  # fmt: skip
    assert {**told, "scrape_configs": 0} == {**plain, "scrape_configs": 0}
    mounts = {target: source for source, target, _ in volumes("prometheus")}
    key = Path(job["authorization"]["credentials_file"])
    assert mounts[str(key.parent)] == "state"
    assert key.name in SERVICES["metrics-key"]["command"][0]
    assert "--admin" in SERVICES["metrics-key"]["command"][0]
    for rules in told["rule_files"]:
        assert mounts[f"/etc/prometheus/{rules}"] == f"./deploy/prometheus/{rules}"
    assert networks("prometheus") & networks("gateway") == {"front"}


def test_grafana_finds_the_board_and_its_prometheus() -> None:
    mounts = {target: source for source, target, _ in volumes("grafana")}
    provider = yaml.safe_load((ROOT / "deploy" / "grafana" / "provisioning.yml").read_text())
    folder = provider["providers"][0]["options"]["path"]
    assert mounts[f"{folder}/slotgate.json"] == "./deploy/grafana/slotgate.json"
    source = yaml.safe_load((FOLDER / "grafana-datasource.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    assert SERVICES["prometheus"]["ports"][0].endswith(":9090")


def test_promtool_accepts_its_configuration(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on PATH (apt-get install prometheus)")
    shutil.copytree(ROOT / "deploy" / "prometheus", tmp_path, dirs_exist_ok=True)
    shutil.copy(FOLDER / "prometheus.yml", tmp_path)
    run = subprocess.run(
        [promtool, "check", "config", "--syntax-only", str(tmp_path / "prometheus.yml")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_config_in_the_manual_is_correct(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "deploy.md").read_text()
    configs = re.findall(r"^```yaml\n(backends:.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert configs
    for config_text in configs:
        file = tmp_path / "slotgate.yaml"
        file.write_text(config_text)
        assert load(file, environ={}).backends


@pytest.mark.parametrize("profile", ["", "tools", *ENGINES])
def test_docker_compose_accepts_it(profile: str) -> None:
    run = subprocess.run(
        [*_docker_compose(), "--profile", profile, "config", "-q"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


def _docker_compose() -> list[str]:
    """The command; it needs no daemon for this. Skips the test when there is none."""
    if alone := shutil.which("docker-compose"):
        return [alone]
    docker = shutil.which("docker")
    if docker is not None:
        asked = subprocess.run([docker, "compose", "version"], capture_output=True, check=False)
        if asked.returncode == 0:
            return [docker, "compose"]
    pytest.skip("no docker compose on PATH")
