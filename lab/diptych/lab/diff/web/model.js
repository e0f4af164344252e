// The data in columns, the metrics, and the lines of the heat map that the filters leave.

const data = JSON.parse(document.getElementById("data").textContent);
const rows = data.rows;
const ROWS = rows.name.length;
const STEPS = data.steps.length;
const NONE = 255; // the verdict where a row has no cell
const isBackward = (row) => !data.forward.includes(rows.kind[row]);
const isFinding = data.severity.map((verdict) => !data.quiet.includes(verdict));
const finding = (verdict) => verdict !== NONE && isFinding[verdict];
const tone = (verdict) => (finding(verdict) ? "bad" : data.severity[verdict] === "unknown" || verdict === NONE ? "soft" : "good");
const words = (verdict) => (verdict === NONE ? "no cell" : data.words[data.severity[verdict]]);

const parsed = { inf: Infinity, "-inf": -Infinity, nan: NaN };
const number = (x) => (x === null ? NaN : typeof x === "string" ? parsed[x] : x);

// A column as float64 [ROWS * STEPS]; NaN: not measured.
function column(name) {
  const out = new Float64Array(ROWS * STEPS);
  data.cells[name].forEach((values, row) => {
    const start = row * STEPS;
    if (!Array.isArray(values)) out.fill(number(values), start, start + STEPS);
    else for (let i = 0; i < STEPS; i++) out[start + i] = typeof values[i] === "number" ? values[i] : number(values[i]);
  });
  return out;
}

const verdicts = new Uint8Array(ROWS * STEPS).fill(NONE);
data.verdicts.forEach((text, row) => {
  for (let i = 0; i < STEPS; i++) if (text[i] !== ".") verdicts[row * STEPS + i] = text.charCodeAt(i) - 48;
});
const values = {};
for (const name of Object.keys(data.cells)) values[name] = column(name);
values.share = values.differing.map((x, i) => (values.compared[i] > 0 ? x / values.compared[i] : NaN));
values.verdict = Float64Array.from(verdicts, (x) => (x === NONE ? NaN : x));

const METRICS = {
  relative: { title: "Relative rms", short: "Relative rms", axis: "rms(B − A) / rms(A)", log: true },
  noise: { title: "R: distance over rounding", short: "R", axis: "R = rms(B − H) / rms(A − H)", log: true, limit: 2 },
  ulp: { title: "Largest ULP distance", short: "ULP, at most", axis: "largest distance, ULP", log: true },
  share: { title: "Share of elements that differ", short: "Differ", axis: "share of elements that differ", log: false },
  definition: { title: "Distance of the references", short: "References", axis: "relative rms of H_B − H_A", log: true, limit: 1e-10 },
  verdict: { title: "Verdict", axis: "", categories: true },
};

// The smallest and largest of the positive finite values, and whether there is any value.
function extent(values) {
  let low = Infinity, high = -Infinity, any = false;
  for (let i = 0; i < values.length; i++) {
    const x = values[i];
    if (x === x) any = true;
    if (x > 0 && x !== Infinity) { if (x < low) low = x; if (x > high) high = x; }
  }
  return { low, high, any };
}

for (const [name, metric] of Object.entries(METRICS)) {
  metric.name = name;
  metric.values = values[name];
  const { low, high, any } = extent(metric.values);
  metric.any = any;
  metric.low = 0;
  metric.high = 1;
  if (metric.log) {
    metric.low = low === Infinity ? 0 : Math.floor(Math.log10(low) + 1e-9);
    metric.high = high === -Infinity ? 1 : Math.max(metric.low + 1, Math.ceil(Math.log10(high) - 1e-9));
  }
  // The place of a value on the scale, from 0 to 1.
  const place = (x) => ((metric.log ? Math.log10(x) : x) - metric.low) / (metric.high - metric.low);
  metric.place = (x) => Math.min(1, Math.max(0, place(x)));
}

// --- numbers as text ---

const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const power = (e) => "10" + String(e).replace(/./g, (c) => SUPERSCRIPT[c]);
const decimal = (e, k = 1) => (Math.abs(e) < 3 ? String(+(k * 10 ** e).toPrecision(1)) : k === 1 ? power(e) : `${k}·${power(e)}`);
const whole = (n) => String(n).replace(/\B(?=(\d{3})+$)/g, "\u202f"); // narrow no-break space

