// Numbers as people hold them. Bounds round up and what is left rounds down: no figure here flatters.

const LOCALE = "en";
const whole = new Intl.NumberFormat(LOCALE, { maximumFractionDigits: 0 });

export const count = (value) => whole.format(Math.floor(value));

/** A bound in per cent, rounded up: 0.51081 -> "51.1 %". */
export function bound(probability, digits = 1) {
  return `${(Math.ceil(probability * 10 ** (digits + 2)) / 10 ** digits).toFixed(digits)} %`;
}

export function share(part, of) {
  if (!(of > 0)) return "–";
  const percent = (100 * part) / of;
  if (percent > 0 && percent < 0.1) return "< 0.1 %";
  if (percent < 100 && percent > 99.9) return "> 99.9 %";
  return `${percent.toFixed(percent < 10 || percent > 90 ? 1 : 0).replace(/^(0|100)\.0$/, "$1")} %`;
}

const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const raised = (exponent) => [...String(exponent)].map((sign) => RAISED[sign]).join("");

/** Nats: exact powers of two as such, the rest with three digits. */
export function nats(value) {
  if (value === 0) return "0";
  const exponent = Math.log2(value);
  if (Number.isInteger(exponent) && exponent < -3) return `2${raised(exponent)}`;
  if (value >= 0.001 && value < 1000) return String(Number(value.toPrecision(3)));
  const [mantissa, power] = value.toExponential(2).split("e");
  return `${mantissa}\u202f×\u202f10${raised(Number(power))}`;
}

/** A rate: one decimal while that says something. */
export const rate = (value) => (value >= 100 ? whole.format(value) : value.toFixed(1));

/** A span of days in the unit that fits, rounded down. */
export function span(days) {
  if (days >= 365 * 1000) return "more than 1,000 years";
  if (days >= 365 * 2) return plural(Math.floor(days / 365), "year");
  if (days >= 2 && days < 10) return `${(Math.floor(days * 10) / 10).toFixed(1)} days`;
  if (days >= 2) return plural(Math.floor(days), "day");
  const hours = days * 24;
  if (hours >= 2) return plural(Math.floor(hours), "hour");
  return hours * 60 >= 1 ? plural(Math.floor(hours * 60), "minute") : "less than a minute";
}

export const plural = (number, noun) => `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
