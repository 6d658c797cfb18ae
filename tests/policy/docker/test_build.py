"""Builds: the query, the tar that is written anew, and the Dockerfile in it."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.policy.docker.context import BLOCK, MAX_STEP, Archive, Context
from agent_sandbox.policy.docker.decision import decide, transform
from agent_sandbox.policy.docker.dockerfile import Dockerfile, instructions, keys
from agent_sandbox.policy.docker.target import parse
from agent_sandbox.policy.docker.values import OWNER_LABEL, Decision, Grants, Refused, Upstream

from .world import CLOSED, GRANTS, OWNER, again, ask, id_of, look, refusal, request

ALPINE = id_of("image", "alpine:latest")
APP = id_of("image", "agent-sandbox-run1/app:latest")


def query(answer: Decision | Upstream) -> dict[str, str]:
    assert isinstance(answer, Upstream), answer
    return dict(parse(f"/x?{answer.query}").query)


def rendered(text: str, grants: Grants = GRANTS, **arguments: str) -> str:
    made = Dockerfile(text.encode(), grants, arguments)
    return made.render(look(made.references(), grants)).decode()


def rule(text: str, grants: Grants = GRANTS, **arguments: str) -> str:
    with pytest.raises(Refused) as refused:
        rendered(text, grants, **arguments)
    return refused.value.rule


def tar(
    *entries: tuple[str, bytes],
    extra: Iterable[tarfile.TarInfo] = (),
    form: int = tarfile.PAX_FORMAT,
) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for info in extra:
            archive.addfile(info)
    return buffer.getvalue()


def context(name: str = "Dockerfile", grants: Grants = GRANTS, **arguments: str) -> Context:
    return Context(grants, dockerfile=name, arguments=arguments)


def passed(body: Archive, data: bytes, step: int = 1 << 30) -> dict[str, tarfile.TarInfo | bytes]:
    """What the engine unpacks."""
    out = b"".join(body.feed(data[i : i + step]) for i in range(0, len(data), step))
    out += body.finish(look(body.references(), GRANTS))
    found: dict[str, tarfile.TarInfo | bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(out)) as archive:
        for info in archive:
            file = archive.extractfile(info) if info.isreg() else None
            found[info.name] = file.read() if file else info
    return found


# --- the query


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("networkmode=host", "networkmode"), ("networkmode=container:MINE", "networkmode"),
        ("remote=http://x/", "remote"), ("remote=git@x:y", "remote"), ("cgroupparent=x",
         "cgroupparent"),
        ("version=2", "version"), ("session=x", "session"), ('outputs=[{"Type":"local"}]',
         "outputs"),
        ('cachefrom=["private"]', "cachefrom"), ('extrahosts=["a:1.2.3.4"]', "extrahosts"),
        ('securityopt=["seccomp=unconfined"]', "securityopt"), ("squash=1", "squash"),
        ("dockerfile=../Dockerfile", "dockerfile"), ("dockerfile=/etc/passwd", "dockerfile"),
        ("dockerfile=a//b", "dockerfile"), ("cpusetmems=0", "cpusetmems"),
        ('ulimits=[{"Name":"memlock","Soft":-1,"Hard":-1}]', "ulimits"),
        ('labels={"traefik.enable":"1"}', "labels"), (f'labels={{"{OWNER_LABEL}":"run2"}}',
         "labels"),
        ("target=a b", "target"), ("platform=../x", "platform"),
    ],
)  # fmt: skip
def test_a_dangerous_parameter_is_refused(words: str, name: str) -> None:
    key, _, value = words.partition("=")
    value = value.replace(" ", "%20").replace('"', "%22")
    assert refusal(ask(request("POST", f"/build?{key}={value}"))) == f"build.{name}"


def test_a_build_is_limited_labelled_and_in_the_run_s_network() -> None:
    found = query(ask(request("POST", "/build?t=x&memory=0&memswap=-1&cpuquota=0&pull=1&q=False")))
    assert found["memory"] == found["memswap"] == str(1 << 30)
    assert found["cpuquota"] == "150000"
    assert found["version"] == "1"
    assert found["networkmode"] == id_of("network", f"agent-sandbox-{OWNER}")
    assert json.loads(found["labels"]) == {OWNER_LABEL: OWNER}
    assert "pull" not in found
    assert found["t"] == "agent-sandbox-run1/x:latest"


def test_several_tags_are_kept_and_each_in_its_place() -> None:
    answer = ask(request("POST", "/build?t=a&t=b:2&t=ghcr.io/x/y"))
    assert isinstance(answer, Upstream)
    tags = [value for key, value in parse(f"/x?{answer.query}").query if key == "t"]
    assert tags == [
        "agent-sandbox-run1/a:latest", "agent-sandbox-run1/b:2",
        "agent-sandbox-run1/ghcr.io/x/y:latest",
    ]  # fmt: skip
    assert ask(again(answer)) == answer


def test_the_transform_belongs_to_the_route() -> None:
    build = decide(
        request("POST", "/build?dockerfile=sub/D&buildargs=%7B%22A%22:%22b%22%7D"), GRANTS
    )
    assert isinstance(transform(build, GRANTS), Context)
    copy = decide(request("PUT", "/containers/MINE/archive?path=/"), GRANTS)
    assert type(transform(copy, GRANTS)) is Archive
    assert transform(decide(request("GET", "/info"), GRANTS), GRANTS) is None


# --- the Dockerfile


def test_images_become_ids_and_stages_stay() -> None:
    text = """# syntax=evil.example/frontend
