"use strict";
// Everything the page does after it has been drawn: sort, show and hide, read values, move through rounds.
const SVG = "http://www.w3.org/2000/svg";

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function shown(value) {
  return typeof value === "number" ? String(Number(value.toPrecision(5))) : (value ?? "");
}

// Tables

function sortTable(table, column, button) {
  const head = button.closest("th");
  const descending = head.getAttribute("aria-sort") !== "descending";
  for (const th of table.tHead.rows[0].cells) th.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent;
  const sign = descending ? -1 : 1;
  const compare = (a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === "" || y === "") return (x === "") - (y === "");  // empty cells stay last
    const [m, n] = [Number(x), Number(y)];
    return sign * (Number.isNaN(m) || Number.isNaN(n) ? x.localeCompare(y) : m - n);
  };
  table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
}

function setUpTable(table) {
  [...table.tHead.rows[0].cells].forEach((th, column) => {
    const button = th.querySelector("button");
    button.addEventListener("click", () => sortTable(table, column, button));
  });
}

function makeTable(columns, rows) {
  const table = element("table"), head = table.createTHead().insertRow();
  for (const name of columns) head.append(element("th", name, { scope: "col" }));
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((value, k) => line.append(element(k ? "td" : "th", shown(value), k ? {} : { scope: "row" })));
  }
  return table;
}

// Data and files of a chart

function save(name, type, content) {
  const link = element("a", undefined, { download: name });
  link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function csv(columns, rows) {
  const quote = (value) => {
    let text = String(value ?? "");
    if (typeof value === "string" && /^[=+\-@]/.test(text)) text = "'" + text;  // no formulas in spreadsheets
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [columns, ...rows].map((row) => row.map(quote).join(",")).join("\r\n") + "\r\n";
}

function standalone(svg) {
  // Outside the page there are no variables: write every colour as it is seen now.
  const copy = svg.cloneNode(true), style = getComputedStyle(document.documentElement);
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  copy.setAttribute("xmlns", SVG);
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  copy.setAttribute("font-family", "sans-serif");
  copy.querySelectorAll(".off, .cross").forEach((part) => part.remove());
  const text = new XMLSerializer().serializeToString(copy);
  return { width, height, text: text.replace(/var\((--[a-z0-9]+)\)/g, (_, name) => style.getPropertyValue(name)) };
}

function savePng(svg, name) {
  const { width, height, text } = standalone(svg), image = new Image(), canvas = document.createElement("canvas");
  image.onload = () => {
    [canvas.width, canvas.height] = [2 * width, 2 * height];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => save(name + ".png", "image/png", blob));
  };
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
}

function setUpData(figure, data, table) {
  const details = figure.querySelector(".data"), body = details.querySelector(".data-body");
  details.addEventListener("toggle", () => {
    if (!details.open) return;
    const { columns, rows } = table(), svg = figure.querySelector("svg");
    const buttons = [
      ["CSV", () => { const now = table(); save(data.name + ".csv", "text/csv", csv(now.columns, now.rows)); }],
      ["SVG", () => save(data.name + ".svg", "image/svg+xml", standalone(svg).text)],
      ["PNG", () => savePng(svg, data.name)],
    ].map(([name, action]) => {
      const button = element("button", "Save " + name, { type: "button" });
      button.addEventListener("click", action);
      return button;
    });
    const scroll = element("div", undefined, { class: "scroll", tabindex: "0", role: "region", "aria-label": "Data of " + data.title });
    scroll.append(makeTable(columns, rows.slice(0, 2000)));
    if (rows.length > 2000) scroll.append(element("p", `The first 2000 of ${rows.length} rows; the file has them all.`));
    body.replaceChildren(...buttons.flatMap((button) => [button, " "]), scroll);
  });
}

// Reading values

function place(tip, plot, x, y) {
  tip.hidden = false;
  const left = x + 14 + tip.offsetWidth > plot.clientWidth ? x - 14 - tip.offsetWidth : x + 14;
  tip.style.left = Math.max(0, left) + "px";
  tip.style.top = Math.max(0, Math.min(y - 10, plot.clientHeight - tip.offsetHeight)) + "px";
}

function setUpHover(figure, axes) {
  const plot = figure.querySelector(".plot"), svg = plot.querySelector("svg"), tip = plot.querySelector(".tip");
  const rule = document.createElementNS(SVG, "line");
  rule.setAttribute("class", "cross");
  const hide = () => { tip.hidden = true; rule.remove(); };
  const show = (px, py) => {
    const scale = svg.viewBox.baseVal.width / svg.clientWidth, [x, y] = [px * scale, py * scale];
    const ax = axes.find(({ box }) => x >= box[0] - 6 && x <= box[2] + 6 && y >= box[1] && y <= box[3]);
    if (!ax) return hide();
    const [x0, top, x1, bottom] = ax.box, [low, high] = ax.xlim;
    const at = low + ((x - x0) / (x1 - x0)) * (high - low);
    const nearest = (xs) => xs.reduce((best, v, k) => (Math.abs(v - at) < Math.abs(xs[best] - at) ? k : best), 0);
    const hidden = new Set([...figure.querySelectorAll(".legend [aria-pressed=false]")].map((b) => b.textContent));
    const rows = ax.series.filter((s) => s.x.length && !hidden.has(s.name)).map((s) => [s, nearest(s.x)]);
    if (!rows.length) return hide();
    const where = rows[0][0].x[rows[0][1]], line = x0 + ((where - low) / (high - low)) * (x1 - x0);
    for (const [name, value] of Object.entries({ x1: line, x2: line, y1: top, y2: bottom })) rule.setAttribute(name, value);
    svg.append(rule);
    tip.replaceChildren(element("b", `${ax.unit ?? "round"} ${shown(where)}`), ...rows.map(([s, k]) => {
      const row = element("div"), name = element("span"), swatch = element("span", undefined, { class: "swatch" });
      swatch.style.background = s.colour;
      name.append(swatch, s.name);
      row.append(name, element("span", shown(s.y[k])));
      return row;
    }));
    place(tip, plot, line / scale, py);
  };
  plot.addEventListener("pointermove", (event) => {
    const frame = plot.getBoundingClientRect();
    show(event.clientX - frame.left, event.clientY - frame.top);
  });
  plot.addEventListener("pointerleave", hide);
}

function setUpLegend(figure) {
  for (const button of figure.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const visible = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", visible);
      for (const part of figure.getElementsByClassName(button.dataset.part)) part.classList.toggle("off", !visible);
    });
  }
}

