// A line chart of one metric: over the sites in order, or over steps.

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, parent, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

// The axis of some values: its ticks as [value, text], and the place of a value from 0 (bottom) to 1. On a log axis zero
// and infinity have lanes of their own, below and above.
function axis(metric, points) {
  const finite = points.map((p) => p.y).filter((y) => y > 0 && y !== Infinity);
  if (metric.limit && metric.log && finite.length && metric === METRICS.noise) finite.push(metric.limit);
  const zero = metric.log && points.some((p) => p.y === 0), top = points.some((p) => p.y === Infinity);
  const low0 = zero ? 0.12 : 0, high0 = top ? 0.86 : 1;
  let low = 0, high = 1, ticks = [];
  if (!metric.log) {
    high = Math.max(...finite, 0) > 0.5 ? 1 : Math.max(...finite, 0.01) * 1.1;
    const step = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25].find((n) => high / n <= 5) ?? 0.25;
    for (let y = 0; y <= high * 1.0001; y += step) ticks.push([y, `${+(100 * y).toFixed(2)} %`]);
  } else if (finite.length) {
    const lowest = Math.log10(Math.min(...finite)), highest = Math.log10(Math.max(...finite));
    low = Math.floor(lowest + 1e-9);
    high = Math.max(low + 1, Math.ceil(highest - 1e-9));
    const every = Math.ceil((high - low) / 6);
    for (let e = low; e <= high; e += every) ticks.push([10 ** e, decimal(e)]);
    if (high - low <= 2)
      for (let e = low; e < high; e++) for (const k of [2, 5]) ticks.push([k * 10 ** e, decimal(e, k)]);
  }
  const place = (y) => {
    if (y === Infinity) return 1;
    if (metric.log && y === 0) return 0;
    const at = ((metric.log ? Math.log10(y) : y) - low) / (high - low);
    return low0 + at * (high0 - low0);
  };
  if (zero) ticks.unshift([0, "0"]);
  if (top) ticks.push([Infinity, "∞"]);
  return { ticks, place };
}

