"""Mounts: what the sandbox sees, at most as writable, and nothing that it could swap."""

from __future__ import annotations

from typing import Any

import pytest

from agent_sandbox.policy.docker.decision import decide, provision, rebuild
from agent_sandbox.policy.docker.mounts import root_volume
from agent_sandbox.policy.docker.values import (
    OWNER_LABEL,
    Bind,
    Engine,
    Found,
    Grants,
    Reference,
    Upstream,
)

from .world import GRANTS, OWNER, SUBPATH, again, ask, create, host, look, refusal, request

PINS = GRANTS.replace(engine=Engine(pins=True))
PLAIN = {"Propagation": "rprivate"}


def mounts(grants: Grants = GRANTS, **host_config: object) -> dict[str, dict[str, Any]]:
    made = host(create(host=host_config, grants=grants))
    assert "Binds" not in made
    return {mount["Target"]: mount for mount in made["Mounts"]}


@pytest.mark.parametrize(
    "source",
    [
        "/", "/etc", "/etc/passwd", "/proc/1/root", "/proc/self/fd/3", "/var/run", "/run", "/dev",
        "/dev/sda", "/root", "/home", "/wsx", "/ws/../etc", "/ws/./x", "//ws", "/ws//x", "/ws/..",
        "/WS", "/ws/.env", "/ws/secrets", "/ws/secrets/key", "/run/docker/docker.sock",
        "/run/containerd/containerd.sock", "/sys", "/ws\n/etc", "/dev/null/..",
    ],
)  # fmt: skip
@pytest.mark.parametrize("grants", [GRANTS, SUBPATH, PINS], ids=["old", "subpath", "pins"])
def test_cannot_mount_what_the_sandbox_does_not_see(source: str, grants: Grants) -> None:
    assert refusal(create(host={"Binds": [f"{source}:/x"]}, grants=grants)) == "create.binds"
    asked = [{"Type": "bind", "Source": source, "Target": "/x"}]
    assert refusal(create(host={"Mounts": asked}, grants=grants)) == "create.mounts.source"


@pytest.mark.parametrize("options", ["z", "Z", "rw,Z", "shared", "rshared", "slave", "bogus", "RO"])
def test_cannot_reach_the_host_through_options(options: str) -> None:
    assert refusal(create(host={"Binds": [f"/ws:/x:{options}"]})) == "create.binds"
    assert refusal(create(host={"Binds": [f"vol:/x:{options}"]})) == "create.binds"


@pytest.mark.parametrize(
    "at", ["/", "/proc", "/proc/sys", "/sys", "x", "/a/../proc", "", "/dev/pts"]
)
def test_cannot_mount_over_what_protects_the_container(at: str) -> None:
    assert refusal(create(host={"Binds": [f"/ws:{at}"]})) == "create.binds"
    assert refusal(create(host={"Binds": [f"vol:{at}"]})) == "create.binds"


def test_a_root_is_mounted_with_what_is_different_below_it() -> None:
    found = mounts(Binds=["/ws:/src"])
    assert found == {
        "/src": {"Type": "bind", "Source": "/ws", "Target": "/src", "BindOptions": PLAIN},
        # By itself writable; as a mount point it cannot be renamed, and hooks with it.
        "/src/.git": {
            "Type": "bind", "Source": "/ws/.git", "Target": "/src/.git", "BindOptions": PLAIN,
        },
        "/src/.git/hooks": {
            "Type": "bind", "Source": "/ws/.git/hooks", "Target": "/src/.git/hooks",
            "ReadOnly": True, "BindOptions": PLAIN,
        },
        "/src/.env": {
            "Type": "bind", "Source": "/dev/null", "Target": "/src/.env", "ReadOnly": True,
            "BindOptions": PLAIN,
        },
        "/src/secrets": {
            "Type": "volume", "Target": "/src/secrets",
            "VolumeOptions": {"NoCopy": True, "Labels": {OWNER_LABEL: OWNER}},
        },
    }  # fmt: skip


