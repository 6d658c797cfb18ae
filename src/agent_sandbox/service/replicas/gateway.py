"""The door between replicas: requests that come from another, and requests that go to one."""

from __future__ import annotations

import asyncio
from time import time

from ..http.messages import Peer as Client
from . import claims
from .forwarding import Errand, unavailable
from .lease import LEASE
from .upstream import Unreached

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..http.messages import Request, Response, WebSocketResponse
    from .interface import Peer
    from .shared import Shared

# A home that cannot be reached is tried again until its lease must be over.
PATIENCE = LEASE + 4.0
PAUSE = 0.25


class Gateway:
    """For the dispatcher. Only the loop may use it."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._once = claims.Once()

    def check(self) -> None:
        """Refuse what comes when the lease is lost."""
        self._shared.check()

    def receive(self, request: Request) -> claims.Claim | None:
        """Whether another replica has sent it; it then shows whom that one has seen.

        FORBIDDEN for one who only says so.
        """
        text = request.headers.get(claims.HEADER)
        if text is None:
            return None
        now = time()
        claim = claims.read(
            text, self._shared.key, receiver=self._shared.id, method=request.method,
            target=request.target, headers=request.headers, now=now,
        )  # fmt: skip
        # Who has seen it on a network without TLS must not send it again, with another body.
        self._once.take(claim, now)
        request.id = claim.request_id
        request.peer = Client(
            address=claim.address, uid=claim.uid, unix=claim.unix, tls=claim.tls,
            owner=claim.owner if claim.unix else None,
        )  # fmt: skip
        return claim

    async def ask_login(
        self, request: Request, home: str, most: int
    ) -> Response | WebSocketResponse | None:
        """The answer of the replica that has the login of a cookie; None: it is gone, and that."""
        peer = self._shared.peer(home)
        if peer is None:
            return None
        return await self.pass_on(request, peer, most=most, session=True)

    async def pass_on(
        self, request: Request, peer: Peer, *, most: int, token: str = "", owner: bool = False,
        body: bytes | None = None, session: bool = False,
    ) -> Response | WebSocketResponse | None:  # fmt: skip
        """The home's answer; None: it is gone, and has got nothing of this request."""
        shared, home = self._shared, peer
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while True:
            errand = Errand(
                request, sender=shared.id, home=home.id, address=home.address,
                gone=shared.lease.gone(home.id), most=most, token=token, owner=owner, body=body,
                session=session,
            )  # fmt: skip
            try:
                return await shared.forwarder.forward(errand)
            except Unreached:
                shared.upstream.forget(home.address)
            await asyncio.sleep(PAUSE)
            found = shared.peer(home.id)
            if found is None:
                return None
            home = found
            if asyncio.get_running_loop().time() >= deadline or request.disconnected.is_set():
                raise unavailable()
