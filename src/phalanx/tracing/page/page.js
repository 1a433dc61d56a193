"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const memory = (name) => { // storage may be denied to a page that was opened from a file
    try { if (name) localStorage.setItem("phalanx-theme", name); return localStorage.getItem("phalanx-theme"); } catch { return null; }
  };
  const preferred = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = new URLSearchParams(location.search).get("theme") || memory() || preferred;

  const clip = (value, low, high) => Math.max(low, Math.min(high, value));
  const digits = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));
  const duration = (ns) => {
    const [size, unit] = [[1e9, " s"], [1e6, " ms"], [1e3, " µs"], [0, " ns"]].find(([least]) => ns >= least);
    return (size ? digits(ns / size) : ns) + unit;
  };
  const bytes = (count) => {
    const unit = count < 1 ? 0 : Math.min(4, Math.floor(Math.log2(count) / 10));
    return (unit ? digits(count / 1024 ** unit) : count) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][unit];
  };
  const element = (tag, name, ...children) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    made.append(...children);
    return made;
  };

  /* ---- rows: headings of groups, and tracks; a slice is FIELDS numbers ---- */
  const START = 0, LENGTH = 1, LANE = 2, DEPTH = 3, NAME = 4, KIND = 5, CALL = 6, OPEN = 7, TEXT = 8, FIELDS = 9;
  const IS_CALL = 0, IS_SPAN = 2; // kinds; the other is a phase
  const FIRST = 16, NEXT = data.nested, total = data.total; // heights
  const view = document.querySelector(".view"), canvas = view.querySelector("canvas"), axis = document.querySelector(".axis");
  const tip = document.querySelector(".tip"), chosen = document.querySelector(".chosen");
  const context = canvas.getContext("2d"), axisContext = axis.getContext("2d");
  const faded = new Set(), rows = data.rows.map((row) => ({ ...row, slices: Float64Array.from(row.slices || []) }));
  const spacer = view.appendChild(element("div"));
  const home = Math.max(0, data.first - (data.length - data.first) / 50); // start-up is to the left of the first view
  let from = home, to = Math.max(home + 1, data.length), width = 0, height = 0, left = 190, hover = null, pinned = null;
  const x = (time) => left + ((time - from) / (to - from)) * (width - left);
  const timeAt = (pixel) => from + ((pixel - left) / (width - left)) * (to - from);

  /* ---- drawing ---- */
  const resize = (one, brush, w, h) => { // also clears the canvas
    const ratio = devicePixelRatio || 1;
    [one.width, one.height, one.style.width, one.style.height] = [w * ratio, h * ratio, w + "px", h + "px"];
    brush.scale(ratio, ratio);
  };
  const draw = () => {
    const style = (name) => getComputedStyle(root).getPropertyValue(name).trim();
    const ink = style("--ink"), line = style("--line"), bad = style("--bad"), stripe = style("--row");
    left = innerWidth <= 640 ? 100 : 190;
    width = view.clientWidth;
    height = Math.min(total + 2, Math.round(innerHeight * 0.62));
    view.style.height = height + "px";
    spacer.style.height = Math.max(0, total - height + 2) + "px";
    resize(canvas, context, width, height - 2);
    resize(axis, axisContext, width, 24);
    drawAxis(style("--soft"), line);
    context.fillStyle = stripe;
    for (const row of rows) {
      context.globalAlpha = row.heading ? 1 : row.striped ? 0.45 : 0;
      context.fillRect(0, row.top - view.scrollTop, width, row.height);
    }
    context.globalAlpha = 1;
    const marked = hover ? hover.call : pinned ? pinned.call : -1, ends = [];
    context.save();
    context.beginPath();
    context.rect(left, 0, width - left, height);
    context.clip();
    for (const row of rows) if (!row.heading) drawRow(row, row.top - view.scrollTop, marked, ends, ink, bad);
    drawArrows(ends, ink);
    context.restore();
    context.fillStyle = line;
    context.fillRect(left - 1, 0, 1, height);
  };
  const drawRow = (row, top, marked, ends, ink, bad) => {
    const { slices } = row, last = new Map(), seen = top + row.height >= 0 && top <= height;
    if (!seen && marked < 0) return;
    for (let i = 0; i < slices.length; i += FIELDS) {
      const start = slices[i + START], end = start + slices[i + LENGTH], depth = slices[i + DEPTH], kind = slices[i + KIND];
      const mine = marked >= 0 && slices[i + CALL] === marked && kind === IS_CALL;
      if (mine) ends.push({ x: x(start), y: top + slices[i + LANE] * row.lane + FIRST / 2, driver: row.driver });
      if (!seen || end < from || start > to) continue;
      const a = x(start), wide = Math.max(x(end) - a, 0.8), key = slices[i + LANE] * 64 + depth;
      if (wide < 1 && last.get(key) >= Math.round(a)) continue; // the pixel is painted already
      if (wide < 1) last.set(key, Math.round(a));
      const y = top + slices[i + LANE] * row.lane + 2 + (depth ? FIRST + (depth - 1) * NEXT : 0), high = (depth ? NEXT : FIRST) - 1;
      const name = slices[i + NAME], text = data.names[name];
      context.globalAlpha = faded.has(name) ? 0.12 : marked >= 0 && kind === IS_CALL && !mine ? 0.5 : 1;
      context.fillStyle = (kind !== IS_SPAN && data.colors[name]) || "#7b8794";
      context.fillRect(a, y, wide, high);
      if (slices[i + TEXT] >= 0 || slices[i + OPEN]) {
        context.strokeStyle = bad;
        context.lineWidth = 2;
        context.setLineDash(slices[i + OPEN] ? [4, 3] : []);
        context.strokeRect(a + 1, y + 1, Math.max(wide - 2, 1), high - 2);
        context.setLineDash([]);
      }
      if (mine) { context.strokeStyle = ink; context.lineWidth = 1.5; context.strokeRect(a, y, wide, high); }
      if (wide > 26 && high > 9) {
        context.fillStyle = kind === IS_CALL ? "#fff" : "#1b2330";
        context.font = (depth ? "10px " : "11px ") + "system-ui, sans-serif";
        const shown = Math.max(a, left) + 4;
        context.fillText(shortened(text, Math.min(a + wide, width) - shown - 4), shown, y + (depth ? 9 : 11));
      }
    }
  };
  const shortened = (text, room) => {
    const size = context.measureText(text).width, kept = Math.floor((text.length * room) / size) - 1;
    return size <= room ? text : kept > 1 ? text.slice(0, kept) + "…" : "";
  };
  const drawArrows = (ends, ink) => { // from the call on the driver to its ranks
    const start = ends.find((end) => end.driver);
    context.strokeStyle = context.fillStyle = ink;
    context.globalAlpha = 0.55;
    context.lineWidth = 1;
    for (const end of ends) {
      if (end.driver || !start) continue;
      const a = Math.min(start.x + 2, end.x);
      context.beginPath();
      context.moveTo(a, start.y);
      context.bezierCurveTo(a, (start.y + end.y) / 2, end.x - 14, end.y, end.x, end.y);
      context.stroke();
      context.fillRect(end.x - 4, end.y - 2, 4, 4);
    }
  };
  const drawAxis = (soft, line) => {
    const rough = (to - from) / Math.max(2, (width - left) / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    const [unit, size] = step >= 1e8 ? [" s", 1e9] : step >= 1e5 ? [" ms", 1e6] : [" µs", 1e3];
    const places = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
    axisContext.font = "11px system-ui, sans-serif";
    for (let mark = Math.ceil(from / step) * step; mark <= to; mark += step) {
      axisContext.fillStyle = soft;
      axisContext.fillText((mark / size).toFixed(places) + unit, x(mark) + 3, 15);
      axisContext.fillStyle = context.fillStyle = line;
      axisContext.fillRect(x(mark), 4, 1, 20);
      context.fillRect(x(mark), 0, 1, height);
    }
  };

  /* ---- the part of the time that is shown ---- */
  let waiting = false;
  const redraw = () => {
    if (!waiting) requestAnimationFrame(() => { waiting = false; draw(); });
    waiting = true;
  };
  const show = (start, span) => {
    from = clip(start, 0, Math.max(0, data.length - span));
    to = from + span;
    redraw();
  };
  const zoom = (factor, pivot = (from + to) / 2) => {
    const span = clip((to - from) * factor, Math.min(1000, data.length), Math.max(1, data.length));
    show(pivot - ((pivot - from) / (to - from)) * span, span);
  };
  const pan = (by) => show(from + by, to - from);
  const showAll = () => show(0, Math.max(1, data.length));

  /* ---- facts about a slice, in the tip and below the timeline ---- */
  const sliceUnder = (event) => {
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top + view.scrollTop;
    const row = rows.find((one) => !one.heading && py >= one.top && py < one.top + one.height);
    if (px < left || !row) return null;
    const lane = Math.floor((py - row.top) / row.lane), inside = (py - row.top) % row.lane;
    const level = inside < FIRST + 2 ? 0 : 1 + Math.floor((inside - FIRST - 2) / NEXT);
    const at = timeAt(px), slack = (to - from) / (width - left), { slices } = row;
    let found = null;
    for (let i = 0; i < slices.length; i += FIELDS) {
      const start = slices[i + START], there = start - slack <= at && at <= start + slices[i + LENGTH] + slack;
      if (!there || slices[i + LANE] !== lane || slices[i + DEPTH] > level) continue;
      if (!found || slices[i + DEPTH] >= slices[found.i + DEPTH]) found = { row, i, call: slices[i + CALL] };
    }
    return found;
  };
  const describe = (box, { row, i }) => {
    const { slices } = row, list = element("dl");
    const add = (name, value) => list.append(element("dt", "", name), element("dd", "", value));
    add("on", row.group + " · " + row.label);
    add("lasted", duration(slices[i + LENGTH]) + (slices[i + OPEN] ? " so far: its end was not seen" : ""));
    add("began at", duration(slices[i + START]));
    const call = slices[i + KIND] === IS_SPAN ? null : data.calls[slices[i + CALL]];
    if (call) add("call", `${call.group}.${call.name}, ${call.ranks} rank${call.ranks === 1 ? "" : "s"}`);
    if (call && (call.sent || call.stored)) add("to ranks", `${bytes(call.sent)} in messages, ${bytes(call.stored)} stored`);
    if (call && call.back) add("back", bytes(call.back));
    for (const [name, value] of Object.entries(row.facts[i / FIELDS] || {}))
      add(name, typeof value === "number" && name.includes("bytes") ? bytes(value) : String(value));
    box.replaceChildren(element("b", "", data.names[slices[i + NAME]]), list);
    if (slices[i + TEXT] >= 0) box.append(element("div", "bad-text", data.texts[slices[i + TEXT]]));
  };
  const pin = (found) => { // and list the ranks of its call
    pinned = found;
    chosen.replaceChildren();
    redraw();
    if (!pinned) return;
    describe(chosen, pinned);
    const body = element("tbody"), cells = (tag, texts, name) => texts.map((text) => element(tag, name, text));
    for (const { slices, label, place, heading, driver } of rows) {
      if (heading || driver || pinned.call < 0) continue;
      const parts = { "await results": 0, arguments: 0, return: 0 };
      for (let i = 0; i < slices.length; i += FIELDS) {
        if (slices[i + CALL] !== pinned.call || slices[i + KIND] === IS_SPAN) continue;
        if (slices[i + KIND] === IS_CALL) [parts.start, parts.all] = [slices[i + START], slices[i + LENGTH]];
        else parts[data.names[slices[i + NAME]]] = slices[i + LENGTH];
      }
      if (parts.start === undefined) continue;
      const method = parts.all - parts["await results"] - parts.arguments - parts.return;
      const times = [parts.start, parts.arguments, method, parts.return].map(duration);
      body.append(element("tr", "", ...cells("td", [label, place]), ...cells("td", times, "number")));
    }
    const head = [...cells("th", ["rank", "place"]), ...cells("th", ["began at", "arguments", "method", "return"], "number")];
    if (body.rows.length) chosen.append(element("table", "", element("thead", "", element("tr", "", ...head)), body));
  };

  /* ---- mouse, keys and buttons ---- */
  view.addEventListener("wheel", (event) => {
    const zooms = event.ctrlKey || event.metaKey || event.altKey;
    if (!zooms && !event.shiftKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
    event.preventDefault();
    if (zooms) zoom(1.0015 ** event.deltaY, timeAt(Math.max(left, event.clientX - canvas.getBoundingClientRect().left)));
    else pan(((event.deltaX || event.deltaY) / (width - left)) * (to - from));
  }, { passive: false });
  let drag = null;
  view.addEventListener("pointerdown", (event) => {
    const onScrollBar = event.clientX > view.getBoundingClientRect().left + view.clientWidth;
    if (event.button === 0 && !onScrollBar) drag = { x: event.clientX, moved: false };
  });
  addEventListener("pointermove", (event) => {
    if (drag) {
      const by = event.clientX - drag.x;
      if (Math.abs(by) <= 3 && !drag.moved) return;
      drag = { x: event.clientX, moved: true };
      view.classList.add("dragging");
      pan((-by / (width - left)) * (to - from));
      return;
    }
    const found = view.contains(event.target) ? sliceUnder(event) : null;
    if (found?.i !== hover?.i || found?.row !== hover?.row) redraw();
    hover = found;
    tip.style.display = found ? "block" : "none";
    if (!found) return;
    describe(tip, found);
    const below = event.clientY + 18, fits = below + tip.offsetHeight <= innerHeight;
    tip.style.left = clip(event.clientX + 14, 4, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = (fits ? below : event.clientY - tip.offsetHeight - 10) + "px";
  });
  addEventListener("pointerup", (event) => {
    const clicked = drag && !drag.moved && view.contains(event.target);
    drag = null;
    view.classList.remove("dragging");
    if (clicked) pin(sliceUnder(event));
  });
  view.addEventListener("dblclick", (event) => {
    const found = sliceUnder(event);
    if (!found) return;
    const start = found.row.slices[found.i + START], length = Math.max(found.row.slices[found.i + LENGTH], 1000);
    show(start - length * 0.1, length * 1.2);
  });
  view.addEventListener("keydown", (event) => {
    const back = () => pan(-(to - from) / 6), on = () => pan((to - from) / 6), closer = () => zoom(0.7), farther = () => zoom(1.4);
    const act = {
      w: closer, "+": closer, s: farther, "-": farther, a: back, d: on, ArrowLeft: back, ArrowRight: on, 0: showAll, Escape: () => pin(null),
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    act();
  });
  view.addEventListener("scroll", redraw);
  addEventListener("resize", redraw);
  const buttons = {
    in: () => zoom(0.6), out: () => zoom(1.7), all: showAll,
    theme: () => { memory(root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"); redraw(); },
  };
  for (const [name, act] of Object.entries(buttons)) document.getElementById(name).addEventListener("click", act);
  for (const button of document.querySelectorAll(".legend button"))
    button.addEventListener("click", () => {
      const name = Number(button.dataset.name);
      if (!faded.delete(name)) faded.add(name);
      button.classList.toggle("off", faded.has(name));
      redraw();
    });
  draw();
  root.dataset.ready = "yes";
})();