ARG BASE=alpine
FROM ${BASE} AS one
RUN echo \\
  # a comment
  two   \\

  three
FROM one
COPY --from=one --chown=1:1 /a /b
COPY --from=0 /a /b
COPY --from=app /a /b
FROM --platform=linux/amd64 app as Last
from scratch
"""
    assert rendered(text).splitlines() == [
        "ARG BASE=alpine", f"FROM {ALPINE} AS one", "RUN echo   two     three", "FROM one",
        "COPY --from=one --chown=1:1 /a /b", "COPY --from=0 /a /b", f"COPY --from={APP} /a /b",
        f"FROM --platform=linux/amd64 {APP} AS Last", "FROM scratch",
    ]  # fmt: skip


def test_arguments_decide_which_image_is_checked() -> None:
    assert rendered("ARG B\nFROM ${B}\n", B="alpine") == f"ARG B\nFROM {ALPINE}\n"
    assert rule("ARG B=alpine\nFROM ${B}\n", B="private") == "image.allow-list"
    assert rendered("FROM ${B:-alpine}\n") == f"FROM {ALPINE}\n"
    # Not declared before FROM: the builder does not see it either.
    assert rule("FROM $B\n", B="alpine") == "image.name"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM private\n", "image.allow-list"), ("FROM evil.example/x\n", "image.allow-list"),
        ("FROM python:3.99\n", "image.missing"), ("FROM agent-sandbox-run2/app\n",
         "image.allow-list"),
        ("", "build.from"), ("RUN x\n", "build.from"), ("FROM\n", "build.instruction"),
        ("FROM a b c d\n", "build.from"), ("FROM --x=y alpine\n", "build.from"),
        ("FROM alpine AS $x\n", "build.from"), ("FROM ${A:+x}\n", "build.from"),
        ("# escape=`\nFROM alpine\n", "build.escape"), ("FROM alpine\nRUN a \\\\\n",
         "build.escape"),
        ("FROM alpine\nEVIL x\n", "build.instruction"), ("FROM alpine\x00\n", "build.text"),
        ("FROM alpine\nRUN --mount=type=bind,from=private true\n", "build.run-option"),
        ("FROM alpine\nRUN --network=host true\n", "build.run-option"),
        ("FROM alpine\nRUN --security=insecure true\n", "build.run-option"),
        ("FROM alpine\nCOPY --from=private / /\n", "image.allow-list"),
        ("FROM alpine\nCOPY --chown=1 --from=private / /\n", "image.allow-list"),
        ("FROM alpine\nCOPY \\\n --from=private / /\n", "image.allow-list"),
        ("FROM alpine\nCOPY --chown=1\t--from=private / /\n", "build.copy"),
        ("FROM alpine\nCOPY --from=$X / /\n", "image.name"),
        ("FROM alpine\nCOPY --from=7 / /\n", "image.allow-list"),
        ("FROM alpine\nONBUILD FROM private\n", "build.onbuild"),
        ("FROM alpine\nONBUILD COPY --from=private / /\n", "build.onbuild"),
        ("FROM alpine\nONBUILD RUN --mount=x true\n", "build.run-option"),
        ("FROM alpine\nLABEL traefik.enable=true\n", "build.label"),
        ("FROM alpine\nLABEL a=b traefik.enable=true\n", "build.label"),
        ("FROM alpine\nLABEL traefik.enable true\n", "build.label"),
        ('FROM alpine\nLABEL "traefik.enable"=true\n', "build.label"),
        ("FROM alpine\nLABEL a='b c' \\\n traefik.enable=true\n", "build.label"),
        ("FROM alpine\nLABEL ${X}=true\n", "build.label"),
        ("FROM alpine\nLABEL a\\\\b=true\n", "build.label"),
        (f"FROM alpine\nLABEL {OWNER_LABEL}=run2\n", "build.label"),
        ("FROM alpine\nONBUILD LABEL traefik.enable=true\n", "build.label"),
        ("FROM alpine\nENV NVIDIA_VISIBLE_DEVICES=all\n", "build.env"),
        ("FROM alpine\nENV a=b NVIDIA_VISIBLE_DEVICES=all\n", "build.env"),
        ("FROM alpine\nENV NVIDIA_VISIBLE_DEVICES all\n", "build.env"),
        ("FROM alpine\nENV $X=all\n", "build.env"),
    ],
)  # fmt: skip
def test_a_dangerous_instruction_is_refused(text: str, expected: str) -> None:
    assert rule(text) == expected


@pytest.mark.parametrize(
    "line",
    [
        "ADD http://169.254.169.254/x /x",
        "ADD HTTPS://x/y /",
        'ADD ["http:\\u002f\\u002fx", "/"]',
        "ADD $URL /x",
        "ADD git@github.com:a/b /x",
        "ONBUILD ADD http://x/ /",
        "ADD \\\n http://x /y",
    ],
)
def test_the_engine_fetches_nothing_for_a_closed_sandbox(line: str) -> None:
    assert rule(f"FROM alpine\n{line}\n", CLOSED) == "build.add"
    rendered("FROM alpine\nADD a.tar /x\n", CLOSED)
    if "\\" not in line:
        rendered(f"FROM alpine\n{line}\n")


def test_everyday_instructions_pass() -> None:
    text = """FROM alpine
