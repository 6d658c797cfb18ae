"""Reads kubeconfigs, tokens and certificates, and asks plugins for them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import ssl
import sys
import time

from ...errors import HostError, UsageError, reason
from ..problems import Problem
from . import kube_config
from .kube_config import bad
from .kube_objects import at, moment, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .kube_config import Access, Plugin
    from .kube_settings import KubeSettings

MOST_FILE = 1 << 20
MOST_TOKEN = 64 << 10
PLUGIN_SECONDS = 30.0
# Token files are replaced long before they end; a read per request would still be one too many.
TOKEN_SECONDS = 30.0
# A credential that ends within this time is made anew.
EARLY_SECONDS = 30.0


def read_text(path: str) -> str:
    """A file as text, if it is not absurdly large."""
    with open(path, "rb") as file:
        data = file.read(MOST_FILE + 1)
    if len(data) > MOST_FILE:
        raise bad(f"'{path}' is too large")
    return data.decode("utf-8")


def find(settings: KubeSettings, environ: Mapping[str, str]) -> Access:
    """How to reach the API server.

    By the kubeconfig that is named, else as the pod we are in, else by the user's own kubeconfig.
    """
    if sys.flags.no_site:
        # A checkout's command starts without site-packages, where our two libraries lie.
        import site

        site.main()
    if not settings.kubeconfig:
        home = os.path.join(environ.get("HOME", ""), ".kube", "config")
        # Without a home it would be a file of the directory that we are in. Whoever can write there
        # would name a cluster, and a program (an exec plugin) that we would start.
        is_ours = os.path.isabs(home) and os.path.exists(home)
        if environ.get("KUBERNETES_SERVICE_HOST") or not is_ours:
            found = kube_config.in_cluster(environ, read_text)
            return found.replace(namespace=settings.namespace or found.namespace)
        paths = [home]
    else:
        paths = [one for one in settings.kubeconfig.split(os.pathsep) if one]
    documents = [(path, parse(path)) for path in paths]
    whole = kube_config.merge(documents)
    found = kube_config.decode(whole, context=settings.context, read=read_text)
    return found.replace(namespace=settings.namespace or found.namespace)


def parse(path: str) -> object:
    """A kubeconfig as a document."""
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError
    except ImportError as error:
        raise HostError(
            "reading a kubeconfig needs ruamel.yaml",
            hint="pip install 'agent-sandbox[kubernetes]'", code="kubernetes-missing",
        ) from error  # fmt: skip
    try:
        found: object = YAML(typ="safe", pure=True).load(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        words = reason(error) if isinstance(error, OSError) else "it is not text"
        raise bad(f"'{path}': {words}", "--kubeconfig FILE") from error
    except (YAMLError, RecursionError, ValueError) as error:
        raise bad(f"'{path}' is not YAML") from error
    return found


class Credentials:
    """What we are known by, kept fresh."""

    def __init__(self, access: Access, environ: Mapping[str, str]) -> None:
        self._access = access
        self._environ = environ
        self._token = access.token
        self._until = 0.0
        self._asking = asyncio.Lock()
        # PEM of what a plugin gave.
        self._pair: tuple[str, str] | None = None
        self._context: ssl.SSLContext | None = None

    async def token(self, *, refused: bool = False) -> str:
        """The bearer token; "" with certificates alone. `refused`: the last one was."""
        if self._access.token_file:
            if refused or time.monotonic() >= self._until:
                self._token = _token_file(self._access.token_file)
                self._until = time.monotonic() + TOKEN_SECONDS
        elif self._access.plugin is not None:
            async with self._asking:
                if refused or not (self._token or self._pair) or time.time() >= self._until:
                    await self._ask(self._access.plugin)
        return self._token

    @property
    def can_renew(self) -> bool:
        """Whether asking again could give another one."""
        return bool(self._access.token_file or self._access.plugin)

    async def _ask(self, plugin: Plugin) -> None:
        document = await run_plugin(plugin, self._access, self._environ)
        token = text(document, "status", "token")
        pair = (
            text(document, "status", "clientCertificateData"),
            text(document, "status", "clientKeyData"),
        )
        if not token and not all(pair):
            raise _plugin_failed(plugin, "it gave no credential")
        self._token = _checked(token) if token else ""
        if all(pair) and pair != self._pair:
            self._pair, self._context = pair, None
        ends = text(document, "status", "expirationTimestamp")
        self._until = moment(ends) - EARLY_SECONDS if ends else float("inf")

    def context(self) -> ssl.SSLContext | None:
        """TLS with the server's authority and our certificate; None: no TLS. After `token`."""
        if not self._access.tls:
            return None
        if self._context is None:
            self._context = tls(self._access, self._pair)
        return self._context


