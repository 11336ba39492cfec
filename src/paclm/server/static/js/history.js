// What the server tells about the past, made ready for charts and for the pace. No drawing here.

const DAY = 86400;
const BARS = 5; // bins of the last minutes that share one bar
const SHORTEST = 120; // seconds in view right after a start

const seconds = (stamp) => Date.parse(stamp) / 1000;

/** The ledger's bins: tokens in each, and what was spent up to its end. */
export function longPast({ bin, points }) {
  return {
    step: bin === "day" ? DAY : 3600,
    points: points.map((point) => ({
      at: seconds(point.at),
      agreed: point.private_tokens - point.dissent_tokens,
      disputed: point.dissent_tokens,
      public: point.public_tokens,
      charged: point.charged_nats,
      spent: point.spent_nats,
    })),
  };
}

/** The last minutes; spending, where there is a budget, is followed backwards from what is spent now. */
export function recentPast({ recent }, { budget, settings, uptime_seconds: uptime }) {
  const step = recent.seconds * BARS;
  const sinceStart = recent.points.slice(-Math.ceil(Math.max(uptime, SHORTEST) / recent.seconds));
  const bars = new Map(); // by clock time, so that a bar stays where it is while it ages
  for (const bin of sinceStart) {
    const at = Math.floor(seconds(bin.at) / step) * step;
    const bar = bars.get(at) ?? { at, agreed: 0, disputed: 0, public: 0 };
    bar.agreed += bin.private_tokens - bin.dissent_tokens;
    bar.disputed += bin.dissent_tokens;
    bar.public += bin.public_tokens;
    bars.set(at, bar);
  }
  const points = [...bars.values()];
  let spent = budget?.spent_nats;
  for (const point of budget ? points.toReversed() : []) {
    point.charged = chargedTokens(point, settings.mechanism) * budget.per_token_nats;
    point.spent = spent;
    spent = Math.max(0, spent - point.charged);
  }
  return { step, points };
}

const SECRET_IS_READ = ["gaussian", "channel"]; // the other releases cost nothing

function chargedTokens({ agreed, disputed }, { release, charge }) {
  if (!SECRET_IS_READ.includes(release)) return 0;
  return charge === "dissent" ? disputed : agreed + disputed;
}

/** Charged nats and private tokens a day, over the last day or since the first token; null where nothing was had. */
export function paceOf({ bin, points }, now) {
  const window = bin === "day" ? 7 * DAY : DAY;
  const lately = points.filter((point) => seconds(point.at) > now - window);
  if (!lately.length) return null;
  const days = Math.max(now - seconds(lately[0].at), 3600) / DAY;
  const sum = (field) => lately.reduce((total, point) => total + point[field], 0);
  return { natsPerDay: sum("charged_nats") / days, tokensPerDay: sum("private_tokens") / days };
}
