"""What the image and the manifests do at run time, without a container: the health check, the key for Prometheus, mounted files."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import RawClient
from tests.fakes.running import eventually, in_loop, slack
from tests.gateway.served import ROOT, serving

BIN = Path(sys.executable).parent


def _health_check(port: int) -> list[str]:
    (found,) = re.findall(r"HEALTHCHECK .*\\\n\s+CMD (\[.*\])", (ROOT / "Dockerfile").read_text())
    assert "8088" in found
    return [str(part) for part in json.loads(found.replace("8088", str(port)))]


async def _status(command: list[str]) -> int:
    environ = {**os.environ, "http_proxy": "http://127.0.0.1:9", "PATH": f"{BIN}:{os.environ['PATH']}"}  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, env=environ, stderr=asyncio.subprocess.DEVNULL
    )
    return await asyncio.wait_for(process.wait(), 20 * slack())


@in_loop
async def test_the_health_check_passes_while_the_gateway_lives_even_without_engines(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, {"backends": [{"url": "http://127.0.0.1:9"}]}) as served:
        assert (await served.get("/readyz")).status == 503
        assert await _status(_health_check(served.port)) == 0
        served.signal()
        await served.status()
        assert await _status(_health_check(served.port)) != 0


def test_the_key_for_prometheus_is_made_once_and_only_the_keys_file_is_secret(
    tmp_path: Path,
) -> None:
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["metrics-key"]
    config = (ROOT / "deploy" / "compose" / "slotgate.yaml").read_text()
    file = tmp_path / "slotgate.yaml"
    file.write_text(config.replace("/var/lib/slotgate/", f"{tmp_path}/"))
    command = ["/bin/sh", *service["entrypoint"][1:], *service["command"]]
    environ = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "SLOTGATE_CONFIG": str(file),
        "PYTHONPATH": str(ROOT),
    }
    key = tmp_path / "prometheus.key"

    def make() -> str:
        subprocess.run(command, cwd=tmp_path, env=environ, check=True, capture_output=True, umask=0o022)  # fmt: skip
        return key.read_text()

    first = make()
    assert re.fullmatch(r"sk-sg-\S+\n", first)
    assert make() == first
    (record,) = yaml.safe_load((tmp_path / "keys.yaml").read_text())
    assert (record["name"], record["admin"]) == ("prometheus", True)
    assert key.stat().st_mode & 0o777 == 0o644, "Prometheus runs as another user"
    assert (tmp_path / "keys.yaml").stat().st_mode & 0o777 == 0o600
    key.write_text("")  # as after a crash between the two
    assert make() != first


@in_loop
async def test_keys_and_settings_that_kubernetes_swaps_below_a_mount_are_taken(
    tmp_path: Path,
) -> None:
    """A mounted ConfigMap is links to a link to a folder, and only the middle link is ever changed."""
    async with FakeEngine() as engine:
        secret = _keys(tmp_path / "one", [])
        mount = tmp_path / "etc"
        mount.mkdir()
        (mount / "..data").symlink_to(tmp_path / "one")
        (mount / "keys.yaml").symlink_to("..data/keys.yaml")
        config = {
            "auth": {"keys_file": str(mount / "keys.yaml")},
            "backends": [{"url": engine.url}],
        }
        async with serving(tmp_path, config) as served:
            assert await _models(served.port, "sk-sg-none") == 401
            secret = _keys(tmp_path / "two", ["alice"])
            (mount / "..data_tmp").symlink_to(tmp_path / "two")
            (mount / "..data_tmp").replace(mount / "..data")
            await eventually(lambda: _is_taken(served.port, secret), within_s=20)
            shutil.rmtree(tmp_path / "one")  # as Kubernetes does
            assert await _models(served.port, secret) == 200


def _keys(folder: Path, names: list[str]) -> str:
    """A keys file in a folder of its own; the last key made."""
    folder.mkdir()
    file = folder / "keys.yaml"
    file.write_text("[]\n")
    secret = ""
    for name in names:
        secret = subprocess.run(
            [sys.executable, "-m", "gateway", "keys", "new", name, "--keys-file", str(file)],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
    return secret


async def _is_taken(port: int, secret: str) -> bool:
    return await _models(port, secret) == 200


async def _models(port: int, secret: str) -> int:
    async with await RawClient.connect(port) as client:
        await client.request("GET", "/v1/models", headers={"Authorization": f"Bearer {secret}"})
        return (await client.response()).status
