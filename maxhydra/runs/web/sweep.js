"use strict";
(() => {
  const { axes, lines, charts } = page.data;
  const plot = document.getElementById("parallel");
  if (plot) parallel(plot, document.getElementById("parallel-readout")).show({ axes, lines });

  const host = document.querySelector(".charts"), select = document.getElementById("metric");
  if (!host) return;
  const group = curves.group(host), decoded = series.decode(charts), figure = host.querySelector("figure");
  const show = () => {
    const chart = decoded[+select.value];
    figure.querySelector("h3").textContent = chart.title;
    group.show([{ ...chart, figure }]);
  };
  curves.control(group, decoded.some((chart) => chart.lines.some((line) => line.steps.length > 200)) ? 0.7 : 0);
  select.addEventListener("change", show);
  show();
})();
