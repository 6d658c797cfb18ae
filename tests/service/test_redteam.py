"""What an agent tried on a running service: the machine's own network and files, and its patience.

Each attack has a control: what the same step does where the one protection is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import io
import os
import secrets
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from agent_sandbox.launch import flood, syscalls
from agent_sandbox.sandbox import owned
from agent_sandbox.service.backend import tree, tree_steps
from conftest import IS_ROOT, As

from .conftest import Serve, Served, Team

FETCH = "import urllib.request as u, sys; print(u.urlopen(sys.argv[1], timeout=20).read().decode())"
CLONE_FILES = 0x400


@contextlib.contextmanager
def place(client: httpx.Client, **wish: object) -> Iterator[str]:
    answer = client.post("/v1/sandboxes", json=wish)
    assert answer.status_code == 201, answer.text
    yield answer.json()["id"]
    client.delete(f"/v1/sandboxes/{answer.json()['id']}")


def descriptors(served: Served) -> int:
    return len(os.listdir(f"/proc/{served.process.pid}/fd"))


# --- the machine's own network


class Neighbour(http.server.BaseHTTPRequestHandler):
    """A service on the loopback that trusts whoever reaches it."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"the neighbour's secret")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def neighbour() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Neighbour)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.mark.kernel
def test_cannot_open_this_machine_by_naming_its_address(
    serve: Serve, runner: As, neighbour: int
) -> None:
    data = runner.directory(runner.project() / "data")
    data.chmod(0o700)
    (data / "templates.toml").write_text(
        f'[opened.network]\nmode = "allow"\nallow = ["127.0.0.1:{neighbour}"]\n'
    )
    (data / "templates.toml").chmod(0o644)
    served = serve(runner, data=data)
    url = f"http://127.0.0.1:{neighbour}/"
    with served.client(served.token("agent")) as client:
        for host in (f"127.0.0.1:{neighbour}", f"localhost:{neighbour}", f"[::1]:{neighbour}",
                     f"[::ffff:127.0.0.1]:{neighbour}", "127.0.0.0/8:*", "10.0.0.0/8", "10.1.2.3",
                     "169.254.169.254", "192.0.2.1", "8.8.8.8"):  # fmt: skip
            wish = {"network": {"mode": "allow", "allowOut": ["pypi.org", host]}}
            for path, more in (("/v1/sandboxes", {}), ("/v1/run", {"command": "true"})):
                answer = client.post(path, json={**wish, **more})
                assert (answer.status_code, answer.json()["code"]) == (403, "NETWORK_NOT_ALLOWED")
        command = {"cmd": ["python3", "-c", FETCH, url], "template": "opened"}
        # Not even beside a template that opens it.
        own = {"network": {"mode": "allow", "allowOut": ["126.0.0.0/7:*", "0.0.0.0/0:*", "*:*"]}}
        assert "secret" not in client.post("/v1/run", json={**command, **own}).json()["stdout"]
        # The control: the operator may, and then it is reached.
        assert "the neighbour's secret" in client.post("/v1/run", json=command).json()["stdout"]


# --- the machine's own files


