"""The files in deploy/ fit the program: its options, its routes, its times. Tools that are here check them too."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.test_documented_commands import parse

from octavo.server.args import ServerArgs
from octavo.server.http.exchange import OPEN_PATHS
from octavo.server.pages import PUBLIC_PATHS
from octavo.server.settings import resolve_settings

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
WITHOUT_KEY = OPEN_PATHS | PUBLIC_PATHS


def unit() -> configparser.RawConfigParser:
    class Repeated(dict[str, Any]):
        """Keys of a unit may be repeated; here none is that matters."""

    parser = configparser.RawConfigParser(strict=False, dict_type=Repeated, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "octavo.service").read_text())
    return parser


def manifest(kind: str) -> dict[str, Any]:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    [found] = [document for document in documents if document["kind"] == kind]
    assert isinstance(found, dict)
    return found


def test_the_service_starts_what_there_is_and_waits_for_its_end() -> None:
    service = dict(unit()["Service"])
    parse(service["ExecStart"].split()[1:])
    assert service["Type"] == "notify"
    assert int(service["TimeoutStopSec"]) > ServerArgs().drain_timeout_s
    names = dict(pair.split("=") for pair in service["Environment"].split())
    known = {name: value for name, value in names.items() if name.startswith("OCTAVO_")}
    settings = resolve_settings({}, known, DEPLOY / "octavo.yaml")
    assert settings.server.state_dir == "/var/lib/octavo"
    assert settings.server.host == "127.0.0.1"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (
        (DEPLOY / "octavo.service").read_text().replace("/opt/octavo/bin/octavo", shutil.which("true") or "/bin/true")
    )
    (tmp_path / "octavo.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "octavo.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "octavo.service" in line]) == (0, [])


def test_the_pod_has_probes_that_need_no_key_and_time_to_end(tmp_path: Path) -> None:
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    probes = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")]
    assert {*probes} <= WITHOUT_KEY
    (tmp_path / "octavo.yaml").write_text(manifest("ConfigMap")["data"]["octavo.yaml"])
    drain_s = resolve_settings({}, {}, tmp_path / "octavo.yaml").server.drain_timeout_s
    pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > drain_s + pause_s
    assert pod["enableServiceLinks"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounts, volumes = ({item["name"] for item in items} for items in (container["volumeMounts"], pod["volumes"]))
    assert mounts == volumes
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in manifest("Service")["spec"]["ports"]} <= ports
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert manifest("Service")["spec"]["selector"] == labels


def test_the_container_is_not_root_and_is_asked_for_its_health() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    assert re.search(r"^USER 10001$", text, re.MULTILINE)
    assert "http://127.0.0.1:8000/health" in text
    [command] = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    assert yaml.safe_load(command) == ["octavo", "serve"]
    names = dict(re.findall(r"\b(OCTAVO_\w+)=(\S+)", re.sub(r"^#.*$", "", text, flags=re.MULTILINE)))
    settings = resolve_settings({"auth": False}, names, None)
    assert (settings.server.host, settings.server.port) == ("0.0.0.0", 8000)


def test_proxies_wait_less_for_idle_connections_than_the_server() -> None:
    nginx, caddy = (DEPLOY / "nginx.conf").read_text(), (DEPLOY / "Caddyfile").read_text()
    [idle_s] = re.findall(r"keepalive_timeout (\d+)s", nginx)
    assert int(idle_s) < ServerArgs().keep_alive_s
    [idle_s] = re.findall(r"keepalive (\d+)s", caddy)
    assert int(idle_s) < ServerArgs().keep_alive_s
    assert "proxy_buffering off" in nginx
    assert "flush_interval -1" in caddy
