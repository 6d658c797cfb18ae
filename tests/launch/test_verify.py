"""The check of a built root against its plan."""

from __future__ import annotations

import pytest

from agent_sandbox.launch.verify import by_point, parse, place_of, stray

HOST = parse(
    """\
20 1 8:1 / / rw - ext4 /dev/root rw
21 20 8:2 /@home /home rw - btrfs /dev/h rw
22 20 0:5 / /usr/local rw - tmpfs t rw
23 20 0:6 / /mnt/a\\040b rw - tmpfs t rw
24 20 0:7 / /dev/shm rw - tmpfs t rw
25 24 0:8 / /dev/shm rw - tmpfs t rw
"""
)
PLANNED = {"/usr": ["/usr"], "/home/u/p": ["/home/u/p"], "/home/u/p/.git": ["/home/u/p/.git"]}
GOOD = """\
40 1 0:40 / / ro - tmpfs tmpfs rw
41 40 8:1 /usr /usr ro - ext4 /dev/root rw
42 41 0:5 / /usr/local ro - tmpfs t rw
43 40 8:2 /@home/u/p /home/u/p rw - btrfs /dev/h rw
44 43 8:2 /@home/u/p/.git /home/u/p/.git rw - btrfs /dev/h rw
45 40 0:41 / /proc rw - proc proc rw
"""


def test_the_planned_root_is_accepted() -> None:
    """With the host's own mounts below what was bound."""
    assert stray(parse(GOOD), HOST, PLANNED) == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/@home/u/p/.git /home/u/p/.git", "/@home/u /home/u/p/.git"),
        ("8:2 /@home/u/p/.git", "8:1 /@home/u/p/.git"),
        ("/@home/u/p/.git /home/u/p/.git", "/@home/u /home/u"),
        ("0:5 / /usr/local", "0:9 / /usr/local"),
        ("0:5 / /usr/local", "0:5 / /usr/share"),
        ("0:41 / /proc", "8:2 /@home/u /dev/sneaky"),
        ("/@home/u/p /home/u/p", "/@home/u/p//deleted /home/u/p"),
    ],
    ids=["other-source", "other-device", "other-place", "other-submount", "moved-submount",
         "in-dev", "deleted"],
)  # fmt: skip
def test_cannot_pass_with_another_mount(old: str, new: str) -> None:
    """A swapped source, a mount somewhere else, or one that nobody planned."""
    assert old in GOOD
    assert stray(parse(GOOD.replace(old, new)), HOST, PLANNED) != ""


def test_cannot_pass_without_a_planned_mount() -> None:
    """A mask that landed elsewhere is missing here."""
    without = "".join(line + "\n" for line in GOOD.splitlines() if ".git" not in line)
    assert "/home/u/p/.git" in stray(parse(without), HOST, PLANNED)


def test_cannot_pass_with_one_of_two_mounts_on_one_place() -> None:
    """A bind is there, the mask on top of it is not."""
    planned = {**PLANNED, "/home/u/p/.git": ["/home/u/p/.git", "/home/u/mask"]}
    assert "/home/u/p/.git" in stray(parse(GOOD), HOST, planned)
    masked = GOOD + "46 44 8:2 /@home/u/mask /home/u/p/.git ro - btrfs /dev/h rw\n"
    assert stray(parse(masked), HOST, planned) == ""


def test_stacked_mounts_of_the_host_come_along() -> None:
    """The whole host, with two mounts on one place."""
    inside = (
        "1 0 8:1 / / ro - ext4 r rw\n2 1 0:7 / /dev/shm rw - t t rw\n"
        "3 2 0:8 / /dev/shm rw - t t rw\n"
    )
    assert stray(parse(inside), HOST, {"/": ["/"]}) == ""


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/etc", ("8:1", "/etc")),
        ("/home/u", ("8:2", "/@home/u")),
        ("/home", ("8:2", "/@home")),
        ("/usr/local", ("0:5", "/")),
        ("/mnt/a b/c", ("0:6", "/c")),
    ],
)
def test_a_path_stands_for_a_directory_on_a_device(path: str, place: tuple[str, str]) -> None:
    """Through subvolumes, escapes and mounts on mounts."""
    assert place_of(path, by_point(HOST)) == place
