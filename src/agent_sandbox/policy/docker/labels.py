"""Labels: other programs of the host act on them, so only known harmless kinds pass."""

from __future__ import annotations

import re

from .schema import mapping, string
from .values import IMAGE_LABEL, OWNER_LABEL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .schema import Site

# What compose, testcontainers, dev containers and builders write and look for.
PREFIXES = (
    "com.docker.compose.", "org.testcontainers", "org.opencontainers.", "org.label-schema.",
    "devcontainer.", "com.example.", "org.example.",
)  # fmt: skip
# A word without a dot. Reverse proxies, updaters and schedulers of the host read dotted names.
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,254}")
IMAGE = re.compile(r"[A-Za-z0-9._:/@-]{1,255}")
# Words that such programs read all the same.
READ_BY_OTHERS = re.compile(
    r"(caddy|traefik|watchtower|ofelia|socketproxy|nginx|autoheal)([_-].*)?"
)


def labels(site: Site, value: object) -> dict[str, object]:
    """Labels of a new object. The owner is set last, so that nothing can set it otherwise."""
    found: dict[str, object] = {}
    for key, content in mapping(site, value).items():
        check(site, key, string(site, content))
        found[key] = content
    found[OWNER_LABEL] = site.grants.owner
    return found


def check(site: Site, key: str, content: str) -> None:
    """Refuse a label that something else may act on."""
    if key == OWNER_LABEL:
        if content != site.grants.owner:
            raise site.refuse("the owner label is set by agent-sandbox")
        return
    if key == IMAGE_LABEL and IMAGE.fullmatch(content):
        return
    known = key.startswith(PREFIXES) and KEY.fullmatch(key)
    plain = WORD.fullmatch(key) and not READ_BY_OTHERS.fullmatch(key.lower())
    if not known and not plain:
        raise site.refuse(
            f"the label {key[:80]!r} may be read by other programs of this machine; "
            "names without a dot are allowed"
        )
