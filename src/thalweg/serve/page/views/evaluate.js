// Pairs of sources and right answers, measured while you watch; mistakes can be looked through.
import { ServerError, events } from "../lib/api.js";
import { html, useEffect, useMemo, useRef, useState } from "../lib/html.js";
import { Choice, Drop, Empty, Hint, Problem, Share } from "../lib/parts.js";
import { addressOf, squeeze, unsqueeze } from "../lib/place.js";
import { count, number, percent, python, save } from "../lib/words.js";
import { SearchControls, asked as askedOf, readSearch, searchInPython } from "./search.js";

const LINKED = 200_000; // characters of a file that a link may carry
const PAGE = 100;
const SHOWN = [
  { value: "wrong", label: "Wrong" },
  { value: "right", label: "Right" },
  { value: "all", label: "All" },
];
const ABOUT = {
  cer: "Character error rate: symbols to be changed, for each symbol of the right answer.",
  wer: "Word error rate: answers that are not right in every symbol.",
};
const isRight = (record) => record.right ?? record.correct;

export function Evaluate({ models, words, change }) {
  const usable = models.filter((model) => model.view === "strings");
  const model = usable.find((each) => each.name === words.model) || usable[0];
  const [file, setFile] = useState(null); // {name, text}
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    if (!words.tsv) return;
    unsqueeze(words.tsv).then(
      (text) => setFile({ name: words.file || "pairs.tsv", text }),
      () => setProblem(new ServerError("The pairs in this link are damaged; drop the file instead.")),
    );
  }, []);
  const how = readSearch({ ...words, search: words.search === "greedy" ? "greedy" : "beam" }, model?.default);
  const { k, ...search } = askedOf(how);
  const query = new URLSearchParams({ model: model?.name, k, ...search });
  const run = useExam(
    file && model ? { path: `v1/evaluate?${query}`, body: file.text, type: "text/tab-separated-values" } : null,
  );
  if (!model)
    return html`<${Empty} title="No model of strings is loaded">
      <p>Start the server with one: <code>thalweg serve runs/demo</code></p><//
    >`;
  const take = async (chosen) => {
    setProblem(null);
    setFile({ name: chosen.name, text: await chosen.text() });
    change({ file: chosen.name, tsv: null });
  };
  const link = async () => {
    if (!file) return {};
    if (file.text.length > LINKED)
      return { about: `${file.name} is too long for a link: whoever opens it drops the file again.` };
    return {
      address: new URL(addressOf("evaluate", { ...words, file: file.name, tsv: await squeeze(file.text) }), location)
        .href,
      about: "It carries the pairs.",
    };
  };
  const asked = { path: `v1/evaluate?${query}`, body: `the lines of ${file?.name}` };
  return html`<section class="view evaluate">
    <p class="lead">
      Drop a file of pairs, one a line: source, tab, right answer. Scores with 95 % intervals fill in while the model
      works through it.
    </p>
    <div class="give">
      <${Drop} accept=".tsv,.txt,text/tab-separated-values,text/plain" label="Choose a TSV file" onFile=${take}>
        ${
          words.file &&
          !file &&
          !words.tsv &&
          html`<p class="note">This link was made with ${words.file}: drop that file to see it again.</p>`
        }
        ${file && html`<p class="note"><strong>${file.name}</strong></p>`}
      <//>
      <div class="card">
        ${
          usable.length > 1 &&
          html`<label
            >Model
            <select value=${model.name} onChange=${(event) => change({ model: event.target.value })}>
              ${usable.map((each) => html`<option key=${each.name} value=${each.name}>${each.name}</option>`)}
            </select></label
          >`
        }
        <${SearchControls} how=${how} kinds=${["greedy", "beam"]} change=${change} />
        ${model.measured && html`<p class="note">Measured is ${model.measured}.</p>`}
      </div>
    </div>
    <${Problem} error=${problem || run.error} retry=${run.error && run.again} />
    ${run.of > 0 && html`<${Standing} run=${run} />`}
    ${run.records.length > 0 && html`<${Records} run=${run} words=${words} change=${change} name=${model.name} />`}
    <${Share}
      name="evaluation"
      link=${link}
      code=${() => inPython(model, file, k, search)}
      json=${run.of > 0 && (() => ({ asked, scores: run.scores, records: run.records }))}
    />
  </section>`;
}

