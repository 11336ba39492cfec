// The log-in form: hands a key over, says why one was refused.

import { key } from "./api.js";
import { byId, say, saySentence } from "./page.js";

export function setUpLogin(onKey) {
  byId("login-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = byId("key").value.trim();
    if (!given) return complain("Enter the admin key.");
    if (!/^[\x21-\x7e]+$/.test(given)) return complain("A key has no spaces or accents. Copy it as it was printed.");
    key.set(given);
    byId("login-button").disabled = true;
    say("login-error", "");
    return onKey();
  });
}

export function showLogin(message = "") {
  byId("panel").hidden = true;
  byId("leave").hidden = true;
  byId("login").hidden = false;
  document.title = "Log in · paclm";
  complain(message);
}

function complain(message) {
  const field = byId("key");
  byId("login-button").disabled = false;
  field.setAttribute("aria-invalid", String(Boolean(message)));
  saySentence("login-error", message);
  field.focus();
  field.select();
}

/** Why a key does not open the dashboard, or does no longer. */
export function reasonOf({ status, code, message }, wasOpen) {
  if (status === 401 && wasOpen) return "The server no longer takes this key.";
  if (status === 401) return "The server does not know this key. Copy it as it was printed, or make a new one.";
  if (code === "admin_key_required") return "This is a key for completions. The dashboard needs an admin key.";
  return message;
}
