// Who is signed in, and what the server can do for them.

export const session = {
  agent: "",
  scopes: [],
  pausing: new Set(),

  start({ agent, scopes }, policy) {
    this.agent = agent;
    this.scopes = scopes;
    this.pausing = new Set((policy.backends ?? []).filter((backend) => backend.pause).map((backend) => backend.name));
  },
  // An admin has every scope.
  has(scope) {
    return this.scopes.includes("admin") || this.scopes.includes(scope);
  },
  canPause(backend) {
    return this.pausing.has(backend);
  },
};
