"use strict";
(() => {
const $ = (id) => document.getElementById(id);
let data = JSON.parse($("data").textContent);
const AXES = { step: "step", tokens: "tokens", hours: "hours of training" };
const MARKS = { skip: "skipped step", restart: "restart after a failure", resume: "resumed",
  hang: "hang", signal: "signal", end: "ended early", stage: "data stage" };
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
let axis = "step", log = false, charts = [];

/** An element; children that are texts stay texts, whatever they say. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(element.style, value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function colour(name) {
  const probe = make("span", { style: { color: `var(--${name})`, display: "none" } });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(3);
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1e4 ? 7 : 5 });
}

function compact(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3) return value.toExponential(1).replace("e-", "e−");
  return value.toLocaleString("en", { notation: size >= 1e4 ? "compact" : "standard", maximumSignificantDigits: 4 });
}

function header() {
  const title = data.runs.length === 1 ? data.runs[0].name : `${data.runs.length} runs`;
  document.title = `${title} – DMT report`;
  const theme = make("button", { type: "button" }, "Light or dark");
  theme.addEventListener("click", () => {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark" ||
      (!document.documentElement.style.colorScheme && matchMedia("(prefers-color-scheme: dark)").matches);
    document.documentElement.style.colorScheme = dark ? "light" : "dark";
    draw();
  });
  const parts = [];
  if (data.runs.length > 1) parts.push(make("div", { class: "run-head" }, make("h1", {}, title), theme));
  data.runs.forEach((run, index) => {
    const name = data.runs.length === 1 ? make("h1", {}, title)
      : make("h2", {}, make("span", { class: "swatch", style: { borderColor: `var(--run-${index % 6})`, marginRight: "8px", verticalAlign: "middle" } }), run.name);
    parts.push(make("div", { class: "run-head" }, name,
      make("span", { class: `state ${run.state}` }, run.state),
      data.runs.length === 1 ? theme : null,
      run.why ? make("span", { class: "why" }, run.why) : null));
    parts.push(make("dl", { class: "tiles" }, ...run.tiles.map(([what, amount, remark]) =>
      make("div", { class: "tile" }, make("dt", {}, what), make("dd", { class: "amount" }, amount),
        make("dd", { class: "remark" }, remark)))));
  });
  $("header").replaceChildren(...parts);
}

function warnings() {
  const found = data.runs.flatMap((run) => [
    ...run.missing.map((what) => (data.runs.length > 1 ? `${run.name}: ${what}` : what)),
    ...(run.more_marks ? [`${run.name}: ${run.more_marks} earlier events are not marked`] : []),
  ]);
  $("warnings").replaceChildren(...(found.length ? [make("div", { class: "warning", role: "note" },
    make("strong", {}, "What is missing"), make("ul", {}, ...found.map((what) => make("li", {}, what))))] : []));
}

function controls() {
  const set = make("fieldset", {}, make("legend", {}, "Over"), ...Object.entries(AXES).map(([name, label]) => {
    const input = make("input", { type: "radio", name: "axis", value: name, checked: name === axis ? "" : null });
    input.addEventListener("change", () => { axis = name; draw(); });
    return make("label", {}, input, label);
  }));
  const scale = make("input", { type: "checkbox" });
  scale.addEventListener("change", () => { log = scale.checked; draw(); });
  $("controls").replaceChildren(set, make("label", {}, scale, "logarithmic loss and gradient norm"));
}

function key() {
  const kinds = new Set(data.runs.flatMap((run) => run.marks.map((mark) => mark.kind)));
  const items = data.runs.length > 1 ? data.runs.map((run, index) => make("li", {},
    make("span", { class: "swatch", style: { borderColor: `var(--run-${index % 6})` } }), run.name)) : [];
  for (const kind of Object.keys(MARKS)) if (kinds.has(kind)) items.push(make("li", {},
    make("span", { class: "tick", style: { borderColor: `var(--${kind})` } }), MARKS[kind]));
  $("key").replaceChildren(...(items.length ? [make("ul", { "aria-label": "Key" }, ...items)] : []));
}

/** Colour and dashes of a line: several runs differ by colour, lines of one run otherwise, too. */
function styles(chart) {
  const counts = {};
  return chart.lines.map((line) => {
    if (line.kind === "predicted") return { name: `run-${line.run % 6}`, dash: [3, 5], width: 1.5, css: "dotted" };
    const at = counts[line.run] = (counts[line.run] ?? -1) + 1;
    const name = data.runs.length > 1 ? line.run : at;
    return { name: `run-${name % 6}`, dash: data.runs.length > 1 ? DASHES[at % 4] : [], width: 1.75, css: data.runs.length > 1 && at ? (at === 1 ? "dashed" : "dotted") : "" };
  });
}

function columns(chart) {
  const tables = chart.lines.map((line) => {
    const kept = line[axis].map((x, at) => at).filter((at) => line[axis][at] !== null);
    return [kept.map((at) => line[axis][at]), kept.map((at) => line.y[at])];
  });
  // So that the axis reaches as far as the marks do; the column itself is not drawn.
  const places = [...new Set(data.runs.flatMap((run) => run.marks.map((mark) => mark[axis])))];
  const marked = places.filter((x) => x !== null).sort((a, b) => a - b);
  return uPlot.join([...tables, [marked, marked.map(() => null)]]).slice(0, -1);
}

function labelOf(line, chart) {
  const parts = [data.runs.length > 1 ? data.runs[line.run].name : "", line.label || (chart.lines.length > 1 && data.runs.length === 1 ? "measured" : "")];
  if (chart.id === "loss" && !line.label && data.runs.length === 1 && chart.lines.length > 1) parts[1] = "training";
  return parts.filter(Boolean).join(", ");
}

function summary(chart) {
  return chart.lines.map((line) => {
    const ys = line.y.filter((y) => y !== null), name = labelOf(line, chart);
    if (line.kind === "predicted") return `${name} ${number(ys[0])}`;
    return `${name} from ${number(ys[0])} to ${number(ys.at(-1))}, lowest ${number(Math.min(...ys))}, highest ${number(Math.max(...ys))}`.trim();
  }).join("; ");
}

function labelled(chart) {
  return `${chart.title}. ${summary(chart)}. Arrow keys move along the curve.`;
}

function placeMarks(u) {
  u.root.querySelectorAll(".mark").forEach((mark) => mark.remove());
  const seen = new Set(), { min, max } = u.scales.x;
  data.runs.forEach((run, index) => run.marks.forEach((mark) => {
    const x = mark[axis];
    if (x === null || x < min || x > max) return;
    const at = u.valToPos(x, "x"), same = `${mark.kind} ${Math.round(at)}`;
    if (seen.has(same)) return;
    seen.add(same);
    u.over.append(make("div", { class: `mark ${mark.kind}`, "data-kind": mark.kind, "data-step": mark.step,
      "data-run": index, "aria-hidden": "true", style: { left: `${at}px` } }));
  }));
}

function valueAt(values, at) {
  while (at > 0 && values[at] === undefined) at--;
  return values[at];
}

function readout(item, at) {
  const { chart, u, list, looks } = item, xs = u.data[0];
  const where = at === null || at === undefined ? null : xs[at];
  const last = xs.length - 1;
  const parts = chart.lines.map((line, index) => {
    const value = valueAt(u.data[index + 1], at ?? last);
    return make("li", {}, make("span", { class: `swatch ${looks[index].css}`, style: { borderColor: `var(--${looks[index].name})` } }),
      labelOf(line, chart), " ", make("b", {}, number(value)));
  });
  list.replaceChildren(make("li", {}, where === null ? "last" : `${axis} ${number(where)}`), ...parts);
  return list.textContent;
}

function plot(chart) {
  const looks = styles(chart), box = make("div", { class: "plot" });
  const list = make("ul", { class: "readout" });
  const name = `chart-${charts.length}`;
  const figure = make("figure", { id: name, tabindex: "0", role: "group", "data-chart": chart.id, "aria-label": labelled(chart) },
    make("figcaption", {}, chart.title, " ", make("span", { class: "unit" }, chart.unit)), list, box);
  $("grid").append(figure);
  const positive = chart.lines.every((line) => line.y.every((y) => y === null || y > 0));
  const dim = colour("dim"), grid = { stroke: colour("grid"), width: 1 }, ticks = { show: false };
  const item = { chart, looks, list, figure };
  const options = {
    width: Math.max(200, box.clientWidth), height: 230, legend: { show: false }, padding: [10, 12, 0, 0],
    cursor: { sync: { key: "dmt" }, drag: { x: true, y: false }, points: { size: 7 } },
    scales: { x: { time: false }, y: { distr: log && chart.log && positive ? 3 : 1 } },
    axes: [
      { stroke: dim, grid, ticks, size: 34, values: (u, all) => all.map(compact) },
      { stroke: dim, grid, ticks, size: 58, values: (u, all) => all.map((y) => (y === null ? "" : compact(y))) },
    ],
    series: [{}, ...chart.lines.map((line, index) => ({
      stroke: colour(looks[index].name), width: looks[index].width, dash: looks[index].dash,
      points: { show: line.kind === "points" || line.y.length === 1, size: 6 },
    }))],
    hooks: {
      draw: [placeMarks],
      setCursor: [(u) => item.u && readout(item, u.cursor.idx)],
    },
  };
  item.u = new uPlot(options, columns(chart), box);
  readout(item, null);
  new ResizeObserver(() => {
    const width = box.clientWidth;
    if (width && width !== item.u.width) item.u.setSize({ width, height: 230 });
  }).observe(box);
  figure.addEventListener("keydown", (event) => keys(event, item));
  charts.push(item);
}

function keys(event, item) {
  const { u } = item, last = u.data[0].length - 1;
  const at = item.at ?? last;
  const jump = event.shiftKey ? Math.max(1, Math.round(last / 20)) : 1;
  const next = { ArrowLeft: at - jump, ArrowRight: at + jump, Home: 0, End: last }[event.key];
  if (event.key === "Escape") u.setScale("x", { min: u.data[0][0], max: u.data[0][last] });
  if (next === undefined) return;
  event.preventDefault();
  item.at = Math.min(last, Math.max(0, next));
  u.setCursor({ left: u.valToPos(u.data[0][item.at], "x"), top: 1 });
  $("announce").textContent = readout(item, item.at);
}

function draw() {
  charts.forEach((item) => item.u.destroy());
  charts = [];
  $("grid").replaceChildren();
  data.charts.forEach(plot);
  if (!data.charts.length) $("grid").append(make("p", {}, "No step is logged yet."));
  document.body.dataset.drawn = String(charts.length);
}

function table([head, ...rows], title) {
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title },
    make("table", {}, make("thead", {}, make("tr", {}, ...head.map((cell) => make("th", { scope: "col" }, cell)))),
      make("tbody", {}, ...rows.map(([first, ...cells]) => make("tr", {}, make("th", { scope: "row" }, first),
        ...cells.map((cell) => make("td", {}, cell)))))));
}

