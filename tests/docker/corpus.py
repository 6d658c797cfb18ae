"""The corpus of requests, as bytes."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / "policy" / "docker" / "corpus.json"
REQUESTS: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["requests"]
BY_NAME = {entry["name"]: entry for entry in REQUESTS}
# Seen to take effect on dockerd 20.10: an engine without a filter must still accept them.
VERIFIED = """
    hc.binds.root hc.binds.dotdot hc.mounts.vol_bind hc.mounts.vol_proc hc.mounts.vol_overlay
    hc.capadd hc.pid.host hc.uts.host hc.cgroupparent hc.secopt.seccomp:unconfined
    hc.secopt.label=disable hc.secopt.no-new-privileges=false hc.runtime hc.oomadj js.toplevel
    js.toplevel_null js.lower js.longs js.kelvin js.dupscalar js.trailing ct.param
    path:/v1.41/containers/%63reate path:/v1.041/containers/create path:/v01.41/containers/create
    path:http://evil/v1.41/containers/create http.cl_te http.chunked http.barelf start.body
    form.tag form.rename vol.create
""".split()


def context() -> bytes:
    """A build context that needs nothing."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        text = b"FROM alpine\n"
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
    return made.getvalue()


def raw(entry: dict[str, Any], **names: str) -> bytes:
    """A request of the corpus as it goes over the wire. `names` replaces words in its target."""
    target: str = entry["target"]
    for word, name in names.items():
        target = target.replace(word, name)
    body: bytes = entry.get("text", "").encode()
    if "json" in entry:
        body = json.dumps(entry["json"]).encode()
    if "/build" in target and "remote=" not in target:
        body = context()
    fields = {"Host": "docker", **(entry.get("headers") or {})}
    if body and "Content-Type" not in fields:
        fields["Content-Type"] = "application/json"
    if fields.get("Transfer-Encoding") == "chunked":
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    elif entry["method"] != "GET" and entry["method"] != "HEAD":
        fields.setdefault("Content-Length", str(len(body)))
    lines = [f"{entry['method']} {target} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items())]
    end = "\n" if entry["name"] == "http.barelf" else "\r\n"
    sent = end.join([*lines, "Connection: close", "", ""]).encode() + body
    return sent if "Upgrade" not in fields else sent.replace(b"Connection: close\r\n", b"")
