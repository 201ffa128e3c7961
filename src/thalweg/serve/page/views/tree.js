// What a beam looked at: each column is a step, each node a symbol after its beginning. What was dropped is grey.
import { html, useEffect, useMemo, useState } from "../lib/html.js";
import { Slider } from "../lib/parts.js";
import { percent, visible } from "../lib/words.js";

const COLUMN = 58;
const ROW = 31;
const DROPPED = 3; // shown at each step; a beam drops many more

// The best of what was dropped at each step, and all that was not.
function worthwhile(nodes) {
  const seen = new Map();
  const best = nodes.filter((node) => node.fate === "dropped").sort((a, b) => b.score - a.score);
  const shown = new Set(
    best.filter((node) => seen.set(node.step, (seen.get(node.step) || 0) + 1).get(node.step) <= DROPPED),
  );
  return nodes.filter((node) => node.fate !== "dropped" || shown.has(node));
}

// The exact optimum may leave what the beam looked at: the rest of its path is added as nodes of the fate "missed".
function withExact(nodes, exact, end) {
  const path = new Set();
  if (!exact) return { nodes, path };
  const all = [...nodes];
  let at = nodes.find((node) => node.step === 0)?.id ?? null;
  [...exact.symbols, end].forEach((symbol, n) => {
    let next = all.find((node) => node.parent === at && node.symbol === symbol);
    if (!next) {
      next = { id: `missed-${n}`, parent: at, symbol, score: null, fate: "missed", step: n + 1 };
      all.push(next);
    }
    path.add(next.id);
    at = next.id;
  });
  return { nodes: all, path };
}

// Rows of each column: the best path first, what was kept in the order of its parents, what was dropped below.
function laidOut(nodes, best) {
  const group = (node) => (best.has(node.id) ? 0 : node.fate === "missed" ? 2 : node.fate === "dropped" ? 3 : 1);
  const row = new Map();
  let rows = 1;
  for (let step = 0; ; step++) {
    const column = nodes.filter((node) => node.step === step);
    if (!column.length) break;
    const from = (node) => row.get(node.parent) ?? 0;
    column.sort((a, b) => group(a) - group(b) || from(a) - from(b) || (b.score ?? 0) - (a.score ?? 0));
    column.forEach((node, n) => row.set(node.id, best.has(column[0].id) ? n : n + 1));
    rows = Math.max(rows, column.length + (best.has(column[0].id) ? 0 : 1));
  }
  return { row, rows };
}

export function Tree({ tree, name, direction, width: beam }) {
  const drawn = useMemo(() => {
    const end = tree.nodes.find((node) => node.fate === "finished")?.symbol ?? "</s>";
    const best = new Set(tree.best);
    const found = withExact(worthwhile(tree.nodes), tree.exact, end);
    return {
      ...found,
      ...laidOut(found.nodes, best),
      best,
      end,
      byId: new Map(found.nodes.map((node) => [node.id, node])),
    };
  }, [tree]);
  const steps = Math.max(...drawn.nodes.map((node) => node.step), 1);
  const [step, setStep] = useState(steps);
  useEffect(() => {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return setStep(steps);
    setStep(1);
    const timer = setInterval(() => setStep((now) => (now >= steps ? (clearInterval(timer), now) : now + 1)), 90);
    return () => clearInterval(timer);
  }, [tree]);
  const { best, byId, path } = drawn;
  const differs = tree.exact && [...path].some((id) => !best.has(id));
  const width = steps * COLUMN + 48;
  const height = drawn.rows * ROW + 10;
  const x = (node) => (direction.target === "rtl" ? width - 16 - node.step * COLUMN : 16 + node.step * COLUMN);
  const y = (node) => 20 + drawn.row.get(node.id) * ROW;
  const kind = (node) =>
    `${node.fate} ${best.has(node.id) ? "best" : ""} ${differs && path.has(node.id) ? "exact" : ""}`;
  const letter = (node) => (node.symbol === drawn.end ? "⏎" : visible(node.symbol));
  const seen = drawn.nodes.filter((node) => node.step <= step);
  const order = seen.sort((a, b) => weight(a, best) - weight(b, best)); // what matters is drawn last
  return html`<figure class="tree">
    <figcaption>
      Beam of ${beam} <small>beginnings that such a search keeps at each step, and the best of those it drops</small>
    </figcaption>
    <div class="scroll" tabindex="0" role="region" aria-label=${`Beam of ${name}`} dir=${direction.target}>
      <svg
        width=${width}
        height=${height}
        viewBox=${`0 0 ${width} ${height}`}
        role="img"
        aria-label=${told(tree, drawn, differs, letter)}
      >
        ${order
          .filter((node) => byId.has(node.parent))
          .map(
            (node) =>
              html`<path
                key=${`e${node.id}`}
                class=${`edge ${kind(node)}`}
                d=${curve(x(byId.get(node.parent)), y(byId.get(node.parent)), x(node), y(node))}
              />`,
          )}
        ${order.map(
          (node) =>
            html`<g key=${node.id} class=${`node ${kind(node)}`} transform=${`translate(${x(node)} ${y(node)})`}>
              <title>${tip(node, letter)}</title>
              ${
                node.step
                  ? html`<rect x="-15" y="-11" width="30" height="22" rx="6" /><text dy="4.5">${letter(node)} </text>`
                  : html`<circle r="5" />`
              }
            </g>`,
        )}
      </svg>
    </div>
    <div class="legend">
      <span class="best">best of the beam</span><span class="kept">kept</span><span class="dropped">dropped</span>
      ${differs && html`<span class="exact">exact optimum</span>`}
    </div>
    <p class="readout">${verdict(tree, differs)}</p>
    ${
      steps > 1 &&
      html`<${Slider}
        label="Step"
        value=${step}
        min=${1}
        max=${steps}
        onChange=${setStep}
        text=${`${step} of ${steps}`}
      />`
    }
  </figure>`;
}

const weight = (node, best) => (best.has(node.id) ? 3 : node.fate === "missed" ? 2 : node.fate === "dropped" ? 0 : 1);

function curve(x0, y0, x1, y1) {
  const middle = (x0 + x1) / 2;
  return `M${x0} ${y0}C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}`;
}

function tip(node, letter) {
  if (node.fate === "missed") return `${letter(node)}: on the most probable answer, but not among what the beam kept`;
  if (!node.step) return "beginning";
  return `${letter(node)}: ${node.fate}, probability of the beginning ${percent(Math.exp(node.score))}`;
}

function verdict(tree, differs) {
  if (!tree.exact) return "";
  const { optimal, symbols, log_prob } = tree.exact;
  const answer = symbols.length ? html`<bdi>${symbols.join(" ")}</bdi>` : "to say nothing at all";
  if (differs)
    return html`The beam missed ${optimal ? "the most probable answer" : "a more probable answer"}: ${answer},${" "}
    ${percent(Math.exp(log_prob))}.`;
  return optimal
    ? "The beam's best is the most probable answer of all."
    : "The beam's best is as good as what exact search had found when it was stopped, without a proof.";
}

function told(tree, { byId }, differs, letter) {
  const kept = tree.nodes.filter((node) => node.fate === "kept").length;
  const dropped = tree.nodes.filter((node) => node.fate === "dropped").length;
  const best = tree.best
    .map((id) => byId.get(id))
    .filter((node) => node?.step)
    .map(letter)
    .join(" ");
  const other = differs ? " The exact optimum differs." : "";
  return `Beam tree: ${kept} beginnings kept, ${dropped} dropped. Best: ${best}.${other}`;
}
