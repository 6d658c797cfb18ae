"""Compose files into one Project, the way Compose puts them together.

Follows `extends` and `include`, lays override files over each other and reads env files. All
profiles count: what a profile starts later is as dangerous. Files come through `Host`, so nothing
here touches the machine.
"""

from __future__ import annotations

from ..errors import PolicyError
from ..policy import paths
from . import merge, variables
from .merge import names
from .model import (
    FROM_ENV_FILE,
    FROM_FILE,
    PASSED,
    Host,
    Mounts,
    Project,
    Service,
    Unread,
    Variable,
    host_path,
)
from .nodes import Node, Place, broken, parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

DEFAULT_NAMES = ("compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml")
REMOTE = ("http://", "https://", "git://", "ssh://", "git@", "oci://", "docker://", "github.com/")
MAX_FILES = 100


def override_name(name: str) -> tuple[str, ...]:
    """What Compose lays over a file with this name when it is started beside it."""
    stem, _, suffix = name.rpartition(".")
    if name not in DEFAULT_NAMES:
        return ()
    return tuple(f"{stem}.override.{s}" for s in dict.fromkeys((suffix, "yml", "yaml")))


def load(
    files: Sequence[str], host: Host, *, env_files: Sequence[str] = (), name: str = ""
) -> Project:
    """The project that `docker compose -f FILE -f FILE…` would run; paths are absolute."""
    loader = _Loader(host)
    base = paths.parent(files[0])
    env = {**loader.dotenv(env_files or (f"{base}/.env",), given=bool(env_files)), **host.env}
    node = loader.project(files, base, env, ())
    return loader.finish(node, base, name, env)


