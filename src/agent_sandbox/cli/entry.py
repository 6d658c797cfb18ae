"""The script behind the checkout's two commands: `python -I -S entry.py run|ctl ARGUMENTS…`.

A script is compiled on every start, so it only finds the package and hands over. `-I -S` leave
the package out of sys.path on purpose: no site, no environment, no current directory.
"""

import gc
import sys

gc.disable()  # a start makes little garbage and ends soon: looking for it costs a millisecond
sys.path.insert(0, __file__.removesuffix("/agent_sandbox/cli/entry.py"))

from agent_sandbox.cli import bytecode  # noqa: E402 - the path comes first

bytecode.install()
if sys.argv.pop(1) == "ctl":
    from agent_sandbox.cli.ctl import main

    sys.exit(main())
else:
    from agent_sandbox.cli.run import script

    script()
