"use strict";
(() => {
const $ = (id) => document.getElementById(id);
let data = JSON.parse($("data").textContent);
const AXES = { step: "step", tokens: "tokens", hours: "training time" };
const HEIGHT = 240, AXIS_FONT = "12px system-ui, sans-serif";
const MARKS = { skip: "skipped step", restart: "restart after a failure", resume: "resumed",
  hang: "hang", signal: "signal", end: "ended early", change: "setting changed", stage: "data stage" };
const COLOURS = 6, LINES_EACH = 3;
/** Three for the lines of a run; the next three are of the runs whose colours come again. */
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [4, 4], [10, 3, 2, 3, 2, 3], [16, 4], [6, 3, 6, 8], [16, 3, 5, 3]];
const PREDICTED = [3, 5];
let axis = "step", log = false, minutes = false, charts = [];

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

/** As the terminal writes it: 0.00051, 5.1e-7; thousands are separated. */
function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return exponential(value, 5);
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1e4 ? 7 : 5 });
}

/** Short, of an axis; neighbours stay different. */
function compact(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e15)) return exponential(value, 4);
  return value.toLocaleString("en", { notation: size >= 1e4 ? "compact" : "standard", maximumSignificantDigits: 4 });
}

function exponential(value, digits) {
  return String(Number(value.toPrecision(digits)).toExponential()).replace("e+", "e");
}

/** Colour and dashes of the line `at` of a run, or of one of many lines of one run. */
function look(index, at = 0) {
  return { name: `run-${index % COLOURS}`, width: 1.75,
    dash: DASHES[(LINES_EACH * Math.floor(index / COLOURS) + at) % DASHES.length] };
}

/** A short piece of a line, as charts draw it. */
function swatch({ name, dash }) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = document.createElementNS(svg.namespaceURI, "path");
  svg.setAttribute("class", "swatch");
  svg.setAttribute("aria-hidden", "true");
  line.setAttribute("d", "M0 2H24");
  line.setAttribute("stroke-dasharray", dash.join(" "));
  line.style.stroke = `var(--${name})`;
  svg.append(line);
  return svg;
}

/** Fill a part of the page unless it shows just that; a reader in it stays where they are. */
function put(part, value, build) {
  const shown = JSON.stringify(value);
  if (part.shown === shown) return;
  part.shown = shown;
  keepPlace(part, () => part.replaceChildren(...build()));
}

/** Rebuild what is in `part`: what is scrolled, opened or has the focus is so afterwards, too. */
function keepPlace(part, rebuild) {
  const before = new Map([...named(part)].map(([name, one]) =>
    [name, { left: one.scrollLeft, top: one.scrollTop, open: one.open, focused: one === document.activeElement }]));
  rebuild();
  for (const [name, one] of named(part)) {
    const old = before.get(name);
    if (old?.open) one.open = true;
    if (old?.left || old?.top) one.scrollTo(old.left, old.top);
    if (old?.focused) one.focus({ preventScroll: true });
  }
}

/** What a reader can be in, by a name that it has again when it is rebuilt. */
function named(part) {
  const found = new Map();
  for (const one of part.querySelectorAll("[id], [aria-label], button, details, summary")) {
    let name = one.id || one.getAttribute("aria-label") || one.tagName;
    while (found.has(name)) name += "'";
    found.set(name, one);
  }
  return found;
}

function header() {
  const title = data.runs.length === 1 ? data.runs[0].name : `${data.runs.length} runs`;
  document.title = `${title} – DMT ${data.kind ?? "report"}`;
  put($("header"), data.runs.map((run) => [run.name, run.state, run.why, run.tiles]), () => heads(title));
}

function heads(title) {
  const theme = make("button", { type: "button", id: "theme" }, "Light or dark");
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
      : make("h2", {}, swatch(look(index)), " ", run.name);
    parts.push(make("div", { class: "run-head" }, name,
      make("span", { class: `state ${run.state}` }, run.state),
      data.runs.length === 1 ? theme : null,
      run.why ? make("span", { class: "why" }, run.why) : null));
    parts.push(make("dl", { class: "tiles" }, ...run.tiles.map(([what, amount, remark]) =>
      make("div", { class: "tile" }, make("dt", {}, what), make("dd", { class: "amount" }, amount),
        make("dd", { class: "remark" }, remark)))));
  });
  return parts;
}

