// The dashboard: log in, follow the figures, and say so when they stop coming. Speaks HTTP to this server only.

import { Refusal, getJson, key } from "./js/api.js";
import { showPast } from "./js/charts.js";
import { showFigures } from "./js/figures.js";
import { clock } from "./js/format.js";
import { longPast, paceOf, recentPast } from "./js/history.js";
import { showKeys } from "./js/keys.js";
import { reasonOf, setUpLogin, showLogin } from "./js/login.js";
import { byId, say, saySentence } from "./js/page.js";
import { askPlan, setUpPlan } from "./js/plan.js";
import { clearPlayground, setUpPlayground, showPrice } from "./js/playground.js";
import { isStudent, showPromise } from "./js/promise.js";
import { showSettings } from "./js/settings.js";

const EVERY_MS = 2000;
const HISTORY_MS = 3500; // every second time
const HASTE_MS = 500; // while the playground moves the figures
const LONGEST_WAIT_MS = 15000;

const state = {
  timer: 0, isAsking: false, isOpen: false, failures: 0, period: "recent",
  overview: null, lastAt: 0, history: null, historyAt: 0,
};

// --- asking -----------------------------------------------------------------------------------------------------

async function refresh() {
  clearTimeout(state.timer);
  if (state.isAsking || !key.get()) return;
  state.isAsking = true;
  try {
    const now = Date.now();
    const isDue = now - state.historyAt >= HISTORY_MS;
    const [overview, history] = await Promise.all([
      getJson("v1/admin/overview"),
      isDue ? getJson("v1/admin/history") : state.history,
    ]);
    if (!key.get()) return; // logged out meanwhile
    Object.assign(state, { overview, history, failures: 0, lastAt: now / 1000 });
    if (isDue) state.historyAt = now;
    if (!state.isOpen) openPanel();
    show();
    setConnection(overview.state === "serving" ? "live" : "lost", wordFor(overview.state));
  } catch (problem) {
    if (!(problem instanceof Refusal)) throw problem;
    onRefusal(problem);
  } finally {
    state.isAsking = false;
  }
  if (key.get()) state.timer = setTimeout(refresh, Math.min(EVERY_MS * 1.6 ** state.failures, LONGEST_WAIT_MS));
}

function onRefusal(refusal) {
  if (refusal.status === 401 || refusal.status === 403) {
    leave(reasonOf(refusal, state.isOpen));
  } else if (!state.isOpen) {
    leave(refusal.message);
  } else {
    state.failures += 1;
    setConnection("lost", refusal.code === "waiting_for_workers" ? "Waiting for a worker" : "Connection lost");
    saySentence("toast-text", `${refusal.message} The figures are those of ${clock(state.lastAt)}.`);
    byId("toast").hidden = false;
  }
}

const wordFor = (serverState) => ({ serving: "Live", draining: "Shutting down" })[serverState] ?? "Stopped";

function setConnection(kind, text) {
  byId("status").dataset.kind = kind;
  document.body.dataset.connection = kind;
  say("status-text", text);
  if (kind === "live") byId("toast").hidden = true;
}

// --- showing ----------------------------------------------------------------------------------------------------

function show() {
  const { overview, history, period } = state;
  if (overview.promise) showPromise(overview);
  else showFigures(overview, paceOf(history, Date.now() / 1000));
  showKeys(overview);
  showSettings(overview);
  showPrice(overview);
  const past = period === "recent" ? recentPast(history, overview) : longPast(history);
  showPast(past, overview.budget?.total_nats ?? null);
}

function openPanel() {
  state.isOpen = true;
  byId("login").hidden = true;
  byId("key").value = "";
  document.body.dataset.promise = state.overview.promise ? "corpus" : "half";
  document.body.dataset.student = String(isStudent(state.overview));
  byId("panel").hidden = false;
  byId("leave").hidden = false;
  byId("main").focus({ preventScroll: true });
  scrollTo(0, 0);
  const { runtime, server } = state.overview.settings;
  const usual = Math.max(1, Math.min(server.default_max_tokens, Math.floor(runtime.context / 2)));
  byId("max-tokens").value = byId("plan-tokens").value = usual;
  if (!state.overview.promise) askPlan(state.overview);
}

function leave(message = "") {
  key.forget();
  clearTimeout(state.timer);
  Object.assign(state, { isOpen: false, failures: 0, overview: null, history: null, historyAt: 0 });
  for (const name of ["exhausted", "promise", "student", "mixed"]) delete document.body.dataset[name];
  say("model", "");
  setConnection("idle", "Not connected");
  byId("toast").hidden = true;
  showLogin(message);
  clearPlayground();
}

// --- wiring -----------------------------------------------------------------------------------------------------

let hurryTimer = 0;
function hurry() {
  if (hurryTimer) return;
  hurryTimer = setTimeout(() => { hurryTimer = 0; refresh(); }, HASTE_MS);
}

for (const button of document.querySelectorAll("[data-window]")) {
  button.addEventListener("click", () => {
    state.period = button.dataset.window;
    for (const other of document.querySelectorAll("[data-window]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    if (state.history) show();
  });
}
byId("leave").addEventListener("click", () => leave());
byId("toast-retry").addEventListener("click", refresh);
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(state.timer) : refresh()));
setUpLogin(refresh);
setUpPlayground(hurry);
setUpPlan(() => state.overview);
if (key.get()) refresh();
else showLogin();
