// Requests by key.

import { count, share } from "./format.js";
import { byId, make, setPart } from "./page.js";

let shown = "";

export function showKeys({ keys, budget }) {
  const asText = JSON.stringify([keys, budget?.total_nats]);
  if (asText === shown) return; // a table that is replaced loses what the reader has selected
  shown = asText;
  const rows = keys.map((entry) => {
    const name = make("th", "", entry.name || "(no name)"); // charged from Python, without a tag
    name.scope = "row";
    const remarks = [entry.is_admin && "admin", entry.is_revoked && "revoked"].filter(Boolean).join(", ");
    if (remarks) name.append(make("small", "", remarks));
    return make("tr", "", name,
      cell("Requests", count(entry.requests)),
      cell("Tokens", count(entry.tokens ?? entry.private_tokens + entry.public_tokens)),
      quotaCell(entry),
      ...(budget ? [spentCell(entry, budget.total_nats)] : []));
  });
  byId("keys").tBodies[0].replaceChildren(...(rows.length ? rows : [emptyRow()]));
}

function cell(label, text) {
  const node = make("td", "n", text);
  node.dataset.label = label;
  return node;
}

function quotaCell({ quota_tokens: quota, used_tokens: used }) {
  if (quota === null) return cell("Quota", "none");
  const node = cell("Quota", share(used, quota));
  node.append(make("small", "", `of ${count(quota)}`));
  return node;
}

function spentCell({ charged_nats: charged }, total) {
  const node = cell("Spent so far", share(charged, total));
  const bar = make("span", "key-bar");
  setPart(bar, "--share", charged / total);
  node.append(bar);
  return node;
}

function emptyRow() {
  const node = make("td", "hint", "No keys and no requests yet.");
  node.colSpan = 5;
  return make("tr", "", node);
}
