// Scatter plots of a sweep's results: over one setting (slice), and over two with an interpolated background (contour).
const SLICE = { width: 240, height: 170, left: 44, right: 12, top: 10, bottom: 34 };
const CONTOUR = { height: 300, left: 64, right: 16, top: 12, bottom: 40 };
// Cells of the background in each direction.
const CELLS = 48;

function ticks(box, scale, { width, height, vertical }) {
  return scale.ticks.map((tick) => {
    const share = scale.at(tick);
    return vertical
      ? page.svg("text", { x: box.left - 6, y: box.top + (1 - share) * height + 4, "text-anchor": "end" }, page.cell(tick))
      : page.svg("text", { x: box.left + share * width, y: box.top + height + 15, "text-anchor": share > 0.9 ? "end" : "middle" }, page.cell(tick));
  });
}

// A category has a place for each value; nulls count as the text "null".
const clean = (value) => (value === null || value === undefined ? "null" : value);

// Ticks of a small plot: the ends, and the middle of a long axis.
function fewer(scale, count) {
  const stride = Math.ceil(scale.ticks.length / count);
  return { ...scale, ticks: scale.ticks.filter((_, i) => i % stride === 0) };
}

export function slice(axis, points, index, metric, onPick) {
  const box = SLICE, width = box.width - box.left - box.right, height = box.height - box.top - box.bottom;
  const x = fewer(series.scaleOf(points.map((point) => clean(point.values[index]))), 4), y = fewer(series.scaleOf(points.map((point) => point.result)), 5);
  const dots = points.map((point) => {
    const dot = page.svg("circle", { class: `dot fd${point.shade}`, cx: box.left + x.at(clean(point.values[index])) * width, cy: box.top + (1 - y.at(point.result)) * height, r: 4 },
      page.svg("title", {}, `${point.run}: ${axis.name} ${page.cell(point.values[index])}, ${metric} ${page.cell(point.result)}`));
    dot.addEventListener("click", () => onPick(point.path));
    return dot;
  });
  const node = page.svg("svg", { viewBox: `0 0 ${box.width} ${box.height}`, role: "img", "aria-label": `${metric} over ${axis.full ?? axis.name}, ${points.length} runs` },
    page.svg("line", { class: "base", x1: box.left, x2: box.width - box.right, y1: box.top + height, y2: box.top + height }),
    page.svg("line", { class: "base", x1: box.left, x2: box.left, y1: box.top, y2: box.top + height }),
    ...ticks(box, x, { width, height }), ...ticks(box, y, { width, height, vertical: true }),
    page.svg("text", { class: "name", x: box.left + width / 2, y: box.height - 4, "text-anchor": "middle" }, axis.name), ...[...dots].reverse());
  return page.html("figure", { class: "slice" }, node);
}

// Mean of the results, weighted by the inverse square of the distance (Shepard's method).
export function shepard(points, x, y) {
  let sum = 0, mass = 0;
  for (const point of points) {
    const squared = (point.x - x) ** 2 + (point.y - y) ** 2;
    if (squared < 1e-9) return point.result;
    sum += point.result / squared ** 1.5;
    mass += 1 / squared ** 1.5;
  }
  return sum / mass;
}

// From the best result (0) to the worst (1), as the rank among the results, so that outliers do not hide the rest.
function shadeOf(results, isLargest) {
  const sorted = [...results].sort((a, b) => (isLargest ? b - a : a - b));
  return (value) => {
    const worse = sorted.findIndex((each) => (isLargest ? each < value : each > value));
    return (worse < 0 ? sorted.length : worse) / sorted.length;
  };
}

export function contour(axes, points, indices, sweep) {
  const canvas = page.html("canvas", { width: CELLS, height: CELLS, "aria-hidden": "true" });
  const overlay = page.html("div", { class: "overlay" });
  const label = `${sweep.compared} over ${axes[0].full ?? axes[0].name} and ${axes[1].full ?? axes[1].name}, interpolated between ${points.length} runs`;
  const host = page.html("div", { class: "contour", role: "img", "aria-label": label }, canvas, overlay);
  const scales = indices.map((index) => series.scaleOf(points.map((point) => point.values[index])));
  const placed = points.map((point) => ({ ...point, x: scales[0].at(point.values[indices[0]]), y: scales[1].at(point.values[indices[1]]) }));
  const shade = shadeOf(points.map((point) => point.result), sweep.largest);
  const context = canvas.getContext("2d");
  for (let row = 0; row < CELLS; row++) {
    for (let column = 0; column < CELLS; column++) {
      const value = shepard(placed, (column + 0.5) / CELLS, 1 - (row + 0.5) / CELLS);
      // Eight bands, whose edges are the contour lines.
      context.fillStyle = `rgba(31, 102, 199, ${(0.85 * (1 - Math.floor(shade(value) * 8) / 8)).toFixed(3)})`;
      context.fillRect(column, row, 1, 1);
    }
  }
  const drawOverlay = () => {
    const box = CONTOUR, total = host.clientWidth, width = total - box.left - box.right, height = box.height - box.top - box.bottom;
    if (width <= 0) return;
    const dots = placed.map((point) => page.svg("circle", { class: "dot", cx: box.left + point.x * width, cy: box.top + (1 - point.y) * height, r: 4 },
      page.svg("title", {}, `${point.run}: ${axes[0].name} ${page.cell(point.values[indices[0]])}, ${axes[1].name} ${page.cell(point.values[indices[1]])}, ${sweep.compared} ${page.cell(point.result)}`)));
    overlay.replaceChildren(page.svg("svg", { viewBox: `0 0 ${total} ${box.height}`, width: total, height: box.height }, ...dots,
      ...ticks(box, fewer(scales[0], 7), { width, height }), ...ticks(box, fewer(scales[1], 6), { width, height, vertical: true }),
      page.svg("text", { class: "name", x: box.left + width / 2, y: box.height - 6, "text-anchor": "middle" }, axes[0].name),
      page.svg("text", { class: "name", x: 14, y: box.top + height / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${box.top + height / 2})` }, axes[1].name)));
    Object.assign(canvas.style, { left: `${box.left}px`, top: `${box.top}px`, width: `${width}px`, height: `${height}px` });
  };
  new ResizeObserver(drawOverlay).observe(host);
  return page.html("div", {}, host, page.html("p", { class: "under" }, `Darker is better. Dots are runs; the background between them is interpolated (inverse distance), in bands of equal rank.`));
}
