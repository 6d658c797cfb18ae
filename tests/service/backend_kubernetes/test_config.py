"""Kubeconfigs, and the account of a pod: what is read, and what is refused rather than ignored."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.errors import UsageError
from agent_sandbox.service.backend import kube_config, kube_credentials, kube_settings
from agent_sandbox.service.backend.kube_config import Access, Plugin
from agent_sandbox.service.backend.kube_credentials import Credentials
from agent_sandbox.service.problems import Problem

PEM = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
V1 = "client.authentication.k8s.io/v1"


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def config(
    cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None, **context: Any
) -> dict[str, Any]:
    return {
        "clusters": [
            {"name": "c", "cluster": {"server": "https://k8s.example:6443", **(cluster or {})}}
        ],
        "users": [{"name": "u", "user": user or {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", **context}}],
        "current-context": "x",
    }  # fmt: skip


def decoded(
    document: dict[str, Any], *, context: str = "", files: dict[str, str] | None = None
) -> Access:
    def read(path: str) -> str:
        if path not in (files or {}):
            raise FileNotFoundError(2, "No such file or directory", path)
        return (files or {})[path]

    whole = kube_config.merge([("/etc/kube/config", document)])
    return kube_config.decode(whole, context=context, read=read)


# --- what is read


def test_an_address_and_a_token() -> None:
    found = decoded(config(user={"token": "abc"}, namespace="team"))
    assert (found.host, found.port, found.tls, found.prefix) == ("k8s.example", 6443, True, "")
    assert (found.token, found.namespace) == ("abc", "team")


def test_a_path_before_all_paths_and_another_name_in_the_certificate() -> None:
    found = decoded(config({"server": "https://[2001:db8::1]/k8s/", "tls-server-name": "api"}))
    assert (found.host, found.port, found.prefix) == ("2001:db8::1", 443, "/k8s")
    assert found.server_name == "api"


def test_certificates_inline_and_in_files_beside_the_kubeconfig() -> None:
    user = {"client-certificate": "me.crt", "client-key-data": b64("KEY")}
    found = decoded(
        config({"certificate-authority-data": b64(PEM)}, user), files={"/etc/kube/me.crt": PEM}
    )
    assert (found.authority, found.certificate, found.key) == (PEM, PEM, "KEY")


def test_another_context_than_the_current_one() -> None:
    document = config()
    document["contexts"].append({"name": "y", "context": {"cluster": "c", "namespace": "other"}})
    assert decoded(document, context="y").namespace == "other"


def test_of_two_files_the_first_one_counts() -> None:
    first, second = config(user={"token": "first"}), config(user={"token": "second"})
    second["current-context"] = "nowhere"
    second["users"].append({"name": "v", "user": {"token": "third"}})
    whole = kube_config.merge([("/a/config", first), ("/b/config", second)])
    assert kube_config.decode(whole, read=str).token == "first"


def test_an_exec_plugin() -> None:
    plugin = {
        "apiVersion": V1, "command": "./get-token", "args": ["--cluster", "c"],
        "env": [{"name": "A", "value": "b"}], "provideClusterInfo": True,
    }  # fmt: skip
    found = decoded(config(user={"exec": plugin})).plugin
    assert found == Plugin(
        command="/etc/kube/./get-token", args=("--cluster", "c"), env={"A": "b"}, version=V1,
        cluster_info=True,
    )  # fmt: skip


# --- what is refused: name → (document, words)

REFUSED: dict[str, tuple[Any, str]] = {
    "not a mapping": ([], "not a mapping"),
    "nothing": ({}, "no current-context"),
    "no such context": ({**config(), "current-context": "z"}, "has no 'z'"),
    "no such cluster": ({**config(), "clusters": []}, "has no 'c'"),
    "clusters not a list": ({**config(), "clusters": {}}, "not a list"),
    "entry without a name": ({**config(), "users": [{"user": {}}]}, "no name"),
    "no TLS": (config({"server": "http://k8s.example"}), "without TLS"),
    "another scheme": (config({"server": "unix:///x"}), "not an address"),
    "no address": (config({"server": "k8s.example"}), "not an address"),
    "a password in the address": (config({"server": "https://a:b@k8s"}), "not an address"),
    "a bad port": (config({"server": "https://k8s:99999"}), "not an address"),
    "unchecked TLS": (config({"insecure-skip-tls-verify": True}), "insecure-skip-tls-verify"),
    "a proxy": (config({"proxy-url": "http://p:3128"}), "proxy-url"),
    "a password": (config(user={"username": "a", "password": "b"}), "username"),
    "a provider": (config(user={"auth-provider": {"name": "gcp"}}), "auth-provider"),
    "somebody else": (config(user={"token": "t", "as": "system:admin"}), "it has as"),
    "a key alone": (config(user={"client-key-data": b64("k")}), "belong together"),
    "not base64": (config({"certificate-authority-data": "%%%"}), "not base64"),
    "no such file": (config({"certificate-authority": "ca.crt"}), "cannot be read"),
    "a token in lines": (config(user={"token": "a\nb"}), "not a text"),
    "a plugin without a command": (config(user={"exec": {"apiVersion": V1}}), "needs a command"),
    "an old plugin": (
        config(user={"exec": {"command": "x", "apiVersion": V1 + "alpha1"}}),
        "apiVersion",
    ),
    "a plugin that asks": (
        config(user={"exec": {"command": "x", "apiVersion": V1, "interactiveMode": "Always"}}),
        "asks people",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_in_words(name: str) -> None:
    document, words = REFUSED[name]
    with pytest.raises(UsageError, match=words) as caught:
        decoded(document)
    assert caught.value.code == "bad-kubeconfig"


# --- files


def test_a_kubeconfig_is_yaml_and_its_namespace_can_be_another(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(
        "# comment\nclusters: [{name: c, cluster: {server: 'https://h'}}]\n"
        "users: [{name: u, user: {token: t}}]\n"
        "contexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n"
    )
    environ = {"KUBECONFIG": str(path), "KUBE_NAMESPACE": "mine"}
    found = kube_credentials.find(kube_settings.load(environ), environ)
    assert (found.host, found.namespace, found.token) == ("h", "mine", "t")


@pytest.mark.parametrize(
    "data", [b"a: [", b"\xff\xfe\xfd", b"!!python/object:os.system x", b"&a [*a"]
)
def test_a_file_that_is_not_one_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "config"
    path.write_bytes(data)
    with pytest.raises(UsageError):
        kube_credentials.find(kube_settings.load({"KUBECONFIG": str(path)}), {})


def test_without_a_kubeconfig_it_has_to_be_a_pod(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a pod"):
        kube_credentials.find(kube_settings.load({}), {"HOME": str(tmp_path)})


@pytest.mark.parametrize("home", [None, "", "."])
def test_cannot_be_led_to_a_cluster_by_the_directory_that_it_starts_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    """A kubeconfig may name a program. The control: the same file in a home is taken."""
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text(json.dumps(config()))
    monkeypatch.chdir(tmp_path)
    environ = {} if home is None else {"HOME": home}
    with pytest.raises(UsageError, match="not a pod"):
        kube_credentials.find(kube_settings.load(environ), environ)
    there = {"HOME": str(tmp_path)}
    assert kube_credentials.find(kube_settings.load(there), there).host == "k8s.example"


def test_a_pod_has_an_account_and_its_token_is_read_again() -> None:
    files = {
        f"{kube_config.ACCOUNT}/{name}": text
        for name, text in (("ca.crt", PEM), ("namespace", "team\n"), ("token", "t"))
    }
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    found = kube_config.in_cluster(environ, files.__getitem__)
    assert (found.host, found.namespace, found.authority) == ("10.0.0.1", "team", PEM)
    # A value would be worth nothing after an hour.
    assert (found.token, found.token_file) == ("", f"{kube_config.ACCOUNT}/token")


# --- tokens that change


def token(credentials: Credentials, *, refused: bool = False) -> str:
    return asyncio.run(credentials.token(refused=refused))


def test_a_refused_token_is_read_again_at_once(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    credentials = Credentials(Access(host="h", port=1, token_file=str(path)), {})
    assert token(credentials) == "first"
    path.write_text("second\n")
    assert token(credentials) == "first"
    assert token(credentials, refused=True) == "second"


@pytest.mark.parametrize("text", ["", "a\nb", "a\rb", "ü", "x" * 100_000])
def test_a_token_that_cannot_be_a_header_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(Problem, match="token"):
        token(Credentials(Access(host="h", port=1, token_file=str(path)), {}))


class Script:
    """A plugin that says what a test wants, and notes that it was asked."""

    def __init__(self, base: Path, body: str) -> None:
        self.asked = base / "asked"
        path = base / "plugin"
        path.write_text(f'#!/bin/sh\necho "$KUBERNETES_EXEC_INFO" >> {self.asked}\n{body}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        self.access = Access(
            host="h", port=1, plugin=Plugin(command=str(path), version=V1, cluster_info=True)
        )

    def credentials(self) -> Credentials:
        return Credentials(self.access, dict(os.environ))

    def times(self) -> int:
        return len(self.asked.read_text().splitlines())


def says(status: dict[str, str]) -> str:
    document = {"apiVersion": V1, "kind": "ExecCredential", "status": status}
    return f"echo '{json.dumps(document)}'"


def test_a_plugin_is_asked_once_and_again_when_its_token_is_refused(tmp_path: Path) -> None:
    script = Script(tmp_path, says({"token": "t"}))
    credentials = script.credentials()
    assert [token(credentials) for _ in range(3)] == ["t"] * 3
    assert script.times() == 1
    assert json.loads(script.asked.read_text())["spec"]["cluster"]["server"] == "https://h:1"
    token(credentials, refused=True)
    assert script.times() == 2


def test_a_plugin_is_asked_again_when_its_token_has_ended(tmp_path: Path) -> None:
    script = Script(tmp_path, says({"token": "t", "expirationTimestamp": "2020-01-01T00:00:00Z"}))
    credentials = script.credentials()
    token(credentials)
    token(credentials)
    assert script.times() == 2


@pytest.mark.parametrize(
    "body",
    ["exit 3", "echo nonsense", says({}), 'echo \'{"kind": "Pod"}\'', says({"token": "a\\nb"})],
)
def test_a_plugin_that_fails_is_told_without_what_it_printed(tmp_path: Path, body: str) -> None:
    with pytest.raises(Problem) as caught:
        token(Script(tmp_path, body).credentials())
    assert caught.value.code == "BACKEND_UNAVAILABLE"
    assert "nonsense" not in caught.value.message


def test_a_plugin_is_looked_for_on_the_path(tmp_path: Path) -> None:
    script = Script(tmp_path, says({"token": "t"}))
    access = script.access.replace(plugin=Plugin(command="plugin", version=V1))
    assert token(Credentials(access, {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"})) == "t"


@pytest.mark.parametrize("path", [".:/usr/bin:/bin", ":/usr/bin:/bin", "/usr/bin:/bin", ""])
def test_cannot_be_a_plugin_by_standing_in_the_directory_that_it_starts_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    script = Script(tmp_path, says({"token": "t"}))
    monkeypatch.chdir(tmp_path)
    access = script.access.replace(plugin=Plugin(command="plugin", version=V1))
    with pytest.raises(Problem, match="in no directory of PATH"):
        token(Credentials(access, {**os.environ, "PATH": path}))
    assert not script.asked.exists()


def test_a_plugin_that_is_not_there_is_told() -> None:
    access = Access(host="h", port=1, plugin=Plugin(command="/nowhere/plugin"))
    with pytest.raises(Problem, match="no such file"):
        token(Credentials(access, {}))
