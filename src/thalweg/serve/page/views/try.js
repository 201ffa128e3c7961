// Type a word or paste a list; every model answers as you type.
import { useAnswer } from "../lib/api.js";
import { html, useEffect, useId, useMemo, useRef } from "../lib/html.js";
import { Bar, Empty, Problem, Share } from "../lib/parts.js";
import { count, directionOf, percent, python, visible } from "../lib/words.js";
import { Attention } from "./attention.js";
import { SearchControls, asked, readSearch, said, searchInPython } from "./search.js";
import { Tree } from "./tree.js";

const PROVED = 80; // lines that are searched exactly: more may cost a server too much at once
const FIRST = { at: null, pick: null, part: null }; // line, answer and word of a sentence: of other words, the first

export function Try({ models, words, change }) {
  const usable = models.filter((model) => model.view === "strings");
  const seen = useRef({}); // what each model was asked and answered, for the JSON
  if (!usable.length) return html`<${NoModels} />`;
  const chosen =
    words.models === undefined ? usable : usable.filter((model) => words.models.split(",").includes(model.name));
  const text = words.words ?? chosen.flatMap((model) => model.examples || [])[0] ?? "";
  const list = text
    .split("\n")
    .map((line) => line.trim())
    .filter(Boolean);
  const at = Math.min(Number(words.at) || 0, Math.max(list.length - 1, 0));
  const how = readSearch(words, chosen[0]?.default);
  const [pick, part] = [Number(words.pick) || 0, Number(words.part) || 0];
  const shared = { list, at, how, tags: words.tags || "", change, pick, part, seen };
  return html`<section class="view try">
    <div class="ask">
      <${Words} text=${text} count=${list.length} models=${chosen} change=${change} />
      ${chosen.some((model) => model.features) && html`<${Tags} tags=${shared.tags} change=${change} />`}
      <${Examples} models=${chosen} text=${text} change=${change} />
      ${usable.length > 1 && html`<${Models} usable=${usable} chosen=${chosen} change=${change} />`}
      <${SearchControls} how=${how} change=${(some) => change({ ...some, pick: null })} />
    </div>
    <${Share}
      name="answers"
      json=${() => chosen.map((model) => seen.current[model.name]).filter(Boolean)}
      code=${() => inPython(chosen, list, how, shared.tags)}
    />
    <div class="columns">
      ${chosen.map((model) => html`<${Model} key=${model.name} model=${model} ...${shared} />`)}
      ${!chosen.length && html`<${Empty} title="No model is chosen"><p>Tick one above.</p><//>`}
    </div>
  </section>`;
}

function NoModels() {
  return html`<${Empty} title="No model of strings is loaded">
    <p>
      This view types words into a model that turns strings into strings, such as spelling into pronunciation. Train one
      with <code>make demo</code> and start the server with it:
    </p>
    <pre tabindex="0"><code>thalweg serve runs/demo</code></pre>
  <//>`;
}

function Words({ text, count: n, models, change }) {
  const id = useId();
  const field = useRef(null);
  useEffect(() => {
    field.current.style.height = "auto"; // as tall as its lines, within reason
    field.current.style.height = `${Math.min(field.current.scrollHeight + 2, 220)}px`;
  }, [text]);
  return html`<div class="words">
    <label for=${id}>Type a word, or paste a list with one a line</label>
    <textarea
      ref=${field}
      id=${id}
      rows="1"
      spellcheck="false"
      autocapitalize="off"
      autocomplete="off"
      dir=${text ? "auto" : models[0]?.direction?.source}
      value=${text}
      placeholder=${models[0]?.examples?.[0] || "word"}
      onInput=${(event) => change({ words: event.target.value, ...FIRST })}
    ></textarea>
    ${n > 1 && html`<p class="note">${count(n, "line")}; choose one below to look inside.</p>`}
  </div>`;
}

function Tags({ tags, change }) {
  return html`<label class="tags"
    >Tags, such as <code>V;PST</code>
    <input type="text" value=${tags} spellcheck="false" onInput=${(event) => change({ tags: event.target.value })} />
  </label>`;
}

