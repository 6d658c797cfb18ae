"""The pages about Kubernetes: what they tell to type exists, in the chart, the code and the CLI."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable

import pytest
from ruamel.yaml import YAML

from agent_sandbox.cli import audit, ctl, remote_options, serve, token
from agent_sandbox.errors import UsageError
from agent_sandbox.service import limits, metrics
from agent_sandbox.service.backend import kube_settings
from conftest import ROOT

DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
PAGES = {
    name: (ROOT / name).read_text()
    for name in (
        "docs/kubernetes.md", "docs/capacity.md", "deploy/README.md", "deploy/seccomp/README.md",
        "deploy/Dockerfile.agent", "deploy/Dockerfile.service",
    )
}  # fmt: skip
SOURCE = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
VALUES = YAML(typ="safe").load((DEPLOY / "helm/agent-sandbox/values.yaml").read_text())
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]+_[A-Z0-9_]+\b")
# The kernel's.
NOT_VARIABLES = {"PR_SET_SECCOMP", "RLIMIT_NPROC"}
# In the sections on clusters `name: value` is one of the chart's, but for these.
NOT_VALUES = {"image", "pool"}
# `word: value` or `word` with a value of YAML behind it, in code font.
SETTING = re.compile(r"`([a-z]\w*(?:\.\w+)*): ?[^`]*`")


def blocks(language: str) -> list[str]:
    """The fenced blocks of the page in one language, without their indentation."""
    found = []
    for name, text in BLOCK.findall(PAGE):
        if name == language:
            lines = text.splitlines()
            margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
            found.append("\n".join(line[margin:] for line in lines))
    return found


def commands() -> list[list[str]]:
    """Every command of the shell blocks, as words; lines that go on are one."""
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def has(values: object, path: str) -> bool:
    for name in path.split("."):
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True


def test_there_is_something_to_check() -> None:
    words = [command[0] for command in commands()]
    assert {"kind", "docker", "kubectl", "helm", "pip", "sandboxctl"} <= set(words)
    assert len(blocks("yaml")) >= 2


@pytest.mark.parametrize("page", PAGES)
def test_every_variable_is_one_that_the_service_reads(page: str) -> None:
    tables = {row.variable for row in kube_settings.TABLE} | {row.variable for row in limits.TABLE}
    named = set(VARIABLE.findall(PAGES[page])) - NOT_VARIABLES
    assert sorted(n for n in named if n not in tables and f'"{n}"' not in SOURCE) == []


def test_every_value_of_the_chart_exists() -> None:
    (install,) = [c for c in commands() if c[:2] == ["helm", "install"]]
    given = [
        install[i + 1].partition("=")[0]
        for i, word in enumerate(install) if word in ("--set", "--set-file")
    ]  # fmt: skip
    assert len(given) >= 4
    text = section("A team's cluster") + section("A cloud's cluster")
    told = [name for name in SETTING.findall(text) if name not in NOT_VALUES]
    assert {"networkPolicy", "seccomp", "runtimes"} <= set(told)
    assert [name for name in (*given, *told) if not has(VALUES, name)] == []
    for option in ("autoscaling", "quota", "monitoring"):
        assert has(VALUES, f"{option}.enabled")
        assert (DEPLOY / "kustomize" / option / "kustomization.yaml").exists()


def taken_by_token(words: list[str]) -> None:
    action = token.ACTIONS[words[0]]
    given = token.parse(words[1:], action.switches, (*action.values, *token.PLACES), "")
    assert len(given.rest) == action.words


def taken_by_audit(words: list[str]) -> None:
    action = audit.ACTIONS[words[0]]
    assert not token.parse(words[1:], action.switches, (*action.values, *token.PLACES), "").rest


TAKEN: dict[str, Callable[[list[str]], object]] = {
    "serve": serve.split, "remote": remote_options.parse, "token": taken_by_token,
    "audit": taken_by_audit,
}  # fmt: skip


def ours() -> list[list[str]]:
    """The words after `sandboxctl` in blocks, in code font, and behind `kubectl exec … --`."""
    inline = [shlex.split(text) for text in re.findall(r"`([^`\n]*sandboxctl [^`\n]*)`", PAGE)]
    found = []
    for words in (*commands(), *inline):
        if "sandboxctl" in words:
            rest = words[words.index("sandboxctl") + 1 :]
            found.append([word for word in rest if word != "&"])
    return found


@pytest.mark.parametrize("words", ours(), ids=" ".join)
def test_the_command_line_takes_our_own_commands(words: list[str]) -> None:
    assert words[0] in {verb.name for verb in ctl.VERBS}
    TAKEN[words[0]](words[1:])
    # A control: a flag that there is not.
    with pytest.raises(UsageError):
        TAKEN[words[0]]([*words[1:2], "--unheard-of", *words[2:]])


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    named = set(re.findall(r"(?<![\w/-])((?:deploy|bench|tests|docs)/[\w./-]*\w)", PAGES[page]))
    # As kubectl calls a Deployment.
    named.discard("deploy/agent-sandbox")
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_images_are_built_as_their_recipes_want() -> None:
    builds = [c for c in commands() if c[:2] == ["docker", "build"]]
    assert builds
    for words in builds:
        recipe = (ROOT / words[words.index("-f") + 1]).read_text()
        if "--target" in words:
            stage = words[words.index("--target") + 1]
            assert re.search(rf"^FROM \S+ AS {stage}$", recipe, re.MULTILINE)
        argument = words[words.index("--build-arg") + 1].partition("=")[0]
        assert f"ARG {argument}" in recipe.splitlines()


def test_secrets_have_the_names_and_keys_that_the_chart_mounts() -> None:
    made = {
        words[words.index("generic") + 1]: {
            value.partition("=")[2].partition("=")[0] or value.partition("=")[0]
            for value in words if value.startswith("--from-")
        }
        for words in commands() if words[:1] == ["kubectl"] and "secret" in words
    }  # fmt: skip
    assert set(made) == {VALUES[f"{name}Secret"] for name in ("database", "tls", "tokens")}
    assert made[VALUES["databaseSecret"]] == {"url"}
    assert made[VALUES["tlsSecret"]] == {"tls.crt", "tls.key", "ca.crt"}
    assert all(key.endswith("-sandbox-token") for key in made[VALUES["tokensSecret"]])
    rendered = (DEPLOY / "helm/agent-sandbox/templates/deployment.yaml").read_text()
    for file in ("url", "tls.crt", "tls.key"):
        assert f"/{file}" in rendered or f"path: {file}" in rendered


def test_objects_that_commands_name_are_those_of_the_manifests() -> None:
    base = "".join(path.read_text() for path in (DEPLOY / "kustomize/base").glob("*.yaml"))
    examples = "".join(path.read_text() for path in (DEPLOY / "examples").glob("*.yaml"))
    for words in commands():
        if words[0] == "kubectl" and "-n" in words:
            assert f"name: {words[words.index('-n') + 1]}\n" in base, words
        for word in words:
            kind, slash, name = word.partition("/")
            if slash and kind in ("deploy", "pod") and words[0] == "kubectl" and "." not in name:
                assert f"name: {name}\n" in base + examples, words


def test_measurements_that_are_named_exist() -> None:
    told = {name for text in PAGES.values() for name in re.findall(r"`(sandbox_\w+)`", text)}
    assert told
    for name in told:
        own = name.removeprefix("sandbox_kubernetes_")
        assert name in metrics.HELP or (own != name and own in SOURCE), name


READ: dict[str, Callable[[str], object]] = {
    "yaml": lambda text: list(YAML(typ="safe").load_all(text)),
    "toml": tomllib.loads,
    "json": json.loads,
}


@pytest.mark.parametrize("language", READ)
def test_blocks_can_be_read(language: str) -> None:
    for text in blocks(language):
        assert READ[language](text)
