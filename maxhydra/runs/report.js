"use strict";
(() => {
  const charts = curves.group(document.querySelector(".charts"), { resumes: page.data.resumes });
  const drawn = curves.decode(page.data.charts).map((chart, index) => ({ ...chart, figure: document.querySelector(`[data-chart="${index}"]`) }));
  curves.control(charts, drawn.some((chart) => chart.lines.some((line) => line.steps.length > 200)) ? 0.7 : 0);
  charts.show(drawn);

  const table = document.getElementById("config");
  if (!table) return;
  const search = document.getElementById("search"), only = document.getElementById("changed-only"), nothing = document.getElementById("nothing");
  const filter = () => {
    const wanted = search.value.trim().toLowerCase();
    let left = 0;
    for (const row of table.rows) {
      row.hidden = (only.checked && !row.classList.contains("changed")) || !row.textContent.toLowerCase().includes(wanted);
      left += !row.hidden;
    }
    nothing.hidden = left > 0;
    table.parentElement.hidden = left === 0;
  };
  search.addEventListener("input", filter);
  only.addEventListener("change", filter);
  filter();
})();