@pytest.mark.kernel
@pytest.mark.skipif(not IS_ROOT, reason="puts a file into /etc")
def test_cannot_read_what_only_the_service_may_read(serve: Serve, runner: As) -> None:
    top = Path(f"/etc/agent-sandbox-test-{secrets.token_hex(4)}")
    top.mkdir(mode=0o755)
    try:
        for name, mode in (("tls.key", 0o600), ("group.key", 0o640), ("open.conf", 0o644)):
            (top / name).write_text(f"text of {name}")
            os.chown(top / name, runner.uid, runner.gid)
            (top / name).chmod(mode)
        (top / "tokens").mkdir()
        (top / "tokens" / "worker").write_text("text of a token")
        os.chown(top / "tokens", runner.uid, runner.gid)
        (top / "tokens").chmod(0o700)
        served = serve(runner)
        with served.client(served.token("agent")) as client:
            read = f"cat {top}/*.key {top}/tokens/* {top}/open.conf"
            said = client.post("/v1/run", json={"command": read}).json()["stdout"]
        # The control is the file that is for everybody.
        assert said == "text of open.conf"
    finally:
        for path in sorted(top.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        top.rmdir()


def test_closed_files_are_found_and_links_are_not_followed(tmp_path: Path) -> None:
    for name, mode in (("open", 0o644), ("closed", 0o640), ("below/closed", 0o600)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / "below").chmod(0o755)
    (tmp_path / "shut").mkdir(mode=0o750)
    (tmp_path / "link").symlink_to("/etc")
    found = {match.path.removeprefix(f"{tmp_path}/") for match in owned._closed(str(tmp_path))}
    assert found == {"closed", "below/closed", "shut"}


# --- the service's descriptors


@pytest.mark.kernel
def test_cannot_use_up_descriptors_by_asking_for_heads(team: Team) -> None:
    with place(team.a) as box:
        files = f"/v1/sandboxes/{box}/files"
        team.a.put(files, params={"path": "f"}, content=b"x")
        before = descriptors(team.served)
        for _ in range(40):
            assert team.a.head(files, params={"path": "f"}).status_code == 200
            assert team.a.head(f"/v1/sandboxes/{box}/archive").status_code == 200
            far = {"Range": "bytes=999999999999999-"}
            assert team.a.get(files, params={"path": "f"}, headers=far).status_code in (206, 422)
        assert descriptors(team.served) < before + 20


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_stream_that_nobody_begins_lets_go() -> None:
    async def generator(fd: int) -> AsyncIterator[bytes]:
        try:
            yield os.read(fd, 1)
        finally:
            os.close(fd)

    async def more() -> None:
        return None

    async def leave() -> tuple[bool, bool]:
        first, second = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_RDONLY)
        await generator(first).aclose()  # type: ignore[attr-defined]
        await tree.Pieces(more, lambda: os.close(second)).aclose()
        found = is_open(first), is_open(second)
        os.close(first)
        return found

    # The control is the generator: it stays open.
    assert asyncio.run(leave()) == (True, False)


# --- the disk, and the time that it takes to look at it


@pytest.mark.kernel
def test_cannot_use_up_the_file_system_with_empty_files(team: Team) -> None:
    code = "import os,sys,time\nfor n in range(int(sys.argv[1])): open(f'{n}', 'w').close()\n"
    with place(team.a, resources={"disk": "4M"}) as box:
        run = {"cmd": ["python3", "-c", code + "time.sleep(float(sys.argv[2]))"], "timeout": 60}
        for count, seconds, exceeded in ((100, 1, None), (3000, 50, "disk")):
            run["cmd"] = ["python3", "-c", f"{code}time.sleep({seconds})", str(count)]
            said = team.a.post(f"/v1/sandboxes/{box}/exec", json=run).json()
            assert said["exceeded"] == exceeded, said


def test_empty_files_and_second_names_weigh_something(tmp_path: Path) -> None:
    (tmp_path / "first").touch()
    for number in range(1000):
        (tmp_path / f"n{number}").hardlink_to(tmp_path / "first")
        (tmp_path / f"e{number}").touch()
    # The control: for the file system they are nothing.
    blocks = sum(path.lstat().st_blocks for path in tmp_path.iterdir())
    assert blocks * 512 < 1000 * tree_steps.NAME_BYTES
    weight = tree.disk_usage(str(tmp_path))
    assert weight >= 1000 * (tree_steps.NAME_BYTES + tree_steps.FILE_BYTES)
    assert tree.disk_usage(str(tmp_path), 10_000) < 20_000