// Matrices over rounds

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
}

function decode(run) {
  if (!run.values) {
    const bytes = Uint8Array.from(atob(run.data), (c) => c.charCodeAt(0)), view = new DataView(bytes.buffer);
    run.values = Float32Array.from({ length: bytes.length / 2 }, (_, k) => half(view.getUint16(2 * k, true)));
  }
  return run.values;
}

function drawCells(svg, heat, size) {
  const [x0, y0, x1, y1] = heat.box, w = (x1 - x0) / size, h = (y1 - y0) / size;
  const group = document.createElementNS(SVG, "g");
  for (let k = 0; k < size * size; k++) {
    const cell = document.createElementNS(SVG, "rect"), gap = Math.min(0.6, w / 8);
    const place = { class: "cell", x: x0 + (k % size) * w + gap / 2, y: y0 + Math.floor(k / size) * h + gap / 2, width: w - gap, height: h - gap };
    for (const [name, value] of Object.entries(place)) cell.setAttribute(name, value);
    group.append(cell);
  }
  svg.append(group);
  return [...group.children];
}

function setUpHeat(figure, data) {
  const { heat } = data, svg = figure.querySelector("svg"), plot = figure.querySelector(".plot"), tip = plot.querySelector(".tip");
  const select = figure.querySelector(".heat-run"), slider = figure.querySelector(".heat-round"), output = figure.querySelector(".heat-value");
  const size = heat.runs[0].clients.length, cells = drawCells(svg, heat, size), [low, high] = heat.scale;
  const run = () => heat.runs[select.value], frame = () => decode(run()).subarray(slider.value * size * size, (Number(slider.value) + 1) * size * size);
  const paint = () => {
    const values = frame();
    cells.forEach((cell, k) => {
      const t = Math.max(0, Math.min(1, (values[k] - low) / (high - low)));
      cell.style.fill = Number.isNaN(t) ? "none" : `var(--${heat.ramp}${Math.round(32 * t)})`;
    });
    const text = `round ${run().rounds[slider.value]}`;
    output.textContent = text;
    slider.setAttribute("aria-valuetext", text);
  };
  select.addEventListener("change", () => {
    const wanted = Number(output.textContent.slice(6)), { rounds } = run();
    slider.max = rounds.length - 1;
    slider.value = rounds.reduce((best, r, k) => (Math.abs(r - wanted) < Math.abs(rounds[best] - wanted) ? k : best), 0);
    paint();
  });
  slider.addEventListener("input", paint);
  plot.addEventListener("pointermove", (event) => {
    const k = cells.indexOf(event.target);
    if (k < 0) return void (tip.hidden = true);
    const box = plot.getBoundingClientRect(), { clients } = run(), value = frame()[k];
    const same = heat.axes[0] === heat.axes[1];
    const lines = same ? [`${clients[Math.floor(k / size)]} and ${clients[k % size]}`]
      : [`${heat.axes[0]}: ${clients[k % size]}`, `${heat.axes[1]}: ${clients[Math.floor(k / size)]}`];
    tip.replaceChildren(element("b", Number.isNaN(value) ? "not in this round" : shown(Number(value.toPrecision(3)))), ...lines.map((t) => element("div", t)));
    place(tip, plot, event.clientX - box.left, event.clientY - box.top);
  });
  plot.addEventListener("pointerleave", () => { tip.hidden = true; });
  paint();
  return () => ({
    columns: ["method", "round", heat.axes[1] + (heat.axes[0] === heat.axes[1] ? " (row)" : ""), heat.axes[0], "value"],
    rows: [...frame()].map((value, k) => [run().label, run().rounds[slider.value], run().clients[Math.floor(k / size)], run().clients[k % size], Number.isNaN(value) ? null : Number(value.toPrecision(4))]),
  });
}

function setUpChart(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const table = data.heat ? setUpHeat(figure, data) : () => data;
  if (data.hover.length) setUpHover(figure, data.hover);
  setUpLegend(figure);
  setUpData(figure, data, table);
}

function setUpTheme() {
  const button = document.getElementById("theme"), root = document.documentElement;
  const dark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; button.title = `Switch to ${button.textContent.toLowerCase()} colours`; };
  const kept = (action) => { try { return action(); } catch { return null; } };  // a browser may keep nothing for files
  const before = kept(() => localStorage.getItem("fedld-theme"));
  if (before === "dark" || before === "light") root.dataset.theme = before;
  name();
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    kept(() => localStorage.setItem("fedld-theme", root.dataset.theme));
    name();
  });
}

function setUp(root) {
  root.querySelectorAll("table.sortable").forEach(setUpTable);
  root.querySelectorAll("[data-chart]").forEach(setUpChart);
}

setUp(document);
setUpTheme();
document.documentElement.dataset.ready = "yes";