def tls(access: Access, pair: tuple[str, str] | None = None) -> ssl.SSLContext:
    """The context of a client."""
    try:
        context = ssl.create_default_context(cadata=access.authority or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # An upgrade to WebSocket is one of HTTP/1.1.
        context.set_alpn_protocols(["http/1.1"])
        certificate, key = pair or (access.certificate, access.key)
        if certificate:
            # The module takes files only. The key is in memory, and nobody else can open it.
            fd = os.memfd_create("client-pair", os.MFD_CLOEXEC)
            try:
                os.write(fd, f"{certificate}\n{key}\n".encode())
                context.load_cert_chain(f"/proc/self/fd/{fd}")
            finally:
                os.close(fd)
    except (ssl.SSLError, ValueError) as error:
        words = error.reason if isinstance(error, ssl.SSLError) else "it is not PEM"
        raise bad(f"its certificates cannot be used: {words}") from error
    return context


def _token_file(path: str) -> str:
    try:
        return _checked(read_text(path).strip())
    except (OSError, UsageError, UnicodeDecodeError) as error:
        raise Problem("BACKEND_UNAVAILABLE", f"the token of the cluster cannot be read: {error}") from error  # noqa: E501 # fmt: skip


def _checked(token: str) -> str:
    """A token that can be a header."""
    if not token or len(token) > MOST_TOKEN or not token.isascii() or not token.isprintable():
        raise Problem("BACKEND_UNAVAILABLE", "the token of the cluster is not one line of text")
    return token


async def run_plugin(plugin: Plugin, access: Access, environ: Mapping[str, str]) -> object:
    """The ExecCredential that a plugin prints."""
    spec: dict[str, object] = {"interactive": False}
    if plugin.cluster_info:
        spec["cluster"] = {"server": f"https://{access.host}:{access.port}{access.prefix}"}
    asked = {"apiVersion": plugin.version, "kind": "ExecCredential", "spec": spec}
    env = {**environ, **plugin.env, "KUBERNETES_EXEC_INFO": json.dumps(asked)}
    try:
        process = await asyncio.create_subprocess_exec(
            _program(plugin, env), *plugin.args, env=env, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        raise _plugin_failed(plugin, reason(error)) from error
    try:
        async with asyncio.timeout(PLUGIN_SECONDS):
            out, _ = await process.communicate()
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise _plugin_failed(plugin, "it does not end") from error
    if process.returncode:
        raise _plugin_failed(plugin, f"it ended with {process.returncode}")
    try:
        document: object = json.loads(out[:MOST_FILE])
    except ValueError as error:
        raise _plugin_failed(plugin, "it printed no credential") from error
    if at(document, "kind") != "ExecCredential" or at(document, "apiVersion") != plugin.version:
        raise _plugin_failed(plugin, f"it printed no ExecCredential of {plugin.version}")
    return document


def _program(plugin: Plugin, env: Mapping[str, str]) -> str:
    """Its path. What stands on PATH relative to the directory that we are in is nobody's word."""
    if "/" in plugin.command:
        return plugin.command
    known = filter(os.path.isabs, env.get("PATH", os.defpath).split(os.pathsep))
    found = shutil.which(plugin.command, path=os.pathsep.join(known))
    if found is None:
        raise _plugin_failed(plugin, "it is in no directory of PATH")
    return found


def _plugin_failed(plugin: Plugin, why: str) -> Problem:
    name = os.path.basename(plugin.command)
    return Problem("BACKEND_UNAVAILABLE", f"the exec plugin '{name}' of the kubeconfig: {why}")
