// What several views are made of.
import { html, useEffect, useId, useRef, useState } from "./html.js";
import { percent, save } from "./words.js";

// A calm line about what went wrong, and what to do.
export function Problem({ error, retry }) {
  if (!error) return null;
  return html`<div class="problem" role="alert">
    <p dir="auto">${error.message}</p>
    ${retry && html`<button type="button" class="quiet" onClick=${retry}>Try again</button>`}
  </div>`;
}

export function Empty({ title, children }) {
  return html`<div class="empty">
    <h2>${title}</h2>
    ${children}
  </div>`;
}

// What a term means, for those who want to know.
export function Hint({ children, term }) {
  return html`<details class="hint">
    <summary>${term || "What is this?"}</summary>
    <div>${children}</div>
  </details>`;
}

export function Choice({ label, value, options, onChange, hideLabel }) {
  const name = useId();
  return html`<fieldset class="choice">
    <legend class=${hideLabel ? "unseen" : ""}>${label}</legend>
    <div>
      ${options.map(
        (option) =>
          html`<label key=${option.value} title=${option.about || ""}>
            <input
              type="radio"
              name=${name}
              value=${option.value}
              checked=${option.value === value}
              onChange=${() => onChange(option.value)}
            />
            <span>${option.label}</span>
          </label>`,
      )}
    </div>
  </fieldset>`;
}

// `toText` says the value; `from` and `to` may map a straight slider to a curved scale.
export function Slider({ label, value, min, max, step = 1, onChange, text, about }) {
  const id = useId();
  return html`<div class="slider">
    <label for=${id} title=${about || ""}>${label}</label>
    <output for=${id}>${text ?? value}</output>
    <input
      id=${id}
      type="range"
      min=${min}
      max=${max}
      step=${step}
      value=${value}
      aria-valuetext=${text ?? String(value)}
      onInput=${(event) => onChange(Number(event.target.value))}
    />
  </div>`;
}

// A share as a bar with its figure.
export function Bar({ share, tone = "" }) {
  return html`<span class=${`bar ${tone}`} aria-hidden="true">
    <span style=${{ width: `${Math.max(100 * share, share > 0 ? 0.8 : 0)}%` }}></span>
  </span>`;
}

export function ClassBars({ answers }) {
  return html`<ol class="answers">
    ${answers.map(
      (answer, n) =>
        html`<li key=${answer.text} class=${n ? "" : "first"}>
          <span class="text" dir="auto">${answer.text}</span>
          <${Bar} share=${answer.probability} />
          <span class="figure">${percent(answer.probability)}</span>
        </li>`,
    )}
  </ol>`;
}

// Where files are dropped, chosen with a button, or reached by the keyboard.
export function Drop({ accept, label, onFile, children }) {
  const [over, setOver] = useState(false);
  const input = useRef(null);
  const id = useId();
  const take = (files) => {
    if (files?.length) onFile(files[0]);
    if (input.current) input.current.value = "";
  };
  return html`<div
    class=${`drop ${over ? "over" : ""}`}
    onDragOver=${(event) => {
      event.preventDefault();
      setOver(true);
    }}
    onDragLeave=${() => setOver(false)}
    onDrop=${(event) => {
      event.preventDefault();
      setOver(false);
      take(event.dataTransfer.files);
    }}
  >
    <input
      ref=${input}
      id=${id}
      type="file"
      class="unseen"
      accept=${accept}
      onChange=${(event) => take(event.target.files)}
    />
    <p><label class="button" for=${id}>${label}</label> or drop one here.</p>
    ${children}
  </div>`;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

function Sheet({ sheet, close }) {
  const dialog = useRef(null);
  const [said, setSaid] = useState("");
  useEffect(() => {
    setSaid("");
    if (sheet && !dialog.current.open) dialog.current.showModal();
  }, [sheet]);
  if (!sheet) return null;
  const copy = async () =>
    setSaid((await copied(sheet.text)) ? "Copied." : "Copying is not allowed here: select the text.");
  return html`<dialog
    ref=${dialog}
    class="sheet"
    aria-label=${sheet.title}
    onClose=${close}
    onClick=${(event) => event.target === dialog.current && dialog.current.close()}
  >
    <header>
      <h2>${sheet.title}</h2>
      <button type="button" class="quiet" onClick=${() => dialog.current.close()}>Close</button>
    </header>
    <p>${sheet.about}</p>
    <pre tabindex="0" dir="ltr"><code>${sheet.text}</code></pre>
    <footer>
      <button type="button" onClick=${copy}>Copy</button>
      <button type="button" class="quiet" onClick=${() => save(sheet.file, sheet.text, "text/plain")}>
        Save as ${sheet.file}
      </button>
      <span role="status">${said}</span>
    </footer>
  </dialog>`;
}

// The three buttons of every view. `json` and `code` are functions, called when asked for; `link` may be one too.
export function Share({ name, json, code, link }) {
  const [sheet, setSheet] = useState(null);
  const [said, setSaid] = useState("");
  useEffect(() => {
    const timer = said && setTimeout(() => setSaid(""), 4000);
    return () => clearTimeout(timer);
  }, [said]);
  const share = async () => {
    const { address = location.href, about = "" } = (await link?.()) || {};
    if (await copied(address)) setSaid(`Link copied. ${about}`);
    else
      setSheet({ title: "Link", about: `Opens this view as it is now. ${about}`, text: address, file: `${name}.txt` });
  };
  const showJson = () =>
    setSheet({
      title: "JSON",
      about: "What was asked of the server and what it answered.",
      text: JSON.stringify(json(), null, 1),
      file: `${name}.json`,
    });
  const showCode = () =>
    setSheet({
      title: "Python",
      about: "These lines give the same without the server.",
      text: code(),
      file: `${name}.py`,
    });
  return html`<div class="share">
    <button type="button" class="quiet" onClick=${share}>Copy link</button>
    <button type="button" class="quiet" onClick=${showJson} disabled=${!json}>JSON</button>
    <button type="button" class="quiet" onClick=${showCode} disabled=${!code}>Python</button>
    <span role="status">${said}</span>
    <${Sheet} sheet=${sheet} close=${() => setSheet(null)} />
  </div>`;
}
