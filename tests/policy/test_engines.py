"""Where container engines may listen."""

from __future__ import annotations

import pytest

from agent_sandbox.policy import engines
from agent_sandbox.policy.environment import PASSED, PASSED_PREFIXES, PROXIES
from agent_sandbox.policy.profiles.builtin import PROFILES


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("unix:///var/run/docker.sock", "/var/run/docker.sock"),
        ("unix:/p", "/p"),
        ("/run/containerd/containerd.sock", "/run/containerd/containerd.sock"),
        ("tcp://127.0.0.1:2375", None),
        ("ssh://me@host", None),
        ("npipe:////./pipe/docker", None),
        ("", None),
        ("unix://relative", "relative"),
        ("fd://", None),
    ],
)
def test_unix_path_reads_every_spelling(address: str, path: str | None) -> None:
    """Both forms of unix addresses and plain paths; nothing else is a path."""
    assert engines.unix_path(address) == path


@pytest.mark.parametrize("name", engines.VARIABLES)
def test_each_variable_adds_its_socket_first(name: str) -> None:
    """Wherever the user's own engine is, it is covered."""
    found = engines.candidates({name: "unix:///data/x.sock"}, "/home/u", ())
    assert found[0] == "/data/x.sock"


@pytest.mark.parametrize("value", ["tcp://1.2.3.4:2375", "unix://relative", "", "x"])
def test_addresses_that_are_no_absolute_path_add_nothing(value: str) -> None:
    """And break nothing."""
    assert engines.candidates({"DOCKER_HOST": value}, "/h", ()) == engines.candidates({}, "/h", ())


@pytest.mark.parametrize(
    "path",
    [
        "/var/run/docker.sock", "/run/docker.sock", "/run/podman/podman.sock",
        "/run/containerd/containerd.sock", "/run/crio/crio.sock", "/run/buildkit/buildkitd.sock",
        "/run/user/7/docker.sock", "/run/user/7/podman/podman.sock",
        "/home/u/.docker/run/docker.sock", "/home/u/.docker/desktop/docker.sock",
        "/home/u/.colima/default/docker.sock", "/home/u/.rd/docker.sock",
    ],
)  # fmt: skip
def test_the_usual_sockets_are_candidates(path: str) -> None:
    """Rootful, rootless and desktop engines."""
    assert path in engines.candidates({}, "/home/u", ("/run/user/7",))


def test_candidates_are_unique_and_absolute() -> None:
    """Each is looked up once."""
    env = {"DOCKER_HOST": "unix:///run/docker.sock"}
    found = engines.candidates(env, "/home/u", ("/run/user/7", "/tmp/rt"))
    assert len(found) == len(set(found))
    assert all(path.startswith("/") for path in found)


@pytest.mark.parametrize("name", [*engines.VARIABLES, "DOCKER_CONTEXT", "DOCKER_CONFIG"])
def test_no_list_passes_the_name_of_an_engine(name: str) -> None:
    """Neither the allow-list nor a profile."""
    assert name not in PASSED
    assert name not in PROXIES
    assert not name.startswith(PASSED_PREFIXES)
    assert not any(name in profile.env for profile in PROFILES)


def test_the_socket_is_bound_where_the_standard_path_leads() -> None:
    """`/var/run` is a link to `/run` inside."""
    assert engines.STANDARD == "/var" + engines.INSIDE
