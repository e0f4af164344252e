// The controls, what is chosen, and the table.

const $ = (id) => document.getElementById(id);
function element(name, text, className) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

const heat = new Heat($("map"), $("map-tip"), select, toggle, (text) => { $("map-status").textContent = text; });
const depth = new Chart($("depth"), (p) => select(p.row, state.step), (by) => along(by));
const time = new Chart($("time"), (p) => select(state.row, p.step), (by) => select(state.row, Math.max(0, Math.min(STEPS - 1, state.step + by))));
let shown = [];

// --- changes of the state ---

function refilter() {
  shown = passing();
  heat.setLines(layout(shown));
  if (!shown.includes(state.row)) state.row = shown.length ? shown[0] : -1;
  const sites = `${whole(shown.length)} of ${whole(rows.kind.filter((_, r) => isBackward(r) === state.backward).length)} sites`;
  $("count").textContent = sites;
  $("expand").disabled = $("collapse").disabled = !heat.lines.some((line) => line.row < 0);
  table.page = PAGE;
  redraw();
}

function redraw() {
  heat.later();
  drawLegend();
  drawDetail();
  drawCharts();
  drawTable();
}

function toggle(group) {
  if (!state.open.delete(group)) state.open.add(group);
  heat.setLines(layout(shown));
}

// Chooses a cell. A row that the filters hide changes them, so that it is seen.
function select(row, step, reveal = false) {
  if (row < 0) return;
  const hidden = !shown.includes(row);
  state.row = row;
  state.step = step;
  if (hidden) {
    setDirection(isBackward(row));
    for (const name of ["filter", "kind", "rank"]) $(name).value = state[name] = "";
    $("findings").checked = state.findings = false;
  }
  if (reveal) state.open.add(rows.group[row]);
  if (hidden || reveal) {
    refilter();
    const at = heat.find(row, step);
    if (at) { heat.cursor = at; heat.reveal(at, true); }
  } else redraw();
}

function setDirection(backward) {
  state.backward = backward;
  $(backward ? "backward" : "forward").checked = true;
  const kinds = data.kinds.filter((kind) => rows.kind.some((k, r) => k === kind && isBackward(r) === backward));
  $("kind").replaceChildren(option("", "all kinds"), ...kinds.map((kind) => option(kind, kind.replace("_", " "))));
  state.kind = "";
}

function option(value, text) {
  const node = element("option", text);
  node.value = value;
  return node;
}

// The next or previous site of the shown ones, in the chosen step.
function along(by) {
  const drawn = depthRows(), at = drawn.indexOf(state.row);
  const next = drawn[Math.max(0, Math.min(drawn.length - 1, at + by))];
  if (next !== undefined) select(next, state.step);
}

// The next or previous finding in the order of steps and then of sites, of either direction, as [row, step] or null.
function neighbour(by) {
  const order = (row, step) => step * ROWS + row, from = order(state.row, state.step);
  let best = -1;
  for (let row = 0; row < ROWS; row++) {
    if (!rowFinding[row]) continue;
    for (let step = 0; step < STEPS; step++) {
      const at = order(row, step);
      if ((at - from) * by <= 0 || !finding(verdicts[row * STEPS + step])) continue;
      if (best < 0 || (at - best) * by < 0) best = at;
    }
  }
  return best < 0 ? null : [best % ROWS, Math.floor(best / ROWS)];
}

function seek(by) {
  const found = neighbour(by);
  if (found) select(...found, true);
}

// --- legend ---

function swatch(name, x, code, text) {
  const box = element("span", undefined, "swatch"), canvas = element("canvas");
  const scale = devicePixelRatio || 1;
  canvas.width = 19 * scale;
  canvas.height = 15 * scale;
  const c = canvas.getContext("2d");
  c.scale(scale, scale);
  c.textBaseline = "middle";
  drawCell(c, name, x, code, 0, 0, 19, 15);
  box.append(canvas, text);
  return box;
}

