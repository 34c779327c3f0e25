"use strict";
// Numbers of curves and axes, shared by reports and dashboard: smoothing, ticks, scales, and decoding of lines.
const series = (() => {
  // With more lines than this, the readout names only the line under the pointer.
  const MAX_NAMED = 8;

  // Two-sided exponential smoothing, so that the curve does not lag behind; gaps stay gaps.
  function smooth(values, weight) {
    const sums = values.map(() => 0), masses = values.map(() => 0);
    for (const order of [values.keys(), [...values.keys()].reverse()]) {
      let sum = 0, mass = 0;
      for (const i of order) {
        sums[i] += weight * sum;
        masses[i] += weight * mass;
        sum = weight * sum + (values[i] ?? 0);
        mass = weight * mass + (values[i] === null ? 0 : 1);
      }
    }
    return values.map((value, i) => (value === null ? null : (sums[i] + value) / (masses[i] + 1)));
  }

  function linearTicks(low, high, count) {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough);
    const ticks = [];
    for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) ticks.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
    return ticks;
  }

  function logTicks(low, high, count) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    for (const digits of [[1], [1, 3], [1, 2, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]]) {
      const ticks = [];
      for (let e = first; e <= last; e++) for (const d of digits) if (d * 10 ** e >= low && d * 10 ** e <= high) ticks.push(d * 10 ** e);
      if (ticks.length >= 3) return ticks.length > count + 2 ? ticks.filter((_, i) => i % Math.ceil(ticks.length / count) === 0) : ticks;
    }
    return linearTicks(low, high, count);
  }

  function nearest(steps, step) {
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
  }

  // Decode delta-encoded steps. The default look of a line is the CSS class of its index.
  function decode(charts) {
    return charts.map((chart) => ({
      ...chart,
      lines: chart.lines.map((line, index) => {
        let step = 0;
        return { ...line, look: line.look ?? String(index % MAX_NAMED), steps: line.steps.map((d) => (step += d)) };
      }),
    }));
  }

  // Numeric axes are linear, or logarithmic if values span more than a factor of 30; other values are evenly spaced.
  function scaleOf(values) {
    if (values.every((value) => typeof value === "number")) {
      const low = Math.min(...values), high = Math.max(...values), isLog = low > 0 && high / low > 30;
      const warp = isLog ? Math.log : (v) => v, [a, b] = [warp(low), warp(high)];
      const distinct = [...new Set(values)].sort((x, y) => x - y);
      const ticks = distinct.length <= 7 ? distinct : isLog ? [low, Math.sqrt(low * high), high] : linearTicks(low, high, 4);
      return { at: (value) => (b === a ? 0.5 : (warp(value) - a) / (b - a)), ticks };
    }
    const names = [...new Set(values.map(String))].sort();
    return { at: (value) => (names.length === 1 ? 0.5 : names.indexOf(String(value)) / (names.length - 1)), ticks: names };
  }

  return { MAX_NAMED, smooth, linearTicks, logTicks, nearest, decode, scaleOf };
})();