def test_read_only_holds_for_everything_below() -> None:
    found = mounts(Binds=["/ws:/src:ro"])
    assert all(m.get("ReadOnly") for m in found.values() if m["Type"] == "bind")
    assert found["/src"]["ReadOnly"] is True


def test_what_is_read_only_inside_is_read_only_in_a_container() -> None:
    assert mounts(Binds=["/usr:/host-usr:rw"])["/host-usr"]["ReadOnly"] is True
    asked = [{"Type": "bind", "Source": "/ws/.git/hooks", "Target": "/h", "ReadOnly": False}]
    assert mounts(Mounts=asked)["/h"]["ReadOnly"] is True


@pytest.mark.parametrize("source", ["/ws/sub", "/ws/sub/deep", "/ws/.git/refs", "/usr/lib"])
def test_cannot_mount_what_could_become_a_link(source: str) -> None:
    # ln -s / sub, after the check: the engine follows it, as root, at every start.
    assert refusal(create(host={"Binds": [f"{source}:/x"]})) == "create.binds"


def test_below_a_root_the_engine_resolves_the_rest() -> None:
    found = mounts(SUBPATH, Binds=["/ws/sub/deep:/x:ro"])["/x"]
    assert found == {
        "Type": "volume", "Source": root_volume(SUBPATH, "/ws"), "Target": "/x", "ReadOnly": True,
        "VolumeOptions": {"NoCopy": True, "Subpath": "sub/deep"},
    }  # fmt: skip


def test_below_a_root_the_proxy_may_hold_the_rest() -> None:
    asked = decide(
        request("POST", "/containers/create", {
            "Image": "alpine", "HostConfig": {"Binds": ["/ws/sub:/x"]},
        }), PINS,
    )  # fmt: skip
    path = Reference(kind="path", name="/ws/sub")
    assert path in asked.references
    found = look(asked.references, PINS)
    assert refusal(rebuild(asked, PINS, found)) == "mount.path"
    held = f"agent-sandbox-{OWNER}-fd00-2a"
    found[path] = Found(id=held, owner=OWNER)
    (mount,) = host(rebuild(asked, PINS, found))["Mounts"]
    assert mount["Source"] == held
    assert mount["VolumeOptions"] == {"NoCopy": True}
    # The volume that stands for it is not to be had without its rules.
    refusal(create(host={"Binds": [f"{held}:/x"]}, grants=PINS))
    for wrong in ("/etc", "/proc/1/root", "other-tenant", "../x", ""):
        found[path] = Found(id=wrong, owner=OWNER)
        assert refusal(rebuild(asked, PINS, found)) == "mount.path"


def test_a_root_that_can_be_swapped_is_reached_through_one_that_cannot() -> None:
    swappable = Bind(host_path="/ws/out", writable=False, swappable=True)
    for base in (GRANTS, SUBPATH):
        grants = base.replace(binds=(*GRANTS.binds, swappable))
        answer = create(host={"Binds": ["/ws/out:/x"]}, grants=grants)
        if grants.engine.subpath:
            (mount,) = host(answer)["Mounts"]
            assert mount["Source"] == root_volume(grants, "/ws")
            assert mount["ReadOnly"] is True
        else:
            assert refusal(answer) == "create.binds"


def test_the_volume_of_a_root_is_no_way_around() -> None:
    name = root_volume(SUBPATH, "/usr")
    asked: list[dict[str, object]] = [{"Type": "volume", "Source": name, "Target": "/x"}]
    assert mounts(SUBPATH, Mounts=asked)["/x"]["ReadOnly"] is True
    name = root_volume(SUBPATH, "/ws")
    found = mounts(SUBPATH, Binds=[f"{name}:/x"])
    assert "/x/.git/hooks" in found
    for sub in ("secrets", "../etc", "/etc", "a//b", "."):
        asked = [
            {"Type": "volume", "Source": name, "Target": "/x", "VolumeOptions": {"Subpath": sub}}
        ]
        refusal(create(host={"Mounts": asked}, grants=SUBPATH))


