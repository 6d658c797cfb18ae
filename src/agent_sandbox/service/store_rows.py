"""How sandboxes and executions are written in the database, and read back. Pure."""

from __future__ import annotations

import base64
import binascii
import json
import math

from .problems import Problem
from .values import Execution, Network, Resources, Sandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# `default`: mappings that are no dict.
_encode = json.JSONEncoder(separators=(",", ":"), default=dict).encode


def sandbox_text(sandbox: Sandbox) -> str:
    """A sandbox as JSON; the columns that are searched are in it too."""
    values = dict(vars(sandbox))
    values["resources"] = vars(sandbox.resources)
    values["network"] = vars(sandbox.network)
    return _encode(values)


def sandbox_of(text: str) -> Sandbox:
    """The sandbox of a row. Fields that a later version has written are left out."""
    values = _known(Sandbox, json.loads(text))
    values["resources"] = Resources(**_known(Resources, values.get("resources", {})))
    network = _known(Network, values.get("network", {}))
    for name in ("allow", "deny"):
        network[name] = tuple(network.get(name, ()))
    values["network"] = Network(**network)
    return Sandbox(**values)


def execution_text(execution: Execution) -> str:
    """An execution as JSON."""
    return _encode(vars(execution))


def execution_of(text: str) -> Execution:
    """The execution of a row."""
    values = _known(Execution, json.loads(text))
    values["command"] = tuple(values["command"])
    return Execution(**values)


def _known(kind: type[Sandbox | Execution | Network | Resources], values: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return {name: values[name] for name in kind.__fields__ if name in values}


# --- where a page ends


def cursor(at: float, id: str) -> str:
    """The place behind an item, opaque for clients."""
    return base64.urlsafe_b64encode(f"{at!r} {id}".encode()).decode().rstrip("=")


def read_cursor(text: str) -> tuple[float, str]:
    """The place that a cursor means; one that we have not made is the client's mistake."""
    try:
        plain = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        at, name = plain.decode("ascii").split(" ")
        if math.isfinite(float(at)):
            return float(at), name
    except (ValueError, binascii.Error):
        pass
    raise Problem("INVALID", "this cursor is not one of ours", field="cursor", rule="paging")
