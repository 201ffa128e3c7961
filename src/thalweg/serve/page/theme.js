// Runs before the page is drawn, so that a chosen theme does not flash. Without a choice the system's holds.
"use strict";
try {
  const chosen = localStorage.getItem("thalweg-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // storage may be forbidden; the system's theme holds
}
