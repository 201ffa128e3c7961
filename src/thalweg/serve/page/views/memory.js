// A Hopfield memory: spoil a digit and watch it being remembered, step by step.
import { useAnswer } from "../lib/api.js";
import { html, useEffect, useState } from "../lib/html.js";
import { INK, Pad, Picture, fromText, toText } from "../lib/pad.js";
import { Bar, Hint, Problem, Share, Slider } from "../lib/parts.js";
import { Plot } from "../lib/plot.js";
import { clamp, number, percent, python } from "../lib/words.js";

const SIDE = 8;
// Entmax of alpha: 1 and 2 are its ends, and with 1.5 it has a name of its own.
const NAMED = { softmax: 1, entmax15: 1.5, sparsemax: 2 };
const BETA = 7;
const STEPS = 50;
const FILM = 16; // steps that are shown side by side
const WEIGHTS = 10; // stored digits whose weights are shown, the heaviest
const alphaOf = (word) => NAMED[word] ?? clamp(Number(word) || 1, 1, 2);
const separationOf = (alpha) => Object.keys(NAMED).find((name) => NAMED[name] === alpha) ?? alpha;
const inPixels = (pattern) => pattern.map((value) => clamp(Math.round(value), 0, INK));

// Spoilt pixels: noise of a size, or the lower half gone. Chance enters here alone: the address holds the result.
const noisy = (pixels) =>
  pixels.map((value) => clamp(Math.round(value + (Math.random() + Math.random() - 1) * INK), 0, INK));
const halved = (pixels) => pixels.map((value, n) => (n < pixels.length / 2 ? value : 0));

function said(alpha) {
  const named = { 1: "softmax", 2: "sparsemax" };
  return named[alpha] ?? `entmax ${alpha}`;
}

function effect(alpha) {
  if (alpha === 1) return "Every stored pattern keeps some weight.";
  if (alpha === 2) return "Patterns that are far away get weight zero.";
  return "Between softmax and sparsemax: the further to the right, the sooner a weight falls to zero.";
}

export function Memory({ words, change }) {
  const count = clamp(Math.trunc(Number(words.count)) || 10, 10, 100);
  const stored = useAnswer({ path: `v1/memory?count=${count}` }, 0);
  if (!stored.data) return html`<${Problem} error=${stored.error} retry=${stored.retry} />`;
  return html`<${Stored} stored=${stored.data} count=${count} words=${words} change=${change} />`;
}

function Stored({ stored, count, words, change }) {
  const pixels = fromText(words.pixels, SIDE * SIDE) || halved(inPixels(stored.patterns[3]));
  const beta = clamp(Number(words.beta) || BETA, 1, 100);
  const alpha = alphaOf(words.separation);
  const separation = separationOf(alpha);
  const set = (next) => change({ pixels: toText(next), step: null });
  const body = { patterns: "digits", count, query: pixels, beta, separation, steps: STEPS };
  const found = useAnswer({ path: "v1/memory", body }, 60);
  return html`<section class="view memory">
    <p class="lead">
      This memory has stored ${count} handwritten digits. Draw one, or spoil a stored one: each step replaces the
      picture by a mixture of what is stored, weighted by likeness, and the energy falls until nothing changes any more.
    </p>
    <div class="columns">
      <div class="card">
        <h2>What is seen</h2>
        <${Pad} pixels=${pixels} side=${SIDE} onChange=${set} label="Drawing, 8 by 8 pixels" />
        <p class="note">
          Draw with mouse or finger; hold Shift to erase. With the keyboard: arrows move, Space sets a pixel.
        </p>
        <div class="share">
          <button type="button" class="quiet" onClick=${() => set(noisy(pixels))}>Add noise</button>
          <button type="button" class="quiet" onClick=${() => set(halved(pixels))}>Hide lower half</button>
          <button type="button" class="quiet" onClick=${() => set(pixels.map(() => 0))}>Clear</button>
        </div>
        <h3 id="stored">Start from a stored digit</h3>
        <ul class="stored" aria-labelledby="stored">
          ${stored.patterns.slice(0, 10).map((pattern, n) => {
            const start = () => set(inPixels(pattern));
            return html`<li key=${n}>
              <button type="button" aria-label=${`Digit ${stored.labels[n]}`} onClick=${start}>
                <${Picture} values=${pattern} side=${SIDE} high=${INK} />
              </button>
            </li>`;
          })}
        </ul>
        <${Slider}
          label="Digits stored"
          value=${count}
          min=${10}
          max=${100}
          step=${10}
          onChange=${(next) => change({ count: next, step: null })}
        />
        <${Slider}
          label="Beta, how sharply it tells patterns apart"
          value=${Math.log10(beta)}
          min=${0}
          max=${2}
          step=${0.02}
          text=${number(beta, 2)}
          onChange=${(power) => change({ beta: +(10 ** power).toPrecision(2), step: null })}
        />
        <${Slider}
          label="Separation, how likeness becomes weight"
          value=${alpha}
          min=${1}
          max=${2}
          step=${0.05}
          text=${said(alpha)}
          about="Alpha of entmax, from softmax to sparsemax"
          onChange=${(next) => change({ separation: separationOf(next), step: null })}
        />
        <p class="note">${effect(alpha)}</p>
        <${Share}
          name="memory"
          json=${found.data && (() => [{ asked: found.asked, answered: found.data }])}
          code=${() => inPython(pixels, count, beta, separation)}
        />
      </div>
      <div class="card" aria-busy=${found.waiting ? "true" : "false"}>
        <h2>What is remembered</h2>
        <${Problem} error=${found.error} retry=${found.retry} />
        ${!found.data && !found.error && html`<p class="note" role="status">Working …</p>`}
        ${found.data && html`<${Retrieval} found=${found.data} words=${words} change=${change} />`}
      </div>
    </div>
  </section>`;
}

