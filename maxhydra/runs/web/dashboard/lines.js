// Lines of a chart from the curves of runs: other x axes, smoothing, and groups of runs with a band.
export const AXES = {
  step: { title: "Step", name: "step", format: (value) => Math.round(value).toLocaleString("en") },
  tokens: { title: "Tokens", name: "tokens", format: (value) => page.number(value, { trim: true }) },
  seconds: { title: "Training time", name: "time", format: (value) => page.duration(value) },
  flops: { title: "Model FLOPs", name: "FLOPs", format: (value) => page.number(value, { trim: true }) },
  trial: { title: "Trial", name: "trial", format: (value) => String(Math.round(value)) },
};
export const BANDS = { minmax: "minimum to maximum", stderr: "± standard error" };

// Value at `x` of a piecewise linear function; null outside of its range.
export function interpolate(xs, ys, x) {
  if (!xs.length || x < xs[0] || x > xs[xs.length - 1]) return null;
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  if (xs[high] === xs[low] || x === xs[low]) return ys[low];
  if (x === xs[high]) return ys[high];
  if (ys[low] === null || ys[high] === null) return null;
  return ys[low] + ((x - xs[low]) / (xs[high] - xs[low])) * (ys[high] - ys[low]);
}

// x of the points of a line. A step after the last logged one, such as an evaluation's, has the x of the last.
function positions(line, axis, axes) {
  const table = axes[line.run];
  if (axis === "step" || !table) return line.steps;
  const last = table.steps.length - 1;
  return line.steps.map((step) => (step >= table.steps[last] ? table[axis][last] : interpolate(table.steps, table[axis], step)));
}

// Lines to draw: { name, run, look, xs, values, raw }; values that a logarithmic scale cannot show are null.
export function prepare(chart, { x, log, smoothing, axes }) {
  return chart.lines.map((line) => {
    const values = log ? line.values.map((value) => (value > 0 ? value : null)) : line.values;
    const weight = line.exact ? 0 : smoothing;
    return { ...line, xs: positions(line, x, axes), raw: values, values: weight ? series.smooth(values, weight) : values, isSmooth: weight > 0 };
  });
}

// One line per group of runs: mean, and a band from minimum to maximum or of one standard error.
export function aggregate(lines, groups, kind) {
  return groups.flatMap(({ name, runs }, index) => {
    const members = lines.filter((line) => runs.includes(line.run));
    if (!members.length) return [];
    const xs = [...new Set(members.flatMap((line) => line.xs))].sort((a, b) => a - b);
    const rows = xs.map((x) => summary(members.map((line) => interpolate(line.xs, line.values, x)).filter((value) => value !== null), kind));
    const column = (key) => rows.map((row) => row[key]);
    const label = `${name} (${members.length})`;
    return [{ name: label, run: name, look: String(index % 8), xs, values: column("mean"), raw: column("mean"), low: column("low"), high: column("high") }];
  });
}

function summary(values, kind) {
  if (!values.length) return { mean: null, low: null, high: null };
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  if (kind === "minmax") return { mean, low: Math.min(...values), high: Math.max(...values) };
  const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  const error = values.length > 1 ? Math.sqrt(squares / (values.length - 1) / values.length) : 0;
  return { mean, low: mean - error, high: mean + error };
}
