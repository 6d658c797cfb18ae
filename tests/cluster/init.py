"""The first process of a machine of the test cluster: mounts, starts programs, reaps, and dies.

It runs in namespaces of its own, and takes one JSON order per line: `[verb, words…]`. When its
input ends, so does it, and the kernel ends everything else in its pid namespace: a harness that is
killed leaves no process, no mount and no network device.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable


def mount(*words: str) -> None:
    """`mount WORDS`."""
    subprocess.run(["mount", *words], check=True)


def put(path: str, text: str) -> None:
    """Write a file, such as a sysctl of this namespace."""
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def hide(path: str, text: str) -> None:
    """Show a file of our own at a place: kubelet sets kernel values of the whole machine."""
    if not os.path.exists(path):
        return
    own = "/run/" + path.strip("/").replace("/", "-")
    put(own, text)
    mount("--bind", own, path)


def run(*argv: str) -> None:
    """Run a program to its end."""
    subprocess.run(argv, check=True)


def start(log: str, *argv: str) -> None:
    """Start a program that stays."""
    with open(log, "ab") as file:
        subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )


ORDERS: dict[str, Callable[..., None]] = {
    "mount": mount,
    "put": put,
    "hide": hide,
    "run": run,
    "start": start,
}


def obey(line: str) -> str:
    """Do what a line says; `ok` or what went wrong."""
    verb, *words = json.loads(line)
    try:
        ORDERS[verb](*words)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{verb} {words}: {error}".replace("\n", " ")
    return "ok"


def reap() -> None:
    """Take the ends of all that was left to us; children of subprocess.run are waited for there."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def main() -> None:
    """Obey until the input ends."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    mount("-t", "proc", "proc", "/proc")
    # Orders come one at a time, each answered: nothing is left in a buffer when select waits.
    print("ok", flush=True)
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            reap()
        if 0 in ready:
            line = sys.stdin.readline()
            if not line:
                return
            print(obey(line), flush=True)


if __name__ == "__main__":
    main()
