// How answers are searched: the controls, what they ask of the server, and the same in Python.
import { html } from "../lib/html.js";
import { Choice, Slider } from "../lib/parts.js";
import { clamp, python } from "../lib/words.js";

const KINDS = [
  { value: "greedy", label: "Greedy", about: "Takes the most probable symbol at each step and never looks back." },
  {
    value: "beam",
    label: "Beam",
    about: "Keeps the most probable beginnings, as many as its width, and extends them all.",
  },
  {
    value: "nucleus",
    label: "Sampling",
    about: "Draws symbols by chance, from the most probable ones whose shares reach p.",
  },
  { value: "exact", label: "Exact", about: "Goes on until it has proved that no other answer is more probable." },
];

export function readSearch(words, usual = {}) {
  const number = (name, fallback, low, high) => clamp(Number(words[name] ?? fallback) || fallback, low, high);
  return {
    search: KINDS.some((kind) => kind.value === words.search) ? words.search : usual.search || "beam",
    width: number("width", usual.width || 5, 1, 20),
    k: number("k", usual.k || 5, 1, 10),
    p: number("p", 0.9, 0.05, 1),
    heat: number("heat", 1, 0.1, 3),
    seed: Math.max(0, Math.trunc(Number(words.seed) || 0)),
  };
}

// The fields of a request, without those that the search has no use for.
export function asked(how) {
  if (how.search === "greedy" || how.search === "exact") return { search: how.search, k: 1 };
  if (how.search === "beam") return { search: "beam", width: how.width, k: Math.min(how.k, how.width) };
  return { search: how.search, top_p: how.p, temperature: how.heat, seed: how.seed, k: how.k };
}

export function searchInPython(body) {
  const { search, width, top_p, temperature, seed } = body;
  const words = { search, width, top_p, temperature, sampling_seed: seed };
  const given = Object.entries(words).filter(([, value]) => value !== undefined);
  return `SearchConfig(${given.map(([name, value]) => `${name}=${python(value)}`).join(", ")})`;
}

export function said(body) {
  if (body.search === "beam") return `beam ${body.width}`;
  if (body.search === "nucleus") return `sampling, p ${body.top_p}, temperature ${body.temperature}`;
  return `${body.search} search`;
}

export function SearchControls({ how, change, kinds = KINDS.map((kind) => kind.value) }) {
  const about = KINDS.find((kind) => kind.value === how.search).about;
  return html`<div class="controls">
    <${Choice}
      label="Search"
      value=${how.search}
      options=${KINDS.filter((kind) => kinds.includes(kind.value))}
      onChange=${(search) => change({ search })}
    />
    ${
      how.search === "beam" &&
      html`<${Slider}
        label="Width"
        value=${how.width}
        min=${1}
        max=${20}
        about="Beginnings kept at each step"
        onChange=${(width) => change({ width })}
      />`
    }
    ${
      how.search === "nucleus" &&
      html` <${Slider}
          label="Nucleus p"
          value=${how.p}
          min=${0.05}
          max=${1}
          step=${0.05}
          about="Symbols that together have this share are drawn from"
          onChange=${(p) => change({ p })}
        />
        <${Slider}
          label="Temperature"
          value=${how.heat}
          min=${0.1}
          max=${3}
          step=${0.1}
          about="Above 1 flattens the odds, below 1 sharpens them"
          onChange=${(heat) => change({ heat })}
        />
        <button type="button" class="quiet" onClick=${() => change({ seed: how.seed + 1 })}>Draw again</button>`
    }
    ${
      (how.search === "beam" || how.search === "nucleus") &&
      html`<${Slider} label="Answers" value=${how.k} min=${1} max=${10} onChange=${(k) => change({ k })} />`
    }
    <p class="about">${about}</p>
  </div>`;
}