function drawLegend() {
  const name = state.metric, metric = METRICS[name], out = [];
  const code = (verdict) => data.severity.indexOf(verdict);
  const used = new Set(verdicts);
  if (!metric.categories) {
    const bar = element("span", undefined, "ramp"), n = 5;
    bar.style.background = `linear-gradient(to right, ${theme.ramp.filter((_, i) => i % 15 === 0).map(rgb).join(",")})`;
    const ticks = element("span", undefined, "ticks");
    const whole10 = metric.high - metric.low;
    const every = metric.log ? Math.ceil(whole10 / n) : 0.25;
    for (let y = metric.low; y <= metric.high + 1e-9; y += every) {
      const tick = element("span", metric.log ? decimal(y) : `${100 * y} %`);
      tick.style.left = `${(100 * (y - metric.low)) / whole10}%`;
      ticks.append(tick);
    }
    const scale = element("span", undefined, "scale");
    scale.append(bar, ticks);
    out.push(scale, swatch(name, 0, code("same"), "0"));
    if (metric.values.includes(Infinity)) out.push(swatch(name, Infinity, code("differs"), "not finite"));
    if (metric.values.some((x, i) => x !== x && verdicts[i] !== NONE && verdicts[i] !== code("unknown"))) out.push(swatch(name, NaN, code("rounding"), "not measured"));
    for (const verdict of data.severity)
      if ((isFinding[code(verdict)] || verdict === "unknown") && used.has(code(verdict))) out.push(swatch(name, verdict === "unknown" ? NaN : 10 ** metric.high, code(verdict), data.words[verdict]));
  } else for (const verdict of data.severity) out.push(swatch(name, code(verdict), code(verdict), data.words[verdict]));
  if (data.first.length) out.push(ringed());
  $("legend").replaceChildren(...out);
}

function ringed() {
  const box = element("span", undefined, "swatch");
  box.append(element("i", undefined, "first-mark"), "first");
  return box;
}

// --- the chosen cell ---

function judged(verdict) {
  return element("span", (finding(verdict) ? "▲ " : "") + words(verdict), tone(verdict));
}

function drawDetail() {
  const { row, step } = state, box = $("detail");
  for (const [id, by] of [["previous", -1], ["next", 1]]) $(id).disabled = !neighbour(by);
  if (row < 0 || !STEPS) {
    box.replaceChildren(element("p", "No site is chosen.", "soft"));
    return;
  }
  const facts = element("dl");
  const add = (term, ...nodes) => { const d = element("dd"); d.append(...nodes); facts.append(element("dt", term), d); };
  const i = row * STEPS + step;
  add("Step", String(data.steps[step]));
  for (const [term, text] of numbers(row, step)) {
    add(term, term === "Verdict" ? judged(verdicts[i]) : text);
  }
  if (values.differing[i] === values.differing[i]) add("Elements", `${whole(values.differing[i])} of ${whole(values.compared[i])} differ`);
  add("Kind", rows.kind[row].replace("_", " "));
  add("B's site", element("code", rows.b[row]));
  add("Matched by", rows.matched[row] + (rows.transposed[row] ? ", transposed" : ""));
  add("Shape", element("code", `[${rows.shape[row].join(", ")}]`));
  add("Dtype", element("code", rows.dtype[row]));
  if (severalRanks) add("Rank", String(rows.rank[row]));
  const steps = [...Array(STEPS).keys()].filter((s) => finding(verdicts[row * STEPS + s]));
  add("Findings", steps.length ? `${steps.length} of ${STEPS} steps, first at step ${data.steps[steps[0]]}` : "none in any step");
  const inputs = rows.inputs[row];
  if (inputs) add("Computed from", ...(inputs.length ? inputs.map((input) => link(input, step, kinded(input))) : ["no recorded site"]));
  box.replaceChildren(element("code", tensor(row), "name"), facts);
}

function link(row, step, text = tensor(row)) {
  const button = element("button", text, "link");
  button.addEventListener("click", () => select(row, step, true));
  return button;
}

// --- charts ---

