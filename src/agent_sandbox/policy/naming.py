"""What a command reads about names and proxies where a proxy decides about its network. Pure.

The stub that answers on 127.0.0.1 knows every name and asks nobody. The host's own files would send
questions elsewhere (systemd-resolved, mDNS), and would tell the names of the user's network.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

RESOLV_CONF, HOSTS, NSSWITCH = "/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf"
# Where a missing file needs none of ours: the C library's defaults ask 127.0.0.1.
FILES = (RESOLV_CONF, HOSTS, NSSWITCH)
RESOLVER = "nameserver 127.0.0.1\noptions timeout:2 attempts:1\n"
LOOKUP = "hosts: files dns"

PROXY = "http://127.0.0.1:3128"
LOCAL = "localhost,127.0.0.1,::1"
# For programs that would rather ask a proxy. ALL_PROXY is an http:// one too: some clients stop at
# a socks URL for want of a module.
VARIABLES: Mapping[str, str] = {
    "HTTP_PROXY": PROXY, "http_proxy": PROXY,
    "HTTPS_PROXY": PROXY, "https_proxy": PROXY,
    "ALL_PROXY": PROXY, "all_proxy": PROXY,
    "NO_PROXY": LOCAL, "no_proxy": LOCAL,
    "NODE_USE_ENV_PROXY": "1", "ELECTRON_GET_USE_PROXY": "1",
    # Its port is taken by nobody: rsync:// works through the proxy alone.
    "RSYNC_PROXY": PROXY.removeprefix("http://"),
}  # fmt: skip


def texts(nsswitch: str, host_name: str) -> dict[str, str]:
    """The files by the host's path, given the host's own nsswitch.conf."""
    return {
        RESOLV_CONF: RESOLVER,
        HOSTS: f"127.0.0.1 localhost {host_name}".rstrip() + "\n::1 localhost\n",
        NSSWITCH: switch(nsswitch),
    }


def switch(text: str) -> str:
    """nsswitch.conf with host names from files and DNS alone."""
    kept = [line for line in text.splitlines() if not line.lstrip().startswith("hosts:")]
    return "\n".join((*kept, LOOKUP, ""))


def copy_name(path: str) -> str:
    """What our version of a file is called in the workspace."""
    return path.rpartition("/")[2]
