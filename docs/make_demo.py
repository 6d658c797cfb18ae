#!/usr/bin/env python3
"""Record a real session as docs/demo.txt, and draw docs/demo.svg from it.

    python3 docs/make_demo.py record    run the commands below in real sandboxes, then draw
    python3 docs/make_demo.py           draw only

Recording needs bwrap, git and curl. It happens in a throw-away home that appears as /home/you.
"""
# ruff: noqa: S603, S607

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from xml.sax.saxutils import escape

HERE = os.path.dirname(os.path.abspath(__file__))
TEXT = os.path.join(HERE, "demo.txt")
PICTURE = os.path.join(HERE, "demo.svg")
ENTRY = os.path.join(os.path.dirname(HERE), "src", "agent_sandbox", "cli", "entry.py")
PROMPT = "~/shop$ "
COMMANDS = (
    "ls -A ~",
    "agent-sandbox ls -A ~",
    "agent-sandbox cat ~/.ssh/id_ed25519",
    "agent-sandbox --exclude '**/.env*' cat .env",
    "agent-sandbox sh -c 'echo evil > .git/hooks/pre-commit'",
    "agent-sandbox sh -c 'echo fix >> app.py && git commit -qam Fix && git log --format=%s'",
    "agent-sandbox --network=off curl -sS https://example.org",
    "sandboxctl why ~/.ssh",
)
SET_UP = """
mkdir -p .ssh .aws other-client shop && echo KEY > .ssh/id_ed25519 && cd shop
git init -q -b main . && git config user.name You && git config user.email you@example.org
echo TOKEN=1 > .env && echo .env > .gitignore && echo 'print(1)' > app.py
git add -A && git commit -qm 'First version'
"""
FUNCTIONS = """
agent-sandbox() { "$PYTHON" -I -S "$ENTRY" run "$@"; }
sandboxctl() { "$PYTHON" -I -S "$ENTRY" ctl "$@"; }
"""
# Picture: as wide as the longest line, drawn with plain text elements.
FONT = "ui-monospace, Menlo, Consolas, monospace"
CHAR, LINE, MARGIN = 8.6, 20, 18


def record() -> str:
    """Run the commands; what a terminal would have shown."""
    shown = []
    with tempfile.TemporaryDirectory(prefix="agent-sandbox-demo-") as home:
        subprocess.run(["sh", "-ec", SET_UP], cwd=home, env=environment(home), check=True)
        for command in COMMANDS:
            done = subprocess.run(
                inside(home, FUNCTIONS + command), stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, env=environment("/home/you"), check=False,
            )  # fmt: skip
            shown.append(f"{PROMPT}{command}\n{done.stdout.decode()}")
    return "".join(shown)


def environment(home: str) -> dict[str, str]:
    """Nothing of the recording machine but the PATH."""
    return {
        "HOME": home, "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8",
        "PYTHON": os.path.realpath(sys.executable), "ENTRY": ENTRY, "PWD": "/home/you/shop",
    }  # fmt: skip


def inside(home: str, script: str) -> list[str]:
    """The whole machine as it is, but for /home: one user, called `you`."""
    return [
        "bwrap", "--dev-bind", "/", "/", "--tmpfs", "/home", "--bind", home, "/home/you",
        "--chdir", "/home/you/shop", "--", "bash", "-c", script,
    ]  # fmt: skip


def draw(text: str) -> str:
    """The session as SVG."""
    lines = text.splitlines()
    width = round(max(map(len, lines)) * CHAR + 2 * MARGIN)
    height = len(lines) * LINE + 2 * MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>agent-sandbox in a terminal</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#1d1f27"/>',
        f'<g font-family="{FONT}" font-size="14" xml:space="preserve">',
    ]
    for number, line in enumerate(lines):
        y = MARGIN + 20 + number * LINE
        if line.startswith(PROMPT):
            out.append(
                f'<text x="{MARGIN}" y="{y}"><tspan fill="#7fb77e">{escape(PROMPT)}</tspan>'
                f'<tspan fill="#f2f2f2">{escape(line[len(PROMPT) :])}</tspan></text>'
            )
        else:
            out.append(f'<text x="{MARGIN}" y="{y}" fill="#b8bcc8">{escape(line)}</text>')
    return "\n".join([*out, "</g>", "</svg>"]) + "\n"


def main() -> int:
    """Record when asked to, and draw."""
    if sys.argv[1:] == ["record"]:
        with open(TEXT, "w", encoding="utf-8") as file:
            file.write(record())
    with open(TEXT, encoding="utf-8") as file:
        picture = draw(file.read())
    with open(PICTURE, "w", encoding="utf-8") as file:
        file.write(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
