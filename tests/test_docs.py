"""The documentation says what the code does: nothing is missing, nothing is stale, examples run."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import agent_sandbox
from agent_sandbox import Policy, Process, Result, Sandbox, errors
from agent_sandbox.cli import ctl, options
from agent_sandbox.policy import presets, profiles, settings
from conftest import ROOT, As, must_work

if TYPE_CHECKING:
    from types import ModuleType

DOCS = ROOT / "docs"
REFERENCE = (DOCS / "reference.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FENCE = re.compile(r"^<!-- runnable -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Public by name only: used between the library's own classes.
INTERNAL = {"finish", "replace"}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def error_codes() -> set[str]:
    """Every `code="…"` in the source."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "code":
                value = node.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found.add(value.value)
    return found


def exit_codes() -> dict[str, int]:
    return {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}


def script(name: str) -> ModuleType:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NAMES = {
    "flags": [n for flag in options.TABLE for n in (flag.name, flag.short) if n],
    "keys": [row.key for row in settings.ROWS],
    "presets": [preset.name for preset in presets.PRESETS],
    "profiles": [profiles.NONE, *profiles.NAMES],
    "verbs": [verb.name for verb in ctl.VERBS],
    "exit codes": list(exit_codes()),
    "errors": sorted(error_codes()),
}


@pytest.mark.parametrize("kind", NAMES)
def test_the_reference_names_everything(kind: str) -> None:
    """A name counts when it stands in code font, alone or at the start of a usage."""
    missing = [
        name
        for name in NAMES[kind]
        if not re.search(rf"`(?:[^`\n]*[ ,])?{re.escape(name)}(?![\w-])[^`\n]*`", REFERENCE)
    ]
    assert not missing, f"docs/reference.md does not mention these {kind}: {missing}"


def test_the_reference_explains_each_error_and_no_other() -> None:
    section = REFERENCE.partition("\n## Error codes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+) \| (.+) \|$", section, re.MULTILINE)
    assert {code for code, _, _ in rows} == error_codes()


def test_the_reference_has_the_right_exit_codes() -> None:
    for name, value in exit_codes().items():
        shown = f"{value}+n" if name == "EXIT_SIGNAL_BASE" else str(value)
        assert f"| {shown} | `{name}` |" in REFERENCE


def test_the_reference_is_current() -> None:
    assert script("make_reference").filled(REFERENCE) == REFERENCE, (
        "run python3 docs/make_reference.py"
    )


def test_the_man_pages_are_current() -> None:
    assert script("make_man").stale() == [], "run python3 docs/make_man.py"


def test_the_page_of_the_api_is_that_of_the_routes() -> None:
    page = script("make_api")
    assert page.read(page.API) == page.api(), "run python3 docs/make_api.py"
    assert page.read(page.SERVICE) == page.service(), "run python3 docs/make_api.py"


def test_the_man_pages_have_every_flag_and_verb() -> None:
    page = (DOCS / "man" / "agent-sandbox.1").read_text().replace("\\-", "-")
    assert [n for n in NAMES["flags"] if f"\\fB{n}\\fR" not in page] == []
    page = (DOCS / "man" / "sandboxctl.1").read_text()
    assert [n for n in NAMES["verbs"] if f"\\fB{n}\\fR" not in page] == []


def test_the_picture_shows_the_recorded_session() -> None:
    session = (DOCS / "demo.txt").read_text()
    drawn = script("make_demo").draw(session)
    assert drawn == (DOCS / "demo.svg").read_text(), "run python3 docs/make_demo.py"
    assert session in (ROOT / "README.md").read_text()


def test_the_agents_page_is_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 60


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_threat_model_names_tests_that_exist() -> None:
    text = (DOCS / "threat-model.md").read_text()
    named = set(re.findall(r"`(tests/[\w/.]+\.py)(?:::\w+)?`", text))
    assert named
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
    tests = re.findall(r"`(tests/[\w/.]+\.py)::(\w+)`", text)
    assert tests
    absent = [test for path, test in tests if f"def {test}(" not in (ROOT / path).read_text()]
    assert absent == []


def test_the_threat_model_has_a_row_for_each_invariant() -> None:
    rows = re.findall(
        r"^\|.+\| ([\d, ]+) \|.+\|$", (DOCS / "threat-model.md").read_text(), re.MULTILINE
    )
    numbers = {int(number) for row in rows for number in row.split(",")}
    # The twelfth is the section on what is not defended.
    assert numbers == set(range(1, 12))


def test_the_architecture_page_names_every_module() -> None:
    text = (DOCS / "architecture.md").read_text().partition("\n## Modules\n")[2]
    table = text.partition("\n## ")[0]
    source = ROOT / "src" / "agent_sandbox"
    names = [path.stem for path in source.rglob("*.py") if not path.stem.startswith("__")]
    assert sorted(name for name in names if f"`{name}`" not in table) == []


def test_the_library_page_names_the_public_interface() -> None:
    text = (DOCS / "library.md").read_text()
    names = {*agent_sandbox.__all__, *Policy.__fields__, *Result.__fields__}
    names |= {name for kind in (Sandbox, Process, Result) for name in vars(kind)}
    public = {name for name in names if not name.startswith("_")} - INTERNAL
    assert sorted(name for name in public if not re.search(rf"\b{name}\b", text)) == []


EXAMPLES = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in (ROOT / "README.md", DOCS / "library.md")
    for number, code in enumerate(FENCE.findall(page.read_text()), 1)
]


def test_the_pages_have_examples() -> None:
    assert len(EXAMPLES) >= 5


@pytest.mark.kernel
@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(runner: As, code: str) -> None:
    must_work(shutil.which("bwrap"), "needs bwrap")
    bare = runner.run(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"])
    must_work(bare.returncode == 0, f"bwrap cannot start: {bare.stderr}")
    project = runner.project()
    done = runner.run(
        [runner.python, "-c", code], cwd=project, env={"PYTHONPATH": str(runner.source)}
    )
    assert done.returncode == 0, done.stderr