@pytest.mark.kernel
def test_cannot_go_beyond_the_disk_with_directories(one: Team) -> None:
    with place(one.a, resources={"disk": "1M"}) as box:
        path = f"/v1/sandboxes/{box}/files/directory"
        codes = []
        for number in range(400):
            deep = "/".join([str(number), *"a" * 30])
            codes.append(one.a.post(path, params={"path": deep}).status_code)
            if codes[-1] == 507:
                break
        assert (codes[0], codes[-1]) == (200, 507)


def zeros(name: str, size: int) -> bytes:
    """A small archive of a large file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = size
        tar.addfile(member, io.BytesIO(bytes(size)))
    return buffer.getvalue()


@pytest.mark.kernel
def test_cannot_go_beyond_the_disk_with_packed_archives(one: Team) -> None:
    with place(one.a, resources={"disk": "8M"}) as box, ThreadPoolExecutor(8) as pool:

        def send(archive: bytes) -> int:
            answer = one.a.put(
                f"/v1/sandboxes/{box}/archive", content=archive,
                headers={"Content-Type": "application/x-tar"},
            )  # fmt: skip
            return answer.status_code

        # The control: what fits is unpacked. Then each alone would fit, but not all of them.
        assert send(zeros("fits", 1_000_000)) == 200
        codes = list(pool.map(send, [zeros(f"n{n}", 3_000_000) for n in range(8)]))
        assert sorted(codes) == [200] * 2 + [413] * 6
        assert send(zeros("large", 60_000_000)) == 413


@pytest.mark.kernel
def test_cannot_nest_deeper_than_anybody_looks(one: Team) -> None:
    with place(one.a) as box:
        for depth, status in ((100, 200), (200, 422), (1500, 422)):
            path = f"{depth}/" + "/".join("a" * depth)
            answer = one.a.put(f"/v1/sandboxes/{box}/files", params={"path": path}, content=b"x")
            assert answer.status_code == status, depth


def test_a_table_that_threads_share_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done, ready = threading.Event(), threading.Barrier(3)

    def shares() -> None:
        ready.wait()
        done.wait()

    def leaves() -> None:
        syscalls.syscall(syscalls.SYS_UNSHARE[os.uname().machine], CLONE_FILES)
        ready.wait()
        done.wait()

    before = len(flood._tables(os.getpid()))
    threads = [threading.Thread(target=target) for target in (shares, leaves)]
    for thread in threads:
        thread.start()
    ready.wait()
    try:
        # The control is the thread with a table of its own: that one counts.
        assert len(flood._tables(os.getpid())) == before + 1
        assert flood.nameless([os.getpid()], 0) == 0
        monkeypatch.setattr(flood, "MOST_LOOKED", 2)
        assert flood.nameless([os.getpid()], 0) == flood.UNCOUNTED
    finally:
        done.set()
        for thread in threads:
            thread.join()


@pytest.mark.kernel
def test_cannot_hold_up_others_with_many_descriptors(team: Team) -> None:
    code = (
        "import os,threading,time\ntry:\n for _ in range(9000): os.dup(0)\nexcept OSError: pass\n"
        "for _ in range(100): threading.Thread(target=time.sleep,args=(30,),daemon=True).start()\n"
        "print('ready', flush=True)\ntime.sleep(30)"
    )
    run = {"cmd": ["python3", "-c", code], "background": True, "timeout": 60}
    with contextlib.ExitStack() as stack:
        boxes = [stack.enter_context(place(team.a)) for _ in range(4)]
        for box in boxes:
            job = team.a.post(f"/v1/sandboxes/{box}/exec", json=run).json()
            while "ready" not in team.a.get(f"/v1/execs/{job['execId']}/logs").json()["stdout"]:
                continue
        for _ in range(4):
            # Each is looked at. A look at every descriptor of every thread takes half a minute.
            for box in boxes:
                assert team.a.get(f"/v1/sandboxes/{box}/metrics", timeout=15).status_code == 200
        with place(team.b) as own:
            files = f"/v1/sandboxes/{own}/files"
            answer = team.b.put(files, params={"path": "f"}, content=b"x", timeout=15)
            assert answer.status_code == 200