def test_only_fixtures_of_the_run_are_provided() -> None:
    volume = provision(Reference(kind="volume", name=root_volume(GRANTS, "/ws")), GRANTS)
    assert volume is not None
    assert b'"device":"/ws"' in volume.body
    assert b'"device"' not in (volume.body.replace(b'"device":"/ws"', b""))
    network = provision(Reference(kind="network", name=f"agent-sandbox-{OWNER}"), GRANTS)
    assert network is not None
    assert network.path == "/v1.41/networks/create"
    for kind, name in (
        ("volume", "mine"), ("network", "mine"), ("container", f"agent-sandbox-{OWNER}"),
        ("volume", f"agent-sandbox-{OWNER}"), ("network", root_volume(GRANTS, "/ws")),
    ):  # fmt: skip
        assert provision(Reference(kind=kind, name=name), GRANTS) is None


@pytest.mark.parametrize("source", ["/var/run/docker.sock", "/run/docker.sock"])
def test_the_engine_s_socket_becomes_the_sandbox_s_own(source: str) -> None:
    found = mounts(Binds=[f"{source}:/var/run/docker.sock:rw"])
    assert found["/var/run/docker.sock"]["Source"] == GRANTS.socket
    asked = [{"Type": "bind", "Source": source, "Target": "/d.sock", "ReadOnly": True}]
    assert mounts(Mounts=asked)["/d.sock"]["Source"] == GRANTS.socket
    without = GRANTS.replace(socket="")
    assert refusal(create(host={"Binds": [f"{source}:/x"]}, grants=without)) == "create.binds"


def test_volumes_get_an_owner_and_those_of_others_are_not_used() -> None:
    label = {"Labels": {OWNER_LABEL: OWNER}}
    found = mounts(Binds=["fresh:/a", "mine:/b:ro,nocopy", "/c"])
    assert found["/a"] == {
        "Type": "volume", "Source": "fresh", "Target": "/a", "VolumeOptions": label,
    }  # fmt: skip
    assert found["/b"]["VolumeOptions"] == {**label, "NoCopy": True}
    assert found["/c"] == {"Type": "volume", "Target": "/c", "VolumeOptions": label}
    assert refusal(create(host={"Binds": ["other-tenant:/x"]})) == "owner.volume-name"
    assert refusal(create(host={"Binds": ["agent-sandbox-run2:/x"]})) == "create.binds"
    volumes = host(create({"Volumes": {"/data": {}}}))["Mounts"]
    assert volumes == [{"Type": "volume", "Target": "/data", "VolumeOptions": label}]


