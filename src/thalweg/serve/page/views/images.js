// A picture for a classifier: its classes, and which parts of it spoke for the answer.
import { ask } from "../lib/api.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { INK, Pad, fromText, toText } from "../lib/pad.js";
import { Choice, ClassBars, Drop, Empty, Hint, Problem, Share, Slider } from "../lib/parts.js";
import { addressOf } from "../lib/place.js";
import { clamp, python } from "../lib/words.js";

const MAPS = [
  { value: "values", label: "Regions", about: "Grad-CAM: where the features lie that raise the answer's score." },
  { value: "gradient", label: "Pixels", about: "Smoothed gradient: pixels whose change would change the score most." },
  { value: "none", label: "Off", about: "The picture as the network gets it." },
];

export function Images({ models, words, change }) {
  const usable = models.filter((model) => model.view === "images");
  const [file, setFile] = useState(null);
  const [found, setFound] = useState({});
  const pad = usable.find(
    (model) => model.colour === "grey" && model.size?.[0] === model.size?.[1] && model.size[0] <= 16,
  )?.size[0];
  const pixels = pad ? fromText(words.pixels, pad * pad) : null;
  useEffect(() => {
    // a link carries the picture itself
    if (words.picture && !file) setFile(new File([fromBase64(words.picture)], words.file || "picture.png"));
  }, []);
  const blank = pixels?.every((value) => value === 0);
  useEffect(() => {
    if (pixels && !blank) drawnFile(pixels, pad).then(setFile);
    else if (pixels) setFile(null);
  }, [words.pixels]);
  if (!usable.length) return html`<${NoModels} />`;
  const take = (chosen) => {
    setFile(chosen);
    change({ picture: null, pixels: null, file: chosen.name });
  };
  const draw = (next) => change({ pixels: toText(next), picture: null, file: null });
  const answered = usable.map((model) => found[model.name]).filter((each) => each?.data);
  // The regions of a tiny network are one, of which there is nothing to show.
  const flat = answered.every((each) => each.data.saliency.values.flat().every((value) => value === 0));
  const kind = MAPS.some((map) => map.value === words.map) ? words.map : flat ? "gradient" : "values";
  const strength = clamp(Number(words.strength ?? 0.7), 0, 1);
  const link = async () => {
    const seen = answered[0]?.data.image;
    if (pixels || !seen) return {};
    const picture = toBase64(await pngOf(seen));
    return {
      address: new URL(addressOf("images", { ...words, picture }), location).href,
      about: "It carries the picture as the network sees it.",
    };
  };
  return html`<section class="view images">
    <p class="lead">
      Give a picture to a classifier and see which class it finds, how sure it is, and what in the picture spoke for it.
    </p>
    <div class="give">
      <${Drop} accept="image/*" label="Choose a picture" onFile=${take}
        ><p class="note">PNG, JPEG, WebP, BMP, GIF or TIFF. It stays between your browser and this server.</p><//
      >
      ${
        pad &&
        html`<div class="card">
          <h2>Or draw one</h2>
          <${Pad}
            pixels=${pixels || Array(pad * pad).fill(0)}
            side=${pad}
            onChange=${draw}
            label=${`Drawing, ${pad} by ${pad} pixels`}
          />
          <div class="share">
            <button type="button" class="quiet" onClick=${() => draw(Array(pad * pad).fill(0))}>Clear</button>
          </div>
          <p class="note">Arrows move, Space sets a pixel, Shift erases.</p>
        </div>`
      }
    </div>
    ${
      file &&
      html`<div class="controls">
        <${Choice} label="What spoke for it" value=${kind} options=${MAPS} onChange=${(map) => change({ map })} />
        ${
          kind !== "none" &&
          html`<${Slider}
            label="Strength"
            value=${strength}
            min=${0}
            max=${1}
            step=${0.05}
            onChange=${(next) => change({ strength: next })}
          />`
        }
        <p class="about">${MAPS.find((map) => map.value === kind).about}</p>
      </div>`
    }
    <div class="columns">
      ${usable.map(
        (model) =>
          html`<${Classifier}
            key=${model.name}
            model=${model}
            file=${file}
            kind=${kind}
            strength=${strength}
            report=${(next) => setFound((all) => ({ ...all, [model.name]: next }))}
          />`,
      )}
    </div>
    <${Share}
      name="images"
      link=${link}
      code=${() => inPython(usable, file)}
      json=${answered.length ? () => answered.map((each) => ({ asked: each.asked, answered: each.data })) : null}
    />
    <${Hint} term="How far can I trust the coloured map?">
      <p>
        It shows what the score of the first class depends on, not why the class is right. Two maps that agree say more
        than one.
      </p>
    <//>
  </section>`;
}