function bar(parts) {
  const all = parts.reduce((sum, [, amount]) => sum + amount, 0) || 1;
  const tone = (index) => `var(--part-${Math.min(index, 8)})`;
  return [
    make("div", { class: "stack", "aria-hidden": "true" }, ...parts.map(([, amount], index) =>
      make("span", { style: { width: `${(100 * amount) / all}%`, background: tone(index) } }))),
    make("table", {}, make("tbody", {}, ...parts.map(([name, , text], index) => make("tr", {},
      make("th", { scope: "row" }, make("span", { class: "box", "aria-hidden": "true", style: { background: tone(index) } }), name),
      make("td", {}, text))))),
  ];
}

function card(section) {
  const parts = [make("h3", {}, section.title)];
  if (section.note) parts.push(make("p", {}, section.note));
  if (section.bar) parts.push(...bar(section.bar));
  if (section.facts) parts.push(make("table", {}, make("tbody", {}, ...section.facts.map(([name, text]) =>
    make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, text))))));
  if (section.items && section.items.length) parts.push(make("ul", {}, ...section.items.map((one) => make("li", {}, one))));
  if (section.table) parts.push(table(section.table, section.title));
  if (section.text) parts.push(make("details", {}, make("summary", {}, section.open), make("pre", {}, section.text)));
  return make("section", { class: "card", "aria-label": section.title }, ...parts);
}

