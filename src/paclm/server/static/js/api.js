// Everything that leaves this page: requests to this server, with the key as a bearer. The key lives in sessionStorage.

const PLACE = "paclm-admin-key";

export const key = {
  get: () => sessionStorage.getItem(PLACE),
  set: (value) => sessionStorage.setItem(PLACE, value),
  forget: () => sessionStorage.removeItem(PLACE),
};

/** What the server refused, in its own words. `status` 0: no answer at all. */
export class Refusal extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function ask(path, options = {}) {
  const headers = { Accept: "application/json", ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(path, { cache: "no-store", credentials: "omit", ...options, headers });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new Refusal(0, "The server does not answer.");
  }
  if (!response.ok) throw await refusalOf(response);
  return response;
}

async function refusalOf(response) {
  let body = null;
  try { body = await response.json(); } catch { /* a proxy may answer with a page of its own */ }
  const error = body?.error;
  return new Refusal(response.status, error?.message ?? `The server answered ${response.status}.`, error?.code ?? null);
}

/** The body as JSON; one that was cut off is as good as no answer. */
async function readJson(response) {
  try {
    return await response.json();
  } catch {
    throw new Refusal(0, "The server's answer broke off.");
  }
}

const posting = (body, signal) => ({
  method: "POST", signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json" },
});

export const getJson = async (path) => readJson(await ask(path));

export const postJson = async (path, body) => readJson(await ask(path, posting(body)));

/** Server-sent events of one request, parsed; ends at [DONE]. */
export async function* postStream(path, body, signal) {
  const response = await ask(path, posting(body, signal));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const events = (rest + (await nextPiece(reader))).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data:")) continue; // a comment that keeps the connection alive
      const data = event.slice("data:".length).trim();
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new Refusal(response.status, parsed.error.message, parsed.error.code);
      yield parsed;
    }
  }
}

async function nextPiece(reader) {
  let piece;
  try {
    piece = await reader.read();
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    piece = { done: true };
  }
  if (piece.done) throw new Refusal(0, "The stream broke off before its end. What was released stays charged.");
  return piece.value;
}
