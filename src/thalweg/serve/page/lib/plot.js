// Curves, drawn by uPlot in the colours of the page.
import uPlot from "../vendor/uplot.mjs";
import { html, useEffect, useRef } from "./html.js";
import { number } from "./words.js";

const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];

// A canvas knows no `light-dark`: the colour is read from an element that wears it.
function colour(name, place) {
  const probe = place.appendChild(document.createElement("span"));
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// What a curve that stays where it is would otherwise be given: a scale from 0 to 100.
const around = (plot, low, high) =>
  low === high ? [low - Math.abs(low) / 2, high + Math.abs(high) / 2 || 1] : uPlot.rangeNum(low, high, 0.1, true);

// `x` and each curve's `y` are equally long; a missing value is null. `mark` is an x to point out.
export function Plot({ title, x, curves, xLabel, label, height = 230, mark, legend = true }) {
  const place = useRef(null);
  useEffect(() => {
    const draw = () => {
      const ink = Object.fromEntries(
        ["soft", "line", "accent", "warn", "ink"].map((name) => [name, colour(name, place.current)]),
      );
      const strokes = [ink.accent, ink.warn, ink.soft, ink.ink];
      const axis = {
        stroke: ink.soft,
        grid: { stroke: ink.line, width: 1 },
        ticks: { stroke: ink.line },
        font: "12px system-ui, sans-serif",
      };
      const whole = (plot, splits) => splits.map((value) => (Number.isInteger(value) ? value : ""));
      return new uPlot(
        {
          title,
          width: place.current.clientWidth,
          height,
          scales: {
            x: { time: false, range: (plot, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
            y: { range: around },
          },
          cursor: { y: false },
          legend: { show: legend },
          axes: [
            { ...axis, label: xLabel, labelSize: 18, labelFont: axis.font, size: 36, values: whole },
            { ...axis, size: 58, values: (plot, splits) => splits.map((value) => number(value)) },
          ],
          series: [
            { label: xLabel },
            ...curves.map((curve, n) => ({
              label: curve.label,
              stroke: strokes[n % strokes.length],
              width: 2,
              dash: DASHES[Math.floor(n / strokes.length)],
              points: { show: x.length < 40, size: 6 },
              spanGaps: true,
              value: (plot, value) => number(value, 4),
            })),
          ],
          hooks: { draw: [(plot) => mark !== undefined && pointOut(plot, mark, ink.soft)] },
        },
        [x, ...curves.map((curve) => curve.y)],
        place.current,
      );
    };
    let plot = draw();
    const again = () => {
      plot.destroy();
      plot = draw();
    };
    const size = new ResizeObserver(
      () =>
        place.current &&
        plot.width !== place.current.clientWidth &&
        plot.setSize({ width: place.current.clientWidth, height }),
    );
    size.observe(place.current);
    const theme = new MutationObserver(again);
    theme.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", again);
    return () => {
      size.disconnect();
      theme.disconnect();
      scheme.removeEventListener("change", again);
      plot.destroy();
    };
  }, [JSON.stringify([title, x, curves, mark, height])]);
  return html`<div class="plot" role="img" aria-label=${label} ref=${place}></div>`;
}

function pointOut(plot, at, stroke) {
  const { ctx, bbox } = plot;
  const x = plot.valToPos(at, "x", true);
  ctx.save();
  ctx.strokeStyle = stroke;
  ctx.setLineDash([4, 4]);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}
