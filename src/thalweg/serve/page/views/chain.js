// A linear chain small enough to edit: scores in, probabilities of labels and of whole paths out.
import { useAnswer } from "../lib/api.js";
import { html, useMemo } from "../lib/html.js";
import { Hint, Problem, Share, Slider } from "../lib/parts.js";
import { clamp, number, percent, python } from "../lib/words.js";

const EXAMPLE = {
  words: ["time", "flies", "like", "arrows"],
  labels: ["noun", "verb", "prep"],
  emissions: [
    [2, 1, -1],
    [1, 1.5, -1],
    [-1, 1, 1.5],
    [2, 0, -1],
  ],
  transitions: [
    [0.5, 1, 0.5],
    [0.5, -1, 0.5],
    [1.5, -1, -1],
  ],
};
const MOST = { words: 8, labels: 5 };
const COLUMN = 104;
const ROW = 62;
const HEAD = 30;

// The chain that an address holds, or the example where it holds none that is whole.
function read(words) {
  try {
    const found = JSON.parse(words.chain);
    const [T, C] = [found.words.length, found.labels.length];
    const table = (rows, n) => rows.length === n && rows.every((row) => row.length === C && row.every(Number.isFinite));
    const fits = T >= 1 && T <= MOST.words && C >= 1 && C <= MOST.labels;
    return fits && table(found.emissions, T) && table(found.transitions, C) ? found : EXAMPLE;
  } catch {
    return EXAMPLE;
  }
}

function readForced(text, chain) {
  const pairs = (text || "")
    .split(",")
    .filter(Boolean)
    .map((pair) => pair.split(":").map(Number));
  return Object.fromEntries(pairs.filter(([t, c]) => t in chain.words && c in chain.labels));
}

export function Chain({ words, change }) {
  const chain = useMemo(() => read(words), [words.chain]);
  const force = readForced(words.force, chain);
  const count = clamp(Number(words.samples) || 5, 1, 20);
  const seed = Math.max(0, Math.trunc(Number(words.seed) || 0));
  const { emissions, transitions } = chain;
  const found = useAnswer(
    { path: "v1/chain", body: { emissions, transitions, force, k: 2, samples: count, seed } },
    80,
  );
  const set = (some) => change({ chain: JSON.stringify({ ...chain, ...some }) });
  const toggle = (t, c) => {
    const next = { ...force, [t]: c };
    if (force[t] === c) delete next[t];
    change({
      force:
        Object.entries(next)
          .map(([at, label]) => `${at}:${label}`)
          .join(",") || null,
    });
  };
  const resize = (T, C) => change({ chain: JSON.stringify(resized(chain, T, C)), force: null });
  const fits =
    found.data?.marginals.length === chain.words.length && found.data.marginals[0].length === chain.labels.length;
  return html`<section class="view chain">
    <p class="lead">
      A linear chain gives every position a label. A score for each label at each position, and one for each pair of
      neighbours, make every path of labels more or less probable. Change a score, or click a label to force it.
    </p>
    <div class="card" aria-busy=${found.waiting ? "true" : "false"}>
      <${Problem} error=${found.error} retry=${found.retry} />
      <div class="two">
        ${
          fits &&
          html`<${Lattice} chain=${chain} found=${found.data} force=${force} toggle=${toggle} stale=${found.waiting} />`
        }
        ${fits && html`<${Paths} chain=${chain} found=${found.data} />`}
      </div>
      <${Share}
        name="chain"
        json=${found.data && (() => [{ asked: found.asked, answered: found.data }])}
        code=${() => inPython(chain, force, count, seed)}
      />
    </div>
    <div class="columns">
      <${Scores} chain=${chain} set=${set} resize=${resize} change=${change} />
      <div class="card">
        <h2>Samples</h2>
        <p class="note">Whole paths drawn by their probability: probable ones come often.</p>
        <div class="controls">
          <${Slider} label="How many" value=${count} min=${1} max=${20} onChange=${(samples) => change({ samples })} />
          <button type="button" class="quiet" onClick=${() => change({ seed: seed + 1 })}>Draw again</button>
        </div>
        ${
          fits &&
          html`<ol class="samples">
            ${found.data.samples.map(
              (path, n) => html`<li key=${n}>${path.map((c) => chain.labels[c]).join(" · ")}</li>`,
            )}
          </ol>`
        }
      </div>
    </div>
    <${Hint} term="What do the figures mean?">
      <p>
        The probability of a path y is exp(score(y)) / Z, where its score adds up the scores it passes and Z sums
        exp(score) over all paths. A marginal is the share of all paths, so weighted, that carry a label at a position.
        Forcing a label leaves only the paths through it. The entropy says how undecided the chain is: 0 when one path
        has it all.
      </p>
    <//>
  </section>`;
}

