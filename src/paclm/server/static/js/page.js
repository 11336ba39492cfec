// Small hands for the page. Text only ever enters as text, never as markup.

export const byId = (id) => document.getElementById(id);

export function say(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text; // an unchanged live region stays silent
}

/** A sentence of the server: what stands between backticks is code. */
export function saySentence(id, sentence) {
  const node = byId(id);
  if (node.textContent !== sentence.replaceAll("`", "")) node.replaceChildren(...inCode(sentence));
}

export const inCode = (sentence) => sentence.split("`").map((part, i) => (i % 2 ? make("code", "", part) : part));

/** An element with a class and children; strings become text. */
export function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

/** A CSS variable through the CSSOM, which the content security policy allows. */
export function setPart(node, name, value) {
  node.style.setProperty(name, String(Math.min(1, Math.max(0, value || 0))));
}
