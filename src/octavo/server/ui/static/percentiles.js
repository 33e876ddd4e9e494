// Percentiles of histograms: counts of values up to each bound, and of all.

/** Return how many values came between two readings, up to each bound. */
export const countsBetween = (before, after) => after.counts.map((count, at) => count - before.counts[at]);

/** Return the value below which a fraction lies, read off a straight line within its bucket; null without values. */
export function percentile(bounds, counts, fraction) {
  const total = counts.at(-1);
  if (!total) return null;
  const wanted = fraction * total;
  const at = counts.findIndex((count) => count >= wanted);
  if (at >= bounds.length) return bounds.at(-1);
  const [low, below] = at ? [bounds[at - 1], counts[at - 1]] : [0, 0];
  return low + ((bounds[at] - low) * (wanted - below)) / Math.max(1, counts[at] - below);
}
