"use strict";
(() => {
  const { axes, lines, charts } = page.data;
  const MARGIN = { left: 40, right: 40, top: 28, bottom: 26 };

  // Numeric axes are linear, or logarithmic if values span more than a factor of 30; other values are evenly spaced.
  function scaleOf(index) {
    const values = lines.map((line) => line.values[index]);
    if (values.every((value) => typeof value === "number")) {
      const low = Math.min(...values), high = Math.max(...values), isLog = low > 0 && high / low > 30;
      const warp = isLog ? Math.log : (v) => v, [a, b] = [warp(low), warp(high)];
      const distinct = [...new Set(values)].sort((x, y) => x - y);
      const ticks = distinct.length <= 7 ? distinct : isLog ? [low, Math.sqrt(low * high), high] : curves.linearTicks(low, high, 4);
      return { at: (value) => (b === a ? 0.5 : (warp(value) - a) / (b - a)), ticks };
    }
    const names = [...new Set(values.map(String))].sort();
    return { at: (value) => (names.length === 1 ? 0.5 : names.indexOf(String(value)) / (names.length - 1)), ticks: names };
  }

  function parallel() {
    const plot = document.getElementById("parallel");
    if (!plot) return;
    const readout = document.getElementById("parallel-readout"), scales = axes.map((_, i) => scaleOf(i));
    let chosen = null;

    function draw() {
      const width = plot.clientWidth, height = plot.clientHeight;
      plot.replaceChildren();
      if (!width) return;
      const x = (i) => MARGIN.left + (axes.length === 1 ? 0.5 : i / (axes.length - 1)) * (width - MARGIN.left - MARGIN.right);
      const y = (i, value) => height - MARGIN.bottom - scales[i].at(value) * (height - MARGIN.top - MARGIN.bottom);
      const node = page.svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
      const places = lines.map((line) => axes.map((_, i) => [x(i), y(i, line.values[i])]));
      const paths = places.map((place, i) => {
        const text = place.map(([px, py], j) => {
          if (!j) return `M${px.toFixed(1)} ${py.toFixed(1)}`;
          const middle = ((place[j - 1][0] + px) / 2).toFixed(1);
          return `C${middle} ${place[j - 1][1].toFixed(1)} ${middle} ${py.toFixed(1)} ${px.toFixed(1)} ${py.toFixed(1)}`;
        }).join("");
        return page.svg("path", { class: `curve cs${lines[i].shade}`, d: text });
      });
      // Draw the best run on top.
      node.append(...[...paths].reverse());
      axes.forEach((axis, i) => {
        const anchor = i === 0 ? "start" : i === axes.length - 1 ? "end" : "middle";
        const shift = i === 0 ? -MARGIN.left + 2 : i === axes.length - 1 ? MARGIN.right - 2 : 0;
        node.append(page.svg("line", { class: "axis", x1: x(i), x2: x(i), y1: MARGIN.top, y2: height - MARGIN.bottom }));
        node.append(page.svg("text", { class: "name", x: x(i) + shift, y: 14, "text-anchor": anchor }, axis.name, page.svg("title", {}, axis.full ?? axis.name)));
        for (const tick of scales[i].ticks) {
          const side = i === axes.length - 1 ? -7 : 7;
          node.append(page.svg("text", { x: x(i) + side, y: y(i, tick) + 4, "text-anchor": side < 0 ? "end" : "start" }, page.cell(tick)));
        }
      });
      plot.append(node);

      const choose = (i) => {
        if (i === chosen) return;
        chosen = i;
        paths.forEach((path, j) => { path.classList.toggle("chosen", i === j); path.classList.toggle("dim", i !== null && i !== j); });
        if (i !== null) paths[i].parentNode.insertBefore(paths[i], node.querySelector(".axis"));
        readout.replaceChildren();
        if (i !== null) readout.append(page.html("b", {}, lines[i].run), ...axes.flatMap((axis, j) => [`  ${axis.name} `, page.html("b", {}, page.cell(lines[i].values[j]))]));
        else readout.textContent = "Hover over a line to read its values; the darkest line is the best run.";
      };
      const distanceTo = ([px, py], event, box) => Math.hypot(px - event.clientX + box.left, py - event.clientY + box.top);
      plot.onpointermove = (event) => {
        const box = plot.getBoundingClientRect();
        const distance = places.map((place) => Math.min(...place.map((point) => distanceTo(point, event, box))));
        const nearest = distance.indexOf(Math.min(...distance));
        choose(distance[nearest] < 40 ? nearest : null);
      };
      plot.onpointerleave = plot.onblur = () => choose(null);
      plot.onkeydown = (event) => {
        const move = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
        if (!move) return;
        event.preventDefault();
        choose(((chosen ?? (move > 0 ? -1 : lines.length)) + move + lines.length) % lines.length);
      };
      chosen = undefined;
      choose(null);
    }
    new ResizeObserver(draw).observe(plot);
  }
  parallel();

  const host = document.querySelector(".charts"), select = document.getElementById("metric");
  if (!host) return;
  const group = curves.group(host), decoded = curves.decode(charts), figure = host.querySelector("figure");
  const show = () => {
    const chart = decoded[+select.value];
    figure.querySelector("h3").textContent = chart.title;
    group.show([{ ...chart, figure }]);
  };
  curves.control(group, decoded.some((chart) => chart.lines.some((line) => line.steps.length > 200)) ? 0.7 : 0);
  select.addEventListener("change", show);
  show();
})();
