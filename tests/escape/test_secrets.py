"""Secrets: variables, credentials in the home, root's own files, and who may see them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conftest import must_work
from escape.attack import ROOT, Attack, Scene, Trial, hide, trials

if TYPE_CHECKING:
    from escape.attack import Step

pytestmark = pytest.mark.kernel

# Runs wherever the library is loaded: in bwrap, that is on the host.
PRELOADED = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void run(void) { close(open("%s", O_CREAT | O_WRONLY, 0600)); }
"""


def variable(name: str, value: str = "{}") -> Step:
    """The caller's environment holds a secret."""
    return lambda s: s.caller.update({name: value.format(s.secret)})


def shadow(scene: Scene) -> None:
    """The secret is what the host has in /etc/shadow."""
    scene.secret = Path("/etc/shadow").read_text().splitlines()[0]


def library(scene: Scene) -> None:
    """A library of the project that the user has every command load; the attacker rebuilds it."""
    must_work(shutil.which("cc"), "needs a C compiler")
    scene.write("payload.c", PRELOADED % scene.marker)
    scene.outside("cc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", scene.project / "lib.so")


def settings_and_hooks(scene: Scene) -> None:
    """What the user's own agent runs, and where it would find more."""
    scene.guard("~/.claude/settings.json", "{}\n")
    scene.guard("~/.claude/hooks/pre.sh")
    scene.watch(scene.path("~/.claude/hooks/new.sh"))


ATTACKS = (
    Attack(
        name="token-in-a-variable", invariant=7, what="GITHUB_TOKEN",
        setup=variable("GITHUB_TOKEN"), script="env; cat /proc/*/environ",
        without="list of variables",
    ),
    Attack(
        name="agents-and-buses-in-variables", invariant=7, what="SSH_AUTH_SOCK and the like",
        setup=variable("SSH_AUTH_SOCK", "/tmp/{}/agent.1"), script="env",
        without="list of variables",
    ),
    Attack(
        name="engine-in-a-variable", invariant=5, what="DOCKER_HOST by TCP",
        setup=variable("DOCKER_HOST", "tcp://{}:2375"), script="env", without="list of variables",
    ),
    Attack(
        name="key-of-another-profile", invariant=7, what="ANTHROPIC_API_KEY for codex",
        setup=variable("ANTHROPIC_API_KEY"), flags=("--profile", "codex"), script="env",
        without="list of variables",
    ),
    Attack(
        name="password-of-a-proxy", invariant=7, what="a listed variable with a secret in it",
        setup=variable("https_proxy", "http://me:{}@proxy:3128"), script="env",
        without="no passwords in variables",
    ),
    Attack(
        name="environment-of-bwrap", invariant=7, what="/proc/1/environ",
        setup=variable("API_TOKEN"), script="cat /proc/1/environ",
        without="empty environment of bwrap + hidden first process",
    ),
    Attack(
        name="library-in-bwrap", invariant=9, what="LD_PRELOAD of a file in the project",
        setup=library, flags=("--env", "LD_PRELOAD={project}/lib.so"),
        script="cc -shared -fPIC payload.c -o n.so && mv -f n.so lib.so",
        without="empty environment of bwrap",
    ),
    Attack(
        name="credentials-in-the-home", invariant=3, what="clouds, registries, histories",
        setup=hide("~/.aws/credentials", "~/.netrc", "~/.npmrc", "~/.bash_history"),
        script="cat $home/.aws/credentials $home/.netrc $home/.npmrc $home/.bash_history",
        without="private home",
    ),
    Attack(
        name="credentials-in-the-shown-home", invariant=3, what="with --home=host",
        setup=hide("~/.aws/credentials", "~/.netrc", "~/.config/gh/hosts.yml"),
        flags=("--home=host",),
        script="cat $home/.aws/credentials $home/.netrc $home/.config/gh/hosts.yml",
        without="secrets of the home",
    ),
    Attack(
        name="credentials-in-a-shown-directory", invariant=3, what="with --ro ~/.config",
        setup=hide("~/.config/gh/hosts.yml", "~/.config/gcloud/key.json"),
        flags=("--ro", "~/.config"),
        script="cat $home/.config/gh/hosts.yml $home/.config/gcloud/key.json",
        without="secrets of the home",
    ),
    Attack(
        name="login-of-another-agent", invariant=3, what="codex reads what is claude's",
        setup=hide("~/.claude/.credentials.json"), flags=("--profile", "codex"),
        script="cat $home/.claude/.credentials.json", without="private home",
    ),
    Attack(
        name="shadow", invariant=3, what="root owns it, capabilities or not", who=(ROOT,),
        setup=shadow, script="cat /etc/shadow; chmod 644 /etc/shadow; cat /etc/shadow",
        without="secrets of root",
    ),
    Attack(
        name="agents-own-hooks", invariant=9, what="the host's agent would run them",
        setup=settings_and_hooks, flags=("--profile", "claude"),
        script="""
            cd $home/.claude; echo evil > settings.json; echo evil > hooks/pre.sh
            echo evil > n; mv -f n settings.json; mv hooks h; mkdir hooks; echo evil > hooks/pre.sh
        """, without="protected parts of profiles + private state of agents",
    ),
    Attack(
        name="agents-own-hooks-as-they-are-shown", invariant=9, what="written in place",
        setup=settings_and_hooks, flags=("--profile", "claude"),
        script="cd $home/.claude; echo evil >> settings.json; echo evil > hooks/pre.sh;"
        " echo evil > hooks/new.sh; rm -f hooks/pre.sh",
        without="read-only mounts",
    ),
    Attack(
        name="agents-own-hooks-in-an-opened-state", invariant=9, what="with --rw ~/.claude",
        setup=settings_and_hooks, flags=("--profile", "claude", "--rw", "~/.claude"),
        script="""
            cd $home/.claude; echo evil > settings.json; echo evil > hooks/pre.sh
            echo evil > n; mv -f n settings.json; mv hooks h; mkdir hooks; echo evil > hooks/pre.sh
        """, without="protected parts of profiles",
    ),
    Attack(
        name="servers-of-an-agent", invariant=9, what="codex's config.toml names programs",
        setup=lambda s: s.guard("~/.codex/config.toml"), flags=("--profile", "codex"),
        script="cd $home/.codex; echo evil >> config.toml; echo evil > n; mv -f n config.toml;"
        " rm -f config.toml",
        without="private state of agents",
    ),
)  # fmt: skip


@trials(ATTACKS)
def test_cannot_get_at_secrets(trial: Trial) -> None:
    trial.run()
