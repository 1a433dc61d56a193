"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const stored = (() => { try { return localStorage.getItem("phalanx-theme"); } catch { return null; } })();
  const asked = new URLSearchParams(location.search).get("theme");
  const wanted = matchMedia("(prefers-color-scheme: dark)");
  const setTheme = (name) => { root.dataset.theme = name; };
  setTheme(asked || stored || (wanted.matches ? "dark" : "light"));

  const clip = (value, low, high) => Math.max(low, Math.min(high, value));
  const digits = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));
  const duration = (ns) =>
    ns >= 1e9 ? digits(ns / 1e9) + " s" : ns >= 1e6 ? digits(ns / 1e6) + " ms" : ns >= 1e3 ? digits(ns / 1e3) + " µs" : ns + " ns";
  const bytes = (count) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
    return (unit ? digits(count) : count) + " " + units[unit];
  };
  const element = (tag, text, name) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (name) made.className = name;
    return made;
  };

  /* ---- timeline ---- */
  const FIELDS = 9; // start, duration, lane, depth, name, kind, call, open, text
  const palette = ["#4c78d0", "#e0913a", "#489e68", "#9a72c9", "#2b9ca3", "#c39a1f", "#d06aa0", "#94704f", "#5fa9da", "#84933a"];
  const view = document.querySelector(".view"), canvas = view.querySelector("canvas"), axis = document.querySelector(".axis");
  const labels = view.querySelector(".labels"), tip = document.querySelector(".tip"), chosen = document.querySelector(".chosen");
  const context = canvas.getContext("2d"), axisContext = axis.getContext("2d");
  const many = data.tracks.length > 24;
  const FIRST = 16, NEXT = many ? 6 : 12, GAP = 4, HEADING = 24;
  const colours = new Map(), off = new Set();
  data.names.forEach((name, index) => {
    if (data.methods.includes(index)) colours.set(index, palette[colours.size % palette.length]);
  });
  const rows = [];
  let total = 0, group = null;
  for (const track of data.tracks) {
    if (track.group !== group) {
      group = track.group;
      const label = element("div", group, "group");
      label.style.top = total + 5 + "px";
      labels.append(label);
      rows.push({ top: total, height: HEADING, heading: true });
      total += HEADING;
    }
    const slices = track.slices = Float64Array.from(track.slices);
    let lanes = 1, depth = 0;
    for (let i = 0; i < slices.length; i += FIELDS) {
      lanes = Math.max(lanes, slices[i + 2] + 1);
      depth = Math.max(depth, slices[i + 3]);
    }
    const lane = FIRST + depth * NEXT + GAP;
    const label = element("div", undefined, "track");
    label.dataset.track = track.label;
    label.append(track.label, " ", element("small", track.place));
    label.title = track.label + " " + track.place;
    label.style.top = total + 1 + "px";
    labels.append(label);
    rows.push({ top: total, height: lane * lanes, lane, track });
    total += lane * lanes;
  }
  const spacer = element("div");
  view.append(spacer);
  const home = Math.max(0, data.first - (data.length - data.first) / 50); // start-up is to the left of the first view
  let from = home, to = Math.max(home + 1, data.length), width = 0, height = 0, left = 190, hover = null, pinned = null;

  const style = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const x = (time) => left + ((time - from) / (to - from)) * (width - left);
  const time = (pixel) => from + ((pixel - left) / (width - left)) * (to - from);
  const colour = (row, i) => {
    const name = row.track.slices[i + 4], kind = row.track.slices[i + 5];
    if (kind === 0) return colours.get(name) || "#8a94a3";
    return kind === 1 ? phases[data.names[name]] || "#aab3bf" : "#7b8794";
  };
  const phases = {
    "await results": "#d5dae1", "arguments": "#d7b04a", "return": "#7fb6d9", "plan": "#b79ce0", "send": "#8fb7e8", "start processes": "#8fb7e8",
    "wait": "#b9c1cc", "in the background": "#d5dae1", "fetch": "#7fc4a0", "join": "#e0a56b",
  };

  const draw = () => {
    const ratio = devicePixelRatio || 1;
    left = innerWidth <= 640 ? 100 : 190;
    width = view.clientWidth;
    height = Math.min(total + 2, Math.round(innerHeight * 0.62));
    view.style.height = height + "px";
    spacer.style.height = Math.max(0, total - height + 2) + "px";
    for (const [one, w, h] of [[canvas, width, height - 2], [axis, width, 24]]) {
      if (one.width !== Math.round(w * ratio) || one.height !== Math.round(h * ratio)) {
        one.width = Math.round(w * ratio);
        one.height = Math.round(h * ratio);
        one.style.width = w + "px";
        one.style.height = h + "px";
      }
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    axisContext.setTransform(ratio, 0, 0, ratio, 0, 0);
    const ink = style("--ink"), soft = style("--soft"), line = style("--line"), bad = style("--bad"), ground = style("--row");
    context.clearRect(0, 0, width, height);
    axisContext.clearRect(0, 0, width, 24);
    drawAxis(soft, line);
    const scrolled = view.scrollTop;
    const marked = hover ? hover.call : pinned ? pinned.call : -1;
    const ends = [];
    let stripe = 0;
    for (const row of rows) {
      const top = row.top - scrolled;
      if (row.heading) {
        if (top > -HEADING && top < height) { context.fillStyle = ground; context.fillRect(0, top, width, row.height); }
        stripe = 0;
        continue;
      }
      stripe += 1;
      const seen = top + row.height >= 0 && top <= height;
      if (seen && stripe % 2 === 0) {
        context.globalAlpha = 0.45; context.fillStyle = ground; context.fillRect(0, top, width, row.height); context.globalAlpha = 1;
      }
      if (seen || marked >= 0) drawRow(row, top, seen, marked, ends, ink, bad);
    }
    if (marked >= 0) drawArrows(ends, ink);
    context.fillStyle = line;
    context.fillRect(left - 1, 0, 1, height);
  };

  const drawRow = (row, top, seen, marked, ends, ink, bad) => {
    const slices = row.track.slices;
    const last = new Map();
    context.save();
    context.beginPath();
    context.rect(left, 0, width - left, height);
    context.clip();
    for (let i = 0; i < slices.length; i += FIELDS) {
      const start = slices[i], end = start + slices[i + 1];
      const mine = marked >= 0 && slices[i + 6] === marked;
      if (mine && slices[i + 5] === 0) {
        ends.push({ x0: x(start), x1: x(end), y: top + slices[i + 2] * row.lane + FIRST / 2, driver: row.track.driver });
      }
      if (!seen || end < from || start > to) continue;
      const a = x(start), b = x(end), wide = Math.max(b - a, 0.8);
      const depth = slices[i + 3];
      const y = top + slices[i + 2] * row.lane + 2 + (depth ? FIRST + (depth - 1) * NEXT : 0);
      const high = depth ? NEXT - 1 : FIRST - 1;
      const key = slices[i + 2] * 64 + depth;
      if (wide < 1 && last.get(key) >= Math.round(a)) continue;
      if (wide < 1) last.set(key, Math.round(a));
      const dim = off.has(slices[i + 4]) || (marked >= 0 && !mine && slices[i + 5] === 0);
      context.globalAlpha = dim ? (off.has(slices[i + 4]) ? 0.12 : 0.5) : 1;
      context.fillStyle = colour(row, i);
      context.fillRect(a, y, wide, high);
      const failed = slices[i + 8] >= 0;
      if (failed || slices[i + 7]) {
        context.strokeStyle = bad;
        context.lineWidth = 2;
        context.setLineDash(slices[i + 7] ? [4, 3] : []);
        context.strokeRect(a + 1, y + 1, Math.max(wide - 2, 1), high - 2);
        context.setLineDash([]);
      }
      if (mine && slices[i + 5] === 0) { context.strokeStyle = ink; context.lineWidth = 1.5; context.strokeRect(a, y, wide, high); }
      if (wide > 26 && high > 9) {
        context.fillStyle = slices[i + 5] === 0 ? "#fff" : "#1b2330";
        context.font = (depth ? "10px " : "11px ") + "system-ui, sans-serif";
        const shown = Math.max(a, left) + 4, room = Math.min(b, width) - shown - 4;
        const text = fit(data.names[slices[i + 4]], room);
        if (text) context.fillText(text, shown, y + (depth ? 9 : 11));
      }
    }
    context.restore();
  };

  const fit = (text, room) => {
    const size = context.measureText(text).width;
    if (size <= room) return text;
    const kept = Math.floor((text.length * room) / size) - 1;
    return kept > 1 ? text.slice(0, kept) + "…" : "";
  };

  const drawArrows = (ends, ink) => {
    const start = ends.find((end) => end.driver);
    if (!start) return;
    context.save();
    context.beginPath();
    context.rect(left, 0, width - left, height);
    context.clip();
    context.strokeStyle = context.fillStyle = ink;
    context.globalAlpha = 0.55;
    context.lineWidth = 1;
    for (const end of ends) {
      if (end.driver) continue;
      const a = Math.min(start.x0 + 2, end.x0);
      context.beginPath();
      context.moveTo(a, start.y);
      context.bezierCurveTo(a, (start.y + end.y) / 2, end.x0 - 14, end.y, end.x0 - 3, end.y);
      context.stroke();
      context.beginPath();
      context.moveTo(end.x0, end.y);
      context.lineTo(end.x0 - 6, end.y - 3);
      context.lineTo(end.x0 - 6, end.y + 3);
      context.fill();
    }
    context.restore();
  };

  const drawAxis = (soft, line) => {
    const span = to - from, rough = span / Math.max(2, (width - left) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    axisContext.font = "11px system-ui, sans-serif";
    for (let mark = Math.ceil(from / step) * step; mark <= to; mark += step) {
      const at = x(mark);
      axisContext.fillStyle = soft;
      axisContext.fillText(stamp(mark, step), at + 3, 15);
      axisContext.fillStyle = line;
      axisContext.fillRect(at, 4, 1, 20);
      context.fillStyle = line;
      context.fillRect(at, 0, 1, height);
    }
  };
  const stamp = (ns, step) => {
    const [unit, size] = step >= 1e8 ? [" s", 1e9] : step >= 1e5 ? [" ms", 1e6] : [" µs", 1e3];
    return (ns / size).toFixed(Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9))) + unit;
  };

  let waiting = false;
  const redraw = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  };
  const zoom = (factor, at) => {
    const least = 1000, pivot = at ?? (from + to) / 2;
    const span = clip((to - from) * factor, least, data.length);
    const share = (pivot - from) / (to - from);
    from = clip(pivot - share * span, 0, data.length - span);
    to = from + span;
    redraw();
  };
  const pan = (by) => {
    const span = to - from;
    from = clip(from + by, 0, data.length - span);
    to = from + span;
    redraw();
  };
  const fitAll = () => { from = 0; to = Math.max(1, data.length); redraw(); };

  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    const px = event.clientX - box.left, py = event.clientY - box.top + view.scrollTop;
    if (px < left) return null;
    const row = rows.find((one) => !one.heading && py >= one.top && py < one.top + one.height);
    if (!row) return null;
    const lane = Math.floor((py - row.top) / row.lane), inside = (py - row.top) % row.lane;
    const level = inside < FIRST + 2 ? 0 : 1 + Math.floor((inside - FIRST - 2) / NEXT);
    const at = time(px), slack = (to - from) / (width - left);
    let found = null;
    const slices = row.track.slices;
    for (let i = 0; i < slices.length; i += FIELDS) {
      if (slices[i + 2] !== lane || slices[i + 3] > level) continue;
      if (slices[i] - slack <= at && at <= slices[i] + slices[i + 1] + slack) {
        if (!found || slices[i + 3] >= slices[found.i + 3]) found = { row, i, call: slices[i + 6] };
      }
    }
    return found;
  };

  const facts = (one) => {
    const slices = one.row.track.slices, i = one.i, list = element("dl");
    const add = (name, value) => { list.append(element("dt", name), element("dd", value)); };
    add("on", one.row.track.group + " · " + one.row.track.label);
    add("lasted", duration(slices[i + 1]) + (slices[i + 7] ? " so far: its end was not seen" : ""));
    add("began at", duration(slices[i]));
    const call = data.calls[one.call];
    if (call && slices[i + 5] !== 2) {
      add("call", `${call.group}.${call.name}, ${call.ranks} rank${call.ranks === 1 ? "" : "s"}`);
      if (call.sent || call.stored) add("to ranks", `${bytes(call.sent)} in messages, ${bytes(call.stored)} stored`);
      if (call.back) add("back", bytes(call.back));
    }
    const more = one.row.track.facts && one.row.track.facts[i / FIELDS];
    if (more) for (const [name, value] of Object.entries(more)) add(name, typeof value === "number" && name.includes("bytes") ? bytes(value) : String(value));
    return list;
  };
  const fill = (box, one) => {
    const slices = one.row.track.slices, i = one.i;
    box.replaceChildren(element("b", data.names[slices[i + 4]]), facts(one));
    if (slices[i + 8] >= 0) box.append(element("div", data.texts[slices[i + 8]], "bad-text"));
  };

  const showChosen = () => {
    if (!pinned) { chosen.replaceChildren(); return; }
    fill(chosen, pinned);
    const body = element("tbody");
    for (const row of rows) {
      if (row.heading || row.track.driver) continue;
      const slices = row.track.slices, parts = {};
      for (let i = 0; i < slices.length; i += FIELDS) {
        if (slices[i + 6] !== pinned.call || slices[i + 5] === 2) continue;
        parts[slices[i + 5] === 0 ? "all" : data.names[slices[i + 4]]] = slices[i + 1];
        if (slices[i + 5] === 0) parts.start = slices[i];
      }
      if (parts.start === undefined) continue;
      const line = element("tr");
      const own = parts.all - (parts.arguments || 0) - (parts.return || 0);
      for (const text of [row.track.label, row.track.place]) line.append(element("td", text));
      for (const value of [parts.start, parts.arguments || 0, own, parts.return || 0]) line.append(element("td", duration(value), "number"));
      body.append(line);
    }
    if (!body.rows.length || pinned.call < 0) return;
    const head = element("tr");
    ["rank", "place"].forEach((text) => head.append(element("th", text)));
    ["began at", "arguments", "method", "return"].forEach((text) => head.append(element("th", text, "number")));
    const table = element("table"), top = element("thead");
    top.append(head);
    table.append(top, body);
    chosen.append(table);
  };

  view.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) {
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      zoom(1.0015 ** event.deltaY, time(Math.max(left, event.clientX - box.left)));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      pan(((event.deltaX || event.deltaY) / (width - left)) * (to - from));
    }
  }, { passive: false });
  let drag = null;
  view.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.clientX > view.getBoundingClientRect().left + view.clientWidth) return;
    drag = { x: event.clientX, y: event.clientY, moved: false };
  });
  addEventListener("pointermove", (event) => {
    if (drag) {
      const by = event.clientX - drag.x;
      if (Math.abs(by) > 3 || drag.moved) {
        drag.moved = true;
        view.classList.add("dragging");
        pan((-by / (width - left)) * (to - from));
        drag.x = event.clientX;
      }
      return;
    }
    if (!view.contains(event.target)) {
      if (hover) { hover = null; tip.style.display = "none"; redraw(); }
      return;
    }
    const found = under(event);
    if ((found && found.i) !== (hover && hover.i) || (found && found.row) !== (hover && hover.row)) redraw();
    hover = found;
    tip.style.display = found ? "block" : "none";
    if (found) {
      fill(tip, found);
      tip.style.left = clip(event.clientX + 14, 4, innerWidth - tip.offsetWidth - 8) + "px";
      tip.style.top = (event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18) + "px";
    }
  });
  addEventListener("pointerup", (event) => {
    const moved = drag && drag.moved, mine = drag && view.contains(event.target);
    drag = null;
    view.classList.remove("dragging");
    if (mine && !moved) { pinned = under(event); showChosen(); redraw(); }
  });
  view.addEventListener("dblclick", (event) => {
    const found = under(event);
    if (!found) return;
    const start = found.row.track.slices[found.i], length = Math.max(found.row.track.slices[found.i + 1], 1000);
    from = clip(start - length * 0.1, 0, data.length);
    to = clip(start + length * 1.1, from + 1000, Math.max(data.length, from + 1000));
    redraw();
  });
  view.addEventListener("keydown", (event) => {
    const span = to - from;
    const acts = {
      w: () => zoom(0.7), "+": () => zoom(0.7), s: () => zoom(1.4), "-": () => zoom(1.4), a: () => pan(-span / 6), d: () => pan(span / 6),
      ArrowLeft: () => pan(-span / 6), ArrowRight: () => pan(span / 6), 0: fitAll, Escape: () => { pinned = null; showChosen(); redraw(); },
    };
    const act = acts[event.key];
    if (act && !event.ctrlKey && !event.metaKey) { event.preventDefault(); act(); }
  });
  view.addEventListener("scroll", redraw);
  addEventListener("resize", redraw);
  const on = (name, act) => document.getElementById(name).addEventListener("click", act);
  on("in", () => zoom(0.6));
  on("out", () => zoom(1.7));
  on("all", fitAll);
  on("theme", () => {
    const next = root.dataset.theme === "dark" ? "light" : "dark";
    setTheme(next);
    try { localStorage.setItem("phalanx-theme", next); } catch { /* a page from a file may not store */ }
    redraw();
  });
  const legend = document.querySelector(".legend");
  for (const [name, shade] of colours) {
    const button = element("button", undefined);
    const box = element("i");
    box.style.background = shade;
    button.append(box, data.names[name]);
    button.title = "show or fade " + data.names[name];
    button.addEventListener("click", () => {
      if (!off.delete(name)) off.add(name);
      button.classList.toggle("off", off.has(name));
      redraw();
    });
    legend.append(button);
  }
  const used = new Set();
  for (const track of data.tracks) {
    for (let i = 0; i < track.slices.length; i += FIELDS) if (track.slices[i + 5] === 1) used.add(data.names[track.slices[i + 4]]);
  }
  for (const [name, shade] of Object.entries(phases)) {
    if (!used.has(name)) continue;
    const one = element("span"), box = element("i");
    box.style.background = shade;
    one.className = "soft";
    one.style.cssText = "display:inline-flex;align-items:center;gap:5px";
    one.append(box, name);
    legend.append(one);
  }
  draw();
  root.dataset.ready = "yes";
})();
