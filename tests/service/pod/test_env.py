"""What a pod is told, and what its log tells."""

from __future__ import annotations

import pytest

from agent_sandbox.pod import terms
from agent_sandbox.policy import owned
from agent_sandbox.service.backend import pod_env, pod_identity
from agent_sandbox.service.backend.interface import HOME, WORK

LINE = f"{terms.LINE}{'ab' * 32}\n"


def test_the_fingerprint_is_in_the_first_line() -> None:
    assert pod_env.fingerprint(LINE) == "ab" * 32
    assert pod_env.fingerprint(LINE + "more\n") == "ab" * 32
    assert len(LINE) < pod_env.LOG_BYTES


@pytest.mark.parametrize(
    "log",
    [
        "", "\n", LINE[:-1], LINE[:-2] + "\n", LINE.replace("ab", "AB"), "x" + LINE, "\n" + LINE,
        LINE.replace("agent 1", "agent 2"), LINE.replace("\n", " \n"), LINE.replace("ab", "zz"),
    ],
)  # fmt: skip
def test_anything_else_is_no_fingerprint(log: str) -> None:
    assert pod_env.fingerprint(log) == ""


def test_nothing_that_a_pod_is_told_is_secret() -> None:
    pem = pod_identity.make()
    identity = pod_identity.contexts(pem)
    found = pod_env.env(identity.ca, 60)
    assert set(found) == {terms.CA, terms.UNCLAIMED, terms.AT, *pod_env.NOTHING_OF_THE_IMAGE}
    assert "PRIVATE" in pem.decode()
    assert "PRIVATE" not in "".join(found.values())
    assert identity.ca.count("BEGIN CERTIFICATE") == 1


def test_an_identity_is_another_one_each_time() -> None:
    one, two = (pod_identity.contexts(pod_identity.make()) for _ in range(2))
    assert one.ca != two.ca


def test_one_volume_is_at_every_place_of_a_sandbox() -> None:
    found = pod_env.volume_mounts("files")
    assert {mount["name"] for mount in found} == {"files"}
    places = {mount["mountPath"]: mount.get("subPath", "") for mount in found}
    assert places == {
        pod_env.PLACE: "", WORK: "workspace", HOME: "home/agent", "/tmp": "tmp",
    }  # fmt: skip
    # The agent finds them by the names that commands have for them.
    assert {f"/{part}" for part in pod_env.MOUNTS.values()} == set(owned.PARTS)
    assert tuple(pod_env.MOUNTS) == owned.PARTS


def test_no_command_needs_anything_of_the_image() -> None:
    for argv in (pod_env.COMMAND, pod_env.CONNECT, pod_env.INSTALL):
        assert argv[0].startswith(pod_env.ROOT)
        # What drops the image's variables, the loader, and what it loads.
        assert argv[0].endswith("/enter")
        assert argv[1].startswith(pod_env.ROOT)
        assert argv[4].startswith(pod_env.ROOT)
        assert "-I" in argv
        assert "-S" in argv
