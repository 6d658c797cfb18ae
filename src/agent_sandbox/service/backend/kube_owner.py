"""The one object that all pods of an installation belong to: whoever removes it removes them."""

from __future__ import annotations

import contextlib

from . import kube_pods
from .kube_http import Refusal
from .kube_objects import text
from .kube_pods import Surroundings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .kube_api import Api
    from .kube_settings import KubeSettings


async def surroundings(
    api: Api, settings: KubeSettings, *, installation: str, authority: str, secret: bytes
) -> Surroundings:
    """What all pods have in common; the ConfigMap is made if it is ours to make."""
    name = settings.owner or f"agent-sandbox-{installation}"
    bare = Surroundings(
        settings=settings, namespace=api.namespace, installation=installation,
        authority=authority, secret=secret, owner_name=name,
    )  # fmt: skip
    path = api.path("configmaps", name)
    try:
        found = await api.get(path)
    except Refusal as error:
        # One that the operator has named is the operator's to make.
        if error.status != 404 or settings.owner:
            raise
        # Another replica may be faster; then it is there.
        with contextlib.suppress(Refusal):
            await api.create(api.path("configmaps"), _owner(bare, name))
        found = await api.get(path)
    return bare.replace(owner_uid=text(found, "metadata", "uid"))


def _owner(around: Surroundings, name: str) -> dict[str, object]:
    return {
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": name, "labels": kube_pods.base_labels(around)},
        "data": {"about": "All pods of this installation belong to it and go with it."},
    }  # fmt: skip
