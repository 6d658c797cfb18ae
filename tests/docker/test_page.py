"""The Docker filter's refusals point to the page about the sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agent_sandbox.policy.model import README
from kernel.conftest import World

from .conftest import IMAGE

if TYPE_CHECKING:
    from engine import Engine

pytestmark = [pytest.mark.docker, pytest.mark.kernel]


def test_a_refused_request_points_to_the_page(world: World, daemon: Engine) -> None:
    """Where there is one: a filter that serves others has none to point to."""
    daemon.socket.chmod(0o666)
    script = f"docker run --rm --privileged {IMAGE} true; head -n 1 {README}"
    done = world.sh(
        script, "--docker=filtered", "--docker-image", "busybox", env={"DOCKER_HOST": daemon.url}
    )
    assert f"(see {README})" in done.stderr
    assert done.stdout == "# You are in a sandbox\n"
