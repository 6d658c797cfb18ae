// The colours that were chosen here, before the first paint. "": as the system has it.
"use strict";
try {
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // No storage (a private window): as the system has it.
}
