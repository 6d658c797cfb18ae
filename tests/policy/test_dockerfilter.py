"""Which host paths a run's containers may see."""

from __future__ import annotations

from agent_sandbox.policy.dockerfilter import binds
from agent_sandbox.policy.model import EXCLUDE, RO, RW, Mount

PROJECT = "/home/me/p"


def mount(kind: str, path: str, level: str, *, source: str = "", file: bool = False) -> Mount:
    return Mount(kind=kind, dest=path, source=source or path, level=level, file=file)


MOUNTS = (
    mount("ro", "/usr", RO),
    mount("ro", "/etc", RO),
    mount("rw", "/tmp", "private", source="@work/tmp"),
    mount("rw", "/home/me", "private", source="@home"),
    mount("rw", PROJECT, RW),
    mount("pin", f"{PROJECT}/.git", RW),
    mount("ro", f"{PROJECT}/.git/hooks", RO),
    mount("mask-file", f"{PROJECT}/.env", EXCLUDE, source="@mask/file"),
    mount("mask-dir", f"{PROJECT}/secrets", EXCLUDE, source="@mask/dir"),
    Mount(kind="tmpfs", dest=f"{PROJECT}/closed", level=EXCLUDE),
    Mount(kind="hold", dest=f"{PROJECT}/.envrc", level=RO, file=True),
    Mount(kind="seal", dest=f"{PROJECT}/closed"),
    mount("ro", "/data/shared", RO),
    mount("mask-file", "/etc/shadow", EXCLUDE, source="@mask/file"),
)


def test_the_project_and_what_was_named_with_all_that_differs_in_them() -> None:
    """No system tree: there a container's root reads more than the user. Nothing private either."""
    found = binds(MOUNTS, PROJECT, frozenset(("/data/shared", f"{PROJECT}/.env")))
    assert found == (
        ("/data/shared", False, False, False, True),
        (PROJECT, True, False, False, True),
        (f"{PROJECT}/.env", False, False, True, False),
        (f"{PROJECT}/.envrc", False, False, False, False),
        (f"{PROJECT}/.git", True, False, False, True),
        (f"{PROJECT}/.git/hooks", False, False, False, True),
        (f"{PROJECT}/closed", False, False, True, True),
        (f"{PROJECT}/secrets", False, False, True, True),
    )


def test_a_root_in_a_writable_one_can_be_swapped() -> None:
    """The directories above it can be renamed, from a container at least."""
    mounts = (mount("rw", PROJECT, RW), mount("ro", f"{PROJECT}/a/b", RO))
    found = {bind[0]: bind[2] for bind in binds(mounts, PROJECT, frozenset((f"{PROJECT}/a/b",)))}
    assert found == {PROJECT: False, f"{PROJECT}/a/b": True}
