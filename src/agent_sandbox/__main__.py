"""`python -m agent_sandbox` is `agent-sandbox`."""

from __future__ import annotations

from .cli.run import script

script()
