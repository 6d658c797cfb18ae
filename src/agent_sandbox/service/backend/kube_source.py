"""Where pods come from: the seam between the backend and what makes pods for it.

`kube_pool` makes them itself; `kube_claims` lets the controller of kubernetes-sigs/agent-sandbox
do it. Everything else (the cache, the links to agents, loss) is the same for both: all they need
is that a pod has the label of the installation, and a sandbox's id as its label or annotation
`kube_objects.SANDBOX`. Both are made from an Api, the Cache, the Links, Surroundings, and a
function that makes a manifest of a Shape.
"""

from __future__ import annotations

from typing import Protocol

from ...record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ..values import Sandbox
    from .kube_objects import Pod
    from .kube_pods import Shape


class Order(Record):
    """A pod that is asked for."""

    sandbox: Sandbox
    shape: Shape
    # Seconds since the epoch at which it has to be gone, whatever happens.
    ends: float
    # Which try it is: what is made has another name each time, since the last one may still end.
    number: int = 1
    # A whole pod for this shape, without name and labels of one pod; every call: another uid.
    manifest: Callable[[], dict[str, Any]]


class Wanted(Record):
    """How many warm pods of a shape, and the templates that they are for."""

    count: int
    templates: tuple[str, ...] = ()


class Source(Protocol):
    """Makes pods, keeps some warm, and removes them. All calls are on the loop."""

    # Whether each pod has a uid of its own: the kernel counts processes by uid on a whole node.
    own_uid: bool

    async def open(self) -> None:
        """Find out that it can work; Problem or Refusal if it cannot."""
        ...

    def want(self, wanted: Mapping[Shape, Wanted]) -> None:
        """What to keep warm from now on, and nothing else. Returns at once."""
        ...

    async def take(self, order: Order) -> Pod:
        """A pod that runs, and is this sandbox's alone: no other replica has got it too.

        A failure leaves nothing, also when it is cancelled.
        """
        ...

    async def extend(self, pod: Pod, ends: float) -> None:
        """The pod may live until then; the agent knows already."""
        ...

    async def remove(self, pod: Pod) -> None:
        """Remove a pod with whatever stands for it. What is gone already is no error."""
        ...

    async def tend(self) -> None:
        """Bring the warm pods to their number. Called after every change, and now and then."""
        ...

    async def sweep(self, known: frozenset[str], *, before: float) -> None:
        """Remove what stands for sandboxes that nobody knows, and was claimed before a moment.

        Pods themselves are swept by the backend, through `remove`.
        """
        ...

    def gauges(self) -> Mapping[str, float]:
        """Numbers for the metrics."""
        ...

    async def close(self) -> None:
        """Stop what it does. Warm pods stay: another replica may use them."""
        ...