function Examples({ models, text, change }) {
  const examples = [...new Set(models.flatMap((model) => (model.examples || []).slice(0, 5)))].slice(0, 8);
  if (!examples.length) return null;
  return html`<div class="examples">
    <span>For example</span>
    ${examples.map(
      (word) =>
        html`<button
          type="button"
          key=${word}
          class="chip"
          aria-pressed=${word === text ? "true" : "false"}
          onClick=${() => change({ words: word, ...FIRST })}
        >
          <bdi>${word}</bdi>
        </button>`,
    )}
  </div>`;
}

function Models({ usable, chosen, change }) {
  const toggle = (name) => {
    const names = usable
      .map((model) => model.name)
      .filter((each) => chosen.some((model) => model.name === each) !== (each === name));
    change({ models: names.length === usable.length ? null : names.join(",") });
  };
  return html`<fieldset class="models">
    <legend>Models</legend>
    ${usable.map(
      (model) =>
        html`<label key=${model.name}>
          <input type="checkbox" checked=${chosen.includes(model)} onChange=${() => toggle(model.name)} /> ${model.name}
        </label>`,
    )}
  </fieldset>`;
}

function bodyOf(model, inputs, how, tags, more) {
  const features = model.features ? { features: [tags] } : {};
  return { path: "v1/predict", body: { model: model.name, inputs, ...features, ...asked(how), ...more } };
}

function Model({ model, list, at, how, tags, change, pick, part, seen }) {
  const word = list[at];
  const attention = model.attention ? { attention: true } : {};
  const usual = { ...how, ...model.default };
  const same = JSON.stringify(asked(usual)) === JSON.stringify(asked(how));
  const answer = useAnswer(word ? bodyOf(model, [word], how, tags, attention) : null);
  const before = useAnswer(word && !same ? bodyOf(model, [word], usual, tags, {}) : null);
  const most = Math.min(model.limits?.inputs ?? 256, how.search === "exact" ? PROVED : Infinity);
  const all = useAnswer(list.length > 1 ? bodyOf(model, list.slice(0, most), { ...how, k: 1 }, tags, {}) : null, 300);
  const width = how.search === "greedy" ? 1 : how.search === "beam" ? how.width : usual.width;
  const features = model.features ? { features: tags } : {};
  const spoken = answer.data?.records[0].words; // of a sentence, whose words have a beam each
  const input = word && (spoken ? spoken[Math.min(part, spoken.length - 1)]?.word : answer.asked?.body.inputs[0]);
  const tree = useAnswer(
    input ? { path: "v1/tree", body: { model: model.name, input, ...features, width, exact: true } } : null,
    150,
  );
  seen.current[model.name] = [answer, all, tree]
    .filter((each) => each.data)
    .map((each) => ({ asked: each.asked, answered: each.data }));
  return html`<article class="model" aria-label=${model.name}>
    <header>
      <h2>${model.name}</h2>
      <p>${model.about}</p>
    </header>
    ${
      list.length > 1 &&
      html`<${Lines} all=${all} name=${model.name} list=${list.slice(0, most)} at=${at} change=${change} />`
    }
    ${
      list.length > most &&
      html`<p class="note">
        The first ${most} lines are answered here; <code>thalweg predict</code> takes whole files.
      </p>`
    }
    <${Problem} error=${answer.error || all.error} retry=${answer.retry} />
    ${!word && html`<p class="note">Answers appear here as you type.</p>`}
    ${answer.waiting && !answer.data && html`<p class="note">Working …</p>`}
    <div class="inside">
      ${
        word &&
        !answer.error &&
        answer.data?.records?.[0] &&
        html`<${Answers}
          answer=${answer}
          before=${same ? null : before}
          usual=${usual}
          pick=${pick}
          part=${part}
          change=${change}
          model=${model}
        />`
      }
      ${
        word &&
        tree.data?.nodes?.length > 0 &&
        !answer.error &&
        html`<div class=${tree.waiting ? "stale" : ""}>
          <${Tree}
            tree=${tree.data}
            name=${`${model.name}: ${tree.asked.body.input}`}
            direction=${directions(model, word, answer.data?.records?.[0]?.answers[0]?.text)}
            width=${width}
          />
        </div>`
      }
      ${tree.waiting && !tree.data && answer.data && html`<p class="note">Drawing the beam …</p>`}
      ${!answer.error && tree.error && html`<p class="note" dir="auto">No beam is drawn: ${tree.error.message}.</p>`}
    </div>
  </article>`;
}

