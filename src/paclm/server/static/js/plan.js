// The plan box: what such requests would cost at most, and how long the budget lasts. Asking changes nothing.

import { Refusal, postJson } from "./api.js";
import { count, nats, plural, share, span } from "./format.js";
import { byId, inCode, make } from "./page.js";

/** `current`: gives the overview last shown. */
export function setUpPlan(current) {
  byId("plan-form").addEventListener("submit", (event) => {
    event.preventDefault();
    askPlan(current());
  });
}

export async function askPlan(overview) {
  const body = { model: overview.model, prompt: byId("prompt").value, max_tokens: byId("plan-tokens").valueAsNumber };
  try {
    showPlan(await postJson("v1/privacy/plan", body), overview.budget);
  } catch (problem) {
    if (!(problem instanceof Refusal)) throw problem;
    byId("plan-answer").replaceChildren(make("p", "field-error", ...inCode(problem.message)));
  }
}

function showPlan(plan, budget) {
  const part = share(plan.max_nats, budget.total_nats);
  const perDay = byId("plan-requests").valueAsNumber;
  byId("plan-answer").replaceChildren(
    make("p", "", make("strong", plan.fits ? "" : "does-not-fit", verdictOf(plan, perDay))),
    make("p", "", `One costs at most ${nats(plan.max_nats)} nats, ${part} of the budget.`),
    make("p", "hint", `${count(plan.remaining_tokens)} tokens are left. Planning costs nothing.`),
  );
}

function verdictOf(plan, perDay) {
  if (plan.max_nats === 0) return "Costs nothing: this release never reads the secret.";
  if (!plan.fits) {
    const next = plan.on_exhausted === "public" ? "the public model would take over" : "it would be refused";
    return `Does not fit: ${next}.`;
  }
  const requests = Math.floor(plan.remaining_tokens / plan.max_tokens);
  return `${plural(requests, "such request")} at least: ${span(requests / perDay)}.`;
}