function Retrieval({ found, words, change }) {
  const last = found.states.length - 1;
  const step = words.step === undefined ? last : clamp(Math.trunc(Number(words.step)) || 0, 0, last);
  const weights = found.weights[step];
  const heaviest = weights.map((_, n) => n).sort((a, b) => weights[b] - weights[a]);
  const shown = heaviest.slice(0, WEIGHTS).sort((a, b) => a - b);
  const [playing, setPlaying] = useState(false);
  useEffect(() => {
    if (!playing) return undefined;
    const timer = setTimeout(() => (step < last ? change({ step: step + 1 }) : setPlaying(false)), 450);
    return () => clearTimeout(timer);
  }, [playing, step]);
  const play = () => {
    change({ step: 0 });
    setPlaying(true);
  };
  const fall = `Energy falls from ${number(found.energies[0])} to ${number(found.energies[last])} in ${last} steps`;
  return html` <div class="recall">
      <${Picture} values=${found.states[step]} side=${SIDE} high=${INK} label=${`State after ${step} steps`} />
      <div>
        <p><strong>Step ${step} of ${last}</strong></p>
        <p class="note">Energy ${number(found.energies[step], 4)}</p>
        <p class="note">
          Most like a stored <strong>${found.labels[heaviest[0]]}</strong>: weight ${percent(weights[heaviest[0]])}
        </p>
        <p class="note">${found.converged ? "At rest" : "Not at rest"} after ${last} steps.</p>
        <button type="button" class="quiet" onClick=${play} disabled=${last === 0}>Play</button>
      </div>
    </div>
    <ol class="film" aria-label="Steps">
      ${found.states.slice(0, FILM).map((state, n) => {
        const pressed = n === step ? "true" : "false";
        return html`<li key=${n}>
          <button type="button" aria-pressed=${pressed} aria-label=${`Step ${n}`} onClick=${() => change({ step: n })}>
            <${Picture} values=${state} side=${SIDE} high=${INK} />${n}
          </button>
        </li>`;
      })}
    </ol>
    ${
      last > 0 &&
      html`<${Plot}
        title="Energy"
        legend=${false}
        x=${found.energies.map((_, n) => n)}
        xLabel="step"
        height=${190}
        mark=${step}
        curves=${[{ label: "energy", y: found.energies }]}
        label=${fall}
      />`
    }
    <h3>${weights.length > WEIGHTS ? `The ${WEIGHTS} heaviest` : "Weights of the"} stored digits at this step</h3>
    <ol class="weights">
      ${shown.map(
        (n) =>
          html`<li key=${n}>
            <span>${found.labels[n]}</span><${Bar} share=${weights[n]} />
            <span class="figure">${percent(weights[n])}</span>
          </li>`,
      )}
    </ol>
    <${Hint} term="What am I looking at?">
      <p>
        A modern Hopfield memory. Its state q moves to the mixture of stored patterns x<sub>i</sub> with weights p(β
        x<sub>i</sub>·q). With a large β one pattern wins at once; with a small β several blend, and the state rests at
        their mean. Sparse separations give weight zero to what is far away, so the answer can be one stored digit
        exactly.
      </p>
    <//>`;
}

function inPython(pixels, count, beta, separation) {
  return `import torch
from sklearn.datasets import load_digits
from thalweg.energies import HopfieldMemory

digits = load_digits()
order = [int((digits.target == n % 10).nonzero()[0][n // 10]) for n in range(${count})]  # 0, 1, ... 9, 0, 1, ...
images = torch.tensor(digits.data[order], dtype=torch.float32)  # (N, 64), pixels from 0 to 16
mean = images.mean(0)
patterns = torch.nn.functional.normalize(images - mean, dim=1)
memory = HopfieldMemory(patterns, beta=${python(beta)}, separation=${python(separation)})

pixels = ${python(pixels)}
query = torch.tensor([pixels]) - mean
found = memory.retrieve(query / query.norm(), max_steps=${STEPS})
print("steps", int(found.steps), "at rest", bool(found.converged))
print("energies", found.energies[0].tolist())
print("weights", found.weights[0].tolist())
`;
}
