"""Where language toolchains live under a home, and which of their files hold credentials.

Only directories that carry programs are listed, never whole package homes: `~/.cargo/bin`, not
`~/.cargo`, whose credentials file and registry are nobody's business.
"""

from __future__ import annotations

ROOTS: tuple[str, ...] = (
    # Python
    "~/.pyenv", "~/.local/share/uv", "~/.local/share/pipx", "~/.local/pipx", "~/.local/lib",
    "~/miniconda3", "~/anaconda3", "~/miniforge3", "~/mambaforge", "~/.pixi/bin", "~/.pixi/envs",
    "~/.rye/shims", "~/.rye/py",
    # JavaScript
    "~/.nvm", "~/.fnm", "~/.local/share/fnm", "~/.volta", "~/.nodenv", "~/.n", "~/.npm-global",
    "~/.local/share/pnpm", "~/.config/yarn/global", "~/.yarn/bin", "~/.bun/bin", "~/.deno/bin",
    # Rust, Go, JVM, others
    "~/.rustup", "~/.cargo/bin", "~/.cargo/env", "~/go/bin", "~/.go", "~/.sdkman/candidates",
    "~/.jenv", "~/.rbenv", "~/.rvm", "~/.ghcup/bin", "~/.ghcup/ghc", "~/.cabal/bin", "~/.opam",
    "~/.juliaup", "~/.dotnet", "~/.swiftly", "~/.elan", "~/.foundry/bin", "~/.pub-cache/bin",
    # Version managers and package sets
    "~/.asdf", "~/.local/share/mise", "~/.local/share/rtx", "~/.nix-profile",
    "~/.local/state/nix/profiles", "~/.linuxbrew", "~/.proto",
    # Programs installed for one user, agents among them
    "~/.local/bin", "~/bin", "~/.local/share/claude", "~/.local/share/cursor-agent",
    "~/.opencode/bin", "~/.claude/local", "~/.amp/bin",
)  # fmt: skip

# Variables that move a toolchain somewhere else; the directory they name is shown read-only.
VARIABLES: tuple[tuple[str, str], ...] = (
    ("PYENV_ROOT", ""), ("NVM_DIR", ""), ("VOLTA_HOME", ""), ("FNM_DIR", ""),
    ("RUSTUP_HOME", ""), ("CARGO_HOME", "/bin"), ("GOROOT", ""), ("GOBIN", ""),
    ("JAVA_HOME", ""), ("MAVEN_HOME", ""), ("GRADLE_HOME", ""), ("SDKMAN_DIR", "/candidates"),
    ("ASDF_DIR", ""), ("ASDF_DATA_DIR", ""), ("MISE_DATA_DIR", ""), ("RBENV_ROOT", ""),
    ("CONDA_PREFIX", ""), ("VIRTUAL_ENV", ""), ("BUN_INSTALL", "/bin"), ("DENO_INSTALL", "/bin"),
    ("DOTNET_ROOT", ""), ("PNPM_HOME", ""), ("GHCUP_INSTALL_BASE_PREFIX", "/.ghcup/bin"),
)  # fmt: skip
