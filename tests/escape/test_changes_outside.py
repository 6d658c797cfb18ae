"""Changes outside while a sandbox runs: saves, new files and new mounts of the host."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from escape.attack import ROOT, Attack, Run, Scene, Trial, finish, guard, hide, trials
from kernel.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence

    from escape.attack import Drive, Step

pytestmark = pytest.mark.kernel

# The attacker does not know the moment; it tries when the change is certainly there. Within the
# first fraction of a millisecond it could win: docs/threat-model.md says so.
AFTERWARDS = "touch started; until [ -e changed ]; do sleep 0.01; done; sleep 0.2; rm -f started"
# In a mount namespace of its own, so that nothing of it reaches the machine: like any host with
# systemd, mounts are shared there.
LATE_MOUNT = """
mount --make-rshared / || exit
"$@" &
until [ -e started ]; do sleep 0.01; done
mount -t tmpfs -o mode=0777 late "$TARGET" && echo "$SECRET" > "$TARGET/file"
touch changed
wait $!
[ ! -e "$TARGET/evil" ] || echo written by the sandbox
"""


def meanwhile(change: Step) -> Drive:
    """Something changes outside while the script waits for it."""

    def drive(scene: Scene, argv: Sequence[str]) -> Run:
        (scene.project / "changed").unlink(missing_ok=True)
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = scene.popen(argv, stdin=subprocess.DEVNULL, **streams)
        try:
            assert eventually((scene.project / "started").exists)
            change(scene)
        finally:
            scene.write("changed")
        return finish(process)

    return drive


def save(name: str) -> Step:
    """What every editor does: write a new file and rename it over the old one."""

    def saved(scene: Scene) -> None:
        path = scene.path(name)
        text = path.read_text() if path.exists() else scene.secret
        new = scene.write(f"{name}.new~", text)
        scene.keep_hidden(new)
        new.rename(path)

    return saved


def replaced_directory(scene: Scene) -> None:
    """A checkout or a deployment swaps a whole directory."""
    scene.path("conf").rename(scene.path(f"conf.{len(scene.codes)}"))
    scene.hide("conf/keys/a.pem")


def late_mount(scene: Scene, argv: Sequence[str]) -> Run:
    """The host mounts a disk below what the sandbox shows."""
    (scene.project / "changed").unlink(missing_ok=True)
    scene.caller.update(TARGET=scene.facts["target"], SECRET=scene.secret)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    start = ["unshare", "-m", "sh", "-c", LATE_MOUNT, "-"]
    return finish(scene.popen([*start, *argv], stdin=subprocess.DEVNULL, **streams))


def disk(name: str) -> Step:
    def setup(scene: Scene) -> None:
        scene.facts["target"] = str(scene.mkdir(name))

    return setup


def seen_or_written(scene: Scene) -> bool:
    return scene.leaked() or "written by the sandbox" in scene.output


ATTACKS = (
    Attack(
        name="saved-excluded-file", invariant=3, what="the mask goes with the old file",
        setup=hide(".env"), flags=("--exclude", ".env"), drive=meanwhile(save(".env")),
        script=f"{AFTERWARDS}; cat .env", without="watched names",
    ),
    Attack(
        name="saved-read-only-file", invariant=2, what="so does a read-only mount",
        setup=guard("conf/rules.toml"), flags=("--ro", "conf/rules.toml"),
        drive=meanwhile(save("conf/rules.toml")),
        script=f"{AFTERWARDS}; echo evil > conf/rules.toml", without="watched names",
    ),
    Attack(
        name="new-excluded-file", invariant=3, what="it appears while the sandbox runs",
        flags=("--exclude", "later.key"), drive=meanwhile(save("later.key")),
        script=f"{AFTERWARDS}; cat later.key", without="watched names",
    ),
    Attack(
        name="replaced-excluded-directory", invariant=3, what="with everything above it",
        setup=hide("conf/keys/a.pem"), flags=("--exclude", "conf/keys"),
        drive=meanwhile(replaced_directory),
        script=f"{AFTERWARDS}; cat conf/keys/a.pem", without="watched names",
    ),
    Attack(
        name="late-mount-in-the-project", invariant=3, what="a disk of the host appears inside",
        who=(ROOT,), setup=disk("mnt"), drive=late_mount, escaped=seen_or_written,
        script=f"{AFTERWARDS}; cat mnt/file; echo evil > mnt/evil",
        without="cut off from later mounts",
    ),
    Attack(
        name="late-mount-below-a-read-only-tree", invariant=2, what="where it would be writable",
        who=(ROOT,), setup=disk("~/tools/mnt"), flags=("--ro", "~/tools"), drive=late_mount,
        escaped=seen_or_written,
        script=f"{AFTERWARDS}; cat $home/tools/mnt/file; echo evil > $home/tools/mnt/evil",
        without="cut off from later mounts",
    ),
)  # fmt: skip


@trials(ATTACKS)
def test_cannot_profit_from_changes_outside(trial: Trial) -> None:
    trial.run()
