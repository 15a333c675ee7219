"""deploy/kubernetes: every manifest has only fields that Kubernetes knows, and says what is true of the product."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.core.config import Config
from gateway.runtime.configfile import load

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
FIELDS = json.loads((ROOT / "tests" / "data" / "kubernetes_fields.json").read_text())
OVERLAYS = ("base", "overlays/replicas", "overlays/servicemonitor")
OF_OPERATOR = {"ServiceMonitor", "PrometheusRule"}
KINDS = {
    "string": str,
    "integer": int,
    "boolean": bool,
    "number": (int, float),
    "string|number": (str, int, float),
}


def documents(where: str) -> list[dict[str, Any]]:
    """The manifests in the files that a kustomization lists, before kustomize works on them."""
    folder = KUBERNETES / where
    found = []
    for name in kustomization(where)["resources"]:
        if name.endswith(".yaml"):
            found += list(yaml.safe_load_all((folder / name).read_text()))
    return found


def kustomization(where: str) -> dict[str, Any]:
    return dict(yaml.safe_load((KUBERNETES / where / "kustomization.yaml").read_text()))


def one(where: str, kind: str, name: str = "slotgate") -> dict[str, Any]:
    (found,) = (
        document
        for document in documents(where)
        if document["kind"] == kind and document["metadata"]["name"] == name
    )
    return found


def config_of(document: dict[str, Any], folder: Path) -> Config:
    """The configuration in a ConfigMap, read as the gateway reads it."""
    file = folder / "slotgate.yaml"
    file.write_text(document["data"]["slotgate.yaml"])
    (folder / "keys.yaml").write_text("[]")
    return load(file, environ={})


def faults(value: Any, kind: Any, at: str) -> Iterator[str]:
    """What in `value` the Kubernetes API would not take."""
    if isinstance(kind, list):
        if not isinstance(value, list):
            yield f"{at}: not a list"
        else:
            for number, part in enumerate(value):
                yield from faults(part, kind[0], f"{at}[{number}]")
    elif isinstance(kind, dict):
        for name, part in value.items():
            yield from faults(part, kind["*"], f"{at}.{name}")
    elif kind.startswith("#"):
        yield from _faults_of_fields(value, FIELDS["types"][kind[1:]], at)
    elif kind != "any":
        good = isinstance(value, KINDS[kind])
        if not good or (isinstance(value, bool) and kind != "boolean"):
            yield f"{at}: {value!r} is no {kind}"


def _faults_of_fields(value: Any, fields: dict[str, Any], at: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{at}: {value!r} is no mapping"
        return
    kinds = {name.rstrip("!"): kind for name, kind in fields.items()}
    yield from (f"{at}.{name}: no such field" for name in value.keys() - kinds.keys())
    needed = {name[:-1] for name in fields if name.endswith("!")}
    yield from (f"{at}.{name}: is missing" for name in needed - value.keys())
    for name in value.keys() & kinds.keys():
        yield from faults(value[name], kinds[name], f"{at}.{name}")


def faults_of(document: dict[str, Any]) -> list[str]:
    kind = document["kind"]
    if kind in OF_OPERATOR:
        return [] if document["apiVersion"] == "monitoring.coreos.com/v1" else ["apiVersion"]
    if document["apiVersion"] != FIELDS["versions"][kind]:
        return [f"{kind} is in {FIELDS['versions'][kind]}"]
    return sorted(faults(document, f"#{kind}", kind))


@pytest.mark.parametrize("where", OVERLAYS)
def test_every_manifest_has_only_fields_that_kubernetes_knows(where: str) -> None:
    assert documents(where)
    for document in documents(where):
        assert faults_of(document) == []


def test_a_slip_in_a_manifest_would_be_found() -> None:
    deployment = one("base", "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["readinesProbe"] = container.pop("readinessProbe")
    container["livenessProbe"]["periodSeconds"] = "10"
    del container["name"]
    del deployment["spec"]["selector"]
    assert [fault.rpartition(".")[2].partition(":")[0] for fault in faults_of(deployment)] == [
        "selector", "periodSeconds", "name", "readinesProbe",
    ]  # fmt: skip


def test_files_and_kustomizations_name_each_other() -> None:
    for where in OVERLAYS:
        listed = kustomization(where)
        named = {*listed["resources"], "kustomization.yaml"}
        named |= {patch["path"] for patch in listed.get("patches", ()) if "path" in patch}
        files = {path.name for path in (KUBERNETES / where).glob("*.yaml")} - {"keys.yaml"}
        assert files == {name for name in named if name.endswith(".yaml")}, where


@pytest.mark.parametrize("where", OVERLAYS)
def test_kustomize_builds_it_and_what_it_builds_is_known_too(where: str, tmp_path: Path) -> None:
    built = _built(where, tmp_path)
    kinds = {document["kind"] for document in built}
    assert kinds >= {
        "Deployment", "Service", "ConfigMap", "Secret", "PodDisruptionBudget", "NetworkPolicy",
    }  # fmt: skip
    for document in built:
        assert faults_of(document) == []
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == "slotgate"
    (gateway,) = (
        document
        for document in built
        if document["kind"] == "Deployment" and document["metadata"]["name"] == "slotgate"
    )
    many = where == "overlays/replicas"
    assert gateway["spec"]["replicas"] == (3 if many else 1)
    (config,) = (document for document in built if document["kind"] == "ConfigMap")
    assert (config_of(config, tmp_path).redis is not None) is many, "several gateways need Redis"
    if many:
        _redis_is_reachable(built)
    if where == "overlays/servicemonitor":
        assert kinds >= OF_OPERATOR


def _built(where: str, folder: Path) -> list[dict[str, Any]]:
    kubectl, kustomize = shutil.which("kubectl"), shutil.which("kustomize")
    command = [kustomize, "build"] if kustomize else [kubectl, "kustomize"]
    if not command[0]:
        pytest.skip("neither kustomize nor kubectl on PATH")
    copy = shutil.copytree(KUBERNETES, folder / "kubernetes")
    (copy / "base" / "keys.yaml").write_text("[]\n")
    run = subprocess.run(
        [*command, str(copy / where)], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    return list(yaml.safe_load_all(run.stdout))


def _redis_is_reachable(built: list[dict[str, Any]]) -> None:
    """By the name in the configuration, and through the network policy."""
    services = {doc["metadata"]["name"]: doc for doc in built if doc["kind"] == "Service"}
    redis = services["slotgate-redis"]
    (policy,) = (
        doc
        for doc in built
        if doc["kind"] == "NetworkPolicy" and doc["metadata"]["name"] == "slotgate"
    )
    labels = redis["spec"]["selector"]
    assert {
        "to": [{"podSelector": {"matchLabels": labels}}],
        "ports": [{"port": redis["spec"]["ports"][0]["port"]}],
    } in policy["spec"]["egress"]


@pytest.mark.parametrize(
    "file", ["base/configmap.yaml", "overlays/replicas/configmap.yaml"], ids=str
)
def test_the_configuration_is_correct_and_the_deployment_fits_it(file: str, tmp_path: Path) -> None:
    config = config_of(yaml.safe_load((KUBERNETES / file).read_text()), tmp_path)
    pod = one("base", "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert config.listen.host == "0.0.0.0"
    assert container["ports"] == [{"name": "http", "containerPort": config.listen.port}]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pause >= 5, "shorter than nodes take to hear of it"
    assert pod["terminationGracePeriodSeconds"] >= pause + config.drain_s + 5
    mount = container["volumeMounts"][0]["mountPath"]
    assert container["args"] == ["serve", "--config", f"{mount}/slotgate.yaml"]
    sources = pod["volumes"][0]["projected"]["sources"]
    secrets = {each["name"]: each["files"] for each in kustomization("base")["secretGenerator"]}
    assert {"configMap": {"name": "slotgate"}} in sources
    assert {"secret": {"name": "slotgate-keys"}} in sources
    assert secrets == {"slotgate-keys": ["keys.yaml"]}
    assert config.auth.keys_file == str(tmp_path / "keys.yaml"), "beside the configuration"


def test_probes_ask_what_exists_and_liveness_does_not_ask_for_engines() -> None:
    (container,) = one("base", "Deployment")["spec"]["template"]["spec"]["containers"]
    paths = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}  # fmt: skip
    assert {name: get["path"] for name, get in paths.items()} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    assert {get["port"] for get in paths.values()} == {"http"}


@pytest.mark.parametrize(
    ("where", "name"), [("base", "slotgate"), ("overlays/replicas", "slotgate-redis")]
)
def test_pods_run_without_root_rights_or_a_writable_image(where: str, name: str) -> None:
    pod = one(where, "Deployment", name)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_everything_that_selects_the_gateway_selects_its_pods() -> None:
    labels = one("base", "Deployment")["spec"]["template"]["metadata"]["labels"]
    monitor = one("overlays/servicemonitor", "ServiceMonitor")
    service = one("base", "Service")
    assert one("base", "Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    assert one("base", "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    policy = one("base", "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert policy["ingress"] == [{"ports": [{"port": service["spec"]["ports"][0]["port"]}]}]
    # kustomize adds the name to the Service's own labels, the component is written there
    added = kustomization("base")["labels"][0]["pairs"] | service["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= added.items()
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert added[monitor["spec"]["jobLabel"]] == "slotgate", "the rules say job=slotgate"


def test_engines_take_requests_from_the_gateway_only() -> None:
    labels = one("base", "Deployment")["spec"]["template"]["metadata"]["labels"]
    engines = one("base", "NetworkPolicy", "slotgate-engines")["spec"]
    assert engines["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    egress = one("base", "NetworkPolicy")["spec"]["egress"]
    assert {"podSelector": engines["podSelector"]} in [to for rule in egress for to in rule["to"]]


def test_the_operator_gets_the_rules_that_prometheus_gets() -> None:
    groups = one("overlays/servicemonitor", "PrometheusRule")["spec"]["groups"]
    told = {group["name"]: group["rules"] for group in groups}
    for name in ("rules", "alerts"):
        file = ROOT / "deploy" / "prometheus" / f"{name}.yml"
        (group,) = yaml.safe_load(file.read_text())["groups"]
        assert told[f"slotgate-{name}"] == group["rules"]
