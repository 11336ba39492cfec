// The promise about the corpus, put into the page: the same whatever is asked, so there is no budget to show.

import { showLoad } from "./figures.js";
import { bound, count, nats, rate } from "./format.js";
import { byId, inCode, make, say, saySentence, setPart } from "./page.js";

export function showPromise({ model, promise, sentences, cautions, load, keys }) {
  document.title = `${promise.is_promised ? `ε = ${loss(promise.epsilon)}` : "Nothing promised"} · ${model}`;
  document.body.dataset.mixed = String(!promise.is_promised);
  say("model", model);
  say("promise-title", promise.is_promised ? "Promised about the corpus" : "Promises were mixed");
  for (const name of ["promise-sentence", "promise-scale", "bounds-card"]) byId(name).hidden = !promise.is_promised;
  byId("promise-mixed").hidden = promise.is_promised;
  saySentence("promise-mixed", sentences.guarantee);
  say("promise-unit", sentences.unit);
  byId("promise-cautions").replaceChildren(...cautions.map((sentence) => make("li", "", ...inCode(sentence))));
  if (promise.is_promised) showBounds(promise);
  say("no-budget", sentences.budget);
  say("speed", rate(load.tokens_per_second));
  say("speed-note", `${count(keys.reduce((sum, entry) => sum + entry.tokens, 0))} since the start`);
  showLoad(load, keys);
}

function showBounds(promise) {
  say("promise-mia", bound(promise.mia_bound));
  setPart(byId("promise-scale"), "--at", (promise.mia_bound - 0.5) / 0.5);
  byId("epsilon").replaceChildren(`ε = ${loss(promise.epsilon)} `, make("small", "", `δ = ${up(promise.delta)}`));
  say("protected-unit", promise.unit);
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