function Lattice({ chain, found, force, toggle, stale }) {
  const [T, C] = [chain.words.length, chain.labels.length];
  const [width, height] = [T * COLUMN, HEAD + C * ROW];
  const x = (t) => (t + 0.5) * COLUMN;
  const y = (c) => HEAD + (c + 0.5) * ROW;
  const line = (path) => path.map((c, t) => `${t ? "L" : "M"}${x(t)} ${y(c)}`).join("");
  const [best, second] = found.best;
  return html`<figure class="lattice">
    <figcaption>
      <h2>Marginals</h2>
      <small>how probable each label is at each position; click one to force it</small>
    </figcaption>
    <div class="scroll">
      <div class=${`grid ${stale ? "stale" : ""}`} style=${{ width: `${width}px`, height: `${height}px` }}>
        <svg width=${width} height=${height} aria-hidden="true">
          ${second && html`<path class="second" d=${line(second.labels)} />`}
          ${best && html`<path class="best" d=${line(best.labels)} />`}
        </svg>
        ${chain.words.map(
          (word, t) =>
            html`<span key=${`w${t}`} class="word" dir="auto" style=${{ left: `${t * COLUMN}px`, width: `${COLUMN}px` }}
              >${word}</span
            >`,
        )}
        ${chain.words.map((word, t) =>
          chain.labels.map(
            (label, c) =>
              html`<button
                type="button"
                key=${`${t}-${c}`}
                class=${best?.labels[t] === c ? "on" : ""}
                aria-pressed=${force[t] === c ? "true" : "false"}
                onClick=${() => toggle(t, c)}
                aria-label=${`${word}: ${label}, ${percent(found.marginals[t][c])}${force[t] === c ? ", forced" : ""}`}
                style=${{ left: `${x(t) - 38}px`, top: `${y(c) - 22}px`, "--weight": found.marginals[t][c] }}
              >
                <span>${label}${force[t] === c ? " ✓" : ""}</span><small>${percent(found.marginals[t][c])}</small>
              </button>`,
          ),
        )}
      </div>
    </div>
    <div class="legend">
      <span class="best">best path</span>${second && html`<span class="second">second best</span>`}
    </div>
  </figure>`;
}

function Paths({ chain, found }) {
  return html`<div class="paths">
    <h2>Most probable paths</h2>
    <ol class="answers">
      ${found.best.map(
        (path, n) =>
          html`<li key=${n} class=${n ? "" : "first"}>
            <span class="text">${path.labels.map((c) => chain.labels[c]).join(" · ")}</span>
            <span class="figure">score ${number(path.score)}</span
            ><span class="figure">${percent(path.probability)}</span>
          </li>`,
      )}
    </ol>
    <p class="note">
      log Z ${number(found.log_partition, 4)} · entropy ${number(found.entropy, 3)} nats, as undecided as${" "}
      ${number(Math.exp(found.entropy), 2)} equal paths
    </p>
  </div>`;
}

