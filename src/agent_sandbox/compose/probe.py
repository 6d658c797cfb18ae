"""What `compose verify` runs inside an agent's container, and what the answers mean.

The attack: ask every known address of an engine for its containers, then have a container
created that would mount the host's disk read-only. It is never started, and removed at once.
An image may hold next to nothing, so the same questions are written for Python, Perl and curl, and
a shell picks one.
"""

from __future__ import annotations

from ..policy import engines
from ..record import Record
from .model import ACCEPT_LABEL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LABEL = "agent-sandbox.verify"
HELD, REACHED, ESCAPED = "held", "reached", "escaped"
NOT_TRIED, ACCEPTED, ABSENT = "not tried", "accepted", "not there"
FAILING = frozenset({REACHED, ESCAPED, NOT_TRIED})
# From the best to the worst, to sum up several addresses.
ORDER = (ABSENT, HELD, ACCEPTED, NOT_TRIED, REACHED, ESCAPED)
# Below a directory of the host that is mounted somewhere inside.
NAMES = ("docker.sock", "docker/docker.sock", "podman/podman.sock", "containerd/containerd.sock",
         "crio/crio.sock", "buildkit/buildkitd.sock")  # fmt: skip
NETWORK = ("tcp:host.docker.internal:2375", "tcp:172.17.0.1:2375", "tcp:docker:2375")
MARK = "agsbx"

PYTHON = r"""
import sys, socket
name, image, label = sys.argv[1:4]
def ask(target, method, path, body):
    kind, _, where = target.partition(":")
    try:
        if kind == "unix":
            s = socket.socket(socket.AF_UNIX); s.settimeout(5); s.connect(where)
        else:
            host, _, port = where.rpartition(":")
            s = socket.create_connection((host, int(port)), 3); s.settimeout(5)
    except Exception as e:
        return "-" + str(getattr(e, "errno", None) or type(e).__name__), ""
    try:
        head = "%s %s HTTP/1.0\r\nHost: d\r\nContent-Type: application/json\r\n" % (method, path)
        s.sendall((head + "Content-Length: %d\r\n\r\n%s" % (len(body), body)).encode())
        data = b""
        while len(data) < 1000000:
            part = s.recv(65536)
            if not part: break
            data += part
    except Exception as e:
        if not data: return "-answer", ""
    words = data[:64].split()
    ok = len(words) > 1 and words[0].startswith(b"HTTP/")
    return (words[1].decode() if ok else "-nohttp"), data.decode("utf-8", "replace")
body = '{"Image":"%s","Cmd":["true"],"Labels":{"%s":"%s"},"HostConfig":{"Binds":["/:/host:ro"]}}'
def tried(tool, target):
    ping = ask(target, "GET", "/_ping", "")[0]
    row = [tool, target, "ping=" + ping]
    if not ping.startswith("-"):
        row.append("list=" + ask(target, "GET", "/containers/json", "")[0])
        info = ask(target, "GET", "/info", "")[1].partition('"ID":"')[2].partition('"')[0]
        row.append("id=" + info.replace(" ", "")[:64])
        made = body % (image, label, name)
        row.append("create=" + ask(target, "POST", "/containers/create?name=" + name, made)[0])
        row.append("remove=" + ask(target, "DELETE", "/containers/" + name + "?force=1", "")[0])
    return "agsbx " + " ".join(row)
"""
PYTHON_INSIDE = PYTHON + 'for t in sys.argv[4:]:\n    print(tried("python", t))\n'

PERL = r"""
$| = 1; my ($name, $image, $label, @targets) = @ARGV;
sub ask {
  my ($target, $method, $path, $body) = @_; my ($s, $data, $part) = (undef, "", "");
  my $r = eval {
    local $SIG{ALRM} = sub { die "t\n" }; alarm 5;
    if ($target =~ /^unix:(.*)/) {
      socket($s, 1, 1, 0) or die "socket\n";
      connect($s, pack("Sa108", 1, $1)) or die(($! + 0) . "\n");
    } else {
      $target =~ /^tcp:(.*):(\d+)$/; my $a = gethostbyname($1) or die "name\n"; my $p = $2;
      socket($s, 2, 1, 0) or die "socket\n";
      connect($s, pack("Sna4x8", 2, $p, $a)) or die(($! + 0) . "\n");
    }
    syswrite($s, "$method $path HTTP/1.0\r\nHost: d\r\nContent-Type: application/json\r\n"
      . "Content-Length: " . length($body) . "\r\n\r\n$body");
    while (length($data) < 1000000 && sysread($s, $part, 65536)) { $data .= $part }
    alarm 0; 1;
  };
  my $e = $@; alarm 0;
  if (!$r && $data eq "") { chomp $e; return ("-$e", "") }
  return $data =~ m{^HTTP/\S+ (\d+)} ? ($1, $data) : ("-nohttp", "");
}
for my $t (@targets) {
  my ($ping) = ask($t, "GET", "/_ping", ""); my @row = ("perl", $t, "ping=$ping");
  if ($ping !~ /^-/) {
    push @row, "list=" . (ask($t, "GET", "/containers/json", ""))[0];
    my $info = (ask($t, "GET", "/info", ""))[1]; $info =~ /"ID":"([^" ]{1,64})"/;
    push @row, "id=" . ($1 || "");
    my $b = qq({"Image":"$image","Cmd":["true"],"Labels":{"$label":"$name"},)
      . qq("HostConfig":{"Binds":["/:/host:ro"]}});
    push @row, "create=" . (ask($t, "POST", "/containers/create?name=$name", $b))[0];
    push @row, "remove=" . (ask($t, "DELETE", "/containers/$name?force=1", ""))[0];
  }
  print "agsbx @row\n";
}
"""

