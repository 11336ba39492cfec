// The two charts. uPlot draws on canvas; colours come from the page, so that they follow the theme.

import { count, nats, plural, share } from "./format.js";
import { byId, say } from "./page.js";

const HEIGHT = 210;
const [MINUTE, HOUR, DAY] = [60, 3600, 86400];
const TICKS = [[1, 2, 5, 15], [1, 2, 4, 6, 12], [1, 2, 7, 28, 91, 364]].flatMap((counts, i) =>
  counts.map((number) => number * [MINUTE, HOUR, DAY][i]));
const drawn = { spending: null, tokens: null };
let latest = null;

/** `past`: as js/history.js makes it; `totalNats` is null where there is no budget. */
export function showPast(past, totalNats) {
  latest = [past, totalNats];
  const { points, step } = past;
  const times = points.map((point) => point.at);
  const agreed = points.map((point) => point.agreed);
  const disputed = points.map((point) => point.agreed + point.disputed);
  const all = points.map((point) => point.agreed + point.disputed + point.public);
  if (totalNats !== null) draw("spending", spendingLine(points, totalNats, step), spendingSeries, step, percent);
  draw("tokens", [times, all, disputed, agreed], tokenSeries, step, count); // the tallest first, each over the last
  describe(points, totalNats, step);
}

/** From corner to corner of each bin, so that idle hours between two bins stay flat. */
function spendingLine(points, totalNats, step) {
  const times = [];
  const shares = [];
  const now = Date.now() / 1000;
  const add = (at, spent) => {
    if (at > (times.at(-1) ?? -Infinity)) {
      times.push(at);
      shares.push((100 * spent) / totalNats);
    }
  };
  points.forEach((point) => {
    add(point.at, point.spent - point.charged);
    add(Math.min(point.at + step, Math.max(now, point.at + 1)), point.spent);
  });
  return [times, shares];
}

const percent = (value) => `${Number(value.toPrecision(3))} %`;

function describe(points, totalNats, step) {
  const sum = (field) => points.reduce((total, point) => total + point[field], 0);
  const last = points.at(-1)?.spent ?? 0;
  const [agreed, disputed, ofPublic] = [sum("agreed"), sum("disputed"), sum("public")];
  const period = step < HOUR ? `${step} seconds` : step === HOUR ? "hour" : "day";
  say("spending-text", `${share(last, totalNats)} of the committed total spent so far (${nats(last)} nats).`);
  const ofDispute = totalNats !== null && agreed + disputed ? `, ${share(disputed, agreed + disputed)} of the private ones disputed` : "";
  say("tokens-text", `Per ${period}. ${plural(agreed + disputed + ofPublic, "token")} in view${ofDispute}.`);
}

// --- uPlot ----------------------------------------------------------------------------------------------------------

const colourOf = (selector, property = "color") => getComputedStyle(document.querySelector(selector))[property];
const faded = (colour, percentage) => `color-mix(in srgb, ${colour} ${percentage}%, transparent)`;

function spendingSeries() {
  const blue = colourOf(".swatch.agreed");
  return [{}, { stroke: blue, width: 2, fill: faded(blue, 13), points: { show: false } }];
}

function tokenSeries() {
  const paths = uPlot.paths.bars({ size: [0.8, 26], align: 1 });
  const bars = (name) => ({ fill: colourOf(`.swatch.${name}`), width: 0, paths, points: { show: false } });
  return [{}, bars("public"), bars("disputed"), bars("agreed")];
}

function draw(place, data, makeSeries, step, label) {
  const node = byId(place);
  const width = node.clientWidth;
  if (!width) return;
  if (drawn[place]?.step !== step) {
    drawn[place]?.chart.destroy();
    drawn[place] = { step, chart: new uPlot(optionsOf(place, width, makeSeries(), step, label), data, node) };
    return;
  }
  const { chart } = drawn[place];
  if (chart.width !== width) chart.setSize({ width, height: HEIGHT });
  chart.setData(data);
}

function optionsOf(place, width, series, step, label) {
  const axis = {
    stroke: colourOf(".hint"), font: `12px ${colourOf("body", "fontFamily")}`,
    grid: { stroke: colourOf(".bar", "borderBottomColor"), width: 1 }, ticks: { show: false },
  };
  return {
    width, height: HEIGHT, series, legend: { show: false }, cursor: { show: false }, padding: [10, 18, 0, 0],
    scales: {
      x: { range: (_, first, last) => [first, place === "tokens" ? last + step : last] }, // bars follow their stamp
      y: { range: (_, __, high) => [0, high > 0 ? high * 1.12 : 1] },
    },
    axes: [
      {
        ...axis, size: step < HOUR ? 26 : 42, space: 64, incrs: TICKS,
        values: (chart, splits) => splits.map(labelFor(chart.scales.x, step)),
      },
      { ...axis, size: 56, space: 40, values: (_, splits) => splits.map((at) => (at === null ? "" : label(at))) },
    ],
  };
}

const dayLabel = (at) => new Date(at * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short" });
const timeLabel = (at) => new Date(at * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });

function labelFor(scale, step) {
  if (step >= DAY) return dayLabel;
  return scale.max - scale.min > DAY ? (at) => `${dayLabel(at)}\n${timeLabel(at)}` : timeLabel;
}

function redraw() {
  for (const place of Object.keys(drawn)) {
    drawn[place]?.chart.destroy();
    drawn[place] = null;
  }
  if (latest) showPast(...latest);
}

document.addEventListener("themechange", () => requestAnimationFrame(redraw));
new ResizeObserver(() => latest && showPast(...latest)).observe(byId("spending"));
