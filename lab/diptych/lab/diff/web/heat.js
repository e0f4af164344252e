// The heat map: a canvas as large as its window, which draws the lines that are in view.

const VIRIDIS = [
  [68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50],
  [253, 231, 37],
];
const theme = { dark: false, ramp: [], ink: "", soft: "", line: "", panel: "", same: "", accent: "", verdicts: [] };

function readTheme() {
  theme.dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "soft", "line", "panel", "same", "accent", "none", "head"])
    theme[name] = style.getPropertyValue(`--${name}`).trim();
  theme.verdicts = data.severity.map((verdict) => style.getPropertyValue(`--${verdict}`).trim());
  theme.ramp = [];
  for (let i = 0; i < 256; i++) {
    // More difference is farther from the background: light on dark, dark on light. The end next to it is left out.
    const at = theme.dark ? 0.1 + 0.9 * (i / 255) : 0.97 - 0.97 * (i / 255);
    const p = at * (VIRIDIS.length - 1), k = Math.min(VIRIDIS.length - 2, Math.floor(p)), t = p - k;
    theme.ramp.push(VIRIDIS[k].map((c, j) => Math.round(c + t * (VIRIDIS[k + 1][j] - c))));
  }
}

const luminance = ([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b;
const rgb = (c) => `rgb(${c[0]},${c[1]},${c[2]})`;
function hex(text) {
  const n = parseInt(text.slice(1), 16);
  return [(n >> 16) & 255, (n >> 8) & 255, n & 255];
}

// The color of a value as [r, g, b], or null where nothing was measured.
function colorOf(name, x, code) {
  if (code === NONE) return null;
  if (name === "verdict") return hex(theme.verdicts[code]);
  if (x !== x) return null;
  if (x === 0) return hex(theme.same);
  return theme.ramp[Math.round(255 * METRICS[name].place(x))];
}

// A cell: its color, a hatch where nothing was measured, and the mark of its verdict if that is a finding.
function drawCell(c, name, x, code, left, top, width, height) {
  const color = colorOf(name, x, code);
  const gap = width >= 7 ? 1 : 0;
  const w = width - gap, h = height - 1;
  if (color) {
    c.fillStyle = rgb(color);
    c.fillRect(left, top, w, h);
  } else if (code !== NONE) {
    c.fillStyle = c.strokeStyle = theme.none;
    c.lineWidth = 1;
    if (finding(code) || data.severity[code] === "unknown") c.strokeRect(left + 0.5, top + 0.5, w - 1, h - 1);
    else for (let y = 1; y < h; y += 4) c.fillRect(left, top + y, w, 1);
  }
  if (!finding(code) && data.severity[code] !== "unknown") return;
  const ink = color && luminance(color) > 128 ? "#000" : color || theme.dark ? "#fff" : "#000";
  const verdict = data.severity[code], x0 = left + w / 2, y0 = top + h / 2;
  const r = Math.max(1, Math.min(3.5, w / 2 - 1.5));
  c.fillStyle = c.strokeStyle = ink;
  if (x === Infinity || verdict === "unknown") return glyph(c, x === Infinity ? "∞" : "?", x0, y0, w);
  if (verdict === "definition") {
    c.lineWidth = r > 2 ? 1.5 : 1;
    c.beginPath();
    c.moveTo(x0 - r, y0 - r); c.lineTo(x0 + r, y0 + r);
    c.moveTo(x0 - r, y0 + r); c.lineTo(x0 + r, y0 - r);
    c.stroke();
  } else if (verdict === "beyond") {
    c.beginPath();
    c.moveTo(x0 - r, y0 + r * 0.8); c.lineTo(x0 + r, y0 + r * 0.8); c.lineTo(x0, y0 - r);
    c.fill();
  } else c.fillRect(Math.round(x0 - 1), Math.round(y0 - 1), 2, 2);
}

function glyph(c, text, x, y, width) {
  c.font = `${width < 9 ? 9 : 12}px sans-serif`;
  c.textAlign = "center";
  c.fillText(text, x, y + 1);
  c.textAlign = "left";
}

// Text that fits: its end counts most, so that its beginning is left out.
function fitted(c, text, width) {
  if (c.measureText(text).width <= width) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (c.measureText("…" + text.slice(middle)).width <= width) high = middle;
    else low = middle + 1;
  }
  return "…" + text.slice(low);
}

const FONT = "12px ui-monospace, 'SF Mono', Menlo, Consolas, monospace";
const LINE = 18, HEAD = 26;

class Heat {
  constructor(box, tip, onSelect, onToggle, onCursor) {
    Object.assign(this, { box, tip, onSelect, onToggle, onCursor, lines: [], cursor: null, hover: null });
    this.canvas = box.querySelector("canvas");
    this.space = box.querySelector(".space");
    this.c = this.canvas.getContext("2d");
    this.longest = data.steps.reduce((long, step) => (String(step).length > long.length ? String(step) : long), "");
    this.firsts = new Set(data.first.map(([row, step]) => row * STEPS + step));
    box.addEventListener("scroll", () => this.later());
    box.addEventListener("pointermove", (e) => this.point(e));
    box.addEventListener("pointerleave", () => this.point(null));
    box.addEventListener("click", (e) => this.click(e));
    box.addEventListener("keydown", (e) => this.key(e));
    box.addEventListener("focus", () => { this.cursor ??= this.find(state.row, state.step); this.moved(); });
    box.addEventListener("blur", () => { this.tip.hidden = true; this.later(); });
    new ResizeObserver(() => this.resize()).observe(box);
  }

  setLines(lines) {
    const at = this.cursor && this.lines[this.cursor.line];
    this.lines = lines;
    if (at) {
      const line = lines.findIndex((l) => l.row === at.row && l.group === at.group);
      this.cursor = lines.length ? { line: Math.max(0, line), step: this.cursor.step } : null;
    }
    this.hover = null;
    this.resize();
  }

  find(row, step) {
    if (!this.lines.length) return null;
    let line = this.lines.findIndex((l) => l.row === row);
    if (line < 0) line = this.lines.findIndex((l) => l.members.includes(row));
    return { line: Math.max(0, line), step: Math.max(0, step) };
  }

  // Sizes: the gutter of names, a cell's width, the whole; and the box as high as its lines up to a limit.
  resize() {
    const longest = this.lines.reduce((n, l) => Math.max(n, this.label(l).length + (l.inner ? 2 : 0)), 8);
    const width = this.box.clientWidth;
    this.gutter = Math.round(Math.max(110, Math.min(0.4 * width, 330, longest * 7.3 + 34)));
    const room = width - this.gutter - 8;
    this.cell = Math.max(4, Math.min(34, Math.floor(room / Math.max(1, STEPS))));
    const height = HEAD + this.lines.length * LINE + 4;
    this.space.style.height = `${height}px`;
    this.space.style.width = `${this.gutter + STEPS * this.cell}px`;
    const wide = this.gutter + STEPS * this.cell > width ? 16 : 0;
    this.box.style.height = `${Math.max(90, Math.min(height + wide + 2, Math.max(300, innerHeight * 0.68)))}px`;
    this.later();
  }

  later() {
    this.pending ??= requestAnimationFrame(() => { this.pending = null; this.draw(); });
  }

  label(line) {
    return line.row < 0 ? data.groups[line.group] : tensor(line.row);
  }

  draw() {
    const { box, c, cell, gutter } = this;
    const width = box.clientWidth, height = box.clientHeight, scale = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
    }
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.textBaseline = "middle";
    c.fillStyle = theme.panel;
    c.fillRect(0, 0, width, height);
    const left = box.scrollLeft, top = box.scrollTop;
    const first = Math.floor(top / LINE), last = Math.min(this.lines.length, Math.ceil((top + height) / LINE));
    const rings = [];
    const begin = Math.floor(left / cell), end = Math.min(STEPS, Math.ceil((left + width - gutter) / cell));
    for (let i = first; i < last; i++) this.drawLine(this.lines[i], HEAD + i * LINE - top, begin, end, left, rings);
    for (const [x, y] of rings) this.ring(x, y);
    this.drawSteps(begin, end, left, width);
    const held = document.activeElement === box ? this.cursor : null;
    const at = this.lines.findIndex((l) => l.members.includes(state.row) && (l.row >= 0 || !l.open));
    if (at >= 0) {
      this.frame({ line: at, step: state.step }, 4, theme.panel, left, top);
      this.frame({ line: at, step: state.step }, 2, theme.ink, left, top);
    }
    this.frame(this.hover, 1, theme.ink, left, top);
    this.frame(held, 2, theme.accent, left, top);
    if (!this.lines.length) {
      c.fillStyle = theme.soft;
      c.font = "14px system-ui, sans-serif";
      c.fillText(ROWS ? "No site passes the filters." : "No sites were compared.", 16, HEAD + 24);
    }
  }

  drawLine(line, y, begin, end, left, rings) {
    const { c, cell, gutter } = this;
    const { codes, high } = cells(line, state.metric);
    const chosen = line.members.includes(state.row) && (line.row >= 0 || !line.open);
    for (let s = begin; s < end; s++) {
      drawCell(c, state.metric, high[s], codes[s], gutter + s * cell - left, y, cell, LINE);
      const first = line.members.some((row) => this.firsts.has(row * STEPS + s)) && (line.row >= 0 || !line.open);
      if (first && gutter + s * cell >= left + gutter - 1) rings.push([gutter + s * cell - left, y]);
    }
    c.fillStyle = chosen ? theme.head : theme.panel;
    c.fillRect(0, y, gutter - 2, LINE - 1);
    if (chosen) {
      c.fillStyle = theme.accent;
      c.fillRect(0, y, 3, LINE - 1);
    }
    const indent = line.inner ? 24 : 8;
    c.fillStyle = theme.ink;
    c.font = line.row < 0 ? `600 ${FONT}` : FONT;
    if (line.row < 0) this.arrow(12, y + LINE / 2, line.open);
    const x = line.row < 0 ? 22 : indent;
    c.fillText(fitted(c, this.label(line), gutter - x - 8), x, y + LINE / 2);
  }

  arrow(x, y, open) {
    const { c } = this;
    c.beginPath();
    if (open) { c.moveTo(x - 4, y - 2); c.lineTo(x + 4, y - 2); c.lineTo(x, y + 3); }
    else { c.moveTo(x - 2, y - 4); c.lineTo(x - 2, y + 4); c.lineTo(x + 3, y); }
    c.fill();
  }

  ring(x, y) {
    const { c, cell } = this;
    c.lineWidth = 2;
    c.strokeStyle = theme.panel;
    c.strokeRect(x - 2, y - 2, cell + 3, LINE + 2);
    c.strokeStyle = theme.accent;
    c.strokeRect(x - 1, y - 1, cell + 1, LINE);
  }

  drawSteps(begin, end, left, width) {
    const { c, cell, gutter } = this;
    c.fillStyle = theme.panel;
    c.fillRect(0, 0, width, HEAD - 1);
    c.fillStyle = theme.line;
    c.fillRect(0, HEAD - 2, width, 1);
    c.font = FONT;
    c.fillStyle = theme.soft;
    c.fillText("step", 8, HEAD / 2);
    const room = c.measureText(this.longest).width + 10, every = nice(room / cell);
    // A label is within the window: the last ones move to the left, so that they may meet the chosen one or each other.
    const place = (s) => Math.min(gutter + (s + 0.5) * cell - left, width - room / 2);
    const held = state.step < end ? place(state.step) : Infinity;
    let free = -Infinity;
    c.textAlign = "center";
    for (let s = begin; s < end; s++) {
      const x = gutter + (s + 0.5) * cell - left, chosen = s === state.step;
      if (chosen) {
        c.fillStyle = theme.accent;
        c.fillRect(x - cell / 2, HEAD - 5, cell - 1, 3);
      }
      const at = place(s), near = at < free || Math.abs(at - held) < room;
      if (x > gutter && (chosen || (s % every === 0 && !near))) {
        c.fillStyle = chosen ? theme.ink : theme.soft;
        c.fillText(String(data.steps[s]), at, HEAD / 2);
        free = at + room;
      }
    }
    c.textAlign = "left";
  }

  frame(at, width, color, left, top) {
    if (!at || !STEPS) return;
    const { c, cell, gutter } = this;
    const x = gutter + at.step * cell - left, y = HEAD + at.line * LINE - top;
    if (x < gutter - 1 || y < HEAD - 1) return;
    c.lineWidth = width;
    c.strokeStyle = color;
    c.strokeRect(x - 0.5, y - 0.5, cell, LINE);
  }

  // Where a pointer is: a line, and a step or -1 over the names.
  at(e) {
    const r = this.box.getBoundingClientRect();
    const x = e.clientX - r.left - this.box.clientLeft, y = e.clientY - r.top - this.box.clientTop;
    const line = Math.floor((y - HEAD + this.box.scrollTop) / LINE);
    if (y < HEAD || line < 0 || line >= this.lines.length || x >= this.box.clientWidth || y >= this.box.clientHeight) return null;
    const step = x < this.gutter ? -1 : Math.floor((x - this.gutter + this.box.scrollLeft) / this.cell);
    return step < STEPS ? { line, step, x, y } : null;
  }

  point(e) {
    const at = e && this.at(e);
    this.hover = at && at.step >= 0 ? at : null;
    this.box.style.cursor = at ? "pointer" : "";
    if (at) this.explain(at, at.x, at.y);
    else this.tip.hidden = true;
    this.later();
  }

  explain(at, x, y) {
    const line = this.lines[at.line];
    const row = line.row >= 0 ? line.row : worstMember(line, Math.max(0, at.step), state.metric);
    const head = line.row >= 0 ? `${tensor(row)}, ${rows.kind[row].replace("_", " ")}`
      : `${data.groups[line.group]}: ${line.members.length} sites` + (at.step >= 0 ? `, worst ${tensor(row)}` : "");
    const facts = at.step >= 0 ? [["Step", String(data.steps[at.step])], ...numbers(row, at.step)]
      : [["Matched by", line.row >= 0 ? rows.matched[row] : "–"]];
    const shown = at.step >= 0 || line.row >= 0 ? facts : [];
    this.tip.replaceChildren(element("b", head), ...shown.map(([k, v]) => element("span", `${k}: ${v}`)));
    this.tip.hidden = false;
    const box = this.box, w = this.tip.offsetWidth, h = this.tip.offsetHeight;
    const left = x + 16 + w > box.clientWidth ? Math.max(4, x - w - 12) : x + 16;
    const below = y + LINE + h < box.clientHeight || y - h - 8 < 0;
    this.tip.style.left = `${box.offsetLeft + left}px`;
    this.tip.style.top = `${box.offsetTop + (below ? y + LINE : y - h - 8)}px`;
    return `${head}. ${shown.map(([k, v]) => `${k} ${v}`).join(", ")}.`;
  }

  choose(line, step) {
    this.onSelect(line.row >= 0 ? line.row : worstMember(line, Math.max(0, step), state.metric), Math.max(0, step));
  }

  click(e) {
    const at = this.at(e);
    if (!at) return;
    const line = this.lines[at.line];
    this.cursor = { line: at.line, step: at.step < 0 ? state.step : at.step };
    if (at.step < 0 && line.row < 0) this.onToggle(line.group);
    else this.choose(line, at.step < 0 ? state.step : at.step);
  }

  key(e) {
    if (!this.cursor || e.altKey || e.metaKey) return;
    const page = Math.max(1, Math.floor((this.box.clientHeight - HEAD) / LINE) - 1);
    const { cursor } = this, line = this.lines[cursor.line];
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-page, 0], PageDown: [page, 0] };
    if (by[e.key]) { cursor.line += by[e.key][0]; cursor.step += by[e.key][1]; }
    else if (e.key === "Home") e.ctrlKey ? (cursor.line = 0) : (cursor.step = 0);
    else if (e.key === "End") e.ctrlKey ? (cursor.line = this.lines.length - 1) : (cursor.step = STEPS - 1);
    else if (e.key === " " && line.row < 0) this.onToggle(line.group);
    else if (e.key === "Enter" || e.key === " ") this.choose(line, cursor.step);
    else return;
    e.preventDefault();
    cursor.line = Math.max(0, Math.min(this.lines.length - 1, cursor.line));
    cursor.step = Math.max(0, Math.min(STEPS - 1, cursor.step));
    this.moved();
  }

  moved() {
    if (!this.cursor) return;
    this.reveal(this.cursor);
    const x = this.gutter + (this.cursor.step + 1) * this.cell - this.box.scrollLeft;
    this.onCursor(this.explain(this.cursor, x, HEAD + this.cursor.line * LINE - this.box.scrollTop));
    this.later();
  }

  // Scrolls so that a cell is seen: by as little as needed, or into the middle if it was not seen at all.
  reveal(at, middle = false) {
    const { box, cell } = this;
    const scroll = (side, from, size, room) => {
      if (from >= box[side] && from + size <= box[side] + room) return;
      box[side] = middle ? from - room / 2 : from < box[side] ? from : from + size - room;
    };
    scroll("scrollTop", at.line * LINE, LINE, box.clientHeight - HEAD - LINE);
    scroll("scrollLeft", at.step * cell, cell, box.clientWidth - this.gutter);
  }
}
