(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const canvas = byId("canvas");
  const pen = canvas.getContext("2d");
  const n = data.texts.length;
  const lower = data.texts.map((text) => text.toLowerCase());
  // The page's most distinct colours; further clusters use the same colours with another shape.
  // Filled shapes come before hollow ones, so that 96 clusters have different marks.
  const COLOURS = [1, 2, 3, 4, 5, 7].map((i) => `var(--series-${i})`);
  const star = Array.from({ length: 10 }, (_, i) => [
    (i % 2 ? 0.55 : 1.35) * Math.sin((i * Math.PI) / 5), -(i % 2 ? 0.55 : 1.35) * Math.cos((i * Math.PI) / 5)]);
  const plus = [[-0.4, -1.2], [0.4, -1.2], [0.4, -0.4], [1.2, -0.4], [1.2, 0.4], [0.4, 0.4], [0.4, 1.2], [-0.4, 1.2],
    [-0.4, 0.4], [-1.2, 0.4], [-1.2, -0.4], [-0.4, -0.4]];
  const cross = plus.map(([x, y]) => [(x - y) * Math.SQRT1_2, (x + y) * Math.SQRT1_2]);
  // The corners of each shape, for a radius of 1; null: a circle.
  const SHAPES = [null, [[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]], [[0, -1.2], [1.15, 1], [-1.15, 1]],
    [[0, -1.3], [1.1, 0], [0, 1.3], [-1.1, 0]], [[0, 1.2], [1.15, -1], [-1.15, -1]], plus, cross, star];
  const NOISE = -1;
  const MARGIN = 14;
  const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

  // Text is only ever inserted as text nodes, never as HTML.
  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined) element.setAttribute(key, value);
    }
    element.append(...children);
    return element;
  }

  let shownIndex = 0;       // index of the clustering that is displayed
  let selected = null;      // number of the only cluster that is displayed; null: all are
  let matches = null;       // whether each text matches the search; null: there is no search
  let current = null;       // index of the text that is being read
  const colours = new Map();
  let points = Float64Array.from(data.shown[0].places);
  let from = points, startTime = 0, moving = 0;

  const clustering = () => data.shown[shownIndex];
  const hue = (cluster) => (cluster === NOISE ? "var(--muted)" : COLOURS[cluster % COLOURS.length]);
  const colourOf = (cluster) => colours.get(hue(cluster));
  const shapeOf = (cluster) => Math.floor(cluster / COLOURS.length) % (2 * SHAPES.length);
  const isHollow = (cluster) => cluster !== NOISE && shapeOf(cluster) >= SHAPES.length;
  // The same outline is drawn on the map and in the legend.
  function outline(path, cluster, x, y, r) {
    const corners = cluster === NOISE ? null : SHAPES[shapeOf(cluster) % SHAPES.length];
    const radius = cluster === NOISE ? r * 0.7 : r;
    if (!corners) {
      path.moveTo(x + radius, y);
      path.arc(x, y, radius, 0, 2 * Math.PI);
      return;
    }
    corners.forEach(([a, b], i) => path[i ? "lineTo" : "moveTo"](x + radius * a, y + radius * b));
    path.closePath();
  }
  const nameOf = (cluster) => clustering().clusters.find(([number]) => number === cluster)?.[1] || "";
  const describe = (cluster) => (cluster === NOISE ? "in no cluster" : `cluster ${cluster}${nameOf(cluster) ? `: ${nameOf(cluster)}` : ""}`);
  const visible = (i) => (selected === null || clustering().labels[i] === selected) && (matches === null || matches[i]);

  // -- drawing ----------------------------------------------------------------------------------

  function readColours() {
    // A colour that depends on the theme is resolved where it is used, not where it is declared.
    const probe = make("i", { hidden: "", style: "forced-color-adjust: none" });
    document.body.append(probe);
    for (const name of [...COLOURS, "var(--muted)", "var(--ink)"]) {
      probe.style.color = name;
      colours.set(name, getComputedStyle(probe).color);
    }
    probe.remove();
  }

  let width = 0, height = 0;
  const size = () => Math.max(2, Math.min(5, Math.sqrt((width * height) / n) / 5));
  const position = (i) => [
    width / 2 + (points[2 * i] / data.steps - 0.5) * (width - 2 * MARGIN),
    height / 2 + (points[2 * i + 1] / data.steps - 0.5) * (height - 2 * MARGIN),
  ];

  function draw() {
    const ratio = devicePixelRatio || 1;
    width = canvas.clientWidth;
    height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const r = size();
    // Texts that are filtered out are drawn first, faintly.
    for (const front of [false, true]) {
      const paths = new Map();
      for (let i = 0; i < n; i++) {
        if (visible(i) !== front) continue;
        const cluster = clustering().labels[i];
        if (!paths.has(cluster)) paths.set(cluster, new Path2D());
        outline(paths.get(cluster), cluster, ...position(i), front && matches ? r * 1.3 : r);
      }
      pen.globalAlpha = front ? 0.8 : 0.12;
      pen.lineWidth = Math.max(1, r * 0.4);
      for (const [cluster, path] of paths) {
        pen.fillStyle = pen.strokeStyle = colourOf(cluster);
        pen[isHollow(cluster) ? "stroke" : "fill"](path);
      }
    }
    pen.globalAlpha = 1;
    if (current !== null) {
      const path = new Path2D();
      outline(path, clustering().labels[current], ...position(current), r * 1.6);
      pen.fillStyle = colourOf(clustering().labels[current]);
      pen.fill(path);
      pen.lineWidth = 2;
      pen.strokeStyle = colours.get("var(--ink)");
      pen.stroke(path);
    }
  }

  function step(now) {
    const share = Math.min(1, (now - startTime) / 900);
    const eased = share < 0.5 ? 4 * share ** 3 : 1 - (2 - 2 * share) ** 3 / 2;
    const to = clustering().places;
    points = Float64Array.from(to, (value, i) => from[i] + (value - from[i]) * eased);
    draw();
    moving = share < 1 ? requestAnimationFrame(step) : 0;
    canvas.dataset.moving = String(share < 1);
  }

  function move() {
    cancelAnimationFrame(moving);
    from = points;
    startTime = reducedMotion.matches ? -Infinity : performance.now();
    step(performance.now());
  }

  // -- reading ----------------------------------------------------------------------------------

  const tooltip = byId("tooltip");
  function read(i, pointer = null) {
    current = i;
    byId("read").hidden = i === null;
    byId("text").textContent = i === null ? "" : data.texts[i];
    byId("of").textContent = i === null ? "" : describe(clustering().labels[i]);
    tooltip.hidden = pointer === null || i === null;
    if (!tooltip.hidden) {
      tooltip.replaceChildren(make("p", { class: "clamped", dir: "auto" }, data.texts[i]), describe(clustering().labels[i]));
      const box = tooltip.getBoundingClientRect();
      tooltip.style.left = `${Math.max(4, Math.min(pointer.clientX + 14, innerWidth - box.width - 4))}px`;
      const below = pointer.clientY + 18;
      tooltip.style.top = `${below + box.height > innerHeight ? Math.max(4, pointer.clientY - box.height - 12) : below}px`;
    }
    draw();
  }

  function nearest(x, y, maxDistance) {
    let best = null, smallest = maxDistance * maxDistance;
    for (let i = 0; i < n; i++) {
      if (!visible(i)) continue;
      const [a, b] = position(i);
      const distance = (a - x) ** 2 + (b - y) ** 2;
      if (distance <= smallest) [best, smallest] = [i, distance];
    }
    return best;
  }

  function point(event) {
    const box = canvas.getBoundingClientRect();
    const i = nearest(event.clientX - box.left, event.clientY - box.top, event.pointerType === "mouse" ? 12 : 24);
    if (i !== null || event.type === "pointerdown") read(i, event.pointerType === "mouse" ? event : null);
    else tooltip.hidden = true;
  }
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("pointerleave", () => { tooltip.hidden = true; });

  const DIRECTIONS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Escape") read(null);
    const direction = DIRECTIONS[event.key];
    if (!direction) return;
    event.preventDefault();
    if (current === null || !visible(current)) {
      read(nearest(width / 2, height / 2, Infinity));
      return;
    }
    // Find the next text in that direction; sideways distance counts double.
    const [x, y] = position(current);
    let best = null, smallest = Infinity;
    for (let i = 0; i < n; i++) {
      if (i === current || !visible(i)) continue;
      const [a, b] = position(i);
      const along = (a - x) * direction[0] + (b - y) * direction[1];
      const sideways = Math.abs((a - x) * direction[1] + (b - y) * direction[0]);
      if (along > 0.01 && sideways <= along && along + 2 * sideways < smallest) [best, smallest] = [i, along + 2 * sideways];
    }
    if (best !== null) read(best);
  });

  // -- legend and search ------------------------------------------------------------------------

  const SVG = "http://www.w3.org/2000/svg";
  function swatch(cluster) {
    const svg = document.createElementNS(SVG, "svg");
    const mark = document.createElementNS(SVG, "path");
    const d = [];
    const pencil = {
      moveTo: (x, y) => d.push(`M${x},${y}`),
      lineTo: (x, y) => d.push(`L${x},${y}`),
      arc: (x, y, r) => d.push(`A${r},${r} 0 1 1 ${-r},0A${r},${r} 0 1 1 ${r},0`),
      closePath: () => d.push("Z"),
    };
    outline(pencil, cluster, 0, 0, 5);
    svg.setAttribute("class", "swatch");
    svg.setAttribute("viewBox", "-8 -8 16 16");
    svg.setAttribute("aria-hidden", "true");
    svg.style.color = hue(cluster);
    mark.setAttribute("d", d.join(""));
    if (isHollow(cluster)) mark.setAttribute("class", "hollow");
    svg.append(mark);
    return svg;
  }

  function choose(cluster) {
    selected = selected === cluster ? null : cluster;
    for (const button of byId("legend").querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.cluster) === selected));
    }
    count();
  }

  function legend() {
    byId("legend").replaceChildren(...clustering().clusters.map(([cluster, name, texts]) => make("li", {},
      make("button", { type: "button", "aria-pressed": "false", "data-cluster": cluster, onclick: () => choose(cluster) },
        swatch(cluster),
        make("span", { class: "clamped" }, make("b", {}, cluster === NOISE ? "in no cluster" : cluster), " ", make("bdi", {}, name)),
        make("span", { class: "size" }, texts.toLocaleString("en"))))));
    fitLegend();
  }

  // The list ends below a whole row, and says if there are more.
  function fitLegend() {
    const list = byId("legend");
    list.style.maxHeight = "";
    const rows = [...list.children], top = list.getBoundingClientRect().top - list.scrollTop;
    const ends = rows.map((row) => row.getBoundingClientRect().bottom - top);
    const overflows = list.scrollHeight > list.clientHeight + 1;
    if (overflows) list.style.maxHeight = `${ends.findLast((end) => end <= list.clientHeight + 1) ?? list.clientHeight}px`;
    byId("more").textContent = overflows ? ` (scroll for all ${rows.length})` : "";
  }

  function count() {
    let seen = 0;
    for (let i = 0; i < n; i++) seen += visible(i);
    byId("count").textContent = `${seen.toLocaleString("en")} of ${n.toLocaleString("en")} texts`;
    draw();
  }

  function show(next) {
    shownIndex = next;
    selected = null;
    legend();
    count();
    read(current);
    move();
  }

  byId("search").addEventListener("input", (event) => {
    const needle = event.target.value.trim().toLowerCase();
    matches = needle ? lower.map((text) => text.includes(needle)) : null;
    count();
  });
  byId("switch").append(...data.shown.map((item, i) => make("label", {},
    make("input", { type: "radio", name: "shown", value: i, ...(i ? {} : { checked: "" }), onchange: () => show(i) }),
    make("span", { dir: "auto" }, item.title))));

  const redraw = () => { readColours(); draw(); };
  new MutationObserver(redraw).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  // Paper is light, whatever the theme.
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", redraw);
  new ResizeObserver(() => { draw(); fitLegend(); }).observe(canvas);
  const wide = new ResizeObserver((entries) => {
    for (const { target } of entries) target.classList.toggle("wide", target.scrollWidth > target.clientWidth);
  });
  document.querySelectorAll(".scroll").forEach((box) => wide.observe(box));
  readColours();
  legend();
  count();
})();
