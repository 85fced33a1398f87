// Answers a pointer over the picture of the charts: values and words under it, a window of time by wheel or drag, series
// switched on and off at the legend. The picture itself stays what the kernel has drawn; this only reads the facts that
// come with it, and writes what was asked for into a hidden text field, which is a widget.
//
// One expression: a function of an element inside of the picture's box.
(function attach(element, tries) {
  "use strict";
  const root = element.closest(".hivenb-picture");
  const image = root && root.querySelector("img.hivenb-charts");
  if (!image) {  // the box may not be there yet: front ends build widgets piece by piece
    if ((tries || 0) < 200) setTimeout(() => attach(element, (tries || 0) + 1), 50);
    return;
  }
  if (root.hivenbPointer) return;
  root.hivenbPointer = true;

  const make = (name, parent = root, tag = "div") => {
    const made = document.createElement(tag);
    made.className = name;
    made.hidden = true;
    parent.append(made);
    return made;
  };
  const hair = make("hivenb-hair"), chosen = make("hivenb-chosen"), tip = make("hivenb-tip");
  const whole = make("hivenb-whole", root, "button");
  whole.type = "button";
  whole.textContent = "show all";
  whole.title = "back to all of the run; a double click does the same";

  let text = "", facts = null, window_ = null, pointer = null, drag = null, armed = false, rested = [], sent = 0, timer = 0;

  const read = () => {
    const node = root.querySelector(".hivenb-under-pointer");
    const now = node ? node.textContent : "";
    if (now !== text) {
      text = now;
      facts = now ? JSON.parse(now) : null;
      window_ = null;
    }
    return facts;
  };

  const send = (message) => {
    const gate = root.querySelector(".hivenb-gate input, input.hivenb-gate");
    if (!gate) return;
    gate.value = JSON.stringify({ ...message, number: `${Date.now()}-${sent++}` });
    for (const kind of ["input", "change"]) gate.dispatchEvent(new Event(kind, { bubbles: true }));
  };

  // -- words ---------------------------------------------------------------------------------------------------
  const number = (value) => {
    const size = Math.abs(value);
    if (size >= 1e7) return value.toExponential(2);
    if (size >= 1000) return Math.round(value).toLocaleString("en-US");
    return size >= 10 ? value.toFixed(1) : size >= 1 ? value.toFixed(2)
      : size >= 0.001 || size === 0 ? value.toFixed(3) : value.toExponential(1);
  };
  const bytes = (value) => {
    const [scale, unit] = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]
      .find(([least]) => Math.abs(value) >= 0.9995 * least) || [1, "B"];
    const amount = value / scale;
    return `${scale > 1 && Math.abs(amount) < 9.95 ? amount.toFixed(1) : Math.round(amount)} ${unit}`;
  };
  const written = (value, unit) => unit === "bytes" ? bytes(value) : unit === "whole" ? String(Math.round(value))
    : unit === "share" ? `${(100 * value).toFixed(1)} %` : number(value);
  const duration = (seconds) => {
    if (seconds < 60) return `${seconds.toFixed(1)} s`;
    const all = Math.round(seconds), hours = Math.floor(all / 3600), minutes = Math.floor(all / 60) % 60;
    return hours ? `${hours} h ${minutes} min ${all % 60} s` : `${minutes} min ${all % 60} s`;
  };
  const place = (value, axis) => axis === "time" ? duration(value)
    : `${axis === "epochs" ? "epoch" : "sample"} ${axis === "epochs" ? value.toFixed(1) : number(Math.round(value))}`;

  // -- places --------------------------------------------------------------------------------------------------
  const share = (event) => {
    const box = image.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  };
  const inside = (box, [x, y], more = 0) => box && x >= box[0] - more && x <= box[2] + more
    && y >= box[1] - more && y <= box[3] + more;
  const across = (panel, x) => {
    const [start, end] = panel.across, [left, , right] = panel.box;
    return start + (Math.min(Math.max(x, left), right) - left) / (right - left) * (end - start);
  };
  const down = (panel, at) => {
    const [start, end] = panel.across, [left, , right] = panel.box;
    return left + (at - start) / (end - start) * (right - left);
  };
  const height = (panel, value) => {
    const [low, high] = panel.up, [, top, , bottom] = panel.box;
    return bottom - ((panel.log ? Math.log10(value) : value) - low) / (high - low) * (bottom - top);
  };
  const put = (node, left, top, width, tall) => {
    const box = image.getBoundingClientRect(), from = root.getBoundingClientRect();
    node.style.left = `${box.left - from.left + left * box.width}px`;
    node.style.top = `${box.top - from.top + top * box.height}px`;
    if (width !== undefined) node.style.width = `${width * box.width}px`;
    if (tall !== undefined) node.style.height = `${tall * box.height}px`;
  };

  // The point of a line that belongs to a place: of steps the one before, else the nearest one that is known. None where
  // the line has not begun, or has ended.
  const nearest = (line, at, near) => {
    let low = 0, high = line.x.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (line.x[middle] <= at) low = middle + 1; else high = middle;
    }
    if (line.step) return low > 0 && line.y[low - 1] !== null ? low - 1 : -1;
    let [before, after] = [low - 1, low];
    while (before >= 0 && line.y[before] === null) before--;
    while (after < line.x.length && line.y[after] === null) after++;
    if (before < 0) return after < line.x.length && line.x[after] - at <= near ? after : -1;
    if (after >= line.x.length) return at - line.x[before] <= near ? before : -1;
    return at - line.x[before] <= line.x[after] - at ? before : after;
  };

  // -- what is under the pointer ---------------------------------------------------------------------------------
  const row = (color, words, value) => {
    const made = document.createElement("div"), sign = document.createElement("i");
    sign.style.background = color || "none";
    made.append(sign, words);
    if (value !== undefined) {
      const strong = document.createElement("b");
      strong.textContent = value;
      made.append(strong);
    }
    tip.append(made);
  };
  const dots = [];
  const hide = () => {
    hair.hidden = tip.hidden = true;
    for (const dot of dots) dot.hidden = true;
  };
  const marksAt = (panel, at) => {
    const near = 6 / image.getBoundingClientRect().width;
    return panel.marks.flatMap((mark) => mark.events.filter(
      (event) => inside(mark.box, at) || Math.abs(down(panel, event.at) - at[0]) <= near));
  };
  const show = () => {
    hide();
    if (!pointer || drag || !read()) return;
    const panel = facts.panels.find((one) => inside(one.box, pointer));
    root.style.cursor = legendAt(pointer) ? "pointer" : panel && !facts.closed ? "crosshair" : "";
    if (!panel) return;
    const at = across(panel, pointer[0]);
    tip.replaceChildren();
    row("", place(at, panel.axis) + (panel.axis === "time" ? " since the first start" : ""));
    tip.firstChild.className = "hivenb-tip-place";
    let used = 0;
    for (const line of panel.lines.filter((one) => !one.hidden)) {
      const index = nearest(line, at, 0.03 * (panel.across[1] - panel.across[0]));
      if (index < 0) continue;
      const value = line.y[index], trend = line.trend ? line.trend[index] : null;
      const isFar = !line.step && Math.abs(down(panel, line.x[index]) - down(panel, at)) > 0.015;
      row(line.color, isFar ? `${line.word} at ${place(line.x[index], panel.axis)}` : line.word, written(value, panel.unit));
      if (trend !== null) row("", "smoothed", written(trend, panel.unit));
      const top = height(panel, trend === null ? value : trend), left = down(panel, line.step ? at : line.x[index]);
      if (!panel.stacked && inside(panel.box, [left, top], 0.001)) {
        const dot = dots[used] = dots[used] || make("hivenb-dot");
        dot.style.borderColor = line.color;
        put(dot, left, top);
        dot.hidden = false;
        used++;
      }
    }
    for (const event of marksAt(panel, pointer)) {
      row("", `${event.number}: ${event.text}`, place(event.at, panel.axis));
      tip.lastChild.className = "hivenb-tip-mark";
    }
    put(hair, pointer[0], panel.box[1], undefined, panel.box[3] - panel.box[1]);
    hair.hidden = tip.hidden = false;
    put(tip, pointer[0], pointer[1]);
    const box = tip.getBoundingClientRect(), most = image.getBoundingClientRect();
    const onLeft = pointer[0] * most.width + box.width + 24 > most.width;
    const onTop = pointer[1] * most.height + box.height + 24 > most.height;
    tip.style.transform = `translate(${onLeft ? "calc(-100% - 14px)" : "14px"}, ${onTop ? "calc(-100% - 10px)" : "12px"})`;
  };
  const legendAt = (at) => read() && facts.panels.flatMap((panel) => panel.lines)
    .find((line) => inside(line.legend, at, 0.004));

  // -- a window of time --------------------------------------------------------------------------------------------
  const zoom = (panel, start, end) => {
    const [first, last] = panel.whole, least = (last - first) * 1e-4;
    if (facts.closed || end - start < least) return;
    start = Math.max(start, first);
    end = Math.min(end, last);
    window_ = end - start > 0.98 * (last - first) ? null : [start, end];
    clearTimeout(timer);
    const message = window_ ? { zoom: [panel.axis, ...window_] } : { zoom: null };
    timer = setTimeout(() => send(message), 60);
  };
  image.addEventListener("wheel", (event) => {
    const at = share(event), panel = read() && facts.panels.find((one) => inside(one.box, at));
    // a page that is being scrolled does not stop where a chart comes under a pointer that rests
    if (!panel || !armed || !event.deltaY || facts.closed || !panel.lines.length) return;
    const [start, end] = window_ || panel.across, [first, last] = panel.whole;
    if (event.deltaY > 0 && end - start > 0.98 * (last - first)) return;
    event.preventDefault();
    event.stopPropagation();
    const factor = Math.pow(1.0025, Math.max(-240, Math.min(240, event.deltaY * (event.deltaMode ? 33 : 1))));
    const [left, , right] = panel.box, part = (at[0] - left) / (right - left);
    const middle = start + part * (end - start), width = (end - start) * factor;
    zoom(panel, middle - part * width, middle + (1 - part) * width);
  }, { passive: false });
  window.addEventListener("scroll", () => { armed = false; }, { capture: true, passive: true });
  window.addEventListener("pointermove", (event) => {
    armed = armed || event.clientX !== rested[0] || event.clientY !== rested[1];
    rested = [event.clientX, event.clientY];
  }, { capture: true, passive: true });

  const all = () => {
    if (read() && !facts.closed && (facts.zoomed || window_)) {
      clearTimeout(timer);
      window_ = null;
      send({ zoom: null });
    }
  };
  whole.addEventListener("click", all);
  image.addEventListener("dblclick", (event) => { event.preventDefault(); all(); });

  // -- the pointer -----------------------------------------------------------------------------------------------
  image.draggable = false;
  image.addEventListener("dragstart", (event) => event.preventDefault());
  image.addEventListener("pointermove", (event) => {
    pointer = share(event);
    show();
  });
  image.addEventListener("pointerleave", () => { pointer = null; if (!drag) show(); });
  image.addEventListener("pointerdown", (event) => {
    const at = share(event), panel = read() && facts.panels.find((one) => inside(one.box, at));
    if (event.button !== 0 || event.pointerType === "touch" || !panel || facts.closed || !panel.lines.length) return;
    event.preventDefault();
    drag = { panel, from: at[0], to: at[0] };
    image.setPointerCapture(event.pointerId);
    hide();
  });
  image.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const [left, top, right, bottom] = drag.panel.box;
    drag.to = Math.min(Math.max(share(event)[0], left), right);
    put(chosen, Math.min(drag.from, drag.to), top, Math.abs(drag.to - drag.from), bottom - top);
    chosen.hidden = false;
  });
  const release = (event) => {
    if (!drag) return;
    const { panel, from, to } = drag, width = image.getBoundingClientRect().width;
    drag = null;
    chosen.hidden = true;
    if (event.type === "pointerup" && Math.abs(to - from) * width >= 6) {
      zoom(panel, across(panel, Math.min(from, to)), across(panel, Math.max(from, to)));
    }
    show();
  };
  image.addEventListener("pointerup", release);
  image.addEventListener("pointercancel", release);
  image.addEventListener("click", (event) => {
    const line = legendAt(share(event));
    if (line && !facts.closed) send({ toggle: line.key });
  });

  // -- how wide it is ----------------------------------------------------------------------------------------------
  // The picture is drawn for the room that there is, so that its words are as large as those of the page.
  let wanted = 0, sizing = 0;
  const measure = () => {
    const wide = Math.min(Math.max(10 * Math.round(root.clientWidth / 10), 360), 900);
    if (!root.clientWidth || !read() || facts.closed || wide === wanted) return;
    wanted = wide;
    clearTimeout(sizing);
    if (Math.abs(wide - facts.width) >= 16) sizing = setTimeout(() => send({ width: wide }), 150);
  };
  new ResizeObserver(measure).observe(root);

  // -- a new picture ---------------------------------------------------------------------------------------------
  const arrived = () => {
    if (!read()) return;
    measure();
    image.alt = facts.alt;
    whole.hidden = !facts.zoomed || facts.closed;
    const free = facts.panels.find((panel) => panel.title === "Peers");  // nothing is written in the middle above it
    if (free) {
      whole.style.left = `${50 * (free.box[0] + free.box[2])}%`;
      whole.style.bottom = `${100 * (1 - free.box[1])}%`;
    }
    show();
  };
  image.addEventListener("load", arrived);
  arrived();
})
