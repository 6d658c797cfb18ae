"""Where nothing keeps commands from a volume of the image, the pod is not taken."""

from __future__ import annotations

import types
from typing import Any

import pytest

from agent_sandbox.pod import confine, frames, mounts, operations, terms

TEXT = """21 1 0:20 / / ro,relatime - overlay overlay rw
22 21 0:21 / /proc rw,nosuid - proc proc rw
23 21 0:22 / /dev rw,nosuid - tmpfs tmpfs rw
24 21 8:1 /a /sandbox rw - ext4 /dev/vda rw
25 21 8:1 /a/tmp /tmp rw - ext4 /dev/vda rw
26 21 8:1 /b /data\\040x rw,relatime - ext4 /dev/vda rw
27 21 8:1 /c /etc/hosts ro - ext4 /dev/vda rw
28 21 8:1 /d /tmpfoo rw - ext4 /dev/vda rw
"""


def test_mounts_that_are_not_the_sandboxs() -> None:
    found = mounts.foreign(TEXT, (*confine.WRITABLE, "/proc", "/sys"))
    assert found == ["/data x", "/tmpfoo"]


def claim(unkept: list[str], inner: str, form: str) -> dict[str, object]:
    made: Any = types.SimpleNamespace(
        claim=None, form=form, renew=lambda _: None,
        bounds=types.SimpleNamespace(unkept=unkept, kept_apart="pod"),
    )  # fmt: skip
    fields = {"sandbox": "s", "lease": 1, "inner": inner, "pids": 0, "disk": 0, "network": "off"}
    return operations._claim(made, frames.Fields(fields))


@pytest.mark.parametrize(("inner", "form"), [("off", terms.FRESH), ("preferred", terms.NONE)])
def test_a_pod_with_such_a_mount_is_refused(inner: str, form: str) -> None:
    with pytest.raises(operations.Refused) as caught:
        claim(["/data"], inner, form)
    assert caught.value.document["code"] == "UNSUPPORTED"
    assert "/data" in str(caught.value.document["message"])
    # The controls: none is there, or an inner layer makes it read-only.
    assert claim([], inner, form)
    assert claim(["/data"], "preferred", terms.FRESH)