@pytest.mark.parametrize(
    "mount",
    [
        {"Type": "image", "Source": "alpine", "Target": "/x"},
        {"Type": "npipe", "Source": "x", "Target": "/x"},
        {"Type": "cluster", "Source": "x", "Target": "/x"},
        {"Type": "Bind", "Source": "/ws", "Target": "/x"},
        {"Type": "", "Source": "/ws", "Target": "/x"},
        {"Source": "/ws", "Target": "/x"},
        {"Type": "bind", "Source": "/ws"},
        {"Type": "bind", "Target": "/x"},
        {"Type": "bind", "Source": "/ws", "Target": "/x", "VolumeOptions": {"NoCopy": True}},
        {"Type": "bind", "Source": "/ws", "Target": "/x",
         "BindOptions": {"Propagation": "rshared"}},
        {"Type": "bind", "Source": "/ws", "Target": "/x", "BindOptions": {"NonRecursive": True}},
        {"Type": "volume", "Target": "/x", "VolumeOptions": {"DriverConfig": {"Name": "x"}}},
        {"Type": "volume", "Target": "/x",
         "VolumeOptions": {"DriverConfig": {"Options": {"a": "b"}}}},
        {"Type": "volume", "Target": "/x", "VolumeOptions": {"Labels": {OWNER_LABEL: "run2"}}},
        {"Type": "volume", "Source": "mine", "Target": "/x", "VolumeOptions": {"Subpath": "a"}},
        {"Type": "volume", "Source": "/etc", "Target": "/x"},
        {"Type": "tmpfs", "Source": "/etc", "Target": "/x"},
        {"Type": "tmpfs", "Target": "/x", "TmpfsOptions": {"SizeBytes": 1 << 40}},
        {"Type": "tmpfs", "Target": "/x", "TmpfsOptions": {"Options": [["suid"]]}},
        {"Type": "tmpfs", "Target": "/x", "TmpfsOptions": {"Mode": 0o4777}},
        {"Type": "volume", "Target": "/x", "ClusterOptions": {"a": 1}},
        "x",
    ],
)  # fmt: skip
def test_a_mount_of_another_kind_is_refused(mount: object) -> None:
    assert refusal(create(host={"Mounts": [mount]})).startswith("create")


def test_a_tmpfs_has_a_size_and_no_devices() -> None:
    assert host(create(host={"Tmpfs": {"/run": "", "/t": "exec,size=1m,mode=1777"}}))["Tmpfs"] == {
        "/run": f"rw,noexec,nosuid,nodev,size={1 << 30}",
        "/t": "rw,exec,nosuid,nodev,size=1048576,mode=1777",
    }
    found = mounts(Mounts=[{"Type": "tmpfs", "Target": "/x"}])
    assert found["/x"]["TmpfsOptions"] == {"SizeBytes": 1 << 30}


@pytest.mark.parametrize("grants", [GRANTS, SUBPATH], ids=["old", "subpath"])
def test_what_was_rebuilt_is_rebuilt_the_same(grants: Grants) -> None:
    binds = ["/ws:/src", "/usr:/u:ro", "fresh:/v", "/a", "/var/run/docker.sock:/d"]
    binds += ["/ws/sub:/s"] if grants.engine.subpath else []
    first = create(host={"Binds": binds}, grants=grants)
    assert isinstance(first, Upstream), first
    assert ask(again(first), grants) == first


@pytest.mark.parametrize("place", ["/src/secrets", "/src/.env", "/src/.git", "/src/.git/hooks"])
def test_cannot_put_something_else_in_the_place_of_a_mask(place: str) -> None:
    # `docker cp` mounts everything but a tmpfs, and would see what is below.
    bind = {"Type": "bind", "Source": "/ws", "Target": "/src"}
    expected = mounts(Mounts=[bind])
    for other in (
        {"Type": "tmpfs", "Target": place}, {"Type": "volume", "Source": "mine", "Target": place},
    ):  # fmt: skip
        assert mounts(Mounts=[other, bind]) == mounts(Mounts=[bind, other]) == expected
    assert mounts(Binds=[f"mine:{place}", "/ws:/src"]) == expected
    assert mounts(Binds=[place, "/ws:/src"]) == expected
    for tmpfs in (place, f"{place}/"):
        answer = create(host={"Binds": ["/ws:/src"], "Tmpfs": {tmpfs: ""}})
        assert refusal(answer) == "create.tmpfs"


def test_cannot_uncover_what_another_container_has_masked() -> None:
    for tmpfs in (
        {"Tmpfs": {"/src/secrets": ""}}, {"Mounts": [{"Type": "tmpfs", "Target": "/src/secrets"}]},
    ):  # fmt: skip
        answer = create(host={"VolumesFrom": ["mine-db"], **tmpfs})
        assert refusal(answer) == "create.volumes-from"
    assert isinstance(create(host={"VolumesFrom": ["mine-db"], "Binds": ["mine:/v"]}), Upstream)
