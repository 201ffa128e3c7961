// Curves of a run, drawn while it trains.
import { ServerError, events, useAnswer } from "../lib/api.js";
import { html, useEffect, useState } from "../lib/html.js";
import { Empty, Problem, Share } from "../lib/parts.js";
import { Plot } from "../lib/plot.js";
import { count, duration, number, python } from "../lib/words.js";

const TITLES = {
  loss: "Loss",
  cer: "Character error rate",
  wer: "Word error rate",
  accuracy: "Accuracy",
  bleu: "BLEU",
  f1: "Macro F1",
  ece: "Calibration error",
  learning_rate: "Learning rate",
  gradient_norm: "Gradient norm",
};
const REASONS = { epochs: "Finished: all epochs are done.", patience: "Finished: it no longer got better." };
const MORE = ["learning_rate", "gradient_norm"];

export function Training({ words, change }) {
  const list = useAnswer({ path: "v1/training" }, 0);
  const runs = list.data
    ? (list.data.runs ?? list.data).map((run) => (typeof run === "string" ? { name: run } : run))
    : null;
  const run =
    runs?.find((each) => each.name === words.run) || runs?.find((each) => each.state === "training") || runs?.[0];
  const log = useLog(run?.name);
  if (!runs) return html`<${Problem} error=${list.error} retry=${list.retry} />`;
  if (!run)
    return html`<${Empty} title="No training to watch">
      <p>Start the server with a run that trains, or has trained, and its curves appear here as they grow:</p>
      <pre tabindex="0"><code>thalweg train --data train.tsv --out runs/names &
thalweg serve runs/names</code></pre>
    <//>`;
  return html`<section class="view training">
    <p class="lead">
      What a run logs after each pass over its data (an epoch). While it trains, the curves grow by themselves.
    </p>
    ${
      runs.length > 1 &&
      html`<label class="pick"
        >Run
        <select value=${run.name} onChange=${(event) => change({ run: event.target.value })}>
          ${runs.map((each) => html`<option key=${each.name} value=${each.name}>${each.name}</option>`)}
        </select></label
      >`
    }
    <${Problem} error=${log.error} />
    <${Facts} log=${log} />
    <${Curves} epochs=${log.epochs} best=${log.best} />
    <${Share}
      name="training"
      code=${() => inPython(run)}
      json=${log.all.length ? () => ({ asked: { path: `v1/training/${run.name}` }, events: log.all }) : null}
    />
  </section>`;
}

function useLog(name) {
  const [all, setAll] = useState([]);
  const [live, setLive] = useState(true);
  const [error, setError] = useState(null);
  useEffect(() => {
    setAll([]);
    setError(null);
    setLive(true);
    if (!name) return undefined;
    const stop = new AbortController();
    const read = async () => {
      try {
        for await (const { event, data } of events({ path: `v1/training/${encodeURIComponent(name)}` }, stop.signal))
          if (data?.event) setAll((before) => [...before, data]);
          else if (event === "error") throw new ServerError((data.error ?? data).message);
        setLive(false);
      } catch (problem) {
        if (!stop.signal.aborted)
          setError(
            problem instanceof ServerError
              ? problem
              : new ServerError("The connection broke off; open the view again to go on."),
          );
      }
    };
    read();
    return () => stop.abort();
  }, [name]);
  const last = all.findLastIndex((event) => event.event === "start");
  const resumed = all[last]?.resumed;
  const mine = resumed ? all : all.slice(Math.max(last, 0));
  const byEpoch = new Map(mine.filter((event) => event.event === "epoch").map((event) => [event.epoch, event]));
  const epochs = [...byEpoch.values()].sort((a, b) => a.epoch - b.epoch);
  const end = mine.find((event, n) => event.event === "end" && !mine.slice(n).some((later) => later.event === "start"));
  const best = [...epochs].reverse().find((event) => event.best)?.epoch;
  const stopped = all.at(-1)?.event === "interrupted";
  return { all, live, error, epochs, start: all[last], end, best, stopped };
}

function Facts({ log }) {
  const { start, end, epochs, best, live, stopped } = log;
  if (!start)
    return html`<p class="note">${live ? "Waiting for the first line of the log …" : "The log is empty."}</p>`;
  const state = end
    ? REASONS[end.reason] || "Finished."
    : stopped
      ? "Stopped; it can be resumed."
      : live
        ? "Training now."
        : "Not finished.";
  const facts = [
    `${epochs.length} of ${count(start.epochs, "epoch")}`,
    start.parameters && `${start.parameters.toLocaleString("en")} parameters`,
    start.device && `on ${start.device}`,
    best && `best after epoch ${best}`,
    epochs.length > 0 && duration(epochs.at(-1).seconds),
  ].filter(Boolean);
  return html`<div class="card">
    <div class="progress">
      <progress max=${start.epochs} value=${epochs.length} aria-label="Epochs done"></progress>
      <p role="status"><strong>${state}</strong> <span class="note">${facts.join(" · ")}</span></p>
    </div>
  </div>`;
}

function Curves({ epochs, best }) {
  if (!epochs.length) return html`<p class="note">The first point comes after the first epoch.</p>`;
  const x = epochs.map((event) => event.epoch);
  const dev = [...new Set(epochs.flatMap((event) => Object.keys(event.dev || {})))].filter((name) => name !== "loss");
  const column = (read) => epochs.map((event) => read(event) ?? null);
  const loss = [
    { label: "training", y: column((event) => event.loss) },
    { label: "held out", y: column((event) => event.dev?.loss) },
  ];
  const charts = [
    ["loss", loss.filter((curve) => curve.y.some((value) => value !== null))],
    ...dev.map((name) => [name, [{ label: "held out", y: column((event) => event.dev?.[name]) }]]),
    ...MORE.filter((name) => epochs.some((event) => event[name] !== undefined)).map((name) => [
      name,
      [{ label: "training", y: column((event) => event[name]) }],
    ]),
  ];
  return html`<div class="columns">
      ${charts.map(
        ([name, curves]) =>
          html`<div class="card" key=${name}>
            <${Plot}
              title=${TITLES[name] || name}
              x=${x}
              curves=${curves}
              xLabel="epoch"
              mark=${best}
              label=${told(TITLES[name] || name, curves, x)}
            />
          </div>`,
      )}
    </div>
    ${
      best &&
      html`<p class="note">
        The dashed line marks the best epoch, whose weights the model has. Drag across a chart to look closer;
        double-click to see all again.
      </p>`
    }`;
}

function told(title, curves, x) {
  const at = (curve, n) => `${number(curve.y.at(n))} at epoch ${x.at(n)}`;
  return `${title} by epoch. ${curves.map((curve) => `${curve.label}: ${at(curve, 0)}, ${at(curve, -1)}`).join("; ")}`;
}

function inPython(run) {
  return `import json
from pathlib import Path

for line in (Path(${python(run.run || run.name)}) / "log.jsonl").read_text().splitlines():
    event = json.loads(line)
    if event["event"] == "epoch":
        print(event["epoch"], event["loss"], event.get("dev"))
`;
}
