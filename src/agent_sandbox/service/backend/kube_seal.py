"""Which pods are ours. Labels say it, but whoever may make pods in the namespace can write them.

So a pod that we have made gets a note that only a replica of this service can write: a keyed hash
of the uid, which the API server has chosen. A copy of it on another pod does not fit.
"""

from __future__ import annotations

import hashlib
import hmac

from .kube_objects import SEAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .kube_objects import Pod

KEY_BYTES = 32


class Seal:
    """The key is the store's: all replicas have it, and nobody in the cluster."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @property
    def secret(self) -> bytes:
        """For whatever else nobody in the cluster may know beforehand."""
        return hmac.new(self._key, b"paths", hashlib.sha256).digest()

    def of(self, uid: str) -> str:
        """The note of one pod."""
        return hmac.new(self._key, f"pod {uid}".encode(), hashlib.sha256).hexdigest()

    def fits(self, pod: Pod) -> bool:
        """Whether a replica of this service has made it."""
        return hmac.compare_digest(self.of(pod.uid).encode(), pod.seal.encode("utf-8", "replace"))

    def patch(self, pod: Pod) -> dict[str, object]:
        """A merge patch. With the uid in it, it fits no other pod of that name."""
        return {"metadata": {"uid": pod.uid, "annotations": {SEAL: self.of(pod.uid)}}}
