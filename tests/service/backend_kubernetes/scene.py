"""What the tests of this directory share: values, and a sandbox to make."""

from __future__ import annotations

from typing import Any

from agent_sandbox.service.backend.kube_pods import Shape, Surroundings, shape_of
from agent_sandbox.service.backend.kube_settings import KubeSettings
from agent_sandbox.service.values import RUNNING, Network, Resources, Sandbox

DIGEST = "sha256:" + "ab" * 32
BASE = f"registry.example/base@{DIGEST}"
AGENT = "registry.example/agent@sha256:" + "cd" * 32
INSTALLATION = "0011223344556677"
RESOURCES = Resources(memory=256 << 20, cpus=0.5, pids=64, disk=128 << 20)


def around(**settings: Any) -> Surroundings:
    """The surroundings of pods."""
    return Surroundings(
        settings=KubeSettings(**settings), namespace="sandboxes", installation=INSTALLATION,
        authority="-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        owner_name=f"agent-sandbox-{INSTALLATION}", owner_uid="0b5e-owner",
    )  # fmt: skip


def shape(surroundings: Surroundings, **changes: Any) -> Shape:
    """A shape, as a sandbox of a plain wish has it."""
    values: dict[str, Any] = {
        "agent": True, "runtime": "", "network": "off", "resources": RESOURCES, **changes,
    }  # fmt: skip
    image = values.pop("image", BASE)
    return shape_of(image, around=surroundings, **values)


def sandbox(number: int = 1, **changes: Any) -> Sandbox:
    """A sandbox that was decided on."""
    values: dict[str, Any] = {
        "id": f"sbx-{number:026d}", "owner": "alice", "backend": "kubernetes", "state": RUNNING,
        "image": BASE, "digest": BASE, "resources": RESOURCES, "network": Network(), **changes,
    }  # fmt: skip
    return Sandbox(**values)