function warnings() {
  const found = data.runs.flatMap((run) => [
    ...run.missing.map((what) => (data.runs.length > 1 ? `${run.name}: ${what}` : what)),
    ...(run.more_marks ? [`${run.name}: ${run.more_marks} earlier events are not marked`] : []),
  ]);
  put($("warnings"), found, () => (found.length ? [make("div", { class: "warning", role: "note" },
    make("strong", {}, "What is missing"), make("ul", {}, ...found.map((what) => make("li", {}, what))))] : []));
}

function controls() {
  if (data.kind === "tuning") { $("charts").closest("section").hidden = true; return; }
  if (data.coordinates) {
    $("charts").textContent = "Trials";
    document.querySelector(".bar-of-controls + .hint").remove();
    return;
  }
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
  const names = data.runs.length > 1 ? data.runs.map((run) => run.name) : [];
  const marks = Object.keys(MARKS).filter((kind) => kinds.has(kind));
  const items = () => [
    ...names.map((name, index) => make("li", {}, swatch(look(index)), name)),
    ...marks.map((kind) => make("li", {}, make("span", { class: `tick ${kind}` }), MARKS[kind])),
  ];
  put($("key"), [names, marks], () => (names.length + marks.length ? [make("ul", { "aria-label": "Key" }, ...items())] : []));
}

/** Colour and dashes of a line: several runs differ by colour, lines of one run otherwise, too. */
function styles(chart) {
  const counts = {}, several = data.runs.length > 1;
  return chart.lines.map((line) => {
    if (line.kind === "predicted") return { ...look(line.run), dash: PREDICTED, width: 1.5 };
    const at = counts[line.run] = (counts[line.run] ?? -1) + 1;
    return several ? look(line.run, at) : look(at);
  });
}

/** Where something is on the x axis: a line's column, or a mark's place. */
function place({ [axis]: found }) {
  const scaled = (x) => (x === null || unit() !== "minutes" ? x : 60 * x);
  return Array.isArray(found) ? found.map(scaled) : scaled(found);
}

/** Were runs trained for less than an hour? Then the axis has minutes. */
function areShort() {
  return data.charts.every((chart) => chart.lines.every((line) => line.hours.every((x) => x < 1)));
}

function unit() { return axis === "hours" && minutes ? "minutes" : axis; }