# $1 name, $2 image, $3 label, then programs, then targets. Every row starts with a mark, because
# a shell's start-up files may print as well.
SHELL = r"""
name=$1 image=$2 label=$3 python=$4 perl=$5; shift 5
has() { command -v "$1" >/dev/null 2>&1; }
code() { c=$(curl -s -m 5 -o "${o:-/dev/null}" -w '%{http_code}' "$@" 2>/dev/null); r=$?
  if [ "$c" = 000 ] || [ -z "$c" ]; then echo "-curl$r"; else echo "$c"; fi; }
try() { t=$1; case $t in
    unix:*) set -- --unix-socket "${t#unix:}"; u=http://d ;;
    *) set --; u=http://${t#tcp:} ;; esac
  p=$(code "$@" "$u/_ping"); row="curl $t ping=$p"
  case $p in -*) ;; *)
    row="$row list=$(code "$@" "$u/containers/json")"
    id=$(curl -s -m 5 "$@" "$u/info" 2>/dev/null)
    case $id in *'"ID":"'*) id=${id#*'"ID":"'}; id=${id%%'"'*} ;; *) id= ;; esac
    b='{"Image":"'$image'","Cmd":["true"],"Labels":{"'$label'":"'$name'"},'
    b=$b'"HostConfig":{"Binds":["/:/host:ro"]}}'
    row="$row id=$id create=$(code "$@" -H 'Content-Type: application/json' -d "$b" \
      "$u/containers/create?name=$name")"
    row="$row remove=$(code "$@" -X DELETE "$u/containers/$name?force=1")" ;; esac
  echo "agsbx $row"; }
if has docker; then
  if docker ps >/dev/null 2>&1; then
    row="list=200 id=$(docker info --format '{{.ID}}' 2>/dev/null | tr -d ' ')"
    if docker create --pull never --name "$name-c" --label "$label=$name" -v /:/host:ro "$image" \
      true >/dev/null 2>&1; then row="$row create=201"; else row="$row create=-"; fi
    docker rm -f "$name-c" >/dev/null 2>&1; echo "agsbx docker docker-cli ping=200 $row"
  else echo "agsbx docker docker-cli ping=-cli"; fi
else echo "agsbx none docker-cli ping=-absent"; fi
if has python3 && python3 -c 'import socket' 2>/dev/null; then
  python3 -c "$python" "$name" "$image" "$label" "$@"
elif has python && python -c 'import socket' 2>/dev/null; then
  python -c "$python" "$name" "$image" "$label" "$@"
elif has perl; then perl -e "$perl" "$name" "$image" "$label" "$@"
elif has curl; then for t in "$@"; do try "$t"; done
else for t in "$@"; do case $t in
    unix:*) if [ -S "${t#unix:}" ]; then echo "agsbx none $t ping=-untried"
      else echo "agsbx none $t ping=-absent"; fi ;;
    *) echo "agsbx none $t ping=-untried" ;; esac; done
fi
"""


class Agent(Record):
    """One running container of the project."""

    id: str
    service: str
    image: str
    pid: int
    env: tuple[tuple[str, str], ...]
    mounts: tuple[str, ...]
    labels: tuple[tuple[str, str], ...]


class Row(Record):
    """One address that was tried from inside one container."""

    tool: str
    target: str
    answers: tuple[tuple[str, str], ...]

    def get(self, key: str) -> str:
        """The answer to one question."""
        return dict(self.answers).get(key, "")


class Verdict(Record):
    """What came of one kind of attack on one agent."""

    service: str
    container: str
    attack: str
    outcome: str
    detail: str


def agent(data: Mapping[str, object]) -> Agent:
    """A container as `docker inspect` shows it."""

    def inner(*keys: str) -> object:
        found: object = data
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    env, labels, mounts = inner("Config", "Env"), inner("Config", "Labels"), data.get("Mounts")
    pairs = [str(v).partition("=") for v in env] if isinstance(env, list) else []
    known = {str(k): str(v) for k, v in labels.items()} if isinstance(labels, dict) else {}
    places = [m.get("Destination") for m in mounts if isinstance(m, dict)] if isinstance(
        mounts, list) else []  # fmt: skip
    pid = inner("State", "Pid")
    return Agent(
        id=str(data.get("Id")), image=str(data.get("Image")),
        service=known.get("com.docker.compose.service", str(data.get("Name")).lstrip("/")),
        pid=pid if isinstance(pid, int) else 0,
        env=tuple((key, value) for key, _, value in pairs),
        mounts=tuple(str(p) for p in places if p), labels=tuple(known.items()),
    )  # fmt: skip