function show(name, x) {
  if (x !== x) return "–";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (name === "verdict") return words(x);
  if (name === "share") return x > 0 && x < 0.0001 ? "< 0.01 %" : `${+(100 * x).toPrecision(3)} %`;
  if (x === 0) return "0";
  if (name === "ulp") return x < 1e7 ? whole(x) : x.toExponential(1);
  return x >= 0.01 && x < 1e4 ? String(+x.toPrecision(3)) : x.toExponential(2);
}

const severalRanks = new Set(rows.rank).size > 1;
const tensor = (row) =>
  rows.name[row] + (rows.call[row] ? `#${rows.call[row]}` : "") + (severalRanks ? ` (rank ${rows.rank[row]})` : "");

// A site where its kind is not seen beside it: one name may be that of an activation and of its gradient.
const kinded = (row) => {
  const kind = rows.kind[row];
  if (kind === "activation") return tensor(row);
  return `${kind.endsWith("_grad") ? "gradient of" : kind} ${tensor(row)}`;
};

// A round number of steps between two labels, no less than `least`.
function nice(least) {
  const ten = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((k) => k * ten).find((n) => n >= least);
}

// All numbers of a cell, as [label, text].
function numbers(row, step) {
  const i = row * STEPS + step;
  const out = [["Verdict", words(verdicts[i])]];
  for (const name of ["relative", "noise", "ulp", "share", "definition"])
    if (METRICS[name].any) out.push([METRICS[name].short, show(name, values[name][i])]);
  return out;
}

// --- lines ---

const state = {
  backward: false, metric: "relative", filter: "", kind: "", rank: "", findings: false, open: new Set(),
  row: -1, step: 0,
};
const rowFinding = new Uint8Array(ROWS);
for (let i = 0; i < verdicts.length; i++) if (finding(verdicts[i])) rowFinding[(i / STEPS) | 0] = 1;

function passing() {
  const wanted = state.filter.toLowerCase();
  const out = [];
  for (let row = 0; row < ROWS; row++)
    if (isBackward(row) === state.backward && (!state.kind || rows.kind[row] === state.kind)
      && (state.rank === "" || rows.rank[row] === +state.rank) && (!state.findings || rowFinding[row])
      && (!wanted || tensor(row).toLowerCase().includes(wanted) || rows.b[row].toLowerCase().includes(wanted)))
      out.push(row);
  return out;
}

// The worst of some rows in each step: verdicts [STEPS] and a metric's values [STEPS].
function worst(members, name) {
  const codes = new Uint8Array(STEPS).fill(NONE), high = new Float64Array(STEPS).fill(NaN);
  const from = METRICS[name].values;
  for (const row of members)
    for (let s = 0; s < STEPS; s++) {
      const i = row * STEPS + s, code = verdicts[i], x = from[i];
      if (code !== NONE && (codes[s] === NONE || code > codes[s])) codes[s] = code;
      if (x === x && !(high[s] >= x)) high[s] = x;
    }
  return { codes, high };
}

// Lines of the map: a module's head (row -1) with its members, or a row. A module of one row has no head.
function layout(shown) {
  const lines = [];
  for (let i = 0; i < shown.length; ) {
    const group = rows.group[shown[i]];
    const members = [];
    while (i < shown.length && rows.group[shown[i]] === group) members.push(shown[i++]);
    const lone = members.length === 1;
    if (!lone) lines.push({ row: -1, group, members, open: state.open.has(group) });
    if (lone || state.open.has(group)) for (const row of members) lines.push({ row, group, members: [row], inner: !lone });
  }
  return lines;
}

// What a line shows in a metric, computed once.
function cells(line, name) {
  line.cells ??= {};
  return (line.cells[name] ??= line.row >= 0
    ? { codes: verdicts.subarray(line.row * STEPS, (line.row + 1) * STEPS),
        high: METRICS[name].values.subarray(line.row * STEPS, (line.row + 1) * STEPS) }
    : worst(line.members, name));
}

// The member of a line that is the worst in a step, by verdict and then by the metric.
function worstMember(line, step, name) {
  let best = line.members[0];
  const rank = (row) => {
    const i = row * STEPS + step, x = METRICS[name].values[i];
    return [verdicts[i] === NONE ? -1 : verdicts[i], x === x ? x : -1];
  };
  for (const row of line.members) {
    const [a, x] = rank(row), [b, y] = rank(best);
    if (a > b || (a === b && x > y)) best = row;
  }
  return best;
}
