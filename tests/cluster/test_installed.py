"""The chart on a real cluster, as docs/kubernetes.md installs it: two replicas in pods.

The image is made of this machine's packages, with the layout of deploy/Dockerfile.service: no
registry can be reached here. PostgreSQL is on the host, as a database outside of a cluster is.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import signal
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import ROOT, must_work
from service import postgres

from . import images
from .ground import Cluster
from .keys import Authority
from .manifests import DEPLOY, PODS, SERVICE, rendered
from .serving import until
from .test_deploy_rights import taken

HOST = f"agent-sandbox.{SERVICE}.svc"
SITE = "lib/python3.11/site-packages"
# What deploy/requirements.lock has for all but /mcp.
PACKAGES = ("cryptography", "cffi", "_cffi_backend*", "pycparser", "psycopg*", "ruamel*",
            "typing_extensions*")  # fmt: skip
SCRIPT = f"""\
#!/usr/bin/python3 -I
import sys
sys.path.insert(0, "/opt/service/{SITE}")
from agent_sandbox.cli.ctl import main
sys.exit(main())
"""
CONFIG = {
    "Entrypoint": ["sandboxctl"], "User": "10001:10001",
    "Env": ["PATH=/opt/service/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE=1"],
}  # fmt: skip
SECONDS = 240.0


def image(cluster: Cluster, base: Path) -> str:
    """The service's image, on all nodes; its name."""
    # The settings above are those of the recipe.
    recipe = (DEPLOY / "Dockerfile.service").read_text()
    assert f"ENTRYPOINT {json.dumps(CONFIG['Entrypoint'])}" in recipe
    assert f"USER {CONFIG['User']}" in recipe
    assert f"ENV {' '.join(CONFIG['Env'])}" in recipe
    service = base / "service"
    (service / SITE).mkdir(parents=True)
    here = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    for pattern in PACKAGES:
        for found in here.glob(pattern):
            copy = shutil.copytree if found.is_dir() else shutil.copy
            copy(found, service / SITE / found.name)
    shutil.copytree(
        ROOT / "src" / "agent_sandbox", service / SITE / "agent_sandbox",
        ignore=shutil.ignore_patterns("__pycache__"),
    )  # fmt: skip
    (service / "bin").mkdir()
    (service / "bin" / "sandboxctl").write_text(SCRIPT)
    (service / "bin" / "sandboxctl").chmod(0o755)
    layers = [images.debian(), images.folder(service, "opt/service")]
    return cluster.add(images.image(base, "agent-sandbox", layers, **CONFIG)).name


@pytest.fixture
def database(two_nodes: Cluster) -> Iterator[str]:
    """The address of a database that pods can reach."""
    found = postgres.programs()
    must_work(found, "needs PostgreSQL's server (Debian: postgresql)")
    assert found is not None
    host = two_nodes.net.host
    server = postgres.Cluster(found, listen_addresses=host)
    try:
        with (server.data / "pg_hba.conf").open("a") as rules:
            rules.write(f"host all all {two_nodes.net.prefix}.0.0/16 trust\n")
        assert server.process is not None
        server.process.send_signal(signal.SIGHUP)
        name = server.new().split("/")[3].partition("?")[0]
        yield f"postgresql://postgres@{host}/{name}?sslmode=disable"
    finally:
        server.remove()


