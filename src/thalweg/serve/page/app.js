// The frame: tabs, theme, the models that the server has, and the token it may ask for.
import { ServerError, ask, giveToken } from "./lib/api.js";
import { html, render, useEffect, useRef, useState } from "./lib/html.js";
import { Problem } from "./lib/parts.js";
import { usePlace } from "./lib/place.js";
import { Chain } from "./views/chain.js";
import { Evaluate } from "./views/evaluate.js";
import { Images } from "./views/images.js";
import { Memory } from "./views/memory.js";
import { Training } from "./views/training.js";
import { Try } from "./views/try.js";

const TABS = {
  try: { label: "Try", view: Try },
  memory: { label: "Memory", view: Memory },
  chain: { label: "Chain", view: Chain },
  images: { label: "Images", view: Images },
  evaluate: { label: "Evaluate", view: Evaluate },
  training: { label: "Training", view: Training },
};
const NAMES = Object.keys(TABS);

function Tabs({ tab, go }) {
  const list = useRef(null);
  const move = (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1 };
    const here = NAMES.indexOf(tab);
    const ends = { Home: 0, End: NAMES.length - 1 };
    const next = event.key in ends ? ends[event.key] : (here + (steps[event.key] || 0) + NAMES.length) % NAMES.length;
    if (next === here && !(event.key in ends)) return;
    event.preventDefault();
    go(NAMES[next]);
    list.current.querySelectorAll("[role=tab]")[next].focus();
  };
  useEffect(
    () => list.current.querySelector("[aria-selected=true]").scrollIntoView({ block: "nearest", inline: "nearest" }),
    [tab],
  );
  return html`<div class="tabs" role="tablist" aria-label="Views" ref=${list} onKeyDown=${move}>
    ${NAMES.map(
      (name) =>
        html`<button
          type="button"
          key=${name}
          role="tab"
          id=${`tab-${name}`}
          aria-controls="content"
          aria-selected=${name === tab ? "true" : "false"}
          tabindex=${name === tab ? 0 : -1}
          onClick=${() => go(name)}
        >
          ${TABS[name].label}
        </button>`,
    )}
  </div>`;
}

function Theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const [theme, setTheme] = useState(document.documentElement.dataset.theme || (dark ? "dark" : "light"));
  const other = theme === "dark" ? "light" : "dark";
  const turn = () => {
    document.documentElement.dataset.theme = other;
    try {
      localStorage.setItem("thalweg-theme", other);
    } catch {
      // the choice then lasts as long as the page
    }
    setTheme(other);
  };
  return html`<button
    type="button"
    class="quiet theme"
    aria-label=${`Use ${other} colours`}
    title=${`Use ${other} colours`}
    onClick=${turn}
  >
    <svg viewBox="0 0 20 20" width="18" height="18" aria-hidden="true">
      <circle cx="10" cy="10" r="7.5" />
      <path d="M10 2.5a7.5 7.5 0 0 1 0 15z" />
    </svg>
  </button>`;
}

function Token({ onGiven }) {
  const give = (event) => {
    event.preventDefault();
    giveToken(event.target.elements.token.value.trim());
    onGiven();
  };
  return html`<form class="token" onSubmit=${give}>
    <h2>This server asks for a token</h2>
    <p>Whoever started it knows the token: it is the word after <code>--token</code>.</p>
    <label>Token <input name="token" type="password" autocomplete="off" required /></label>
    <button>Go on</button>
  </form>`;
}

function App() {
  const place = usePlace(NAMES);
  const [models, setModels] = useState(null);
  const [error, setError] = useState(null);
  const load = async () => {
    try {
      setModels((await ask({ path: "v1/models" })).models);
      setError(null);
    } catch (problem) {
      setError(problem instanceof ServerError ? problem : new ServerError(String(problem)));
    }
  };
  useEffect(() => void load(), []);
  useEffect(() => void (document.title = `${TABS[place.tab].label} · Thalweg`), [place.tab]);
  const View = TABS[place.tab].view;
  const skip = (event) => {
    event.preventDefault(); // the address belongs to the view
    document.getElementById("content").focus();
  };
  return html` <a class="skip" href="#content" onClick=${skip}>Skip to the content</a>
    <header class="top">
      <h1>Thalweg <span>playground</span></h1>
      <${Tabs} tab=${place.tab} go=${place.go} />
      <${Theme} />
    </header>
    <main>
      <div id="content" role="tabpanel" aria-labelledby=${`tab-${place.tab}`} tabindex="-1">
        ${
          error?.status === 401
            ? html`<${Token} onGiven=${load} />`
            : error
              ? html`<${Problem} error=${error} retry=${load} />`
              : models
                ? html`<${View} key=${place.tab} models=${models} words=${place.words} change=${place.change} />`
                : html`<p class="loading" role="status">Loading …</p>`
        }
      </div>
    </main>`;
}

const root = document.getElementById("app");
root.textContent = "";
render(html`<${App} />`, root);
