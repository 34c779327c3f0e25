"use strict";
(() => {
  const charts = curves.group(document.querySelector(".charts"), { resumes: page.data.resumes });
  const decoded = series.decode(page.data.charts).map((chart, index) => ({ ...chart, figure: document.querySelector(`[data-chart="${index}"]`) }));
  curves.control(charts, decoded.some((chart) => chart.lines.some((line) => line.steps.length > 200)) ? 0.7 : 0);
  charts.show(decoded);

  const table = document.getElementById("config");
  if (!table) return;
  const search = document.getElementById("search"), only = document.getElementById("changed-only"), nothing = document.getElementById("nothing");
  const filter = () => {
    const query = search.value.trim().toLowerCase();
    let count = 0;
    for (const row of table.rows) {
      row.hidden = (only.checked && !row.classList.contains("changed")) || !row.textContent.toLowerCase().includes(query);
      count += !row.hidden;
    }
    nothing.hidden = count > 0;
    table.parentElement.hidden = count === 0;
  };
  search.addEventListener("input", filter);
  only.addEventListener("change", filter);
  filter();
})();
