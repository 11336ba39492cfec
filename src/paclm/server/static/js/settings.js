// The settings the server runs with, as they are written in paclm.toml.

import { nats } from "./format.js";
import { byId, make } from "./page.js";

const GROUPS = { mechanism: "What the guarantee depends on", decoding: "How tokens are drawn", runtime: "Speed and memory", server: "Serving" };
const IN_NATS = ["per_token", "total"];
let shown = "";

export function showSettings({ settings, belief, version }) {
  const groups = {
    ...(settings.mechanism ? { mechanism: { worlds: belief.num_worlds, ...settings.mechanism } } : {}),
    ...(settings.decoding ? { decoding: settings.decoding } : {}),
    runtime: settings.runtime,
    server: { version, ...settings.server },
  };
  const asText = JSON.stringify(groups);
  if (asText === shown) return; // they change with a restart only
  shown = asText;
  byId("settings").replaceChildren(...Object.entries(groups).map(([name, entries]) => groupOf(GROUPS[name], entries)));
}

function groupOf(title, entries) {
  const rows = Object.entries(entries).map(([name, value]) =>
    make("div", "", make("dt", "", name), make("dd", "", written(name, value))));
  return make("section", "", make("h3", "", title), make("dl", "", ...rows));
}

function written(name, value) {
  if (IN_NATS.includes(name) && typeof value === "number") return `${nats(value)} nats`;
  if (value === null || value === "" || (Array.isArray(value) && !value.length)) return "none";
  if (typeof value === "boolean") return value ? "yes" : "no";
  return Array.isArray(value) ? value.join(", ") : String(value);
}
