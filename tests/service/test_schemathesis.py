"""Requests made from the OpenAPI document: no 5xx, and nothing that the document does not say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import As
from service.conftest import Serve

pytestmark = [pytest.mark.kernel, pytest.mark.slow]
HERE = Path(__file__).parent
PROGRAM = Path(sys.executable).parent / "schemathesis"
EXAMPLES = os.environ.get("AGENT_SANDBOX_SCHEMATHESIS_EXAMPLES", "3")
# What is written in the document may still be refused for reasons that no schema can tell: limits,
# what the backend can do, states, times, paths outside.
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "400", "401", "403", "404", "406", "409", "413", "422", "426", "429"]
[checks.negative_data_rejection]
expected-statuses = [
  "400", "401", "403", "404", "405", "406", "409", "413", "414", "415", "422", "426", "429", "431",
]
"""
# `phases`: "coverage" tries every bound of every field.
PARTS = {
    "agent": ("examples,coverage,fuzzing,stateful", ()),
    "admin": (
        "examples,coverage,fuzzing",
        ("--include-tag", "tokens", "--include-tag", "about", "--include-tag", "operations"),
    ),
}


@pytest.mark.parametrize("who", PARTS)
def test_the_document_and_the_service_agree(
    user: As, serve: Serve, tmp_path: Path, who: str
) -> None:
    served = serve(user, env={"MAX_EXECUTION_TIME": "3", "DEFAULT_EXECUTION_TIME": "2"})
    # Tokens are tried by an admin who is not on the list of names that are tried.
    scope = ("--scope", "admin") if who == "admin" else ()
    token = served.token("tester", *scope)
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    # Not from here: a directory `http` would stand before Python's own.
    shutil.copy(HERE / "schemathesis_hooks.py", tmp_path)
    phases, chosen = PARTS[who]
    done = subprocess.run(
        [
            PROGRAM, "--config-file", "schemathesis.toml", "run", f"{served.url}/openapi.json",
            "-H", f"Authorization: Bearer {token}", "-H", f"X-API-Key: {token}",
            "--phases", phases, "--max-examples", EXAMPLES, "--request-timeout", "30",
            "--checks", "all", "--continue-on-failure", "--no-shrink", "--suppress-health-check",
            "all", *chosen,
        ],
        cwd=tmp_path, text=True, capture_output=True, check=False,
        env={**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(tmp_path),
             "NO_COLOR": "1"},
    )  # fmt: skip
    # It tries very long addresses, and shows them.
    said = "\n".join(line[:400] for line in (done.stdout + done.stderr).splitlines())
    assert done.returncode == 0, said
    faults = [line for line in served.log if line["level"] == "error"]
    assert faults == []