function columns(chart) {
  const tables = chart.lines.map((line) => {
    const xs = place(line), kept = xs.map((x, at) => at).filter((at) => xs[at] !== null);
    return [kept.map((at) => xs[at]), kept.map((at) => line.y[at])];
  });
  // So that the axis reaches as far as the marks do; the column itself is not drawn.
  const places = [...new Set(data.runs.flatMap((run) => run.marks.map(place)))];
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

/** What the page drew is thinned: of how many logged lines. */
function thinned(chart) {
  const counts = chart.lines.filter((line) => line.thinned).map((line) => data.runs[line.run].lines);
  return counts.length ? ` · lowest and highest of ${[...new Set(counts)].map((count) => count.toLocaleString("en")).join(" and ")} logged lines` : "";
}

/** Of several marks on one pixel, each has its triangle below the one before. */
function placeMarks(u) {
  u.root.querySelectorAll(".mark").forEach((mark) => mark.remove());
  const seen = new Set(), rows = {}, { min, max } = u.scales.x;
  data.runs.forEach((run, index) => run.marks.forEach((mark) => {
    const x = place(mark);
    if (x === null || x < min || x > max) return;
    const at = u.valToPos(x, "x"), pixel = Math.round(at), same = `${index} ${mark.kind} ${pixel}`;
    if (seen.has(same)) return;
    seen.add(same);
    const row = mark.kind === "resume" ? 0 : (rows[pixel] = (rows[pixel] ?? -1) + 1);
    u.over.append(make("div", { class: `mark ${mark.kind}`, "data-kind": mark.kind, "data-step": mark.step, "data-run": index, "aria-hidden": "true",
      style: { left: `${at}px`, top: `${7 * row}px`, borderLeftColor: data.runs.length > 1 ? `var(--${look(index).name})` : "" } }));
  }));
}

/** What happened at a place of the x axis, to within some pixels. */
function marksAt(u, x) {
  const reach = Math.abs(u.posToVal(4, "x") - u.posToVal(0, "x"));
  const near = (mark) => place(mark) !== null && Math.abs(place(mark) - x) <= reach;
  const found = data.runs.flatMap((run) => run.marks.filter(near).map((mark) =>
    `${data.runs.length > 1 ? `${run.name}: ` : ""}${MARKS[mark.kind]}, step ${number(mark.step)}`));
  const texts = [...new Set(found)];
  return texts.length > 4 ? [...texts.slice(0, 3), `${texts.length - 3} more`] : texts;
}

/** The value of a line at or before an index; none behind its end. */
function valueAt(values, at) {
  if (values.findLastIndex((value) => value !== undefined) < at) return null;
  while (at > 0 && values[at] === undefined) at--;
  return values[at];
}

function readout(item, at) {
  const { chart, u, list, looks, label } = item, xs = u.data[0];
  const where = at === null || at === undefined ? null : xs[at];
  const parts = chart.lines.map((line, index) => {
    const values = u.data[index + 1];
    const value = where === null ? values.findLast((y) => y !== undefined) : valueAt(values, at);
    return make("li", {}, swatch(looks[index]), labelOf(line, chart), " ", make("b", {}, number(value)));
  });
  list.replaceChildren(make("li", {}, where === null ? "last" : `${unit()} ${number(where)}`), ...parts);
  const marks = where === null ? [] : marksAt(u, where);
  label.replaceChildren(...marks.map((text) => make("div", {}, text)));
  label.hidden = !marks.length;
  const left = marks.length ? u.valToPos(where, "x") : 0, width = u.bbox.width / devicePixelRatio;
  Object.assign(label.style, left > width / 2 ? { left: "", right: `${width - left + 8}px` } : { left: `${left + 8}px`, right: "" });
  return [...[...list.children].map((one) => one.textContent), ...marks].join(", ");
}

function plot(chart) {
  const looks = styles(chart), box = make("div", { class: "plot" });
  const list = make("ul", { class: "readout" }), label = make("div", { class: "at-mark", hidden: "", "aria-hidden": "true" });
  const note = make("span", { class: "unit" }, thinned(chart));
  const name = `chart-${charts.length}`;
  const figure = make("figure", { id: name, tabindex: "0", role: "group", "data-chart": chart.id, "aria-label": labelled(chart) },
    make("figcaption", {}, chart.title, " ", make("span", { class: "unit" }, chart.unit), note), list, box);
  $("grid").append(figure);
  const positive = chart.lines.every((line) => line.y.every((y) => y === null || y > 0));
  const dim = colour("dim"), grid = { stroke: colour("grid"), width: 1 }, ticks = { show: false };
  const item = { chart, looks, list, label, note, figure };
  const options = {
    width: Math.max(200, box.clientWidth), height: HEIGHT, legend: { show: false }, padding: [10, 24, 0, 0],
    cursor: { sync: { key: "dmt" }, drag: { x: true, y: false }, points: { size: 7 } },
    scales: { x: { time: false }, y: { distr: log && chart.log && positive ? 3 : 1 } },
    axes: [
      { stroke: dim, grid, ticks, size: 24, values: (u, all) => all.map(compact),
        label: () => (axis === "hours" ? `${unit()} of training` : axis), labelSize: 18, labelFont: AXIS_FONT },
      { stroke: dim, grid, ticks, size: 66, values: (u, all) => all.map((y) => (y === null ? "" : compact(y))) },
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
  item.u.over.append(label);
  readout(item, null);
  new ResizeObserver(() => {
    const width = box.clientWidth;
    if (width && width !== item.u.width) item.u.setSize({ width, height: HEIGHT });
  }).observe(box);
  figure.addEventListener("keydown", (event) => keys(event, item));
  charts.push(item);
}

function keys(event, item) {
  const { u } = item, last = u.data[0].length - 1;
  const at = item.at ?? last;
  const jump = event.shiftKey ? Math.max(1, Math.round(last / 20)) : 1;
  const next = { ArrowLeft: at - jump, ArrowRight: at + jump, Home: 0, End: last }[event.key];
  if (event.key === "Escape") charts.forEach((each) => each.u.setData(each.u.data));
  if (next === undefined) return;
  event.preventDefault();
  item.at = Math.min(last, Math.max(0, next));
  u.setCursor({ left: u.valToPos(u.data[0][item.at], "x"), top: 1 });
  $("announce").textContent = readout(item, item.at);
}

/** Every trial of a search as a line over its settings to its loss, the better the bolder. */
function coordinates({ title, note, axes, lines }) {
  const width = Math.max(480, 150 * axes.length, $("grid").clientWidth - 34), height = 330, top = 40, bottom = height - 20;
  const x = (axis) => 70 + (axis * (width - 140)) / Math.max(1, axes.length - 1), y = (share) => bottom - share * (bottom - top);
  const shape = (tag, attributes, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", class: "coordinates",
    "aria-label": `${title}. ${lines.length ? `Best: ${lines[0][3]}` : "No trial has a loss yet"}. The table below has all trials.` });
  for (const [places, rank, done, text] of [...lines].reverse()) {
    const points = places.map((share, axis) => (share === null ? null : `${x(axis)},${y(share)}`)).filter(Boolean);
    svg.append(shape("polyline", { points: points.join(" "), class: rank === 0 ? "best" : "", "stroke-dasharray": done ? "" : "5 4",
      "stroke-width": rank === 0 ? 3 : 1.5, opacity: rank === 0 ? 1 : 0.75 - 0.55 * rank }, shape("title", {}, text)));
  }
  axes.forEach(([name, ticks], axis) => {
    svg.append(shape("line", { x1: x(axis), x2: x(axis), y1: top, y2: bottom }), shape("text", { x: x(axis), y: 14, class: "name" }, name));
    for (const [share, text] of ticks) svg.append(shape("text", { x: x(axis) + 5, y: y(share) + (share === 1 ? -5 : share === 0 ? 15 : 4) }, text));
  });
  $("grid").append(make("figure", { class: "wide" }, make("figcaption", {}, title), make("p", { class: "hint" }, note),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, svg)));
}

function draw() {
  const top = scrollY;
  minutes = areShort();
  charts.forEach((item) => item.u.destroy());
  charts = [];
  keepPlace($("grid"), () => {
    $("grid").replaceChildren();
    data.charts.forEach(plot);
    (data.coordinates ?? []).forEach(coordinates);
    if (!$("grid").children.length) $("grid").append(make("p", {}, "No step is logged yet."));
  });
  document.body.dataset.drawn = String(charts.length);
  scrollTo(0, top);
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

/** Several bars of the same parts on one scale, with the limit that all have. */
function stacks({ parts, rows, limit }) {
  const tone = (index) => `var(--part-${Math.min(index, 8)})`, sum = (sizes) => sizes.reduce((all, size) => all + size, 0);
  const most = Math.max(limit ? limit[0] : 0, ...rows.map(([, , , sizes]) => sum(sizes)));
  const used = parts.map((name, index) => [name, index]).filter(([, index]) => rows.some(([, , , sizes]) => sizes[index] > 1e-3 * most));
  const share = (size) => `${(100 * size) / most}%`;
  const key = make("ul", { class: "kinds" }, ...used.map(([name, index]) =>
    make("li", {}, make("span", { class: "box", "aria-hidden": "true", style: { background: tone(index) } }), name)));
  if (limit) key.append(make("li", {}, make("span", { class: "box limit-key", "aria-hidden": "true" }), limit[1]));
  return [key, make("table", { class: "stacks" }, make("tbody", {}, ...rows.map(([name, text, over, sizes], row) =>
    make("tr", { class: row ? null : "chosen" }, make("th", { scope: "row" }, name),
      make("td", {}, make("div", { class: "scale", role: "img", "aria-label": used.map(([part, index]) => `${part} ${number(sizes[index])}`).join(", ") },
        make("div", { class: "stack", style: { width: share(sum(sizes)) } }, ...sizes.map((size, index) =>
          make("span", { style: { width: `${(100 * size) / (sum(sizes) || 1)}%`, background: tone(index) } }))),
        limit ? make("span", { class: "limit", style: { left: share(limit[0]) } }) : null)),
      make("td", { class: over ? "over" : null }, text)))))];
}

function card(section) {
  return make("section", { class: section.stacks || (data.kind === "tuning" && section.table) ? "card wide" : "card", "aria-label": section.title });
}

function contents(section) {
  const parts = [make("h3", {}, section.title)];
  if (section.note) parts.push(make("p", {}, section.note));
  if (section.bar) parts.push(...bar(section.bar));
  if (section.stacks) parts.push(...stacks(section.stacks));
  if (section.facts) parts.push(make("table", {}, make("tbody", {}, ...section.facts.map(([name, text]) =>
    make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, text))))));
  if (section.items && section.items.length) parts.push(make("ul", {}, ...section.items.map((one) => make("li", {}, one))));
  if (section.table) parts.push(table(section.table, section.title));
  if (section.text) parts.push(make("details", {}, make("summary", {}, section.open), make("pre", {}, section.text)));
  return parts;
}

