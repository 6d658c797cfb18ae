"""The table of protections: name → the patch that takes exactly this one away.

Each patch changes one function or table of the package. Which attacks use it is what their
`without` says; test_catalogue.py sees that none goes unattacked. Conditions take nothing away: they
make a rare moment happen in every run, the control's and the others.
"""

from __future__ import annotations

from escape import without_authority, without_files, without_network
from escape.patching import CONDITIONS, INTERPRETER, PROTECTIONS

__all__ = [
    "CONDITIONS", "INTERPRETER", "PROTECTIONS", "without_authority", "without_files",
    "without_network",
]  # fmt: skip