function runs() {
  const opened = [...document.querySelectorAll("details")].map((one) => one.open);
  $("comparison").replaceChildren(...(data.comparison ? [card(data.comparison)] : []));
  $("runs").replaceChildren(...data.runs.map((run) => {
    const events = run.marks.map((mark) => [String(mark.step), mark.word, mark.time, mark.what]);
    const cards = run.sections.map(card);
    if (events.length) cards.splice(2, 0, card({ title: "What happened", table: [["step", "event", "time (UTC)", "why"], ...events] }));
    return make("section", { class: "run" }, make("h2", {}, data.runs.length > 1 ? run.name : "The run"), make("div", { class: "cards" }, ...cards));
  }));
  [...document.querySelectorAll("details")].forEach((one, at) => { one.open = opened[at] ?? false; });
}

function render() {
  header(); warnings(); key(); runs();
}

/** New data into the charts that are there; zoomed ones stay where they are. */
function refresh() {
  render();
  const same = data.charts.length === charts.length && data.charts.every((chart, at) =>
    chart.id === charts[at].chart.id && chart.lines.length === charts[at].chart.lines.length);
  if (!same) { draw(); return; }
  charts.forEach((item, at) => {
    const xs = item.u.data[0], { min, max } = item.u.scales.x;
    const whole = xs.length === 0 || (min <= xs[0] && max >= xs.at(-1));
    item.chart = data.charts[at];
    item.u.setData(columns(item.chart), whole);
    if (!whole) item.u.setScale("x", { min, max });
    item.figure.setAttribute("aria-label", labelled(item.chart));
    readout(item, null);
  });
}

let source = null;
function lost(why) { $("lost").replaceChildren(...(why ? [make("p", { class: "warning", role: "status" }, why)] : [])); }

/** News from the server, while somebody looks. */
function listen() {
  source?.close();
  source = document.hidden ? null : new EventSource(`news?${data.version}`);
  if (!source) return;
  source.onopen = () => lost("");
  source.onmessage = (event) => { data = JSON.parse(event.data); lost(""); refresh(); };
  source.addEventListener("lost", (event) => lost(JSON.parse(event.data)));
  source.onerror = () => {
    lost("The server does not answer; this is what it said last.");
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("beforeprint", () => { document.documentElement.style.colorScheme = "light"; draw(); });
addEventListener("afterprint", () => { document.documentElement.style.colorScheme = ""; draw(); });
controls(); render(); draw();
if (data.version) { listen(); addEventListener("visibilitychange", listen); }
})();
