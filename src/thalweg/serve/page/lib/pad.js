// A grid of pixels that is drawn on with mouse, finger or keyboard. Values are whole numbers, 0 to 16.
import { html, useRef, useState } from "./html.js";
import { clamp } from "./words.js";

export const INK = 16;
const DIGITS = "0123456789abcdefg";

export const fromText = (text, size) =>
  text?.length === size && [...text].every((letter) => DIGITS.includes(letter))
    ? [...text].map((letter) => DIGITS.indexOf(letter))
    : null;
export const toText = (pixels) => pixels.map((value) => DIGITS[value]).join("");

// What is drawn gets soft edges, as the digits have that were scanned.
function stroke(pixels, at, side, ink) {
  const next = [...pixels];
  const [row, column] = [Math.floor(at / side), at % side];
  const touch = (r, c, value) => {
    if (r < 0 || c < 0 || r >= side || c >= side) return;
    next[r * side + c] = ink ? Math.max(next[r * side + c], value) : 0;
  };
  touch(row, column, INK);
  if (ink)
    for (const [r, c] of [
      [0, 1],
      [1, 0],
      [0, -1],
      [-1, 0],
    ])
      touch(row + r, column + c, 5);
  return next;
}

export function Pad({ pixels, side, onChange, label }) {
  const [at, setAt] = useState(0);
  const drawing = useRef(null); // ink or not, while a button or finger is down
  const latest = useRef(pixels);
  latest.current = pixels;
  const paint = (event) => {
    const cell = document.elementFromPoint(event.clientX, event.clientY)?.closest("[data-at]");
    if (!cell || drawing.current === null || !event.currentTarget.contains(cell)) return;
    latest.current = stroke(latest.current, Number(cell.dataset.at), side, drawing.current);
    onChange(latest.current);
  };
  const down = (event) => {
    const cell = event.target.closest("[data-at]");
    if (!cell) return;
    drawing.current = event.button !== 2 && !event.shiftKey;
    event.currentTarget.setPointerCapture(event.pointerId);
    paint(event);
  };
  const press = (event) => {
    const steps = { ArrowUp: -side, ArrowDown: side, ArrowLeft: -1, ArrowRight: 1 };
    if (event.key in steps) {
      const to = clamp(at + steps[event.key], 0, side * side - 1);
      setAt(to);
      event.currentTarget.querySelector(`[data-at="${to}"]`).focus();
    } else if (event.key === " " || event.key === "Enter") {
      onChange(pixels.map((value, n) => (n === at ? (value ? 0 : INK) : value)));
    } else return;
    event.preventDefault();
  };
  const rows = Array.from({ length: side }, (_, r) => r);
  return html`<div
    class="pad"
    role="grid"
    aria-label=${label}
    style=${{ "--side": side }}
    onKeyDown=${press}
    onPointerDown=${down}
    onPointerMove=${paint}
    onPointerUp=${() => (drawing.current = null)}
    onPointerCancel=${() => (drawing.current = null)}
    onContextMenu=${(event) => event.preventDefault()}
  >
    ${rows.map(
      (r) =>
        html`<div role="row" key=${r}>
          ${rows.map((c) => {
            const n = r * side + c;
            return html`<span
              key=${c}
              role="gridcell"
              data-at=${n}
              tabindex=${n === at ? 0 : -1}
              onFocus=${() => setAt(n)}
              aria-label=${`row ${r + 1}, column ${c + 1}: ${Math.round((100 * pixels[n]) / INK)} % ink`}
              style=${{ "--share": pixels[n] / INK }}
            ></span>`;
          })}
        </div>`,
    )}
  </div>`;
}

// A picture of so many values from `low` to `high`, not to be drawn on; without a label it is an ornament.
export function Picture({ values, side, low = 0, high = 1, label }) {
  const cell = (value, n) =>
    html`<rect
      key=${n}
      x=${n % side}
      y=${Math.floor(n / side)}
      width="1"
      height="1"
      fill-opacity=${clamp((value - low) / (high - low), 0, 1).toFixed(3)}
    />`;
  return html`<svg
    class="picture"
    shape-rendering="crispEdges"
    viewBox=${`0 0 ${side} ${side}`}
    role=${label ? "img" : null}
    aria-label=${label}
    aria-hidden=${label ? null : "true"}
  >
    ${values.map(cell)}
  </svg>`;
}