def targets(one: Agent) -> tuple[str, ...]:
    """Every address at which this agent may find an engine."""
    found: list[str] = []
    for name, value in one.env:
        if name not in engines.VARIABLES:
            continue
        path = engines.unix_path(value)
        if path:
            found.append(f"unix:{path}")
        elif value.startswith(("tcp://", "http://")):
            found.append("tcp:" + value.partition("://")[2].rstrip("/"))
    for place in one.mounts:
        found.append(f"unix:{place}")
        found += [f"unix:{place.rstrip('/')}/{name}" for name in NAMES]
    found += [f"unix:{path}" for path in engines.SYSTEM]
    found += NETWORK
    # A row is words: an address with a space in it cannot be asked for that way.
    return tuple(dict.fromkeys(t for t in found if t.isprintable() and " " not in t))


def rows(output: str) -> tuple[Row, ...]:
    """What the probe printed. The container may print as it likes: odd lines are dropped."""
    found = []
    for line in output.splitlines():
        words = line.split(" ")
        if len(words) < 4 or words[0] != MARK:
            continue
        answers = tuple((k, v) for k, _, v in (w.partition("=") for w in words[3:]) if k)
        found.append(Row(tool=words[1], target=words[2], answers=answers))
    return tuple(found)


def judged(row: Row, engine: str) -> tuple[str, str]:
    """Outcome and words for one address; `engine` is the id of the host's own."""
    ping, made, own = row.get("ping"), row.get("create"), row.get("id")
    cases = (
        (ping == "-absent", ABSENT, "nothing there"),
        (ping == "-untried", NOT_TRIED, "no program inside can ask"),
        (ping.startswith("-") or not ping, HELD, "no engine answers"),
        (own and engine and own != engine, HELD, "an engine of its own, not the host's"),
        (made == "201", ESCAPED, "made a container with the host's disk"),
        (row.get("list") == "200", REACHED, "lists the host's containers"),
        # A proxy refuses with 403; only an engine looks at the order itself.
        (made in ("400", "404", "409", "500"), REACHED, f"takes orders for containers ({made})"),
        (True, HELD, f"answers, and refuses ({row.get('list') or ping})"),
    )
    outcome, words = next((o, w) for applies, o, w in cases if applies)
    return outcome, f"{row.target}: {words}"


def verdicts(one: Agent, found: Iterable[Row], engine: str, *, accept: bool) -> tuple[Verdict, ...]:
    """Three attacks on one agent: the docker program, raw requests, the escape."""
    accepted = dict(one.labels).get(ACCEPT_LABEL, "").replace(",", " ").split() if accept else []
    table = [(row, *judged(row, engine)) for row in found]
    program = [t for t in table if t[0].target == "docker-cli"]
    raw = [t for t in table if t[0].target != "docker-cli"]
    listed = [(REACHED if o == ESCAPED else o, d) for _, o, d in raw]
    escapes = [(HELD if o == REACHED else o, d) for _, o, d in table]
    made = (
        ("docker ps", _worst([(REACHED if o == ESCAPED else o, d) for _, o, d in program])),
        ("raw request", _worst(listed)),
        ("escape", _worst(escapes)),
    )
    return tuple(
        Verdict(
            service=one.service, container=one.id[:12], attack=attack,
            outcome=_answered(attack, outcome, accepted), detail=detail,
        )
        for attack, (outcome, detail) in made
    )  # fmt: skip


def _answered(attack: str, outcome: str, accepted: Sequence[str]) -> str:
    """A holder of the socket was named by its author; a reader may read, and no more."""
    if outcome not in FAILING or outcome == NOT_TRIED:
        return outcome
    if "docker-socket" in accepted or ("engine-address" in accepted and attack != "escape"):
        return ACCEPTED
    return outcome


def _worst(found: Sequence[tuple[str, str]]) -> tuple[str, str]:
    if not found:
        return NOT_TRIED, "nothing inside could run the probe"
    worst = max(found, key=lambda f: ORDER.index(f[0]))
    if worst[0] in (HELD, ABSENT):
        said = [d for o, d in found if o == HELD and not d.endswith(("answers", "there"))]
        words = said[0] if said else "no engine answers"
        return worst[0], f"{words} ({len(found)} tried)" if len(found) > 1 else words
    return worst


def table(found: Sequence[Verdict]) -> str:
    """The verdicts for people."""
    head = ("SERVICE", "ATTACK", "OUTCOME", "DETAIL")
    lines = [head, *((v.service, v.attack, v.outcome, v.detail) for v in found)]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    return "".join(
        "  ".join((*(w.ljust(n) for w, n in zip(line[:3], widths, strict=True)), line[3])).rstrip()
        + "\n"
        for line in lines
    )
