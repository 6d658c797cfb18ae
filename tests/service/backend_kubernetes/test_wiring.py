"""`sandboxctl serve --backend kubernetes`: its flags, and what is said before anything is made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent_sandbox.cli import serve
from agent_sandbox.service import app
from conftest import ROOT

# As a checkout's command starts it: without site-packages.
ENTRY = ROOT / "src" / "agent_sandbox" / "cli" / "entry.py"
FLAGS = {
    "--kubeconfig": "KUBECONFIG", "--kube-context": "KUBE_CONTEXT",
    "--kube-namespace": "KUBE_NAMESPACE",
}  # fmt: skip


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_beats_its_variable(flag: str, tmp_path: Path) -> None:
    given = serve.split(["--data", str(tmp_path), flag, "mine"])
    settings = serve.settings_of(given, {FLAGS[flag]: "theirs"})
    assert settings.environ[FLAGS[flag]] == "mine"
    assert (
        serve.settings_of(serve.split([]), {FLAGS[flag]: "theirs", "HOME": str(tmp_path)}).environ[
            FLAGS[flag]
        ]
        == "theirs"
    )


def test_the_backend_is_one_of_those_that_can_be_asked_for() -> None:
    assert "kubernetes" in app.BACKENDS
    assert "kubernetes" in serve.USAGE


OPEN = """
current-context: x
contexts: [{name: x, context: {cluster: c}}]
clusters: [{name: c, cluster: {server: 'http://10.0.0.1'}}]
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clusters: [", "is not YAML"),
        ("{}", "no current-context"),
        (OPEN, "without TLS"),
    ],
)
def test_a_bad_kubeconfig_ends_the_start_in_words(tmp_path: Path, text: str, words: str) -> None:
    config = tmp_path / "config"
    config.write_text(text)
    done = subprocess.run(
        [sys.executable, "-I", "-S", ENTRY, "ctl", "serve", "--data", tmp_path / "data",
         "--listen", "none", "--backend", "kubernetes", "--kubeconfig", config],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 125
    assert words in done.stderr
    assert "Traceback" not in done.stderr