// Letters of a word and of its answer run as they do in print, whatever the model is used to.
const directions = (model, word, answer) => ({
  source: directionOf(word, model.direction?.source),
  target: directionOf(answer ?? "", model.direction?.target),
});

function Answers({ answer, before, usual, pick, part, change, model }) {
  const record = answer.data.records[0];
  const rows = grouped(record.answers);
  const at = Math.min(pick, rows.length - 1);
  const old = before?.data?.records?.[0]?.answers;
  const symbols = answer.data.symbols?.[0];
  const chosen = rows[at];
  const looked = record.words?.length > 1 ? lookOfWord(record.words, part) : lookOf(chosen, symbols);
  const most = Math.max(...rows.map((row) => row.probability)); // bars compare the answers with one another
  return html`<div class=${answer.waiting ? "stale" : ""} aria-busy=${answer.waiting ? "true" : "false"}>
    ${
      record.unknown?.length > 0 &&
      html`<p class="note">
        Never seen in training: ${record.unknown.map((each) => html`<bdi key=${each}>${visible(each)}</bdi> `)}
      </p>`
    }
    <ol class="answers choose" aria-label="Answers">
      ${rows.map(
        (row, n) =>
          html`<li key=${row.text} class=${n === 0 ? "first" : ""}>
            <button
              type="button"
              aria-pressed=${n === at ? "true" : "false"}
              onClick=${() => change({ pick: n || null })}
            >
              <span class="text"
                ><span dir="auto">${row.text || html`<em>nothing</em>`}</span
                ><${Marks} row=${row} old=${old} n=${n} usual=${usual}
              /></span>
              <${Bar} share=${row.probability / most} />
              <span class="figure">${percent(row.probability)}</span>
            </button>
          </li>`,
      )}
    </ol>
    ${!rows.length && html`<p class="note">No answer.</p>`}
    ${record.words?.length > 1 && html`<${Said} words=${record.words} part=${part} change=${change} />`}
    <${Change} rows=${rows} old=${old} usual=${usual} />
    ${
      looked.weights &&
      html`<${Attention} ...${looked} direction=${directions(model, record.source, chosen?.text)} />`
    }
    ${
      !looked.weights &&
      looked.from === "dictionary" &&
      html`<p class="note">
        Looked up in the dictionary, so nothing looked at its letters; the beam is what the model by itself would say.
      </p>`
    }
    ${!model.attention && html`<p class="note">This model has no attention to show.</p>`}
  </div>`;
}

// Where the model looked for an answer, or for the first answer to the chosen word of a sentence.
const lookOf = (answer, symbols) => ({
  from: answer?.from,
  weights: symbols && answer?.attention,
  source: symbols?.source,
  answer: symbols?.answers[answer?.place],
});

function lookOfWord(words, part) {
  const { word, answers } = words[Math.min(part, words.length - 1)];
  const [source, answer] = [[...word], answers[0]?.text.split(" ")];
  const fits = answers[0]?.attention?.[0]?.length === source.length;
  return { from: answers[0]?.from, weights: fits && answers[0].attention, source, answer };
}

// The words of a sentence, with the first answer of each and where that is from; the beam drawn is of the one chosen.
function Said({ words, part, change }) {
  const at = Math.min(part, words.length - 1);
  return html`<ul class="said" aria-label="Word by word">
    ${words.map(
      ({ word, answers: [first] }, n) =>
        html`<li key=${n}>
          <button
            type="button"
            class="chip"
            aria-pressed=${n === at ? "true" : "false"}
            onClick=${() => change({ part: n || null })}
          >
            <bdi>${word}</bdi> <bdi class="text">${first?.text}</bdi> <span class="mark">${first?.from}</span>
          </button>
        </li>`,
    )}
  </ul>`;
}