class _Loader:
    def __init__(self, host: Host) -> None:
        self.host = host
        self.files: list[str] = []
        self.unread: list[Unread] = []
        self.parsed: dict[tuple[str, str], Node] = {}

    def text(self, path: str, asked: Place | str) -> str:
        found = self.host.read(path)
        if found is None:
            raise PolicyError(f"{asked}: cannot read {path}", code="compose-missing")
        return found

    def dotenv(self, files: Sequence[str], *, given: bool) -> dict[str, str]:
        found: dict[str, str] = {}
        for path in files:
            text = self.text(path, "--env-file") if given else self.host.read(path)
            found.update({k: v for k, (v, _) in variables.assignments(text or "").items()})
        return found

    def file(self, path: str, base: str, env: Mapping[str, str], asked: Place | str) -> Node:
        """One file, parsed, with its variables replaced."""
        if path not in self.files:
            self.files.append(path)
        if len(self.files) > MAX_FILES:
            raise PolicyError(f"{asked}: more than {MAX_FILES} files", code="compose-broken")
        if (path, base) not in self.parsed:
            node = parse(self.text(path, asked), path, base)
            if node.fields is None:
                raise broken(path, node.place.line, "not a compose file: no mapping at its top")
            services = node.get("services")
            if services is not None and services.fields is None:
                raise broken(path, services.place.line, "services is not a mapping")
            for key, service in node.mapped("services").items():
                if service.fields is None and not service.is_null:
                    raise broken(path, service.place.line, f"service {key} is not a mapping")
            self.parsed[path, base] = variables.filled(node, env)
        return self.parsed[path, base]

    def project(
        self, files: Sequence[str], base: str, env: Mapping[str, str], above: tuple[str, ...]
    ) -> Node:
        """Files laid over each other, with what each includes below it."""
        whole: Node | None = None
        for path in files:
            if path in above:
                raise PolicyError(f"{path}: includes itself", code="compose-broken")
            node = self.file(path, base, env, path)
            node = self.extended(node, env, whole)
            for included in self.includes(node, env, (*above, path)):
                node = merge.project(included, node)
            whole = node if whole is None else merge.project(whole, node)
        if whole is None:
            raise PolicyError("no compose file", code="compose-missing")
        return whole

    def includes(
        self, node: Node, env: Mapping[str, str], above: tuple[str, ...]
    ) -> Iterator[Node]:
        for item in node.listed("include"):
            wanted = item.listed("path") if item.fields is not None else (item,)
            remote = [w for w in wanted if (w.text or "").startswith(REMOTE) or w.unset]
            if remote:
                what = f"include {remote[0].text or '$' + remote[0].unset[0]}"
                self.unread.append(Unread(what=what, place=remote[0].place, grave=True))
                continue
            found = [host_path(w.text or "", w.place.base, self.host.home) for w in wanted]
            if not found:
                raise broken(item.place.file, item.place.line, "include without a path")
            base = item.string("project_directory")
            base = host_path(base, item.place.base, self.host.home) if base else ""
            base = base or paths.parent(found[0])
            named = [host_path(n.text or "", n.place.base, self.host.home)
                     for n in item.listed("env_file")]  # fmt: skip
            own = self.dotenv(named or (f"{base}/.env",), given=bool(named))
            yield self.project(found, base, {**own, **env}, above)

    def extended(self, node: Node, env: Mapping[str, str], whole: Node | None) -> Node:
        """Every service with what it extends below it."""
        services = node.get("services")
        if services is None:
            return node
        fields = {key: self.service(node, key, env, whole, ()) for key in services.fields or {}}
        return node.replace(
            fields={**(node.fields or {}), "services": services.replace(fields=fields)}
        )

    def service(
        self, node: Node, name: str, env: Mapping[str, str], whole: Node | None,
        above: tuple[tuple[str, str], ...],
    ) -> Node:  # fmt: skip
        own = node.mapped("services").get(name)
        if own is None and whole is not None:
            own = whole.mapped("services").get(name)
        if own is None:
            raise broken(node.place.file, node.place.line, f"extends the unknown service {name}")
        extends = own.get("extends")
        if extends is None:
            return own
        here = (own.place.file, name)
        if here in above:
            raise broken(own.place.file, extends.place.line, f"service {name} extends itself")
        other = extends.string("service") if extends.fields is not None else extends.text or ""
        file = extends.get("file")
        if file is not None and ((file.text or "").startswith(REMOTE) or file.unset):
            self.unread.append(
                Unread(what=f"extends from {file.text}", place=file.place, grave=True)
            )
            return own
        if file is None:
            lower = self.service(node, other, env, whole, (*above, here))
        else:
            path = host_path(file.text or "", file.place.base, self.host.home)
            there = self.file(path, paths.parent(path), env, file.place)
            lower = self.service(there, other, env, None, (*above, here))
        return merge.service(lower, own)

    def finish(self, node: Node, base: str, name: str, env: Mapping[str, str]) -> Project:
        """Services with mounts and variables."""
        mounts = Mounts(node, self.host)
        services = tuple(
            Service(
                name=key, node=service, mounts=tuple(mounts.of(key)),
                variables=tuple(self.environment(service, env)),
            )
            for key, service in node.mapped("services").items()
        )  # fmt: skip
        return Project(
            name=name or project_name(node.string("name") or paths.normalise(base)),
            node=node, services=services, files=tuple(self.files), unread=tuple(self.unread),
        )  # fmt: skip

    def environment(self, service: Node, env: Mapping[str, str]) -> Iterator[Variable]:
        """A container's variables; `environment` wins over env files."""
        found: dict[str, Variable] = {}
        for item in service.listed("env_file"):
            at = item.get("path") or item
            path = host_path(at.text or "", at.place.base, self.host.home)
            text = self.host.read(path)
            if text is None:
                self.unread.append(Unread(what=f"env_file {path}", place=at.place, grave=False))
                continue
            for name, (value, line) in variables.assignments(text).items():
                place = Place(file=path, line=line, base=at.place.base)
                found[name] = Variable(
                    name=name, value=value, origin=FROM_ENV_FILE, place=place, literal=True
                )
        written = service.get("environment")
        for name, node in (names(written).fields or {}).items() if written is not None else ():
            passed = node.text is None
            found[name] = Variable(
                name=name, value=env.get(name, "") if passed else node.text or "",
                origin=PASSED if passed else FROM_FILE, place=node.place,
                literal=not passed and not node.used,
            )  # fmt: skip
        return iter(found.values())


def project_name(text: str) -> str:
    """A project's name as Compose makes it of a directory's."""
    kept = "".join(c for c in text.rpartition("/")[2].lower() if c.isalnum() or c in "_-")
    return kept.lstrip("_-")