// A stream of marks, gathered; drawn a few times a second however fast it comes.
function useExam(request) {
  const key = JSON.stringify(request);
  const [round, setRound] = useState(0);
  const [, draw] = useState(0);
  const gathered = useRef(null);
  const fresh = () => ({ records: [], scores: {}, done: 0, of: 0, over: false, error: null });
  gathered.current ??= fresh();
  useEffect(() => {
    gathered.current = fresh();
    draw((n) => n + 1);
    if (!request) return undefined;
    const stop = new AbortController();
    const timer = setInterval(() => draw((n) => n + 1), 200);
    gathered.current.stop = () => stop.abort();
    const end = () => {
      clearInterval(timer);
      draw((n) => n + 1);
    };
    gather(request, gathered.current, stop.signal).then(end);
    return () => {
      stop.abort();
      clearInterval(timer);
    };
  }, [key, round]);
  return { ...gathered.current, again: () => setRound(round + 1) };
}

async function gather(request, into, signal) {
  try {
    for await (const { event, data } of events(request, signal)) {
      if (event === "progress") Object.assign(into, { done: data.done, of: data.of });
      else if (event === "records") into.records = into.records.concat(data.records ?? data);
      else if (event === "scores") into.scores = data.scores ?? data;
      else if (event === "done") into.scores = data.scores ?? into.scores;
      else if (event === "error") throw new ServerError((data.error ?? data).message);
    }
    into.over = true;
  } catch (error) {
    if (signal.aborted) into.stopped = true;
    else into.error = error instanceof ServerError ? error : new ServerError("The answer broke off. Try again.");
  }
}

function Standing({ run }) {
  const scores = Object.entries(run.scores).filter(([, score]) => Number.isFinite(score?.value));
  const state = run.over ? "done" : run.stopped ? "stopped" : run.error ? "broken off" : "working";
  return html`<div class="card">
    <div class="progress">
      <progress max=${run.of} value=${run.done} aria-label="Pairs measured"></progress>
      <span class="figure" role="status">${run.done.toLocaleString("en")} of ${count(run.of, "pair")}, ${state}</span>
      ${
        !run.over &&
        !run.stopped &&
        !run.error &&
        html`<button type="button" class="quiet" onClick=${run.stop}>Stop</button>`
      }
    </div>
    <div class="scroll" tabindex="0" role="region" aria-label="Scores">
      <table class="scores-table">
        <thead>
          <tr>
            <th scope="col">Score</th>
            <th scope="col" class="figure">Value</th>
            <th scope="col">95 % interval</th>
          </tr>
        </thead>
        <tbody>
          ${scores.map(
            ([key, score]) =>
              html`<tr key=${key}>
                <th scope="row" title=${ABOUT[key] || ""}>
                  ${score.name} <small>${score.higher_is_better ? "higher is better" : "lower is better"}</small>
                </th>
                <td class="figure"><strong>${shownScore(score, score.value)}</strong></td>
                <td><${Interval} score=${score} /></td>
              </tr>`,
          )}
        </tbody>
      </table>
    </div>
    <${Hint} term="What do these scores count?"
      ><p>${ABOUT.cer}</p>
      <p>${ABOUT.wer} WER@k asks whether any of the first k answers is right.</p>
      <p>
        The interval is where 95 % of scores lie when the pairs are drawn anew at random: it narrows as more are
        measured.
      </p><//
    >
  </div>`;
}

// Rates are shares, and of errors there may be more than one for each symbol; BLEU and chrF run to 100.
const isRate = (score) => !/^(BLEU|chrF)/.test(score.name);
const shownScore = (score, value) => (isRate(score) ? `${(100 * value).toFixed(1)} %` : number(value, 3));

function Interval({ score }) {
  const most = isRate(score) ? 1 : 100;
  const at = (value) => `${Math.min(100, (100 * value) / most)}%`;
  return html`<div class="interval">
    <span class="track" aria-hidden="true"
      ><span style=${{ left: at(score.low), width: `calc(${at(score.high)} - ${at(score.low)} + 2px)` }}></span
      ><i style=${{ left: at(score.value) }}></i
    ></span>
    <span class="figure">${shownScore(score, score.low)} to ${shownScore(score, score.high)}</span>
  </div>`;
}

