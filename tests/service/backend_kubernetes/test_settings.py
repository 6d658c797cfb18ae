"""Settings and images, as an operator writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox.errors import UsageError
from agent_sandbox.service.backend import kube_images, kube_settings
from agent_sandbox.service.backend.kube_images import Image
from agent_sandbox.service.problems import Problem

from .scene import BASE, DIGEST

GOOD = {
    "KUBERNETES_AGENT_IMAGE": (f"agent@{DIGEST}", f"docker.io/library/agent@{DIGEST}"),
    "KUBERNETES_TRANSPORT": ("exec", "exec"),
    "KUBERNETES_SECCOMP": ("localhost/profiles/a.json", "localhost/profiles/a.json"),
    "KUBERNETES_RUNTIMES": ("gvisor, kata", ("gvisor", "kata")),
    "KUBERNETES_USER_NAMESPACES": ("on", True),
    "KUBERNETES_NODE_SELECTOR": ("a.b/c=d", {"a.b/c": "d"}),
    "KUBERNETES_NAMESERVERS": ("9.9.9.9 2620:fe::fe", ("9.9.9.9", "2620:fe::fe")),
    "KUBERNETES_CPU_SHARE": ("0.5", 0.5),
    "KUBERNETES_START_SECONDS": ("2m", 120.0),
    "KUBE_NAMESPACE": ("team-a", "team-a"),
}
BAD = {
    "KUBERNETES_AGENT_IMAGE": "agent:latest",
    "KUBERNETES_TRANSPORT": "carrier-pigeon",
    "KUBERNETES_SECCOMP": "localhost/../../etc/x.json",
    "KUBERNETES_NETWORK_POLICY": "yes",
    "KUBERNETES_RUNTIMES": "-gvisor",
    "KUBERNETES_USER_NAMESPACES": "1",
    "KUBERNETES_NODE_SELECTOR": "pool",
    "KUBERNETES_NAMESERVERS": "localhost",
    "KUBERNETES_CPU_SHARE": "2",
    "KUBERNETES_HARD_SECONDS": "forever",
    "KUBE_NAMESPACE": "../kube-system",
}


@pytest.mark.parametrize("name", GOOD)
def test_a_setting_is_read(name: str) -> None:
    text, value = GOOD[name]
    row = next(row for row in kube_settings.TABLE if row.variable == name)
    assert getattr(kube_settings.load({name: text}), row.name) == value


@pytest.mark.parametrize("name", BAD)
def test_a_setting_that_cannot_be_used_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        kube_settings.load({name: BAD[name]})
    assert caught.value.code == "bad-kubernetes"
    assert caught.value.hint


def test_every_setting_is_in_the_table_once_and_empty_is_not_set() -> None:
    names = [row.name for row in kube_settings.TABLE]
    assert sorted(names) == sorted(kube_settings.KubeSettings.__fields__)
    empty = dict.fromkeys((row.variable for row in kube_settings.TABLE), "")
    assert kube_settings.load(empty) == kube_settings.KubeSettings()


def test_a_pod_that_would_end_while_it_waits_is_refused() -> None:
    with pytest.raises(UsageError, match="not below"):
        kube_settings.load({"KUBERNETES_HARD_SECONDS": "10m", "KUBERNETES_WARM_SECONDS": "1h"})


def test_no_setting_has_a_name_that_kubernetes_itself_gives_to_pods() -> None:
    """It sets NAME_SERVICE_HOST, NAME_PORT and the like for a service called kubernetes."""
    given = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBERNETES_PORT")
    assert not {row.variable for row in kube_settings.TABLE} & set(given)


# --- images

TABLE = {"docker.io/library/python:3.13": Image(pin=BASE, agent=True)}


def test_a_name_means_what_the_operator_has_said_or_its_own_digest() -> None:
    assert kube_images.choose("python:3.13", TABLE).pin == BASE
    assert kube_images.choose(f"other@{DIGEST}", TABLE).pin == f"docker.io/library/other@{DIGEST}"
    # By digest or by name, it is the same image, with the agent in it.
    assert kube_images.choose(BASE, TABLE).agent


def test_a_digest_does_not_lead_from_a_short_name_to_somebody_elses_image() -> None:
    """An allow-list that has `python` would let it through."""
    other = "sha256:" + "f" * 64
    for name in (f"python@{other}", f"python:3.13@{other}", f"docker.io/library/python@{other}"):
        with pytest.raises(Problem, match="stands for another image"):
            kube_images.choose(name, TABLE)
    # With the digest that it has, it is what the table says.
    assert kube_images.choose(f"python@{DIGEST}", TABLE) == Image(pin=BASE, agent=True)
    # A name that is its own place stands for nothing else.
    same = {"registry.test/base:1": Image(pin=f"registry.test/base@{DIGEST}")}
    assert kube_images.choose(f"registry.test/base@{other}", same).pin.endswith(other)


@pytest.mark.parametrize("name", ["python", "python:latest", "python:3.12", "evil/python:3.13"])
def test_a_name_that_could_mean_anything_is_refused_with_a_remedy(name: str) -> None:
    with pytest.raises(Problem, match="not pinned") as caught:
        kube_images.choose(name, TABLE)
    assert "sha256" in caught.value.hint


@pytest.mark.parametrize("name", ["", "a b", "UPPER", "x@sha256:12", "../x", "a" * 300])
def test_a_text_that_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(Problem, match="not the name"):
        kube_images.choose(name, TABLE)


def test_a_table_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "images.toml"
    path.write_text(f'"python:3.13" = "{BASE}"\n')
    table = kube_images.Table(str(path))
    assert kube_images.choose("python:3.13", table.read()) == Image(pin=BASE)
    path.write_text(f'"python:3.13" = {{ image = "{BASE}", agent = true }}\n')
    assert kube_images.choose("python:3.13", table.read()).agent


@pytest.mark.parametrize(
    "text",
    [
        '"python" = "registry.example/python:latest"',
        '"python" = 3',
        '"python" = { image = "x", digest = "y" }',
        f'"python" = {{ image = "{BASE}", agent = "yes" }}',
        '"a b" = "x"',
        "not toml",
    ],
)
def test_a_table_with_a_mistake_is_refused_as_a_whole(tmp_path: Path, text: str) -> None:
    path = tmp_path / "images.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        kube_images.Table(str(path)).read()
    assert caught.value.code == "bad-kubernetes"


def test_a_table_that_is_not_there_is_an_error_and_none_is_empty(tmp_path: Path) -> None:
    assert kube_images.Table("").read() == {}
    with pytest.raises(UsageError, match="no such file"):
        kube_images.Table(str(tmp_path / "none.toml")).read()