// Sampling may draw an answer more than once: it is shown once, with how often.
function grouped(answers) {
  const rows = new Map();
  answers.forEach((answer, place) => {
    const row = rows.get(answer.text);
    if (row) row.times += 1;
    else rows.set(answer.text, { ...answer, place, times: 1 });
  });
  return [...rows.values()];
}

// What there is to say of an answer: proved best, cut short, drawn twice, new against the usual search.
function Marks({ row, old, n, usual }) {
  const was = old?.findIndex((answer) => answer.text === row.text);
  const marks = [
    row.optimal && ["proved", "most probable of all", "The search has proved that no other answer is more probable."],
    row.from === "dictionary" && ["", "dictionary", "Looked up. The beam shows what the model by itself would say."],
    row.times > 1 && ["", `drawn ${row.times} times`, ""],
    !row.finished && ["cut", "cut at the length limit", ""],
    row.loop && ["cut", "goes round in circles", ""],
    was === -1 && ["new", `not in ${said(asked(usual))}`, "The model's usual search does not give this answer."],
    was > n && ["new", `up from ${was + 1}`, ""],
  ].filter(Boolean);
  return html`<span class="marks"
    >${marks.map(
      ([kind, text, about]) => html`<span key=${text} class=${`mark ${kind}`} title=${about}>${text}</span>`,
    )}</span
  >`;
}

// What the search that was chosen changes, in a sentence.
function Change({ rows, old, usual }) {
  if (!old?.length || !rows.length) return null;
  const lost = old.filter((answer) => !rows.some((row) => row.text === answer.text)).map((answer) => answer.text);
  const name = said(asked(usual)).replace(/^./, (letter) => letter.toUpperCase());
  const first = html`<bdi>${old[0].text || "nothing"}</bdi>`;
  const few = lost
    .slice(0, 3)
    .map((text, n) => html`${n ? ", " : ""}<s key=${text}><bdi>${text || "nothing"}</bdi></s>`);
  const more = lost.length > few.length ? `, and ${lost.length - few.length} more` : "";
  return html`<p class="change" role="status">
    ${name} begins with ${rows[0].text === old[0].text ? "the same answer." : html`${first} instead.`}
    ${lost.length > 0 && html` Not found this way: ${few}${more}.`}
  </p>`;
}

function Lines({ all, name, list, at, change }) {
  const best = useMemo(
    () => new Map(all.data?.records.map((record) => [record.source, record.answers[0] ?? { text: "none" }])),
    [all.data],
  );
  return html`<div
    class=${`lines scroll ${all.waiting ? "stale" : ""}`}
    tabindex="0"
    role="region"
    aria-label=${`All lines, ${name}`}
  >
    <ol>
      ${list.map(
        (word, n) =>
          html`<li key=${n}>
            <button
              type="button"
              aria-pressed=${n === at ? "true" : "false"}
              onClick=${() => change({ ...FIRST, at: n || null })}
            >
              <bdi>${word}</bdi><bdi class="text">${(best.get(word)?.text ?? "…") || html`<em>nothing</em>`}</bdi>
              <span class="figure">${best.get(word)?.probability >= 0 ? percent(best.get(word).probability) : ""}</span>
            </button>
          </li>`,
      )}
    </ol>
  </div>`;
}

function inPython(models, list, how, tags) {
  const body = asked(how);
  const tagged = models.some((model) => model.features);
  const source = (word) =>
    `Source(${python(word)}, ${python(tags.split(";").filter(Boolean)).replace("[", "(").replace(/\]$/, ",)")})`;
  const inputs = tagged ? `[${list.map(source).join(", ")}]` : python(list);
  return `import thalweg
from thalweg.tasks import SearchConfig${tagged ? ", Source" : ""}

how = ${searchInPython(body)}
for run in ${python(models.map((model) => model.run || model.name))}:
    model = thalweg.load(run)
    for prediction in model.predict(${inputs}, k=${body.k}, how=how):
        for answer in prediction.answers:
            print(run, prediction.source, answer.text, f"{answer.probability:.3f}", sep="\\t")
`;
}