function Scores({ chain, set, resize, change }) {
  const edited = (table, r, c, value) =>
    table.map((row, i) => (i === r ? row.map((old, j) => (j === c ? value : old)) : row));
  const edit = (name, r, c) => (event) => {
    const value = event.target.valueAsNumber; // not a number while it is being typed
    if (Number.isFinite(value)) set({ [name]: edited(chain[name], r, c, value) });
  };
  const rename = (list, n, text) => list.map((old, i) => (i === n ? text : old));
  const cell = (name, r, c, about) =>
    html`<td key=${c}>
      <input type="number" step="0.5" value=${chain[name][r][c]} aria-label=${about} onInput=${edit(name, r, c)} />
    </td>`;
  const [T, C] = [chain.words.length, chain.labels.length];
  return html`<div class="card scores">
    <h2>Scores</h2>
    <div class="scroll">
      <table>
        <caption>
          Of labels at positions
        </caption>
        <thead>
          <tr>
            <td></td>
            ${chain.labels.map(
              (label, c) =>
                html`<th key=${c} scope="col">
                  <input
                    type="text"
                    value=${label}
                    aria-label=${`Name of label ${c + 1}`}
                    onInput=${(event) => set({ labels: rename(chain.labels, c, event.target.value) })}
                  />
                </th>`,
            )}
          </tr>
        </thead>
        <tbody>
          ${chain.words.map(
            (word, t) =>
              html`<tr key=${t}>
                <th scope="row">
                  <input
                    type="text"
                    dir="auto"
                    value=${word}
                    aria-label=${`Word ${t + 1}`}
                    onInput=${(event) => set({ words: rename(chain.words, t, event.target.value) })}
                  />
                </th>
                ${chain.labels.map((label, c) => cell("emissions", t, c, `Score of ${label} at ${word}`))}
              </tr>`,
          )}
        </tbody>
      </table>
    </div>
    <div class="scroll">
      <table>
        <caption>
          Of a label (row) before another (column)
        </caption>
        <thead>
          <tr>
            <td></td>
            ${chain.labels.map((label, c) => html`<th key=${c} scope="col">${label}</th>`)}
          </tr>
        </thead>
        <tbody>
          ${chain.labels.map(
            (from, i) =>
              html`<tr key=${i}>
                <th scope="row">${from}</th>
                ${chain.labels.map((to, j) => cell("transitions", i, j, `Score of ${from} before ${to}`))}
              </tr>`,
          )}
        </tbody>
      </table>
    </div>
    <div class="share">
      <button type="button" class="quiet" disabled=${T >= MOST.words} onClick=${() => resize(T + 1, C)}>
        Add a position
      </button>
      <button type="button" class="quiet" disabled=${T <= 1} onClick=${() => resize(T - 1, C)}>Remove one</button>
      <button type="button" class="quiet" disabled=${C >= MOST.labels} onClick=${() => resize(T, C + 1)}>
        Add a label
      </button>
      <button type="button" class="quiet" disabled=${C <= 1} onClick=${() => resize(T, C - 1)}>Remove one</button>
      <button
        type="button"
        class="quiet"
        onClick=${() => change({ chain: null, force: null, seed: null, samples: null })}
      >
        Start over
      </button>
    </div>
  </div>`;
}

function resized(chain, T, C) {
  const list = (old, n, make) => Array.from({ length: n }, (_, i) => old[i] ?? make(i));
  const row = (old) => list(old || [], C, () => 0);
  return {
    words: list(chain.words, T, (t) => `word ${t + 1}`),
    labels: list(chain.labels, C, (c) => `label ${c + 1}`),
    emissions: list(chain.emissions, T, () => []).map(row),
    transitions: list(chain.transitions, C, () => []).map(row),
  };
}

function inPython(chain, force, count, seed) {
  const fixed = chain.words.map((_, t) => force[t] ?? -1);
  const given = Object.keys(force).length
    ? `\nchain = chain.given(torch.tensor([${python(fixed)}]))  # -1 is free`
    : "";
  return `import torch
from thalweg.inference import LinearChain

labels = ${python(chain.labels)}
emissions = torch.tensor([${python(chain.emissions)}], dtype=torch.float64)  # (1, T, C)
transitions = torch.tensor(${python(chain.transitions)}, dtype=torch.float64)  # (C, C), from row to column
chain = LinearChain(emissions, transitions)${given}

print("log Z", float(chain.log_partition), "entropy", float(chain.entropy()))
print("marginals", chain.marginals[0])
scores, paths = chain.top_k(2)
for score, path in zip(scores[0], paths[0]):
    if score > -torch.inf:
        print([labels[c] for c in path], f"{(score - chain.log_partition[0]).exp():.3f}")
for path in chain.sample((${count},), generator=torch.Generator().manual_seed(${seed}))[:, 0]:
    print([labels[c] for c in path])
`;
}