class Installed:
    """The service in its pods."""

    def __init__(self, cluster: Cluster, base: Path, database: str) -> None:
        self.cluster = cluster
        self.token = secrets.token_hex(32)
        authority = Authority(base / "keys")
        authority.pair("tls", "agent-sandbox", hosts=(HOST,))
        self.trust = ssl.create_default_context(cafile=str(authority.path("ca.crt")))
        cluster.kubectl("create", "namespace", SERVICE)
        self._secret("database", f"--from-literal=url={database}")
        self._secret("tokens", f"--from-literal=worker-1-sandbox-token={self.token}")
        files = {"tls.crt": "tls.crt", "tls.key": "tls.key", "ca.crt": "ca.crt"}
        self._secret("tls", *(f"--from-file={k}={authority.path(v)}" for k, v in files.items()))
        (base / "images.toml").write_text(
            f'[base]\nimage = "{cluster.images["base"].name}"\nagent = true\n'
        )
        values = base / "values.json"
        values.write_text(json.dumps({
            "allowedImages": ["base"],
            "templates": '[quick]\nimage = "base"\nwarm = 1\n', "drainSeconds": 5,
            "env": {"DEFAULT_MEMORY": "128M", "DEFAULT_DISK": "16M"},
        }))  # fmt: skip
        found = rendered(
            "--values", str(values), "--set-file", f"images={base / 'images.toml'}",
            home=base, image=image(cluster, base), agent=cluster.images["base"].name,
        )  # fmt: skip
        cluster.kubectl("apply", "-f", "-", input=taken(found))

    def _secret(self, name: str, *words: str) -> None:
        self.cluster.kubectl(
            "-n", SERVICE, "create", "secret", "generic", f"agent-sandbox-{name}", *words
        )

    def replicas(self) -> list[dict[str, Any]]:
        """Pods of the service that take requests."""
        path = (
            f"/api/v1/namespaces/{SERVICE}/pods?labelSelector=app.kubernetes.io/component=service"
        )
        return [
            pod for pod in self.cluster.api("GET", path)["items"]
            if "deletionTimestamp" not in pod["metadata"] and any(
                c["type"] == "Ready" and c["status"] == "True"
                for c in pod["status"].get("conditions", ())
            )
        ]  # fmt: skip

    def ask(self, replica: dict[str, Any], method: str, path: str, body: Any = None) -> Any:
        """A request to one replica, by its address and under the service's name."""
        address = f"https://{replica['status']['podIP']}:8650{path}"
        headers = {"Authorization": f"Bearer {self.token}", "Host": HOST}
        with httpx.Client(verify=self.trust, timeout=120) as client:
            answer = client.request(
                method, address, headers=headers, json=body, extensions={"sni_hostname": HOST}
            )
        assert answer.status_code < 300, answer.text
        return answer.json() if answer.content else None

    def ctl(self, *words: str) -> str:
        """As the page says: from inside."""
        command = ("-n", SERVICE, "exec", "deploy/agent-sandbox", "--", "sandboxctl", *words)
        return self.cluster.kubectl(*command)

    def sandboxes(self) -> list[dict[str, Any]]:
        """Pods in the namespace of sandboxes."""
        found: list[dict[str, Any]] = self.cluster.api("GET", f"/api/v1/namespaces/{PODS}/pods")[
            "items"
        ]
        return found

    def remove(self) -> None:
        """All of it."""
        for name in (SERVICE, PODS):
            self.cluster.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")


@pytest.fixture
def installed(two_nodes: Cluster, tmp_path: Path, database: str) -> Iterator[Installed]:
    made = Installed(two_nodes, tmp_path, database)
    yield made
    made.remove()


@pytest.mark.slow
def test_what_the_chart_installs_works_with_the_rights_that_it_has(installed: Installed) -> None:
    until("two replicas", lambda: len(installed.replicas()) == 2, SECONDS)
    one, two = installed.replicas()
    # By one replica and by the other.
    box = installed.ask(one, "POST", "/v1/sandboxes", {"image": "base"})["id"]
    command = {"command": "echo hello >>f; cat f"}
    ran = [
        installed.ask(replica, "POST", f"/v1/sandboxes/{box}/exec", command)
        for replica in (one, two)
    ]
    assert [found["stdout"] for found in ran] == ["hello\n", "hello\nhello\n"], ran
    (pod,) = [p for p in installed.sandboxes() if p["metadata"]["labels"].get(LABEL) == box]
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["metadata"]["ownerReferences"][0]["name"] == "agent-sandbox-owner"
    # The page's commands, and what they make.
    secret = installed.ctl("token", "new", "me", "--scope", "admin").strip()
    assert re.fullmatch(r"\S{40,}", secret)
    assert "me" in installed.ctl("token", "list")
    installed.ctl("audit", "verify")
    # A replica that is gone: its sandbox goes on.
    installed.cluster.kubectl(
        "-n", SERVICE, "delete", "pod", one["metadata"]["name"], "--grace-period=0", "--force"
    )
    until("the other has it", lambda: _answers(installed, two, box), SECONDS)
    # All pods go with the installation's own object, as `helm uninstall` removes it.
    installed.cluster.kubectl("-n", SERVICE, "delete", "deployment", "agent-sandbox")
    installed.cluster.kubectl("-n", PODS, "delete", "configmap", "agent-sandbox-owner")
    until("no sandbox is left", lambda: not installed.sandboxes(), SECONDS)


LABEL = "agent-sandbox.dev/sandbox"


def _answers(installed: Installed, replica: dict[str, Any], box: str) -> bool:
    try:
        ran = installed.ask(replica, "POST", f"/v1/sandboxes/{box}/exec", {"command": "cat f"})
    except (AssertionError, httpx.HTTPError):
        return False
    return bool(ran["stdout"] == "hello\nhello\n")
