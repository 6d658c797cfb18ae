"""Where a request is judged: decided, its names resolved, and built anew for the engine."""

from __future__ import annotations

import asyncio

from ...policy.docker import decision as policy
from ...record import Record
from . import engine, profile
from .pins import Pins

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from ...policy.docker import context
    from ...policy.docker.values import Decision, Found, Grants, Reference, Request, Upstream
    from .audit import Audit

FAILED = "proxy.failure"
UNREACHABLE = "engine.unreachable"
MALFORMED = "http.malformed"
# Names of one request that are looked up at a time, and at all.
MAX_REFERENCES = 64


class Verdict(Record):
    """What becomes of a request: `upstream`, or a refusal."""

    rule: str
    status: int
    message: str = ""
    normalised: str = ""
    mutations: tuple[str, ...] = ()
    upstream: Upstream | None = None
    # What a streamed body goes through.
    transform: context.Archive | None = None
    # Let through in the mode warn alone.
    would: bool = False


class Desk:
    """Judges the requests of one run."""

    def __init__(
        self, grants: Grants, client: engine.Client, audit: Audit, *, warns: bool = False
    ) -> None:
        self._grants = grants
        self._warns = warns
        self.client = client
        self.audit = audit
        self._pins = Pins(grants.binds, grants.owner)
        # Two requests at once must not make the same thing twice.
        self._making = asyncio.Lock()
        self._probing: asyncio.Task[Grants] | None = None

    async def grants(self) -> Grants:
        """What the run may do, with what is known of the engine. Asked at the first request."""
        if self._probing is None or (self._probing.done() and self._probing.exception()):
            self._probing = asyncio.ensure_future(self._probe())
        # One client that leaves must not end the question of the others.
        return await asyncio.shield(self._probing)

    async def _probe(self) -> Grants:
        # At once: clients give up on a first answer that is late.
        found, (_, info) = await asyncio.gather(
            self.client.probe(), self.client.ask("GET", "/info")
        )
        # Podman takes no profile in a request.
        rules = "" if found.name == "podman" else profile.wanted(info)
        count = info.get("NCPU") if isinstance(info, dict) else None
        # The engine refuses to limit a container to more processors than there are.
        cpus = min(self._grants.cpus, count) if isinstance(count, int) and count > 0 else None
        return self._grants.replace(engine=found, seccomp=rules, cpus=cpus or self._grants.cpus)

    async def judge(self, request: Request) -> Verdict:
        """The verdict. Whatever goes wrong here is a refusal."""
        try:
            return await self._judge(request, await self.grants())
        except policy.Refused as refused:
            return Verdict(rule=refused.rule, status=refused.status, message=refused.message)
        except engine.EngineError as error:
            return Verdict(rule=UNREACHABLE, status=502, message=str(error))
        except Exception as error:  # noqa: BLE001 - fail closed, whatever it is
            kind = type(error).__name__
            return Verdict(
                rule=FAILED, status=500,
                message=f"agent-sandbox: the filter failed ({kind}); the request was not passed on",
            )  # fmt: skip

    async def _judge(self, request: Request, grants: Grants) -> Verdict:
        decided = policy.decide(request, grants)
        verdict = await self._resolved(decided, grants)
        if verdict.upstream is not None or not self._warns:
            return verdict
        sent = policy.unchecked(request, grants)
        if isinstance(sent, policy.Decision) or policy.is_streamed(request.method, request.target):
            return verdict
        return verdict.replace(upstream=sent, would=True)

    async def _resolved(self, decided: Decision, grants: Grants) -> Verdict:
        """Look up the names of a request that is allowed, and build it anew."""
        if not decided.allowed:
            return refusal(decided)
        found = await self._found(decided.references, grants)
        built = policy.rebuild(decided, grants, found)
        if isinstance(built, policy.Decision):
            return refusal(built)
        return Verdict(
            rule=decided.rule, status=0, normalised=decided.normalised,
            mutations=decided.mutations, upstream=built,
            transform=policy.transform(decided, grants),
        )  # fmt: skip

    async def checked(self, pieces: AsyncIterator[bytes], verdict: Verdict) -> AsyncIterator[bytes]:
        """A streamed body as the engine may have it; raises `Refused` before its end otherwise."""
        body = verdict.transform
        if body is None:
            raise policy.Refused(FAILED, "a body that nobody checks", 500)
        async for piece in pieces:
            sent = body.feed(piece)
            if sent:
                yield sent
        yield body.finish(await self._found(body.references(), await self.grants()))

    async def _found(
        self, references: Iterable[Reference], grants: Grants
    ) -> dict[Reference, Found | None]:
        names = list(dict.fromkeys(references))
        if len(names) > MAX_REFERENCES:
            raise policy.Refused("request.references", "too many names", 400)
        answers = await asyncio.gather(*(self._look_up(name, grants) for name in names))
        return dict(zip(names, answers, strict=True))

    async def _look_up(self, name: Reference, grants: Grants) -> Found | None:
        """What a name means; what the run has by itself is made when it is first needed."""
        if name.kind == "path":
            return await self._pinned(name)
        if name.kind == "count":
            return await self.client.count(grants.owner)
        found = await self.client.inspect(name)
        recipe = policy.provision(name, grants) if found is None else None
        if recipe is None:
            return found
        async with self._making:
            await self.client.order(recipe)
        return await self.client.inspect(name)

    async def _pinned(self, name: Reference) -> Found | None:
        """The volume that stands for a directory, made when it is first needed."""
        pin = self._pins.hold(name.name)
        if pin is None:
            return None
        volume = name.replace(kind="volume", name=pin.name)
        async with self._making:
            found = await self.client.inspect(volume)
            if found is None:
                path = f"/v{self.client.api}/volumes/create"
                await self.client.ask("POST", path, "", pin.volume())
                found = await self.client.inspect(volume)
        return found

    def note(self, request: Request, verdict: Verdict, status: int) -> None:
        """Write the decision down."""
        self.audit.note(
            method=request.method, target=request.target, normalised=verdict.normalised,
            rule=verdict.rule, allowed=verdict.upstream is not None, status=status,
            mutations=verdict.mutations, would=verdict.would,
        )  # fmt: skip


def refusal(decided: Decision) -> Verdict:
    """A refusal of the policy's, with its rule for the user. Pure."""
    message = decided.message
    if decided.rule and decided.rule not in message:
        message = f"{message} [{decided.rule}]"
    return Verdict(
        rule=decided.rule, status=decided.status if decided.status >= 400 else 403,
        message=message, normalised=decided.normalised, mutations=decided.mutations,
    )  # fmt: skip