// Without a kind to choose, the depth is that of activations: parameters have none.
function depthRows() {
  return state.kind ? shown : shown.filter((row) => !rows.kind[row].startsWith("parameter"));
}

function drawCharts() {
  const name = state.metric === "verdict" ? "relative" : state.metric, metric = METRICS[name];
  const point = (row, step, x, title) => ({ x, y: metric.values[row * STEPS + step], code: verdicts[row * STEPS + step], row, step, title });
  const drawn = STEPS ? depthRows() : [];
  const points = drawn.map((row, x) => point(row, state.step, x, tensor(row)));
  const marks = [];
  let begin = 0;
  for (let x = 1; x <= drawn.length; x++)
    if (x === drawn.length || rows.group[drawn[x]] !== rows.group[drawn[begin]]) {
      const title = data.groups[rows.group[drawn[begin]]];
      marks.push([(begin + x - 1) / 2, title.length > 18 ? "…" + title.slice(-17) : title]);
      begin = x;
    }
  const where = state.backward ? "backward" : "forward", now = STEPS ? data.steps[state.step] : "–";
  $("depth-title").textContent = `Growth along depth, ${where}, step ${now}`;
  depth.draw(metric, points, marks, drawn.indexOf(state.row), `${metric.title} over ${points.length} sites, step ${now}. Arrow keys choose a site.`,
    `sites in the order of A's ${where} computation`);
  const over = state.row < 0 ? [] : Array.from({ length: STEPS }, (_, s) => point(state.row, s, s, `step ${data.steps[s]}`));
  $("time-title").textContent = state.row < 0 ? "Over steps" : `Over steps: ${tensor(state.row)}`;
  time.draw(metric, over, over.filter((p) => p.x % nice(STEPS / 12) === 0).map((p) => [p.x, String(data.steps[p.x])]), state.step, `${metric.title} over ${STEPS} steps. Arrow keys choose a step.`, "step");
}

// --- table ---

const PAGE = 25;
const table = { sort: "verdict", down: true, page: PAGE };
const COLUMNS = [
  ["name", "Site"], ["kind", "Kind"], ["step", "Step"], ["dtype", "Dtype"], ["relative", "Relative rms"], ["ulp", "ULP"],
  ["share", "Differ"], ["noise", "R"], ["verdict", "Verdict"], ["matched", "Matched by"],
].filter(([name]) => name !== "noise" || METRICS.noise.any);
const NUMERIC = new Set(["step", "relative", "ulp", "share", "noise"]);

// A row's worst step: by verdict, then by the distance of the references if that is the finding, else by R and others.
const worstStep = Int32Array.from({ length: ROWS }, (_, row) => {
  let best = 0;
  for (let s = 1; s < STEPS; s++) if (worse(row * STEPS + s, row * STEPS + best)) best = s;
  return best;
});

function worse(i, j) {
  const code = (k) => (verdicts[k] === NONE ? -1 : verdicts[k]);
  if (code(i) !== code(j)) return code(i) > code(j);
  for (const name of data.severity[code(i)] === "definition" ? ["definition"] : ["noise", "relative", "ulp"]) {
    const x = values[name][i], y = values[name][j];
    if (x > y || (x === x && y !== y)) return true;
    if (x < y || (y === y && x !== x)) return false;
  }
  return false;
}

