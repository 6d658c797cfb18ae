"""Descriptors of one start: what bwrap inherits, what we keep, and nothing else.

Arguments, texts and the filter travel through files in memory, so that nothing of them shows in
/proc/*/cmdline and no size is too large.
"""

from __future__ import annotations

import os

from ..errors import InternalBug
from ..record import Record
from .bwrap import descriptor_token

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .bwrap import Command


class Descriptors(Record):
    """Open descriptors of one start: what bwrap inherits, and our ends."""

    inherited: tuple[int, ...]
    arguments: int
    status: int
    # Written to release the command.
    release: int


def open_descriptors(command: Command) -> Descriptors:
    """Put arguments and texts behind descriptors; open the status pipe and the one to wait on."""
    inherited: list[int] = []
    tail: list[str] = []
    numbers: dict[str, str] = {}
    for index, (option, dest, content) in enumerate(command.texts):
        fd = memory_file(content)
        inherited.append(fd)
        numbers[descriptor_token(index)] = str(fd)
        if not dest:
            tail += [option, str(fd)]
    status, status_end = os.pipe()
    reader, release = os.pipe()
    # Opened for both: bwrap takes end-of-file for a go, and our death must not be one.
    block = os.open(f"/proc/self/fd/{reader}", os.O_RDWR | os.O_CLOEXEC)
    os.close(reader)
    inherited += (status_end, block)
    tail += ["--json-status-fd", str(status_end), "--block-fd", str(block)]
    options = [numbers.get(option, option) for option in command.options] + tail
    if any("\0" in option for option in options):
        # bwrap splits its arguments there: the rest would be options of somebody else's choice.
        raise InternalBug("an argument for bwrap has a NUL in it")
    arguments = memory_file(b"".join(os.fsencode(option) + b"\0" for option in options))
    inherited.append(arguments)
    return Descriptors(
        inherited=tuple(inherited), arguments=arguments, status=status, release=release
    )


def memory_file(content: bytes) -> int:
    """A file in memory: unlike a pipe it takes any size without a reader."""
    fd = os.memfd_create("agent-sandbox")
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def argument_vector(command: Command, descriptors: Descriptors) -> list[str]:
    """What is really executed: the options stay out of /proc/*/cmdline.

    The first word is the run's: by it `sweeping` knows what a killed supervisor left behind.
    """
    return [f"bwrap-{command.name}", "--args", str(descriptors.arguments), "--", *command.command]


def close_inherited(descriptors: Descriptors) -> None:
    """Drop our copies of what bwrap has inherited, so that end-of-file can be seen."""
    for fd in descriptors.inherited:
        os.close(fd)


def release(descriptors: Descriptors) -> None:
    """Let a command go that was held back until its sandbox was finished and checked."""
    try:
        os.write(descriptors.release, b"x")
    except BrokenPipeError:
        # bwrap has failed already, and says so itself.
        pass
    os.close(descriptors.release)


def hide_descriptors() -> None:
    """Keep what our caller left open from the command: a directory handle would be a way out."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2:
            try:
                os.set_inheritable(fd, False)  # noqa: FBT003 - positional only
            except OSError:
                continue
