"""Everyday programs under the filter: language runtimes, compilers, git, debuggers, a browser.

`make test-runtimes` installs what is missing. On a machine without a program its test skips.
"""

# ruff: noqa: E501 - a program for the inside reads better in one piece
from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from conftest import PATH, must_work

if TYPE_CHECKING:
    import subprocess

    from kernel.conftest import World

pytestmark = pytest.mark.kernel

BOTH = pytest.mark.parametrize("level", ["default", "strict"])
SECONDS = 240.0


def run(world: World, level: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a program inside that must succeed, without a word about a call that was refused."""
    # What has a path was built by the test itself.
    must_work("/" in argv[0] or shutil.which(argv[0], path=PATH), f"needs {argv[0]}")
    done = world.sandbox(f"--seccomp={level}", *argv, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = (done.stdout + done.stderr).lower()
    assert "bad system call" not in said
    assert "function not implemented" not in said
    return done


PYTHON = """
import asyncio, concurrent.futures, multiprocessing, os, sqlite3, subprocess, sys, tempfile, threading

def square(n): return n * n

async def talk():
    server = await asyncio.start_server(lambda r, w: (w.write(b"hi"), w.close()), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    process = await asyncio.create_subprocess_exec("echo", "child", stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return (await reader.read()).decode() + out.decode().strip()

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool: print(sum(pool.map(square, range(10))))
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        print(sum(pool.map(square, range(10))))
    print(asyncio.run(talk()))
    base = sqlite3.connect("base.db"); base.execute("pragma journal_mode=wal")
    base.execute("create table t (n)"); base.executemany("insert into t values (?)", [(1,), (2,)]); base.commit()
    print(base.execute("select sum(n) from t").fetchone()[0])
    print(subprocess.run(["sh", "-c", "exit 3"]).returncode)
"""


@BOTH
def test_python_runs(world: World, level: str) -> None:
    """Pools of processes, asyncio with sockets and children, sqlite."""
    world.write("main.py", PYTHON)
    done = run(world, level, "/usr/bin/python3", "main.py")
    assert done.stdout.split() == ["285", "285", "hichild", "3", "3"], done.stderr


NODE = """
const { Worker, isMainThread, parentPort } = require("worker_threads");
const fs = require("fs/promises"), cp = require("child_process"), net = require("net");
if (!isMainThread) { parentPort.postMessage(6 * 7); return; }
if (process.send) { process.send("forked"); process.disconnect(); return; }
(async () => {
  await fs.mkdir("made/deep", { recursive: true });
  await fs.writeFile("made/deep/f", "text");
  const said = [String(await fs.readFile("made/deep/f"))];
  said.push(await new Promise((r) => new Worker(__filename).on("message", r)));
  said.push(cp.execFileSync("echo", ["child"]).toString().trim());
  said.push(await new Promise((r) => cp.fork(__filename).on("message", r)));
  const server = net.createServer((s) => s.end("socket")).listen(0, "127.0.0.1");
  await new Promise((r) => server.on("listening", r));
  const reply = net.connect(server.address().port, "127.0.0.1");
  said.push(await new Promise((r) => reply.on("data", (d) => r(d.toString()))));
  server.close();
  console.log(said.join(" "));
})();
"""


@BOTH
def test_node_runs(world: World, level: str) -> None:
    """Workers, files, children with and without a channel, sockets."""
    world.write("main.js", NODE)
    assert run(world, level, "node", "main.js").stdout == "text 42 child forked socket\n"


C = """
#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
static void *work(void *p) { *(int *)p = 42; return 0; }
int main(void) {
  int n = 0; pthread_t t; pthread_create(&t, 0, work, &n); pthread_join(t, 0);
  if (fork() == 0) _exit(7);
  int status; wait(&status); printf("%d %d\\n", n, WEXITSTATUS(status));
}
"""
MAKE = "all: a b main\na b:\n\techo $@ > $@\nmain: main.c\n\tcc -O2 -pthread -o main main.c\n"


@BOTH
def test_gcc_and_make_run(world: World, level: str) -> None:
    """With make's job server."""
    must_work(shutil.which("gcc", path=PATH), "needs gcc")
    world.write("main.c", C)
    world.write("Makefile", MAKE)
    run(world, level, "make", "-j2")
    assert run(world, level, "./main").stdout == "42 7\n"


def test_cmake_runs(world: World) -> None:
    world.write("main.c", C)
    world.write(
        "CMakeLists.txt",
        "cmake_minimum_required(VERSION 3.10)\nproject(x C)\nfind_package(Threads REQUIRED)\n"
        "add_executable(main main.c)\ntarget_link_libraries(main Threads::Threads)\n",
    )
    run(world, "default", "cmake", "-B", "build", ".")
    run(world, "default", "cmake", "--build", "build", "-j2")
    assert run(world, "default", "build/main").stdout == "42 7\n"


GIT = """
set -e
git init -q origin; cd origin
git config user.name n; git config user.email e@example.org
seq 500 | while read n; do echo $n > f$n; done
git add -A; git commit -qm one
cd ..; git clone -q origin copy; cd copy
git config user.name n; git config user.email e@example.org
git switch -qc side; echo x > f1; git commit -qam two; git switch -q -; git merge -q side
git gc -q --aggressive --prune=now; git fsck --strict; git push -q origin side
git -C ../origin log --oneline side | wc -l
"""


@BOTH
def test_git_runs(world: World, level: str) -> None:
    """Clone, commit, merge, collect garbage, push between directories."""
    assert run(world, level, "sh", "-c", GIT).stdout.split()[-1] == "2"


GO = """
package main

import ("fmt"; "net"; "os/exec"; "sync")

func main() {
    var wait sync.WaitGroup
    sums := make(chan int, 100)
    for i := 0; i < 100; i++ { wait.Add(1); go func(n int) { defer wait.Done(); sums <- n }(i) }
    wait.Wait(); close(sums)
    total := 0
    for n := range sums { total += n }
    out, err := exec.Command("echo", "child").Output()
    if err != nil { panic(err) }
    listener, err := net.Listen("tcp", "127.0.0.1:0")
    if err != nil { panic(err) }
    go func() { c, _ := listener.Accept(); c.Write([]byte("socket")); c.Close() }()
    connection, err := net.Dial("tcp", listener.Addr().String())
    if err != nil { panic(err) }
    buffer := make([]byte, 9); n, _ := connection.Read(buffer)
    fmt.Print(total, " ", string(buffer[:n]), " ", string(out))
}
"""


def test_go_builds_and_runs(world: World) -> None:
    """Goroutines, children, sockets."""
    world.write("main.go", GO)
    world.write("go.mod", "module example.org/x\n\ngo 1.19\n")
    run(world, "default", "go", "build", "-o", "main", ".")
    assert run(world, "default", "./main").stdout == "4950 socket child\n"


RUST = """
use std::{process::Command, thread};
fn main() {
    let total: u64 = (0..8).map(|n| thread::spawn(move || n)).map(|t| t.join().unwrap()).sum();
    let out = Command::new("echo").arg("child").output().unwrap();
    print!("{} {}", total, String::from_utf8(out.stdout).unwrap());
}
"""


def test_cargo_builds_and_runs(world: World) -> None:
    """Offline."""
    world.write("src/main.rs", RUST)
    world.write("Cargo.toml", '[package]\nname = "x"\nversion = "0.1.0"\nedition = "2021"\n')
    assert run(world, "default", "cargo", "run", "-q", "--offline").stdout == "28 child\n"


JAVA = """
import java.nio.file.*; import java.util.concurrent.*;
public class Main {
  public static void main(String[] a) throws Exception {
    ExecutorService pool = Executors.newFixedThreadPool(8);
    int total = 0;
    java.util.List<Future<Integer>> sums = new java.util.ArrayList<>();
    for (int i = 0; i < 100; i++) { final int n = i; sums.add(pool.submit(() -> n)); }
    for (Future<Integer> f : sums) total += f.get();
    pool.shutdown();
    Process p = new ProcessBuilder("echo", "child").start();
    String said = new String(p.getInputStream().readAllBytes()).trim();
    Files.writeString(Path.of("made"), "text"); System.gc();
    System.out.println(total + " " + said + " " + Files.readString(Path.of("made")));
  }
}
"""


def test_java_compiles_and_runs(world: World) -> None:
    """Threads, children, files, garbage collection."""
    world.write("Main.java", JAVA)
    run(world, "default", "javac", "Main.java")
    assert run(world, "default", "java", "Main").stdout == "4950 child text\n"


def test_a_headless_browser_renders_a_page(world: World) -> None:
    """Without its own sandbox, which needs a user namespace."""
    page = 'data:text/html,<p id="x">no</p><script>x.textContent = 6 * 7</script>'
    flags = ("--headless", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
    done = run(world, "default", "chromium", *flags, "--dump-dom", page)
    assert '<p id="x">42</p>' in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        (("strace", "-f", "-e", "trace=execve", "sh", "-c", "true; true"), "exited with 0"),
        (("gdb", "-batch", "-ex", "catch syscall exit_group", "-ex", "run", "-ex", "bt", "-ex", "c", "/bin/true"), "exited normally"),
    ],
    ids=["strace", "gdb"],
)  # fmt: skip
def test_debuggers_run(world: World, tool: tuple[str, ...], said: str) -> None:
    done = run(world, "default", *tool)
    assert said in done.stdout + done.stderr
