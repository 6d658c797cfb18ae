"""`sandboxctl compose`: check compose files, make them safe, attack a running project.

Exit codes: 0 nothing at or above --fail-on, written, or held; 1 findings, or an attack that
succeeded or could not be tried; 125 usage, a broken file, a missing program.
"""

from __future__ import annotations

import sys

from ...errors import UsageError
from .arguments import HINT

ACTIONS = ("check", "secure", "verify")
HELP = """\
Usage: sandboxctl compose ACTION …

check [FILE…]        find what hands the host to a container
  --json, --sarif      for programs, for code scanning
  --fail-on SEVERITY   low, medium, high (default) or critical: from where on to end with 1
  --env-file FILE      instead of .env; repeatable
  --no-accept          count what a label answers for
  --no-override        without the override file beside a single file
secure FILE          write a safe variant
  --solution NAME      no-socket, dind, sysbox or service
  -o, --output OUT     where to; --force to write over it
  --agent SERVICE      who gets the solution; default: who has an engine today; repeatable
  --read-access SERVICE  no-socket: who gets a filter that only answers questions; repeatable
  --allow-image IMAGE, --max-execution-time SECONDS   service: its two limits
  --no-runtime-check   sysbox: do not ask this engine
verify [FILE…]       attack the running project from inside each container
  -p, --project NAME   instead of the name that Compose makes of the files
  --service SERVICE    only this one; repeatable
  --json, --no-accept

Exit codes: 0 all is well, 1 findings or an attack that got through or was not tried, 125 errors.
"""


def main(arguments: list[str]) -> int:
    """Dispatch to check, secure or verify."""
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(HELP)
        return 0
    if not arguments or arguments[0] not in ACTIONS:
        raise UsageError(f"compose takes one of: {', '.join(ACTIONS)}", hint=HINT, code="usage")
    _site()
    import importlib

    module = importlib.import_module(f"{__name__}.{arguments[0]}")
    code: int = module.main(arguments[1:])
    return code


def _site() -> None:
    """A checkout's command starts without site-packages, where the optional library lies."""
    if sys.flags.no_site:
        import site

        site.main()
