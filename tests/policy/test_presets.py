"""Presets as data and as toggles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy import presets, profiles, secrets, toolchains
from agent_sandbox.policy.profiles.builtin import PROFILES

LEAVES = [p.name for p in presets.PRESETS if not p.includes]
DESIGNED = {
    "@base", "@toolchains", "@caches", "@agents", "@git", "@git-strict", "@lint/ts", "@lint/go",
    "@lint/python", "@lint/all", "@host", "@all", "@control",
}  # fmt: skip


def test_the_presets_are_those_of_the_design() -> None:
    """Names are a promise."""
    assert set(presets.BY_NAME) == DESIGNED


def test_all_is_everything_but_host_and_strict() -> None:
    """`@all` expands through `@lint/all`."""
    assert set(presets.members("@all")) == set(LEAVES) - {"@host", "@git-strict"}


@pytest.mark.parametrize("name", [p.name for p in presets.PRESETS if p.includes])
def test_macros_include_only_known_presets(name: str) -> None:
    """And expand to leaves."""
    assert set(presets.members(name)) <= set(LEAVES)


def test_nothing_written_means_all() -> None:
    """The default."""
    assert presets.switch([]) == frozenset(presets.members("@all"))


def test_not_all_means_nothing() -> None:
    """An empty set is possible."""
    assert presets.switch(["!@all"]) == frozenset()


@given(st.lists(st.sampled_from([m + n for n in LEAVES for m in ("", "!")]), max_size=8))
def test_the_last_mention_of_a_preset_wins(toggles: list[str]) -> None:
    """Whatever came before it."""
    on = presets.switch(toggles)
    for name in LEAVES:
        said = [t for t in toggles if t.removeprefix("!") == name]
        if said and name != "@git":
            assert (name in on) == (not said[-1].startswith("!"))


@given(st.lists(st.sampled_from([m + n for n in DESIGNED for m in ("", "!")]), max_size=6))
def test_strict_git_is_never_without_git(toggles: list[str]) -> None:
    """Its protections build on the others."""
    on = presets.switch(toggles)
    assert "@git-strict" not in on or "@git" in on


@pytest.mark.parametrize("written", ["@nope", "!@nope", "base", "", "!", "@", "@ALL", "!!@all"])
def test_an_unknown_name_is_an_error_that_lists_the_known(written: str) -> None:
    """Also when negated."""
    with pytest.raises(PolicyError) as caught:
        presets.check_name(written, "file: key")
    assert caught.value.code == "unknown-preset"
    assert "file: key" in caught.value.message
    assert "@git-strict" in caught.value.hint


@pytest.mark.parametrize("preset", presets.PRESETS, ids=lambda p: p.name)
def test_every_preset_explains_itself(preset: presets.Preset) -> None:
    """For `--help` and the docs."""
    assert preset.help
    assert preset.name.startswith("@")
    assert all(path and not path.startswith("/") for path in preset.ro)


@pytest.mark.parametrize("name", ["@lint/ts", "@lint/go", "@lint/python"])
def test_any_lint_preset_covers_editorconfig(name: str) -> None:
    """It is everybody's."""
    assert ".editorconfig" in presets.BY_NAME[name].ro


@pytest.mark.parametrize("name", ["@git", "@git-strict", "@lint/ts", "@lint/go", "@lint/python"])
def test_protecting_presets_do_not_count_as_grants(name: str) -> None:
    """Switching them off is the widening."""
    assert not presets.BY_NAME[name].grants


def test_toolchains_show_no_directory_that_holds_credentials() -> None:
    """No toolchain root is a secret's parent."""
    inside = [
        (root, secret)
        for root in toolchains.ROOTS
        for secret in secrets.HOME
        if secret.startswith(root + "/")
    ]
    assert inside == []


def test_toolchains_and_profiles_only_name_places_in_the_home() -> None:
    """`~/…`, never the home itself."""
    listed = [*toolchains.ROOTS, *presets.CACHES, *secrets.HOME]
    for profile in PROFILES:
        listed += [*(state.path for state in profile.state), *profile.protect]
    assert [p for p in listed if not p.startswith("~/") or len(p) < 4 or ".." in p] == []


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_a_profile_protects_only_what_it_shares(profile: profiles.Profile) -> None:
    """A protected path lies below a state path; otherwise it would show more, not less."""
    for path in profile.protect:
        assert any(path.startswith(state.path + "/") for state in profile.state), path


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_a_profile_s_state_is_a_secret_for_everybody_else(profile: profiles.Profile) -> None:
    """With the host's home shown, an agent's credentials are hidden from other commands."""
    for path in (state.path for state in profile.state):
        if not path.startswith(("~/.cache/", "~/.local/state/", "~/.aider.", "~/.agents")):
            hidden = any(path == s or path.startswith(s + "/") for s in secrets.HOME)
            assert hidden, path
