{
  description = "agent-sandbox, and a shell in which agents run in sandboxes";

  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-25.05";

  outputs = { self, nixpkgs }:
    let
      systems = [ "x86_64-linux" "aarch64-linux" ];
      forEach = make: nixpkgs.lib.genAttrs systems (system: make nixpkgs.legacyPackages.${system});

      package = pkgs: pkgs.python3Packages.buildPythonApplication {
        pname = "agent-sandbox";
        version = "0";
        pyproject = true;
        # The checkout that this flake lies in.
        src = ../..;
        build-system = [ pkgs.python3Packages.hatchling ];
        # For `sandboxctl mcp` and secrets; the core needs neither.
        dependencies = [ pkgs.python3Packages.mcp pkgs.python3Packages.cryptography ];
        # A system's own bwrap comes first; this is for systems without one.
        makeWrapperArgs = [ "--suffix" "PATH" ":" (pkgs.lib.makeBinPath [ pkgs.bubblewrap ]) ];
        # They start sandboxes, which a build cannot.
        doCheck = false;
        meta.mainProgram = "agent-sandbox";
      };
    in
    {
      packages = forEach (pkgs: { default = package pkgs; });

      devShells = forEach (pkgs: {
        default = pkgs.mkShell {
          packages = [ (package pkgs) pkgs.git ];
          # Typing `claude` or `codex` means the sandboxed one; AGENT_SANDBOX=false is the way round.
          shellHook = ''
            sandboxctl shim install claude codex 2>/dev/null
            export PATH="''${XDG_DATA_HOME:-$HOME/.local/share}/agent-sandbox/shims:$PATH"
          '';
        };
      });
    };
}
