"""deploy/nginx, deploy/caddy, deploy/systemd: numbers fit the settings they stand for, and the programs accept them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.core.config import Config
from tests.gateway.fronts import CADDY, NGINX, nginx_files, program

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "deploy" / "systemd"
UNIT = (SYSTEMD / "slotgate.service").read_text()
DEFAULT = Config(backends=())


def nginx_number(directive: str, unit: str) -> float:
    (found,) = re.findall(rf"^\s*{directive} (\d+){unit};", NGINX.read_text(), re.MULTILINE)
    return float(found)


def unit_value(name: str) -> str:
    (found,) = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    return str(found)


def drop_in(name: str) -> dict[str, str]:
    text = (SYSTEMD / f"{name}.service.d" / "slotgate.conf").read_text()
    assert "\n[Service]\n" in text
    return dict(re.findall(r"^Environment=([A-Z_]+)=(.*)$", text, re.MULTILINE))


def run(*command: str, home: Path | None = None) -> str:
    environ = {**os.environ, **({"HOME": str(home)} if home else {})}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_nginx_is_more_patient_than_the_gateway_in_every_direction() -> None:
    timeouts, limits = DEFAULT.timeouts, DEFAULT.limits
    assert nginx_number("proxy_read_timeout", "s") > timeouts.first_byte_s + DEFAULT.admission.max_wait_s  # fmt: skip
    assert nginx_number("proxy_read_timeout", "s") > timeouts.between_bytes_s
    assert nginx_number("send_timeout", "s") > timeouts.write_stall_s
    assert nginx_number("client_max_body_size", "m") > limits.body_mib
    assert nginx_number("large_client_header_buffers 4", "k") >= limits.header_kib


def test_kept_connections_end_in_front_before_they_end_in_the_gateway() -> None:
    (nginx,) = re.findall(r"^    keepalive_timeout (\d+)s;.*shorter", NGINX.read_text(), re.MULTILINE)  # fmt: skip
    (caddy,) = re.findall(r"^\t+keepalive (\d+)s$", CADDY.read_text(), re.MULTILINE)
    assert int(nginx) < DEFAULT.keepalive_s
    assert int(caddy) < DEFAULT.keepalive_s


def test_neither_repeats_a_request_nor_holds_a_stream_back() -> None:
    nginx = re.sub(r"#.*", "", NGINX.read_text())
    for line in ("proxy_buffering off;", "proxy_request_buffering off;", "gzip off;"):  # fmt: skip
        assert line in nginx
    (repeated,) = re.findall(r"proxy_next_upstream ([^;]*);", nginx)
    assert set(repeated.split()) <= {"error", "timeout"}, "a POST that was sent could be sent again"
    caddy = re.sub(r"#.*", "", CADDY.read_text())
    for word in ("lb_try_duration", "lb_retries", "flush_interval", "encode"):
        assert word not in caddy


def test_both_lead_to_the_port_that_the_gateway_listens_on() -> None:
    at = f"{DEFAULT.listen.host}:{DEFAULT.listen.port}"
    assert f"server {at} max_fails=0;" in NGINX.read_text()
    assert f"reverse_proxy {at} {{" in CADDY.read_text()


def test_nginx_accepts_its_file(tmp_path: Path) -> None:
    nginx = program("nginx")
    file = nginx_files(tmp_path / "n", gateway=8088, port=8080, tls_port=8443)
    told = run(nginx, "-t", "-p", str(tmp_path), "-e", str(tmp_path / "early.log"), "-c", str(file))
    assert "successful" in told


def test_caddy_accepts_its_file_and_would_format_it_so(tmp_path: Path) -> None:
    caddy = program("caddy")
    assert "Valid" in run(
        caddy, "validate", "--adapter", "caddyfile", "--config", str(CADDY), home=tmp_path
    )
    assert run(caddy, "fmt", str(CADDY)) == CADDY.read_text()


def test_the_unit_gives_the_gateway_time_to_drain_and_starts_a_command_that_exists() -> None:
    assert int(unit_value("TimeoutStopSec")) >= DEFAULT.drain_s + 10
    assert unit_value("KillSignal") == "SIGTERM"
    command = unit_value("ExecStart").split()
    assert command[0].endswith("/bin/slotgate")
    assert command[1:] == ["serve", "--config", "/etc/slotgate/slotgate.yaml"]


def test_systemd_accepts_the_unit_and_calls_it_well_confined(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze on PATH")
    file = tmp_path / "slotgate.service"
    file.write_text(re.sub(r"^ExecStart=.*$", "ExecStart=/bin/true", UNIT, flags=re.MULTILINE))
    assert run(analyze, "verify", "--man=no", str(file)).strip() == ""
    run(
        analyze, "security", "--offline=true", "--threshold=20", str(file)
    )  # tenths of 10: lower is better


def test_engines_that_are_set_up_by_drop_ins_are_found_where_a_config_says() -> None:
    llama, ollama = drop_in("llama-server"), drop_in("ollama")
    assert llama["LLAMA_ARG_ENDPOINT_METRICS"] == "1"
    assert llama["LLAMA_ARG_HOST"] == "127.0.0.1"
    assert ollama["OLLAMA_HOST"].startswith("127.0.0.1:")
    docs = (ROOT / "docs" / "deploy.md").read_text()
    assert f"http://127.0.0.1:{llama['LLAMA_ARG_PORT']}" in docs
    assert f'http://{ollama["OLLAMA_HOST"]}", slots: {ollama["OLLAMA_NUM_PARALLEL"]}' in docs
