"use strict";
// Shared by all pages: DOM helpers, number formatting, light and dark themes, copy buttons.
const page = (() => {
  const SVG = document.querySelector("#theme svg").namespaceURI;

  function fill(node, attributes, children) {
    for (const key in attributes) {
      const value = attributes[key];
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== null && value !== false && value !== undefined) node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }
  // Children are nodes or text, never markup.
  const html = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
  const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

  // Four significant digits; axes drop trailing zeros, readouts keep them so that the text does not jump.
  function number(value, { percent = false, trim = false } = {}) {
    if (value === null || value === undefined) return "NaN";
    const size = Math.abs(value), digits = (v) => (trim ? String(+v.toPrecision(4)) : v.toPrecision(4));
    if (size === 0) return percent ? "0%" : "0";
    if (percent) return digits(value * 100) + "%";
    if (size >= 1e9 || size < 1e-3) return value.toExponential(2).replace(trim ? /\.?0+e/ : /$^/, "e").replace("e+", "e");
    return size >= 1e6 ? digits(value / 1e6) + "M" : size >= 1e4 ? digits(value / 1e3) + "K" : digits(value);
  }

  // Settings as they were written, measurements with four digits.
  function cell(value) {
    if (value === null || value === undefined) return "";
    if (typeof value !== "number") return String(value);
    return value === +value.toPrecision(3) && Math.abs(value) < 1e6 ? String(value) : number(value, { trim: true });
  }

  function duration(seconds) {
    if (seconds < 10) return `${seconds.toFixed(1)} s`;
    const whole = Math.round(seconds);
    for (const [size, unit, small, smaller] of [[86400, "d", 3600, "h"], [3600, "h", 60, "m"], [60, "m", 1, "s"]])
      if (whole >= size) return `${Math.floor(whole / size)} ${unit} ${Math.floor((whole % size) / small)} ${smaller}`;
    return `${whole} s`;
  }

  async function copy(button, text, node) {
    try {
      await navigator.clipboard.writeText(text);
      const label = button.textContent;
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = label), 1500);
    } catch {
      if (node) getSelection().selectAllChildren(node);
    }
  }
  for (const button of document.querySelectorAll("button[data-copy]")) {
    const node = document.getElementById(button.dataset.copy);
    button.addEventListener("click", () => copy(button, node.textContent, node));
  }

  const root = document.documentElement;
  const storedTheme = (() => { try { return localStorage.getItem("theme"); } catch { return null; } })();
  if (storedTheme === "light" || storedTheme === "dark") root.dataset.theme = storedTheme;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* Pages opened as files may not have storage. */ }
  });

  // Redraw a part only when its content has changed, so that clicks and text selections are not lost.
  const currentContent = new WeakMap();
  function update(node, content, draw) {
    const next = JSON.stringify(content);
    if (currentContent.get(node) === next && node.childNodes.length) return;
    currentContent.set(node, next);
    node.replaceChildren(...draw().filter((child) => child !== null));
  }

  const data = document.getElementById("data");
  return { html, svg, number, cell, duration, copy, update, data: data ? JSON.parse(data.textContent) : null };
})();
