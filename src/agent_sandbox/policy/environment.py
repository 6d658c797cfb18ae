"""Which variables of the caller reach the command: an allow-list, and values that are set.

A name that is not listed does not pass. A listed name whose value carries `user:password@` does not
pass either, unless the user named the variable.
"""

from __future__ import annotations

from .gitconfig import has_userinfo
from .model import CONTROLLED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .model import HostFacts, Policy
    from .profiles import Profile

# Set by us: a policy that names them is refused, since it would break the sandbox or lie about it.
OURS = (
    "IN_AGENT_SANDBOX",
    "AGENT_SANDBOX_PATH",
    "AGENT_WORK_DIR",
    "TMPDIR",
    "HOME",
    "PWD",
    "XDG_RUNTIME_DIR",
)

PASSED: frozenset[str] = frozenset(
    """
    LANG LANGUAGE TZ
    TERM COLORTERM TERM_PROGRAM TERM_PROGRAM_VERSION TERMINFO TERMINFO_DIRS VTE_VERSION COLUMNS
    LINES NO_COLOR FORCE_COLOR CLICOLOR CLICOLOR_FORCE LS_COLORS COLORFGBG
    PATH USER LOGNAME SHELL SHLVL MANPATH INFOPATH XDG_DATA_DIRS XDG_CONFIG_DIRS
    PAGER LESS MORE LESSCHARSET
    CI DEBIAN_FRONTEND SOURCE_DATE_EPOCH
    CC CXX CPP AR LD CFLAGS CXXFLAGS CPPFLAGS LDFLAGS MAKEFLAGS PKG_CONFIG_PATH LD_LIBRARY_PATH
    LIBRARY_PATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH CMAKE_PREFIX_PATH CMAKE_GENERATOR
    PYENV_ROOT PYENV_VERSION VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV CONDA_EXE CONDA_SHLVL
    PYTHONPATH PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED PYTHONWARNINGS PYTHONUTF8
    PYTHONIOENCODING UV_PYTHON UV_PYTHON_INSTALL_DIR UV_TOOL_DIR PIPX_HOME PIP_DEFAULT_TIMEOUT
    PIP_DISABLE_PIP_VERSION_CHECK PIP_REQUIRE_VIRTUALENV
    NVM_DIR NVM_BIN NVM_INC FNM_DIR FNM_MULTISHELL_PATH VOLTA_HOME NODENV_ROOT NODE_ENV NODE_PATH
    NODE_OPTIONS COREPACK_HOME PNPM_HOME BUN_INSTALL DENO_INSTALL
    RUSTUP_HOME CARGO_HOME RUSTUP_TOOLCHAIN RUSTFLAGS RUST_BACKTRACE RUST_LOG CARGO_BUILD_JOBS
    CARGO_TERM_COLOR
    GOROOT GOPATH GOBIN GOFLAGS GO111MODULE CGO_ENABLED GOOS GOARCH GOTOOLCHAIN GOMODCACHE
    JAVA_HOME JDK_HOME MAVEN_HOME MAVEN_OPTS GRADLE_HOME SDKMAN_DIR ANDROID_HOME ANDROID_SDK_ROOT
    RBENV_ROOT GEM_HOME GEM_PATH RUBYOPT DOTNET_ROOT DOTNET_CLI_TELEMETRY_OPTOUT
    ASDF_DIR ASDF_DATA_DIR MISE_DATA_DIR MISE_SHELL
    NIX_PATH NIX_PROFILES NIX_SSL_CERT_FILE LOCALE_ARCHIVE
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NODE_EXTRA_CA_CERTS PIP_CERT
    GIT_SSL_CAINFO CARGO_HTTP_CAINFO AWS_CA_BUNDLE DENO_CERT
    GIT_AUTHOR_NAME GIT_AUTHOR_EMAIL GIT_AUTHOR_DATE GIT_COMMITTER_NAME GIT_COMMITTER_EMAIL
    GIT_COMMITTER_DATE GIT_PAGER
    """.split()
)
PASSED_PREFIXES = ("LC_",)
# Only useful with the network, and then needed to reach anything at all.
PROXIES: frozenset[str] = frozenset(
    """
    http_proxy https_proxy ftp_proxy all_proxy no_proxy
    HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY NO_PROXY NODE_USE_ENV_PROXY
    """.split()
)
WORK_DIR = "/tmp/agent-work"


def _moves(profile: Profile, name: str) -> bool:
    """Whether a variable says where the agent's state is."""
    return any(name == variable for variable, _ in profile.moved)


def build(
    policy: Policy, facts: HostFacts, profile: Profile
) -> tuple[dict[str, str], dict[str, str]]:
    """The command's environment and, per name, why the variable is there."""
    env: dict[str, str] = {}
    why: dict[str, str] = {}
    network = policy.network.value == "on"
    controlled = policy.network.value in CONTROLLED
    for name, value in facts.env.items():
        listed = name in PASSED or name.startswith(PASSED_PREFIXES)
        if (listed or (network and name in PROXIES)) and not has_userinfo(value):
            env[name], why[name] = value, "built-in list"
        elif name in profile.env or (value.startswith("/") and _moves(profile, name)):
            env[name], why[name] = value, f"profile {profile.name}"
    for name, value in (*profile.set_env, *(profile.root_env if facts.uid == 0 else ())):
        if name not in env:
            env[name] = facts.home.path + value[1:] if value.startswith("~/") else value
            why[name] = f"profile {profile.name}"
    for kept in policy.env_keep:
        name = str(kept.value)
        # The user's own proxy cannot be reached from there.
        if name in facts.env and not (controlled and name in PROXIES):
            env[name], why[name] = facts.env[name], str(kept.source)
    if controlled:
        from .naming import VARIABLES

        env.update(VARIABLES)
        why.update(dict.fromkeys(VARIABLES, f"network = {policy.network.value}"))
    if policy.docker.value == "filtered":
        from .engines import CLIENT_SETTINGS

        env.update(CLIENT_SETTINGS)
        why.update(dict.fromkeys(CLIENT_SETTINGS, "docker = filtered"))
    for name, setting in policy.env_set.items():
        env[name], why[name] = str(setting.value), str(setting.source)
    ours = {
        "IN_AGENT_SANDBOX": "1",
        # For the profile of the private home: a login shell starts PATH anew.
        "AGENT_SANDBOX_PATH": env.get("PATH", ""),
        "AGENT_WORK_DIR": WORK_DIR,
        "TMPDIR": "/tmp",
        "HOME": facts.home.path,
        "PWD": facts.cwd.path,
        "XDG_RUNTIME_DIR": f"/run/user/{facts.uid}",
    }
    env.update(ours)
    why.update(dict.fromkeys(OURS, "set by agent-sandbox"))
    return env, why