class Chart {
  // `step(by)`: what the arrow keys do. `select(point)`: what a click does.
  constructor(box, select, step) {
    Object.assign(this, { box, select, step, given: null });
    this.tip = box.querySelector(".tip");
    this.root = svg("svg", { tabindex: "0", role: "slider" }, box);
    this.root.addEventListener("pointermove", (e) => this.point(e));
    this.root.addEventListener("pointerleave", () => this.leave());
    this.root.addEventListener("click", (e) => { const p = this.nearest(e); if (p) this.select(p); });
    this.root.addEventListener("keydown", (e) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
      if (by) { e.preventDefault(); this.step(by); }
    });
    new ResizeObserver(() => { if (this.given && box.clientWidth !== this.width) this.draw(...this.given); }).observe(box);
  }

  // points: {x, y, code, title, label}, x = 0, 1, ...; marks: [x, text] on the horizontal axis; at: the chosen x or -1.
  draw(metric, points, marks, at, title, below) {
    this.given = [metric, points, marks, at, title, below];
    const width = (this.width = this.box.clientWidth), height = 250;
    const left = 78, right = 14, top = 14, bottom = 50, w = width - left - right, h = height - top - bottom;
    const root = this.root;
    root.replaceChildren();
    root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    root.setAttribute("height", height);
    const chosen = points[at];
    const said = { label: title, valuemin: 0, valuemax: Math.max(0, points.length - 1), valuenow: Math.max(0, at),
      valuetext: chosen ? `${chosen.title}: ${show(metric.name, chosen.y)}` : "none" };
    for (const [name, text] of Object.entries(said)) root.setAttribute(`aria-${name}`, text);
    const known = points.filter((p) => p.y === p.y);
    if (!known.length) {
      svg("text", { x: left, y: height / 2, class: "axis" }, root, "Nothing to draw: no values of this metric here.");
      this.places = [];
      return;
    }
    const { ticks, place } = axis(metric, known);
    const n = points.length;
    const X = (x) => left + (n > 1 ? (x / (n - 1)) * w : w / 2);
    const Y = (y) => top + (1 - place(y)) * h;
    for (const [y, text] of ticks) {
      svg("line", { x1: left, x2: width - right, y1: Y(y), y2: Y(y), class: text ? "grid" : "grid minor" }, root);
      if (text) svg("text", { x: left - 8, y: Y(y) + 4, class: "axis end" }, root, text);
    }
    if (metric.limit && place(metric.limit) >= 0 && place(metric.limit) <= 1) {
      const y = Y(metric.limit);
      svg("line", { x1: left, x2: width - right, y1: y, y2: y, class: "limit" }, root);
      svg("text", { x: width - right - 4, y: y - 5, class: "axis end limit-text" }, root, `limit ${show("noise", metric.limit)}`);
    }
    let free = -Infinity;
    for (const [x, text] of marks) {
      const half = text.length * 3.4;
      const place = Math.max(left + half, Math.min(width - right - half, X(x)));
      if (place - half < free + 10) continue;
      svg("text", { x: place, y: top + h + 18, class: "axis middle" }, root, text);
      free = place + half;
    }
    svg("text", { x: left + w / 2, y: height - 8, class: "axis middle" }, root, below);
    svg("text", { x: 15, y: top + h / 2, class: "axis middle", transform: `rotate(-90 15 ${top + h / 2})` }, root, metric.axis);
    if (at >= 0 && at < n) svg("line", { x1: X(at), x2: X(at), y1: top, y2: top + h, class: "chosen" }, root);
    let path = "", on = false;
    for (const p of points) {
      if (p.y !== p.y) { on = false; continue; }
      path += `${on ? "L" : "M"}${X(p.x).toFixed(1)} ${Y(p.y).toFixed(1)}`;
      on = true;
    }
    svg("path", { d: path, class: "curve" }, root);
    const r = w / n > 5 ? 3 : 1.5;
    const dot = (p) => {
      const x = X(p.x).toFixed(1), y = Y(p.y).toFixed(1), k = r + 1;
      return finding(p.code) ? `M${x} ${y}m${-k} ${k}l${k} ${-2 * k}l${k} ${2 * k}z` : `M${x} ${y}m${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`;
    };
    svg("path", { d: known.filter((p) => !finding(p.code)).map(dot).join(""), class: "dots" }, root);
    svg("path", { d: known.filter((p) => finding(p.code)).map(dot).join(""), class: "dots found" }, root);
    this.near = svg("circle", { r: 6, class: "near", visibility: "hidden" }, root);
    this.places = known.map((p) => ({ p, x: X(p.x), y: Y(p.y) }));
  }

  nearest(e) {
    const r = this.root.getBoundingClientRect(), x = ((e.clientX - r.left) / r.width) * this.width;
    let best = null;
    for (const at of this.places) if (!best || Math.abs(at.x - x) < Math.abs(best.x - x)) best = at;
    this.found = best;
    return best && best.p;
  }

  point(e) {
    const p = this.nearest(e);
    if (!p) return;
    const { x, y } = this.found;
    this.near.setAttribute("cx", x);
    this.near.setAttribute("cy", y);
    this.near.setAttribute("visibility", "visible");
    this.tip.replaceChildren(element("b", p.title), ...numbers(p.row, p.step).map(([k, v]) => element("span", `${k}: ${v}`)));
    this.tip.hidden = false;
    const right = x + 20 + this.tip.offsetWidth > this.width;
    this.tip.style.left = `${Math.max(0, right ? x - this.tip.offsetWidth - 14 : x + 16)}px`;
    this.tip.style.top = "8px";
  }

  leave() {
    this.tip.hidden = true;
    if (this.near) this.near.setAttribute("visibility", "hidden");
  }
}
