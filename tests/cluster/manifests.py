"""What deploy/ holds, rendered by the tools that people use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from conftest import ROOT, must_work

from . import build

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "agent-sandbox"
BASE = DEPLOY / "kustomize" / "base"
EXTRAS = ("quota", "autoscaling", "monitoring")
IMAGE = "registry.example/agent-sandbox@sha256:" + "1" * 64
AGENT = "registry.example/agent-sandbox-agent@sha256:" + "2" * 64
SERVICE, PODS = "agent-sandbox", "agent-sandbox-pods"


def documents(text: str) -> list[dict[str, Any]]:
    """The objects of a stream."""
    return [one for one in YAML(typ="safe").load_all(text) if one]


def kubectl() -> Path:
    """The one of the cluster's build: it has kustomize in it."""
    must_work(not build.lacking(["kubectl"]), "Kubernetes is not built: tests/cluster/build.py")
    return build.place() / "kubectl"


def kustomized(directory: Path) -> list[dict[str, Any]]:
    """A kustomization's objects."""
    done = subprocess.run(
        [kubectl(), "kustomize", directory], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def helm() -> str:
    """The program; it is in the development environment."""
    beside = Path(sys.prefix) / "bin" / "helm"
    found = str(beside) if beside.exists() else shutil.which("helm") or ""
    must_work(found, "needs helm")
    return found


def rendered(
    *words: str, home: Path, image: str = IMAGE, agent: str = AGENT
) -> list[dict[str, Any]]:
    """The chart's objects."""
    done = subprocess.run(
        [helm(), "template", "agent-sandbox", CHART, "--namespace", SERVICE,
         "--set", f"image={image}", "--set", f"agentImage={agent}", *words],
        capture_output=True, text=True, check=False, env={"HOME": str(home), "PATH": os.defpath},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def key(one: dict[str, Any]) -> tuple[str, str, str]:
    """What an object is called."""
    metadata = one["metadata"]
    return one["kind"], metadata.get("namespace", ""), metadata["name"]


def named(found: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Objects by what they are called; none twice."""
    by_key = {key(one): one for one in found}
    assert len(by_key) == len(found)
    return by_key


def one(found: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    """The only object of a kind, or the one with a name."""
    chosen = [o for o in found if o["kind"] == kind and name in ("", o["metadata"]["name"])]
    assert len(chosen) == 1, [key(o) for o in chosen]
    return chosen[0]
