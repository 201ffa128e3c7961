// Where the model looked while it wrote each symbol: a heat map whose rows and columns are letters.
import { html, useRef, useState } from "../lib/html.js";
import { clamp, percent, visible } from "../lib/words.js";

const END = "end";

// `weights[r][c]`: of answer symbol r on source symbol c.
export function Attention({ weights, source, answer, direction }) {
  const [spot, setSpot] = useState(null); // {r, c}; -1 is a whole row or column
  const table = useRef(null);
  const rows = weights.map((_, r) => (r < answer.length ? answer[r] : END));
  const strength = (c) => (!spot ? 0 : spot.r >= 0 ? weights[spot.r][c] : c === spot.c ? 1 : 0);
  const lit = (r, c) => spot && (spot.r === r || spot.c === c);
  const move = (event) => {
    const forward = direction.source === "rtl" ? -1 : 1;
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowRight: [0, forward], ArrowLeft: [0, -forward] };
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    const from = spot || { r: 0, c: 0 };
    const to = { r: clamp(from.r + step[0], 0, rows.length - 1), c: clamp(from.c + step[1], 0, source.length - 1) };
    setSpot(to);
    table.current.querySelector(`[data-r="${to.r}"][data-c="${to.c}"]`).focus();
  };
  const home = spot && spot.r >= 0 && spot.c >= 0 ? spot : { r: 0, c: 0 };
  const over = (r, c) => ({ onMouseEnter: () => setSpot({ r, c }), onFocus: () => setSpot({ r, c }) });
  return html`<figure class="attention">
    <figcaption>Attention <small>which letters the model looked at for each symbol of its answer</small></figcaption>
    <div class="scroll" tabindex="-1">
      <table
        ref=${table}
        role="grid"
        aria-label="Attention weights"
        dir=${direction.source}
        onMouseLeave=${() => setSpot(null)}
        onKeyDown=${move}
        onFocusOut=${() => setSpot(null)}
      >
        <thead>
          <tr>
            <td></td>
            ${source.map(
              (letter, c) =>
                html`<th
                  key=${c}
                  scope="col"
                  dir="auto"
                  class=${spot?.c === c ? "lit" : ""}
                  style=${{ "--weight": strength(c) }}
                  ...${over(-1, c)}
                >
                  ${visible(letter)}
                </th>`,
            )}
          </tr>
        </thead>
        <tbody>
          ${rows.map(
            (symbol, r) =>
              html`<tr key=${r}>
                <th
                  scope="row"
                  dir="auto"
                  class=${`${spot?.r === r ? "lit" : ""} ${symbol === END && r >= answer.length ? "end" : ""}`}
                  ...${over(r, -1)}
                >
                  ${visible(symbol)}
                </th>
                ${source.map(
                  (letter, c) =>
                    html`<td
                      key=${c}
                      role="gridcell"
                      data-r=${r}
                      data-c=${c}
                      class=${lit(r, c) ? "lit" : ""}
                      style=${{ "--weight": weights[r][c] }}
                      tabindex=${home.r === r && home.c === c ? 0 : -1}
                      aria-label=${`${symbol} looks at ${letter}: ${percent(weights[r][c])}`}
                      ...${over(r, c)}
                    ></td>`,
                )}
              </tr>`,
          )}
        </tbody>
      </table>
    </div>
    <p class="readout" aria-live="polite">${reading(spot, weights, source, rows)}</p>
  </figure>`;
}

function reading(spot, weights, source, rows) {
  if (!spot) return "Point at a letter or a cell, or move with the arrow keys.";
  const { r, c } = spot;
  if (r >= 0 && c >= 0) return html`<bdi>${rows[r]}</bdi> looks at <bdi>${source[c]}</bdi>: ${percent(weights[r][c])}`;
  if (r >= 0) {
    const best = weights[r].indexOf(Math.max(...weights[r]));
    return html`<bdi>${rows[r]}</bdi> looks most at <bdi>${source[best]}</bdi>: ${percent(weights[r][best])}`;
  }
  const most = weights.reduce((best, row, n) => (row[c] > weights[best][c] ? n : best), 0);
  return html`<bdi>${source[c]}</bdi> is looked at most by <bdi>${rows[most]}</bdi>: ${percent(weights[most][c])}`;
}
