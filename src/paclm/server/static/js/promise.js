// The promise about the corpus, or a student's claims, put into the page: the same whatever is asked, so there is no budget to show.

import { showLoad } from "./figures.js";
import { bound, count, nats, rate } from "./format.js";
import { byId, inCode, make, say, saySentence, setPart } from "./page.js";

/** A student makes claims, of either promise, that this server cannot check. */
export const isStudent = ({ promise }) => promise !== undefined && promise.is_promised === undefined;

export function showPromise(overview) {
  const { model, promise, sentences, cautions, load, keys } = overview;
  say("model", model);
  saySentence("promise-mixed", sentences.guarantee);
  say("promise-unit", sentences.unit);
  if (isStudent(overview)) showClaims(model, promise, sentences);
  else showAccount(model, promise);
  byId("promise-cautions").replaceChildren(...cautions.map((sentence) => make("li", "", ...inCode(sentence))));
  say("no-budget", sentences.budget);
  say("speed", rate(load.tokens_per_second));
  say("speed-note", `${count(keys.reduce((sum, entry) => sum + entry.tokens, 0))} since the start`);
  showLoad(load, keys);
}

function showAccount(model, promise) {
  document.title = `${promise.is_promised ? `ε = ${loss(promise.epsilon)}` : "Nothing promised"} · ${model}`;
  document.body.dataset.mixed = String(!promise.is_promised);
  say("promise-title", promise.is_promised ? "Promised about the corpus" : "Promises were mixed");
  for (const name of ["promise-sentence", "promise-scale", "bounds-card"]) byId(name).hidden = !promise.is_promised;
  byId("promise-mixed").hidden = promise.is_promised;
  if (promise.is_promised) showBounds(promise);
}

function showClaims(model, promise, sentences) {
  document.title = `Student · ${model}`;
  say("promise-title", "Claimed by this student");
  byId("promise-sentence").hidden = true;
  byId("promise-mixed").hidden = false;
  byId("epsilon-row").hidden = promise.promise !== "corpus";
  byId("total-row").hidden = promise.promise !== "half";
  showLimits(promise);
  if (promise.promise === "half") say("student-total", `${nats(promise.total_nats)} nats`);
  say("not-promised", sentences.not_promised);
}

function showLimits(promise) {
  setPart(byId("promise-scale"), "--at", (promise.mia_bound - 0.5) / 0.5);
  if (promise.promise === "corpus") {
    byId("epsilon").replaceChildren(`ε = ${loss(promise.epsilon)} `, make("small", "", `δ = ${up(promise.delta)}`));
  }
  say("protected-unit", promise.unit);
}

function showBounds(promise) {
  say("promise-mia", bound(promise.mia_bound));
  showLimits(promise);
  say("tpr-0-1", `at most ${bound(promise.tpr_at_fpr_0_1_percent)}`);
  say("tpr-1", `at most ${bound(promise.tpr_at_fpr_1_percent)}`);
}

/** ε with two decimals, rounded up. */
const loss = (epsilon) => String(Math.ceil(epsilon * 100 - 1e-9) / 100);

/** δ with two digits, rounded up. */
function up(delta) {
  const unit = 10 ** (Math.floor(Math.log10(delta)) - 1);
  return nats(Math.ceil(delta / unit - 1e-9) * unit);
}
