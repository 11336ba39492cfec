// A completion, token by token, each marked by how the worlds voted.

import { Refusal, postStream } from "./api.js";
import { why } from "./figures.js";
import { count, nats, plural } from "./format.js";
import { byId, make, say, saySentence } from "./page.js";
import { isStudent } from "./promise.js";

const MARKS = ["agreed", "disputed", "public"];
let overview = null;
let running = null; // the AbortController of the stream under way

/** Wire the form; `onMove` is called when tokens have left, so that the figures can follow. */
export function setUpPlayground(onMove) {
  byId("playground-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) complete(onMove);
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("max-tokens").addEventListener("input", showPrice);
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("playground-form").requestSubmit();
  });
}

/** Stop what runs and leave no text behind. */
export function clearPlayground() {
  running?.abort();
  byId("playground-form").reset();
  byId("answer").replaceChildren();
  say("answer-error", "");
  say("answer-note", "");
}

export function showPrice(newOverview) {
  if (newOverview?.settings) overview = newOverview;
  if (!overview) return;
  byId("chat-row").hidden = !overview.has_chat_template;
  const { budget, settings } = overview;
  byId("max-tokens").max = settings.runtime.context;
  byId("temperature").max = settings.server.max_temperature;
  const asked = byId("max-tokens").valueAsNumber;
  if (!(asked >= 1)) {
    say("price", "Ask for at least one token.");
  } else if (!budget) {
    const unless = isStudent(overview) ? "" : ", unless the operator trains again";
    say("price", `Charges nothing: the promise is the same after any number of requests${unless}.`);
  } else if (budget.is_exhausted) {
    const isPublic = budget.on_exhausted === "public";
    say("price", `${why(budget)}: ${isPublic ? "the public model will answer, free" : "this will be refused"}.`);
  } else {
    const [most, left] = [nats(asked * budget.per_token_nats), count(budget.remaining_tokens)];
    say("price", `Costs at most ${most} nats: ${plural(asked, "token")} of the ${left} left.`);
  }
}

async function complete(onMove) {
  const answer = byId("answer");
  const counts = { agreed: 0, disputed: 0, public: 0, unmarked: 0 };
  let figures = null;
  running = new AbortController();
  setBusy(true);
  say("answer-error", "");
  say("answer-note", "Waiting for the first token …");
  answer.replaceChildren(make("span", "said", byId("prompt").value + (byId("as-chat").checked ? "\n" : "")));
  try {
    for await (const event of postStream(...request(), running.signal)) {
      const marks = event.privacy?.marks ?? [];
      marks.forEach((mark) => { counts[mark] += 1; });
      if (overview.promise && event.usage) counts.unmarked = event.usage.completion_tokens;
      for (const choice of event.choices) appendText(answer, choice.text ?? choice.delta.content, marks);
      if (!event.choices.length) figures = event.privacy ?? null;
      say("answer-note", summaryOf(counts, figures));
      onMove();
    }
  } catch (problem) {
    if (problem.name === "AbortError") {
      const charged = overview.promise ? "" : ` ${summaryOf(counts, figures)} What was released stays charged.`;
      say("answer-note", `Stopped.${charged}`);
    } else if (problem instanceof Refusal) {
      saySentence("answer-error", problem.message);
      say("answer-note", summaryOf(counts, figures));
    } else {
      throw problem;
    }
  } finally {
    running = null;
    setBusy(false);
    if (!byId("panel").hidden) onMove();
    else clearPlayground();
  }
}

/** Path and body: a text to continue, or one message of a conversation. */
function request() {
  const isChat = overview.has_chat_template && byId("as-chat").checked;
  const said = byId("prompt").value;
  const asked = isChat ? { messages: [{ role: "user", content: said }] } : { prompt: said };
  return [isChat ? "v1/chat/completions" : "v1/completions", { ...asked, ...options() }];
}

function options() {
  const temperature = byId("temperature").valueAsNumber;
  return {
    model: overview.model,
    max_tokens: byId("max-tokens").valueAsNumber,
    ...(Number.isFinite(temperature) ? { temperature } : {}),
    stream: true,
    stream_options: { include_usage: true },
  };
}

/** Text that several tokens share shows the most telling of their marks. */
function appendText(answer, text, marks) {
  if (!text) return;
  const mark = MARKS.findLast((name) => marks.includes(name));
  const isAtEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 40;
  const word = text.trimStart() || text; // the mark sits on the word, not on the space before it
  const piece = make("span", mark ? `mark ${mark}` : "", word);
  if (mark) piece.title = mark;
  answer.append(text.slice(0, text.length - word.length), piece);
  if (isAtEnd) answer.scrollTop = answer.scrollHeight;
}

function summaryOf(counts, figures) {
  if (overview.promise) return counts.unmarked ? `${plural(counts.unmarked, "token")}, nothing charged.` : "";
  const all = counts.agreed + counts.disputed + counts.public;
  const parts = MARKS.filter((mark) => counts[mark]).map((mark) => `${counts[mark]} ${mark}`);
  const charged = figures ? ` Charged ${nats(figures.charged_nats)} nats.` : "";
  return all ? `${plural(all, "token")}: ${parts.join(", ")}.${charged}` : "No tokens.";
}

function setBusy(isBusy) {
  byId("answer").setAttribute("aria-busy", String(isBusy));
  byId("go").disabled = isBusy;
  byId("stop").disabled = !isBusy;
  if (isBusy) byId("stop").focus({ preventScroll: true });
  else if ([byId("stop"), document.body].includes(document.activeElement)) byId("go").focus({ preventScroll: true });
}