function NoModels() {
  return html`<${Empty} title="No classifier of images is loaded">
    <p>
      This view gives pictures to a classifier. A small one of handwritten digits needs no data and trains in seconds:
    </p>
    <pre tabindex="0"><code>thalweg train --task classify digits --out runs/digits
thalweg serve runs/digits</code></pre>
  <//>`;
}

function Classifier({ model, file, kind, strength, report }) {
  const [state, setState] = useState({ data: null, error: null, waiting: false });
  useEffect(() => {
    if (!file) return setState({ data: null, error: null, waiting: false });
    const stop = new AbortController();
    const request = {
      path: `v1/image?model=${encodeURIComponent(model.name)}`,
      body: file,
      type: "application/octet-stream",
    };
    const asked = { path: request.path, body: `the bytes of ${file.name}` };
    setState((last) => ({ ...last, waiting: true }));
    ask(request, stop.signal)
      .then((data) => ({ data, error: null, waiting: false, asked }))
      .catch((error) => ({ data: null, error, waiting: false }))
      .then((next) => {
        if (stop.signal.aborted) return;
        setState(next);
        report(next);
      });
    return () => stop.abort();
  }, [file]);
  const { data, error } = state;
  return html`<article class="model" aria-label=${model.name}>
    <header>
      <h2>${model.name}</h2>
      <p>${model.about}</p>
    </header>
    <${Problem} error=${error} />
    ${
      !file &&
      !error &&
      html`<p class="note">Tells ${(model.classes || []).join(", ")} apart. Its answer appears here.</p>`
    }
    ${
      data &&
      html`<div class=${`seen ${state.waiting ? "stale" : ""}`}>
        <${Seen} data=${data} kind=${kind} strength=${strength} />
        <${ClassBars} answers=${data.records[0].answers} />
      </div>`
    }
  </article>`;
}

function Seen({ data, kind, strength }) {
  const canvas = useRef(null);
  const { width, height } = data.image;
  useEffect(() => {
    const over = kind === "none" ? null : data.saliency[kind];
    canvas.current.getContext("2d").putImageData(pixelsOf(data.image, over, strength), 0, 0);
  }, [data, kind, strength]);
  return html`<figure>
    <canvas
      ref=${canvas}
      width=${width}
      height=${height}
      role="img"
      aria-label=${`The picture as the network sees it, ${width} by ${height} pixels`}
    ></canvas>
    <figcaption><small>as the network sees it, ${width} × ${height}</small></figcaption>
  </figure>`;
}

// The picture as RGBA, blended towards orange where the map is strong.
function pixelsOf({ width, height, channels, values }, over, strength) {
  const image = new ImageData(width, height);
  const heat = [255, 140, 0];
  for (let r = 0; r < height; r++)
    for (let c = 0; c < width; c++) {
      const share = over ? over[r][c] * strength : 0;
      for (let k = 0; k < 3; k++) {
        const own = values[channels === 1 ? 0 : k][r][c];
        image.data[4 * (r * width + c) + k] = own + share * (heat[k] - own);
      }
      image.data[4 * (r * width + c) + 3] = 255;
    }
  return image;
}

function asPng(image) {
  const canvas = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

const pngOf = async (seen) => new Uint8Array(await (await asPng(pixelsOf(seen, null, 0))).arrayBuffer());

// What is drawn is light on dark, as the digits are that such networks learn from.
async function drawnFile(pixels, side) {
  const values = [
    Array.from({ length: side }, (_, r) =>
      pixels.slice(r * side, (r + 1) * side).map((value) => Math.round((255 * value) / INK)),
    ),
  ];
  return new File([await asPng(pixelsOf({ width: side, height: side, channels: 1, values }, null, 0))], "drawing.png");
}

const toBase64 = (bytes) => btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));

function fromBase64(text) {
  try {
    return Uint8Array.from(atob(text.replaceAll(" ", "+")), (letter) => letter.charCodeAt(0));
  } catch {
    return new Uint8Array(); // the server says that this is no picture
  }
}

function inPython(models, file) {
  return `from thalweg.tasks import task_named

picture = ${python(file?.name || "picture.png")}  # a file, a folder or a zip
for run in ${python(models.map((model) => model.run || model.name))}:
    for record in task_named("classify").predict(run, [picture], k=5):
        for answer in record.answers:
            print(run, record.source, answer.text, f"{answer.probability:.3f}", sep="\\t")
`;
}