function Records({ run, words, change, name }) {
  const show = SHOWN.some((each) => each.value === words.show) ? words.show : "wrong";
  const find = words.find || "";
  const [page, setPage] = useState(1);
  const kept = useMemo(() => {
    const wanted = run.records.filter(
      (record) => (show === "all" || isRight(record) === (show === "right")) && (!find || mentions(record, find)),
    );
    return words.order === "file" ? wanted : [...wanted].sort((a, b) => b.edits - a.edits);
  }, [run.records, show, find, words.order]);
  useEffect(() => setPage(1), [show, find, words.order]);
  const jsonLines = () => kept.map((record) => `${JSON.stringify(record)}\n`).join("");
  const tsv = () => ["source\tright answer\tanswer\tprobability\tedits", ...kept.map(line)].join("\n") + "\n";
  return html`<div class="card">
    <h2>Answers</h2>
    <div class="controls">
      <${Choice} label="Show" hideLabel value=${show} options=${SHOWN} onChange=${(next) => change({ show: next })} />
      <label
        >Filter
        <input
          type="search"
          value=${find}
          placeholder="part of a word"
          onInput=${(event) => change({ find: event.target.value || null })}
      /></label>
      <label
        >Order
        <select
          value=${words.order || "worst"}
          onChange=${(event) => change({ order: event.target.value === "file" ? "file" : null })}
        >
          <option value="worst">worst first</option>
          <option value="file">as in the file</option>
        </select></label
      >
      <button
        type="button"
        class="quiet"
        onClick=${() => save(`${name}-${show}.tsv`, tsv(), "text/tab-separated-values")}
      >
        Download TSV
      </button>
      <button
        type="button"
        class="quiet"
        onClick=${() => save(`${name}-${show}.jsonl`, jsonLines(), "application/jsonl")}
      >
        Download JSON lines
      </button>
    </div>
    <p class="note" role="status">${count(kept.length, "answer")}</p>
    <div class="scroll" tabindex="0" role="region" aria-label="Answers">
      <table class="records">
        <thead>
          <tr>
            <th scope="col">Source</th>
            <th scope="col">Right answer</th>
            <th scope="col">Model's answer</th>
            <th scope="col">Probability</th>
            <th scope="col">Edits</th>
          </tr>
        </thead>
        <tbody>
          ${kept.slice(0, PAGE * page).map(
            (record, n) =>
              html`<tr key=${n} class=${isRight(record) ? "" : "wrong"}>
                <td dir="auto">${record.source}</td>
                <td dir="auto">${(record.references || []).join(" / ")}</td>
                <td dir="auto">${record.answers[0] && (record.answers[0].text || html`<em>nothing</em>`)}</td>
                <td class="figure">${record.answers[0] ? percent(record.answers[0].probability) : ""}</td>
                <td class="figure">${record.edits}</td>
              </tr>`,
          )}
        </tbody>
      </table>
    </div>
    ${
      kept.length > PAGE * page &&
      html`<button type="button" class="quiet" onClick=${() => setPage(page + 1)}>
        Show ${Math.min(PAGE, kept.length - PAGE * page)} more
      </button>`
    }
  </div>`;
}

const mentions = (record, text) =>
  [record.source, ...(record.references || []), record.answers[0]?.text ?? ""].some((each) => each.includes(text));
const line = (record) =>
  [
    record.source,
    (record.references || []).join(" / "),
    record.answers[0]?.text ?? "",
    record.answers[0]?.probability ?? "",
    record.edits,
  ].join("\t");

function inPython(model, file, k, search) {
  return `import thalweg
from thalweg.tasks import SearchConfig

how = ${searchInPython(search)}
evaluation = thalweg.evaluate(${python(model.run || model.name)}, ${python(file?.name || "pairs.tsv")}, k=${k}, how=how)
for score in evaluation.scores.values():
    print(score)
print(evaluation.directory)  # every answer, the worst errors and the confusions
`;
}