function drawTable() {
  const only = $("scope").value === "step";
  const step = (row) => (only ? state.step : worstStep[row]);
  const key = { name: tensor, kind: (r) => rows.kind[r], step, dtype: (r) => rows.dtype[r], matched: (r) => rows.matched[r] };
  const of = key[table.sort] ?? ((row) => values[table.sort][row * STEPS + step(row)]);
  const order = (a, b) => {
    if (table.sort === "verdict") {
      const i = a * STEPS + step(a), j = b * STEPS + step(b);
      return worse(i, j) ? -1 : worse(j, i) ? 1 : a - b;
    }
    const x = of(a), y = of(b);
    if (typeof x === "string") return x < y ? -1 : x > y ? 1 : a - b;
    return (x === x ? x : -1) - (y === y ? y : -1) || a - b;
  };
  const sign = table.down === (table.sort === "verdict") ? 1 : -1;
  const sorted = STEPS ? [...shown].sort((a, b) => sign * order(a, b) || a - b) : [];
  $("rows").replaceChildren(...sorted.slice(0, table.page).map((row) => tableRow(row, step(row))));
  $("more").hidden = sorted.length <= table.page;
  $("more").textContent = `Show more (${whole(Math.min(table.page, sorted.length))} of ${whole(sorted.length)})`;
  $("empty").hidden = sorted.length > 0;
  $("empty").textContent = ROWS ? "No site passes the filters." : "No sites were compared.";
  for (const th of $("heads").children) {
    const on = th.dataset.sort === table.sort;
    th.setAttribute("aria-sort", on ? (table.down ? "descending" : "ascending") : "none");
  }
}

function tableRow(row, step) {
  const tr = element("tr"), i = row * STEPS + step;
  if (row === state.row) tr.className = "chosen";
  for (const [name] of COLUMNS) {
    const td = element("td", undefined, NUMERIC.has(name) ? "n" : "");
    if (name === "name") td.append(link(row, step));
    else if (name === "step") td.textContent = data.steps[step];
    else if (name === "verdict") td.append(judged(verdicts[i]));
    else if (name === "kind") td.textContent = rows.kind[row].replace("_", " ");
    else if (name in values) td.textContent = show(name, values[name][i]);
    else td.textContent = rows[name][row];
    tr.append(td);
  }
  return tr;
}

function sortBy(name) {
  table.down = table.sort === name ? !table.down : NUMERIC.has(name) || name === "verdict";
  table.sort = name;
  drawTable();
}

// --- beginning ---

function begin() {
  readTheme();
  $("metric").replaceChildren(...Object.entries(METRICS).filter(([, m]) => m.any || m === METRICS.relative).map(([name, m]) => option(name, m.title)));
  const ranks = [...new Set(rows.rank)];
  $("rank").replaceChildren(option("", "all ranks"), ...ranks.map((rank) => option(String(rank), `rank ${rank}`)));
  $("rank").hidden = !severalRanks;
  $("heads").replaceChildren(...COLUMNS.map(([name, title]) => {
    const th = element("th", undefined, NUMERIC.has(name) ? "n" : ""), button = element("button", title);
    th.scope = "col";
    th.dataset.sort = name;
    button.addEventListener("click", () => sortBy(name));
    th.append(button);
    return th;
  }));
  const on = (id, event, change) => $(id).addEventListener(event, () => { change($(id)); refilter(); });
  on("filter", "input", (node) => (state.filter = node.value));
  for (const name of ["kind", "rank"]) on(name, "change", (node) => (state[name] = node.value));
  on("findings", "change", (node) => (state.findings = node.checked));
  on("forward", "change", () => setDirection(false));
  on("backward", "change", () => setDirection(true));
  on("expand", "click", () => { for (const line of heat.lines) if (line.row < 0) state.open.add(line.group); });
  on("collapse", "click", () => state.open.clear());
  $("metric").addEventListener("change", () => { state.metric = $("metric").value; redraw(); });
  $("scope").addEventListener("change", drawTable);
  $("more").addEventListener("click", () => { table.page += 4 * PAGE; drawTable(); });
  $("previous").addEventListener("click", () => seek(-1));
  $("next").addEventListener("click", () => seek(1));
  for (const button of document.querySelectorAll("button[data-row]"))
    button.addEventListener("click", () => { select(+button.dataset.row, +button.dataset.step, true); $("map").focus(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readTheme(); redraw(); });
  addEventListener("resize", () => heat.resize());

  setDirection(ROWS > 0 && !rows.kind.some((_, row) => !isBackward(row)));
  if (ROWS <= 60) for (const group of rows.group) state.open.add(group);
  const [first] = data.first;
  if (first) select(first[0], first[1], true);
  else refilter();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}
begin();