LABEL maintainer="me" org.opencontainers.image.title='a b'
ENV A=b C="d e" PATH=/x:$PATH
WORKDIR /app
COPY . .
COPY --chown=1:2 ["a b", "c"]
RUN apk add --no-cache x && \\
    echo "done"
EXPOSE 80
HEALTHCHECK --interval=5s CMD true
USER nobody
SHELL ["/bin/sh", "-c"]
ONBUILD RUN true
VOLUME /data
CMD ["sh"]
"""
    assert len(rendered(text).splitlines()) == 14


def test_names_that_are_set_are_found() -> None:
    assert keys("ENV", "a=b c=\"d e=f\" g='h i' j=k\\ l=m n") == ["a", "c", "g", "j", "n"]
    assert keys("ENV", "a b=c") == ["a"]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="FROM alpineRUNCOPY-= \\\n\t#$\"'{}:ADLBV<>", max_size=200))
def test_any_text_is_a_dockerfile_or_a_refusal(text: str) -> None:
    try:
        first = Dockerfile(f"FROM alpine\n{text}".encode(), GRANTS, {})
        made = first.render(look(first.references(), GRANTS))
    except Refused:
        return
    # What was written is read as the same instructions.
    assert [k for k, _ in instructions(made)] == [line.keyword for line in first.lines]
    second = Dockerfile(made, GRANTS, {})
    assert second.render(look(second.references(), GRANTS)) == made


# --- the tar


@pytest.mark.parametrize("step", [1, 7, 511, 512, 513, 1 << 20])
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_files_pass_in_pieces_of_any_size(step: int, form: int) -> None:
    long = "d/" * 40 + "f" if form != tarfile.USTAR_FORMAT else "d/f"
    data = tar(
        ("./Dockerfile", b"FROM alpine\n"), ("a", b"x" * 1000), (long, b"y"), ("e", b""), form=form
    )
    found = passed(context(), data, step)
    assert found == {
        "a": b"x" * 1000, long: b"y", "e": b"", "Dockerfile": f"FROM {ALPINE}\n".encode(),
    }  # fmt: skip


@pytest.mark.parametrize("step", [1, 100, 1 << 30])
def test_gzip_is_read(step: int) -> None:
    content = bytes(MAX_STEP * 3 + 5)
    data = gzip.compress(tar(("Dockerfile", b"FROM alpine\n"), ("zeros", content)))
    found = passed(context(), data, step)
    assert found["zeros"] == content


def test_the_engine_gets_one_dockerfile_and_it_is_the_checked_one() -> None:
    data = tar(("Dockerfile", b"FROM private\n"), ("x", b""), ("Dockerfile", b"FROM alpine\n"))
    assert passed(context(), data)["Dockerfile"] == f"FROM {ALPINE}\n".encode()
    data = tar(("Dockerfile", b"FROM alpine\n"), ("./Dockerfile", b"FROM private\n"))
    with pytest.raises(Refused, match=r"docker\.images"):
        passed(context(), data)
    out = context().feed(data)
    assert b"FROM" not in out


def special(name: str, kind: bytes, **more: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in more.items():
        setattr(info, key, value)
    return info


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (special("dev", tarfile.CHRTYPE), "archive.device"),
        (special("dev", tarfile.BLKTYPE), "archive.device"),
        (special("../x", tarfile.REGTYPE), "archive.name"),
        (special("a/../../x", tarfile.DIRTYPE), "archive.name"),
        (special("x", tarfile.LNKTYPE, linkname="../etc/passwd"), "archive.name"),
        (special("x", b"9"), "archive.type"),
        (special("x", tarfile.GNUTYPE_SPARSE), "archive.type"),
        (special("x", tarfile.REGTYPE, pax_headers={"GNU.sparse.major": "1"}), "archive.sparse"),
    ],
)  # fmt: skip
def test_an_entry_that_reaches_out_is_refused(info: tarfile.TarInfo, expected: str) -> None:
    with pytest.raises(Refused) as refused:
        passed(Archive(GRANTS), tar(extra=[info]))
    assert refused.value.rule == expected


def test_setuid_bits_and_attributes_are_left_behind() -> None:
    info = special(
        "x", tarfile.REGTYPE, mode=0o6755, pax_headers={"SCHILY.xattr.security.capability": "abc"}
    )
    body = Archive(GRANTS)
    data = tar(extra=[info])
    assert b"security.capability" in data
    out = body.feed(data) + body.finish({})
    assert b"security.capability" not in out
    with tarfile.open(fileobj=io.BytesIO(out)) as archive:
        (found,) = archive.getmembers()
    assert found.mode == 0o755


def test_links_and_directories_pass() -> None:
    found = passed(Archive(GRANTS), tar(extra=[
        special("d", tarfile.DIRTYPE, mode=0o1777), special("l", tarfile.SYMTYPE,
         linkname="/etc/x"),
        special("h", tarfile.LNKTYPE, linkname="d/f"), special("p", tarfile.FIFOTYPE),
    ]))  # fmt: skip
    assert set(found) == {"d", "l", "h", "p"}
    link = found["l"]
    assert isinstance(link, tarfile.TarInfo)
    assert link.linkname == "/etc/x"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "build.dockerfile"), (b"x", "archive.truncated"), (b"x" * 512, "archive.header"),
        (b"BZh91AY&SY", "archive.compression"), (b"\xfd7zXZ\x00\x00", "archive.compression"),
        (b"\x1f\x8bxxxxxxxxxxxxxxx", "archive.compression"), (bytes(1024), "build.dockerfile"),
        (tar(("Dockerfile", b"x" * 700))[:1000], "archive.truncated"),
        (gzip.compress(tar(("Dockerfile", b"FROM alpine\n")))[:-12], "archive.truncated"),
        (tar(("other", b"FROM alpine\n")), "build.dockerfile"),
        (tar(("Dockerfile", b"x" * (2 << 20))), "build.size"),
        (tar(extra=[special("Dockerfile", tarfile.SYMTYPE, linkname="x")]), "build.dockerfile"),
    ],
)  # fmt: skip
def test_what_is_no_context_is_refused(data: bytes, expected: str) -> None:
    with pytest.raises(Refused) as refused:
        passed(context(), data)
    assert refused.value.rule == expected


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_broken_archive_is_a_refusal_or_an_archive(data: st.DataObject) -> None:
    original = bytearray(tar(("Dockerfile", b"FROM alpine\n"), ("a/b", b"x" * 600)))
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.integers(0, len(original) - 1))
        original[place] = data.draw(st.integers(0, 255))
    body = context()
    try:
        out = body.feed(bytes(original))
        out += body.finish(look(body.references(), GRANTS))
    except Refused:
        return
    assert len(out) % BLOCK == 0
    with tarfile.open(fileobj=io.BytesIO(out)) as archive:
        names = archive.getnames()
    assert names[-1] == "Dockerfile"
    assert names.count("Dockerfile") == 1
