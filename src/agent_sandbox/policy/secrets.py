"""Paths that hold credentials: hidden wherever a wider view of the host would show them.

With the default private home nothing of the real home is visible, so the first list matters for
`--home=host` and `@host` only. The second list matters always: the system trees are shown.
"""

from __future__ import annotations

HOME: tuple[str, ...] = (
    # Keys and password stores
    "~/.ssh", "~/.gnupg", "~/.pki", "~/.password-store", "~/.local/share/keyrings",
    "~/.local/share/kwalletd", "~/.config/op", "~/.config/Bitwarden CLI", "~/.1password",
    "~/.age", "~/.config/sops", "~/.vault-token", "~/.secrets", "~/.authinfo", "~/.authinfo.gpg",
    # Clouds and clusters
    "~/.aws", "~/.azure", "~/.config/gcloud", "~/.config/doctl", "~/.config/hcloud", "~/.oci",
    "~/.kube", "~/.terraform.d", "~/.terraformrc", "~/.config/rclone", "~/.boto", "~/.s3cfg",
    "~/.config/scw", "~/.fly", "~/.config/heroku", "~/.config/netlify", "~/.config/vercel",
    "~/.config/cloudflare", "~/.wrangler", "~/.config/.wrangler",
    # Registries and forges
    "~/.netrc", "~/.git-credentials", "~/.config/git/credentials", "~/.config/gh",
    "~/.config/hub", "~/.config/glab-cli", "~/.npmrc", "~/.yarnrc", "~/.yarnrc.yml",
    "~/.bunfig.toml", "~/.pypirc", "~/.config/pip", "~/.cargo/credentials",
    "~/.cargo/credentials.toml", "~/.gem/credentials", "~/.m2/settings.xml",
    "~/.m2/settings-security.xml", "~/.gradle/gradle.properties", "~/.nuget/NuGet",
    "~/.composer/auth.json", "~/.config/composer/auth.json", "~/.docker", "~/.config/containers",
    "~/.config/helm", "~/.cabal/config", "~/.huggingface", "~/.cache/huggingface/token",
    # Databases
    "~/.pgpass", "~/.my.cnf", "~/.mylogin.cnf", "~/.mongorc.js", "~/.dbshell",
    # Browsers and mail
    "~/.mozilla", "~/.config/google-chrome", "~/.config/chromium", "~/.config/BraveSoftware",
    "~/.config/microsoft-edge", "~/.config/vivaldi", "~/.config/opera", "~/.thunderbird",
    "~/.config/Signal", "~/.config/Slack", "~/.config/discord", "~/.var", "~/snap",
    # Histories and private notes of shells and tools
    "~/.bash_history", "~/.zsh_history", "~/.histfile", "~/.local/share/fish/fish_history",
    "~/.python_history", "~/.node_repl_history", "~/.psql_history", "~/.mysql_history",
    "~/.sqlite_history", "~/.rediscli_history", "~/.lesshst", "~/.viminfo",
    "~/.local/share/atuin", "~/.local/share/recently-used.xbel", "~/.Xauthority",
    "~/.ICEauthority", "~/.env",
    # Agents' own credentials
    "~/.claude", "~/.claude.json", "~/.codex", "~/.gemini", "~/.qwen", "~/.pi", "~/.copilot",
    "~/.local/share/opencode", "~/.config/opencode", "~/.aider", "~/.config/github-copilot",
    "~/.cursor", "~/.config/Code", "~/.vscode-server", "~/.config/amp", "~/.factory",
    # Engines' sockets and virtual machines
    "~/.colima", "~/.lima", "~/.rd", "~/.orbstack", "~/.local/share/docker",
    "~/.local/share/containers",
)  # fmt: skip

# Root-only material in the system trees. Root without capabilities is still the owner of these
# files, so the mode bits alone do not keep them from a sandbox that root started.
SYSTEM: tuple[str, ...] = (
    "/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/gshadow-", "/etc/security/opasswd",
    "/etc/sudoers", "/etc/sudoers.d", "/etc/doas.conf",
    "/etc/ssl/private", "/etc/pki/tls/private", "/etc/pki/nssdb", "/etc/letsencrypt",
    "/etc/krb5.keytab", "/etc/ipsec.secrets", "/etc/ipsec.d/private", "/etc/swanctl/private",
    "/etc/wireguard", "/etc/openvpn", "/etc/ppp/chap-secrets", "/etc/ppp/pap-secrets",
    "/etc/NetworkManager/system-connections", "/etc/netplan", "/etc/wpa_supplicant",
    "/etc/iwd", "/etc/docker/key.json", "/etc/kubernetes", "/etc/rancher", "/etc/cni",
    "/etc/containers/auth.json", "/etc/apt/auth.conf", "/etc/apt/auth.conf.d",
    "/etc/mysql/debian.cnf", "/etc/postfix/sasl_passwd", "/etc/exim4/passwd.client",
    "/etc/samba/private", "/etc/libvirt/secrets", "/etc/cups/ssl", "/etc/salt/pki",
    "/etc/vault.d", "/etc/consul.d", "/etc/nomad.d", "/etc/credstore",
    "/etc/credstore.encrypted", "/etc/crypttab",
    "/etc/boto.cfg", "/etc/rclone", "/etc/gitlab", "/etc/grafana",
)  # fmt: skip
# Looked up by prefix and suffix in their directory.
SYSTEM_PATTERNS: tuple[tuple[str, str, str], ...] = (
    ("/etc/ssh", "ssh_host_", "_key"),
)  # fmt: skip