/** Cards, of which those that say something else are filled again. */
function cards(part, sections) {
  keepPlace(part, () => {
    put(part, sections.map((section) => section.title), () => sections.map(card));
    sections.forEach((section, at) => put(part.children[at], section, () => contents(section)));
  });
}

function sectionsOf(run) {
  const events = run.marks.map((mark) => [String(mark.step), mark.word, mark.time, mark.what]);
  const found = [...run.sections];
  if (events.length) found.splice(2, 0, { title: "What happened", table: [["step", "event", "time (UTC)", "why"], ...events] });
  return found;
}

function runs() {
  cards($("comparison"), data.comparison ? [data.comparison] : []);
  const names = data.runs.map((run) => (data.runs.length > 1 ? run.name : `The ${data.kind ?? "run"}`));
  put($("runs"), names, () => names.map((name) =>
    make("section", { class: "run" }, make("h2", {}, name), make("div", { class: "cards" }))));
  data.runs.forEach((run, at) => cards($("runs").children[at].lastChild, sectionsOf(run)));
}

function render() {
  header(); warnings(); key(); runs();
}

/** New data into the charts that are there; zoomed ones stay where they are. */
function refresh() {
  render();
  const same = minutes === areShort() && data.charts.length === charts.length && data.charts.every((chart, at) =>
    chart.id === charts[at].chart.id && chart.lines.length === charts[at].chart.lines.length);
  if (!same) { draw(); return; }
  charts.forEach((item, at) => {
    const xs = item.u.data[0], { min, max } = item.u.scales.x;
    const whole = xs.length === 0 || (min <= xs[0] && max >= xs.at(-1));
    item.chart = data.charts[at];
    item.u.setData(columns(item.chart), whole);
    if (!whole) item.u.setScale("x", { min, max });
    item.figure.setAttribute("aria-label", labelled(item.chart));
    item.note.textContent = thinned(item.chart);
    readout(item, item.u.cursor.idx);
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
/** Charts are pictures of a fixed width: drawn again for a sheet of paper, and back. */
function printing(colours, paper) {
  document.documentElement.style.colorScheme = colours;
  $("grid").classList.toggle("paper", paper);
  draw();
}
let chosen = "";
addEventListener("beforeprint", () => { chosen = document.documentElement.style.colorScheme; printing("light", true); });
addEventListener("afterprint", () => printing(chosen, false));
controls(); render(); draw();
if (data.version) { listen(); addEventListener("visibilitychange", listen); }
})();
