"""The script behind the checkout's two commands: `python -I -S entry.py run|ctl ARGUMENTS…`.

A script is compiled on every start, so it only finds the package and hands over. `-I -S` leave
the package out of sys.path on purpose: no site, no environment, no current directory.
"""

import os
import sys

sys.path.insert(0, __file__.removesuffix("/agent_sandbox/cli/entry.py"))

if sys.argv.pop(1) == "ctl":
    from agent_sandbox.cli.ctl import main
else:
    from agent_sandbox.cli.run import main

code = main()
for stream in (sys.stdout, sys.stderr):
    if stream is not None:  # the caller may have closed it
        stream.flush()
os._exit(code)  # Python's own way out frees every object first: 2 ms
