// Numbers as a person reads them, and values as Python writes them.

export function percent(p) {
  if (p >= 0.9995 && p < 1 - 1e-12) return "> 99.9 %";
  if (p > 0 && p < 0.0005) return "< 0.1 %";
  return `${(100 * p).toFixed(p >= 0.0995 ? 0 : 1)} %`;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text = size >= 1e5 || (size > 0 && size < 1e-3) ? value.toExponential(1) : String(+value.toPrecision(digits));
  return text.replace("-", "−");
}

// Which way a text runs: its first strong letter says, and where it has none the model's own script.
export function directionOf(text, fallback = "ltr") {
  const letter = text.match(/\p{L}/u)?.[0];
  if (!letter) return fallback;
  return /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]|[\u{10800}-\u{10fff}]|[\u{1e800}-\u{1efff}]/u.test(letter)
    ? "rtl"
    : "ltr";
}

// A symbol as it is drawn: one that cannot be seen gets a name.
export function visible(symbol) {
  if (symbol === " ") return "␣";
  if (!/^[\p{Z}\p{C}]$/u.test(symbol)) return symbol;
  return `U+${symbol.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

export const duration = (seconds) =>
  seconds < 90 ? count(Math.round(seconds), "second") : `${number(seconds / 60, 2)} minutes`;

export const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

// A Python literal. JSON strings are Python strings except for lone surrogates, which nothing here has.
export function python(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (value === Infinity || value === -Infinity) return `float("${value > 0 ? "" : "-"}inf")`;
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object")
    return `{${Object.entries(value)
      .map(([k, v]) => `${python(k)}: ${python(v)}`)
      .join(", ")}}`;
  return JSON.stringify(value);
}

export const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

export function save(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
