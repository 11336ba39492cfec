// The overview, put into the page. Spent is "so far"; the only bounds are those at the committed total.

import { bound, count, nats, plural, rate, share, span } from "./format.js";
import { byId, inCode, make, say, saySentence, setPart } from "./page.js";

const NOT_A_BOUND = "What is spent so far is not a bound: the guarantee is at the committed total.";

/** Under the promise `half`; js/promise.js has the other. */
export function showFigures(overview, pace) {
  const { budget } = overview;
  const left = budget.is_exhausted ? why(budget) : `${count(budget.remaining_tokens)} tokens left`;
  document.title = `${left} · ${overview.model}`;
  document.body.dataset.exhausted = String(budget.is_exhausted);
  say("model", overview.model);
  showGuarantee(overview);
  showBudget(overview, pace);
  showNow(overview);
  showLeak(overview.belief);
}

function showGuarantee({ budget, belief, cautions, sentences }) {
  say("unit", sentences.unit);
  say("mia", bound(budget.mia_bound));
  setPart(byId("scale"), "--at", (budget.mia_bound - 0.5) / 0.5);
  byId("world-id").replaceChildren(
    `at most ${bound(budget.world_id_bound, 2)} `,
    make("small", "", `blind guess ${(100 / belief.num_worlds).toFixed(2)} %`),
  );
  byId("total").replaceChildren(
    `${nats(budget.total_nats)} nats `,
    make("small", "", `${nats(budget.per_token_nats)} a token`),
  );
  byId("cautions").replaceChildren(...cautions.map((sentence) => make("li", "", ...inCode(sentence))));
}

function showBudget({ budget, tokens, settings }, pace) {
  const held = Math.min(budget.held_tokens * budget.per_token_nats, budget.total_nats - budget.spent_nats);
  say("spent", share(budget.spent_nats, budget.total_nats));
  say("held", share(held, budget.total_nats));
  say("free", share(budget.total_nats - budget.spent_nats - held, budget.total_nats));
  const meter = byId("meter");
  setPart(meter, "--spent", budget.spent_nats / budget.total_nats);
  setPart(meter, "--held", held / budget.total_nats);
  meter.setAttribute("aria-label", `${share(budget.spent_nats, budget.total_nats)} of the budget spent so far`);

  say("budget-title", budget.is_exhausted ? why(budget) : "Budget, so far");
  say("left", count(budget.remaining_tokens));
  say("left-unit", budget.remaining_tokens === 1 ? "token left" : "tokens left");
  say("pace", paceSentence(budget, tokens, settings.mechanism.charge, pace));
  saySentence("budget-note", budget.is_exhausted ? goneSentence(budget) : NOT_A_BOUND);
}

/** How far what is left reaches: in tokens where not every token costs, and in days at the pace of the last day. */
function paceSentence(budget, tokens, charge, pace) {
  if (budget.is_exhausted) return "The guarantee holds as committed; nothing more is charged.";
  if (tokens.private > 0 && tokens.charged === 0) return "No token was charged so far.";
  const reach = charge === "dissent" && tokens.charged > 0
    ? `About ${count((budget.remaining_tokens * tokens.private) / tokens.charged)} at the current dissent rate. `
    : "";
  if (!(pace?.natsPerDay > 0)) return `${reach}No pace yet: nothing was charged in the last day.`;
  const days = (budget.total_nats - budget.spent_nats) / pace.natsPerDay;
  return `${reach}Lasts ${span(days)} at the current pace of ${count(pace.tokensPerDay)} tokens a day.`;
}

/** Why nothing more can be charged: a price that was raised can leave most of a budget. */
export function why(budget) {
  return budget.spent_nats < budget.total_nats ? "One token costs more than is left" : "The budget is spent";
}

function goneSentence(budget) {
  const next = budget.on_exhausted === "public"
    ? "Requests are now answered by the public model alone, and each of its tokens is marked."
    : "Requests are now refused with status 429.";
  return next + " To go on, commit more with `paclm ledger extend`; the bound rises with it.";
}

function showNow({ load, tokens, keys }) {
  say("speed", rate(load.tokens_per_second));
  say("speed-note", `${count(tokens.private + tokens.public)} in all, ${count(tokens.public)} of them public`);
  say("dissent", share(tokens.dissent, tokens.private));
  say("dissent-note", tokens.private
    ? `${count(tokens.dissent)} of ${plural(tokens.private, "private token")}`
    : "no private tokens yet");
  showLoad(load, keys);
}

export function showLoad(load, keys) {
  byId("running").replaceChildren(String(load.running), make("small", "", ` of ${load.places} places`));
  const requests = keys.reduce((sum, entry) => sum + entry.requests, 0);
  say("running-note", `${count(load.waiting)} waiting, ${count(requests)} since the start`);
}

function showLeak(belief) {
  byId("leak").replaceChildren(nats(belief.leak_estimate_nats), make("small", "", " nats"));
  say("leak-note", `belief entropy ${nats(belief.entropy_nats)} of ${nats(belief.max_entropy_nats)}`);
}
