"use strict";
// Parallel coordinates: one line per run over its settings and result. Dragging along an axis selects a range.
function parallel(plot, readout, { onBrush = () => {}, onPick = null } = {}) {
  const MARGIN = { left: 56, right: 56, top: 40, bottom: 26 };
  const HINT = "Hover over a line to read its values; drag along an axis to select a range. The best run has the strongest color.";
  let axes = [], lines = [], scales = [], brushes = {}, chosen = null, geometry = null;

  const isInside = (line) => Object.entries(brushes).every(([i, [low, high]]) => {
    const share = scales[i].at(line.values[i]);
    return share >= low - 1e-9 && share <= high + 1e-9;
  });

  function draw() {
    const width = plot.clientWidth, height = plot.clientHeight;
    plot.replaceChildren();
    if (!width || !axes.length) return;
    const span = height - MARGIN.top - MARGIN.bottom;
    const x = (i) => MARGIN.left + (axes.length === 1 ? 0.5 : i / (axes.length - 1)) * (width - MARGIN.left - MARGIN.right);
    const y = (share) => height - MARGIN.bottom - share * span;
    const node = page.svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    const places = lines.map((line) => axes.map((_, i) => [x(i), y(scales[i].at(line.values[i]))]));
    const paths = places.map((place, i) => page.svg("path", { class: `curve cs${lines[i].shade}`, d: smoothPath(place) }));
    // Draw the best run on top.
    node.append(...[...paths].reverse());
    geometry = { x, y, span, places, paths, node, height };
    axes.forEach(drawAxis);
    plot.append(node);
    chosen = undefined;
    choose(null);
  }

  function smoothPath(place) {
    return place.map(([px, py], j) => {
      if (!j) return `M${px.toFixed(1)} ${py.toFixed(1)}`;
      const middle = ((place[j - 1][0] + px) / 2).toFixed(1);
      return `C${middle} ${place[j - 1][1].toFixed(1)} ${middle} ${py.toFixed(1)} ${px.toFixed(1)} ${py.toFixed(1)}`;
    }).join("");
  }

  // A name that does not overlap those of the axes next to it.
  function fitted(name) {
    const count = Math.max(6, Math.floor((geometry.x(1) - geometry.x(0)) / 7));
    return axes.length > 1 && name.length > count ? `${name.slice(0, count - 1)}…` : name;
  }

  function drawAxis(axis, i) {
    const { x, y, node, height } = geometry, isLast = i === axes.length - 1;
    const anchor = i === 0 ? "start" : isLast ? "end" : "middle";
    const shift = i === 0 ? 16 - MARGIN.left : isLast ? MARGIN.right - 16 : 0;
    node.append(
      page.svg("line", { class: "axis", x1: x(i), x2: x(i), y1: MARGIN.top, y2: height - MARGIN.bottom }),
      page.svg("text", { class: "name", x: x(i) + shift, y: 24, "text-anchor": anchor }, fitted(axis.name), page.svg("title", {}, axis.full ?? axis.name)));
    for (const tick of scales[i].ticks) {
      const side = isLast ? -9 : 9;
      node.append(page.svg("text", { x: x(i) + side, y: y(scales[i].at(tick)) + 4, "text-anchor": side < 0 ? "end" : "start" }, page.cell(tick)));
    }
    if (brushes[i]) {
      const [low, high] = brushes[i];
      node.append(page.svg("rect", { class: "brush", x: x(i) - 7, width: 14, y: y(high), height: Math.max(2, y(low) - y(high)), rx: 3 }));
    }
    const handle = page.svg("rect", { class: "handle", "data-axis": i, x: x(i) - 12, width: 24, y: MARGIN.top - 6, height: geometry.span + 12 });
    handle.addEventListener("pointerdown", (event) => startBrush(i, event));
    node.append(handle);
  }

  // A drag of a few pixels is a click, which removes the range.
  function startBrush(i, event) {
    event.preventDefault();
    const box = plot.querySelector("svg").getBoundingClientRect(), { height, span } = geometry;
    const share = (e) => Math.min(1, Math.max(0, (height - MARGIN.bottom - (e.clientY - box.top)) / span));
    const start = share(event);
    const move = (e) => {
      const end = share(e);
      if (Math.abs(end - start) * span < 4) delete brushes[i];
      else brushes[i] = [Math.min(start, end), Math.max(start, end)];
      draw();
    };
    const stop = (e) => {
      window.removeEventListener("pointermove", move);
      move(e);
      onBrush(brushes, lines.filter(isInside));
    };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", stop, { once: true });
  }

  function choose(i) {
    if (i === chosen) return;
    chosen = i;
    const { paths, node } = geometry;
    paths.forEach((path, j) => {
      path.classList.toggle("outside", !isInside(lines[j]));
      path.classList.toggle("chosen", i === j);
      path.classList.toggle("dim", i !== null && i !== j);
    });
    if (i !== null) node.insertBefore(paths[i], node.querySelector(".axis"));
    const values = (line) => axes.flatMap((axis, j) => [`  ${axis.name} `, page.html("b", {}, page.cell(line.values[j]))]);
    readout.replaceChildren(...(i === null ? [HINT] : [page.html("b", {}, lines[i].run), ...values(lines[i])]));
  }

  plot.addEventListener("pointermove", (event) => {
    if (!geometry || !lines.length) return;
    const box = plot.querySelector("svg").getBoundingClientRect();
    const away = ([px, py]) => Math.hypot(px - event.clientX + box.left, py - event.clientY + box.top);
    const distance = geometry.places.map((place, i) => (isInside(lines[i]) ? Math.min(...place.map(away)) : Infinity));
    const nearest = distance.indexOf(Math.min(...distance));
    choose(distance[nearest] < 40 ? nearest : null);
  });
  const leave = () => geometry && choose(null);
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", leave);
  plot.addEventListener("click", (event) => {
    if (onPick && chosen !== null && chosen !== undefined && !event.target.dataset.axis) onPick(lines[chosen]);
  });
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    if (!move || !lines.length) return;
    event.preventDefault();
    choose(((chosen ?? (move > 0 ? -1 : lines.length)) + move + lines.length) % lines.length);
  });
  new ResizeObserver(draw).observe(plot);

  // `brushes`: axis -> range as shares of the axis.
  function show(data) {
    ({ axes, lines } = data);
    brushes = data.brushes ?? {};
    scales = axes.map((_, i) => series.scaleOf(lines.map((line) => line.values[i])));
    for (const i in brushes) if (!axes[i]) delete brushes[i];
    draw();
  }
  return { show, inside: () => lines.filter(isInside) };
}
