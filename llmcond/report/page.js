(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const SERIES = { A: ["var(--series-1)", "circle"], B: ["var(--series-2)", "square"] };

  // Texts become text nodes, so that markup in them is never interpreted.
  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined) element.setAttribute(key, value);
    }
    element.append(...children);
    return element;
  }

  function swatch(letter) {
    const svg = document.createElementNS(SVG, "svg");
    const use = document.createElementNS(SVG, "use");
    svg.setAttribute("class", "swatch");
    svg.setAttribute("viewBox", "-8 -8 16 16");
    svg.setAttribute("aria-hidden", "true");
    svg.style.color = SERIES[letter][0];
    use.setAttribute("href", `#mark-${SERIES[letter][1]}`);
    svg.append(use);
    return svg;
  }

  function passage(text) {
    const shown = make("span", { class: "text", dir: "auto" }, text);
    if (text.length <= 220 && text.split("\n").length <= 4) return shown;
    shown.classList.add("clamped");
    const button = make("button", { type: "button", class: "more", "aria-expanded": "false" }, "Show all");
    button.addEventListener("click", () => {
      const clamped = shown.classList.toggle("clamped");
      button.textContent = clamped ? "Show all" : "Show less";
      button.setAttribute("aria-expanded", String(!clamped));
    });
    return make("div", {}, shown, button);
  }

  function number(value, digits, signed = false) {
    if (value === null || value === undefined) return "–";
    const text = Math.abs(value).toFixed(digits);
    if (Number(text) === 0) return text;
    return (value < 0 ? "\u2212" : signed ? "+" : "") + text;
  }

  const trimmed = (value, digits) => (value === null ? "–" : String(Number(value.toFixed(digits))));
  const counted = (n, [singular, plural]) => `${n.toLocaleString("en")} ${n === 1 ? singular : plural}`;
  const UNIT = data.ranked ? ["query", "queries"] : ["row", "rows"];

  // -- tables that are wider than the screen -----------------------------------------------------

  // The class makes a hint visible: phones show no scroll bar that would hint at further columns.
  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const box = target.closest(".scroll");
      box.classList.toggle("wide", box.scrollWidth > box.clientWidth);
    }
  });
  function watchSize(box) {
    sizes.observe(box);
    sizes.observe(box.firstElementChild);
    return box;
  }
  document.querySelectorAll(".scroll").forEach(watchSize);

  // -- sorting ----------------------------------------------------------------------------------

  // Unknown values come last in either direction.
  function compare(a, b, direction) {
    const unknown = (value) => value === null || value === undefined || value === "";
    if (unknown(a) || unknown(b)) return unknown(a) - unknown(b);
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return direction === "ascending" ? order : -order;
  }

  // At first, figures are sorted in descending and texts in ascending order; then the order toggles.
  function nextDirection(heading) {
    const current = heading.getAttribute("aria-sort");
    const first = heading.classList.contains("number") ? "descending" : "ascending";
    const second = first === "ascending" ? "descending" : "ascending";
    return current === first ? second : first;
  }

  function markSorted(heading, direction) {
    for (const other of heading.parentNode.children) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", direction);
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => {
      heading.firstElementChild.addEventListener("click", () => {
        const direction = nextDirection(heading);
        const value = (row) => {
          const sort = row.cells[column].dataset.sort;
          return sort === undefined ? null : heading.classList.contains("number") ? Number(sort) : sort;
        };
        markSorted(heading, direction);
        const body = table.tBodies[0];
        body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b), direction)));
      });
    });
  }

  // Further items get the focus, because the button that shows them may disappear.
  function focusOn(item) {
    item.tabIndex = -1;
    item.focus();
  }

  // A table of many rows, which is sorted as a whole and shown in portions.
  function bigTable(label, columns, size = 25, noun = "rows") {
    let rows = [];
    let shown = size;
    let sorted = null;
    const body = make("tbody");
    const more = make("button", { type: "button", class: "further", onclick: () => {
      const next = shown;
      shown += 4 * size;
      fill();
      focusOn(body.rows[next]);
    } });
    const head = make("tr");
    columns.forEach((column, i) => {
      const heading = make("th", { scope: "col", "aria-sort": "none", class: column.text ? null : "number" });
      heading.append(make("button", { type: "button", onclick: () => sort(i, nextDirection(heading)) }, column.label));
      head.append(heading);
    });
    function sort(i, direction) {
      sorted = [i, direction];
      markSorted(head.cells[i], direction);
      fill();
    }
    function fill() {
      const ordered = sorted ? [...rows].sort((a, b) => compare(columns[sorted[0]].value(a), columns[sorted[0]].value(b), sorted[1])) : rows;
      body.replaceChildren(...ordered.slice(0, shown).map((row) => make("tr", {}, ...columns.map((column, i) => {
        const content = column.show ? column.show(row) : column.value(row) ?? "–";
        const attributes = { class: column.text === true ? "text" : column.text ? "name" : "number" };
        return i ? make("td", attributes, content) : make("th", { scope: "row", ...attributes }, content);
      }))));
      more.hidden = ordered.length <= shown;
      more.textContent = `Show more of the ${ordered.length.toLocaleString("en")} ${noun}`;
    }
    const table = make("table", {}, make("thead", {}, head), body);
    const box = make("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" }, table);
    return {
      element: make("div", {}, watchSize(box), more),
      head,
      sort,
      set(newRows) { rows = newRows; shown = size; fill(); },
    };
  }

  // -- charts -----------------------------------------------------------------------------------

  const views = new Map();
  const tip = byId("tooltip");

  function tooltip(_, event, __, value) {
    if (!value || typeof value !== "object") { tip.hidden = true; return; }
    if ("row" in value) tip.replaceChildren(...rowTip(Number(value.row)));
    else tip.replaceChildren(...Object.entries(value).map(([key, shown]) => make("p", {}, make("b", {}, key), ` ${shown}`)));
    tip.hidden = false;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, room)) + scrollX}px`;
    const below = event.clientY + 16 + tip.offsetHeight < innerHeight;
    tip.style.top = `${event.clientY + scrollY + (below ? 16 : -tip.offsetHeight - 12)}px`;
  }

  function rowTip(i) {
    const short = (text) => make("p", { class: "clamped", dir: "auto" }, text);
    const condition = make("p", { dir: "auto" }, make("b", {}, text("condition", i)));
    const rating = make("p", {}, `row ${data.rows.number[i]}, rating ${trimmed(data.rows.rating[i], 3)}`);
    return [condition, short(text("sentence1", i)), short(text("sentence2", i)), rating];
  }

  function draw(key, chart, datasets = {}) {
    const target = document.querySelector(`[data-chart="${key}"]`);
    if (!target || !data.charts[chart]) return;
    const spec = structuredClone(data.charts[chart]);
    spec.datasets = { ...spec.datasets, ...datasets };
    const options = { mode: "vega-lite", renderer: "svg", actions: false, ast: true, defaultStyle: false, logLevel: 1, tooltip, config: data.config };
    // The number of the drawing tells whether a later one has replaced it in the meantime.
    const turn = (views.get(key)?.turn ?? 0) + 1;
    views.get(key)?.view?.finalize();
    views.set(key, { turn });
    window.vegaEmbed(target, spec, options).then((result) => {
      if (views.get(key).turn === turn) views.get(key).view = result.view;
      else result.view.finalize();
    });
  }

  // The table of numbers below a chart is built when it is opened.
  const numbers = new Map();
  function tabulate(key, label, rows, columns, size, noun) {
    numbers.set(key, () => {
      const table = bigTable(label, columns, size, noun);
      table.set(rows());
      return table.element;
    });
  }
  for (const box of document.querySelectorAll("[data-numbers]")) {
    box.addEventListener("toggle", () => { if (box.open) refresh(box.dataset.numbers); });
  }
  function refresh(key) {
    const box = document.querySelector(`[data-numbers="${key}"]`);
    if (box?.open) box.querySelector(".fill").replaceChildren(numbers.get(key)());
  }

  if (data.charts.heads) {
    draw("heads", "heads");
    const rows = Object.values(data.charts.heads.datasets).find((set) => set[0] && "system" in set[0]);
    tabulate("heads", `${data.primary} by system`, () => rows, [
      { label: "system", text: "name", value: (row) => row.system },
      { label: data.primary, value: (row) => row.value, show: (row) => row[data.primary] },
      { label: "lower bound", value: (row) => row.low, show: (row) => number(row.low, 1) },
      { label: "upper bound", value: (row) => row.high, show: (row) => number(row.high, 1) },
    ], 100);
  }
  if (data.charts.differences) draw("differences", "differences");

  // -- rows -------------------------------------------------------------------------------------

  const text = (key, i) => data.texts[data.rows[key][i]];
  const entry = (i, column) => passage(text(data.columns[column][0], i));

  if (data.systems.length) {
    const letters = data.chosen[1] === null ? ["A"] : ["A", "B"];
    const index = new Map(data.systems.map((system, i) => [system.name, i]));
    const state = Object.fromEntries(letters.map((letter, i) => [letter, index.get(data.chosen[i])]));
    const system = (letter) => data.systems[state[letter]];
    const everyRow = data.rows.number.map((_, i) => i);
    const [low, high] = data.scale ?? [0, 1];
    const rating = (i) => (data.ranked ? null : data.rows.rating[i]);
    const distinct = [...new Set((data.rows.rating ?? []).filter((r) => r !== null))].sort((a, b) => a - b);
    const gap = Math.min(...distinct.slice(1).map((r, i) => r - distinct[i]), high - low);
    // A pseudo-random shift that is the same for a row in every chart.
    const spread = (i) => (distinct.length > 21 || distinct.length < 2 ? 0 : (((i * 2654435761) >>> 0) / 2 ** 32 - 0.5) * 0.6 * gap);

    const headed = (what, letter) => (letters.length > 1 ? `${what} of ${letter}` : what);
    const textColumns = data.columns.map(
      ([key, label], column) => ({ label, text: true, value: (i) => text(key, i), show: (i) => entry(i, column) }));
    const shownPrediction = (letter, i, digits) => (data.ranked ? trimmed(system(letter).rank[i], 2) : number(system(letter).similarity[i], digits));
    const predicted = (letter, i) => (data.ranked ? system(letter).rank : system(letter).similarity)[i];

    tabulate("scatter", `Predictions of each ${UNIT[0]}`, () => everyRow, [
      { label: UNIT[0], value: (i) => data.rows.number[i] },
      ...(data.ranked ? [] : [{ label: "rating", value: rating, show: (i) => trimmed(rating(i), 3) }]),
      ...letters.map((letter) => ({ label: headed(data.ranked ? "rank" : "prediction", letter), value: (i) => predicted(letter, i), show: (i) => shownPrediction(letter, i, 4) })),
      ...textColumns,
    ], 25, UNIT[1]);
    const levels = () => letters.flatMap((letter, series) => system(letter).levels.map(([rating, n, mean, q1, median, q3]) => (
      { series: letter, name: system(letter).name, rating, place: rating + (letters.length > 1 ? (series - 0.5) * 0.12 * gap : 0), n, mean, low: q1, median, high: q3 })));
    tabulate("levels", "Predictions by rating", levels, [
      { label: "system", text: "name", value: (level) => level.name },
      { label: "rating", value: (level) => level.rating },
      { label: "rows", value: (level) => level.n },
      ...[["mean", "mean"], ["low", "lower quartile"], ["median", "median"], ["high", "upper quartile"]].map(
        ([key, label]) => ({ label, value: (level) => level[key], show: (level) => number(level[key], 3) })),
    ], 100);

    const hits = () => letters.flatMap((letter) => system(letter).hits.map(([k, share]) => ({ series: letter, name: system(letter).name, k, share })));
    tabulate("hits", "Answers by rank", hits, [
      { label: "system", text: "name", value: (point) => point.name },
      { label: "among the first", value: (point) => point.k },
      { label: "answers in %", value: (point) => point.share, show: (point) => number(100 * point.share, 1) },
    ], 100);

    const updates = [];

    function ranks() {
      draw("hits", "hits", { points: hits() });
      refresh("hits");
      refresh("scatter");
    }

    function charts() {
      const all = levels();
      for (const letter of letters) {
        byId(`scatter-name-${letter}`).replaceChildren(...(letters.length > 1 ? [swatch(letter), `${letter}: ${system(letter).name}`] : [system(letter).name]));
        const points = everyRow.filter((i) => data.rows.rating[i] !== null && system(letter).similarity[i] !== null)
          .map((i) => ({ x: data.rows.rating[i] + spread(i), y: system(letter).similarity[i], row: i }));
        draw(`scatter-${letter}`, "scatter", { points, levels: all.filter((level) => level.series === letter) });
      }
      draw("levels", "levels", { levels: all, ends: [{ rating: low, value: 0 }, { rating: high, value: 1 }] });
      refresh("scatter");
      refresh("levels");
    }
    if (data.ranked) updates.push(ranks);
    else if (data.conditions) updates.push(charts);
    if (data.conditions) updates.push(conditions());
    if (letters.length > 1) updates.push(disagreements());

    function update() {
      for (const letter of letters) byId(`score-${letter}`).textContent = system(letter).score;
      for (const redraw of updates) redraw();
    }
    for (const letter of letters) {
      const select = byId(`system-${letter}`);
      select.append(...data.systems.map(({ name }, i) => make("option", { value: i }, name)));
      select.value = state[letter];
      select.addEventListener("change", () => { state[letter] = Number(select.value); update(); });
    }
    update();

    function search(label) {
      const input = make("input", { type: "search", autocomplete: "off" });
      return [make("label", {}, label, input), input];
    }

    function conditions() {
      const groups = data.conditions;
      const share = (value) => (value === null ? null : value / 10);
      const digits = groups.decimals ?? 1;
      const error = (letter) => (i) => (data.ranked ? groups.figure[state[letter]][i] : share(groups.error[state[letter]][i]));
      const difference = (i) => {
        const [a, b] = [error("A")(i), error("B")(i)];
        return a === null || b === null ? null : a - b;
      };
      const columns = [
        { label: groups.what[0], text: true, value: (i) => data.texts[groups.text[i]], show: (i) => passage(data.texts[groups.text[i]]) },
        { label: UNIT[1], value: (i) => groups.n[i] },
        ...(data.ranked ? [] : [
          { label: "mean rating", value: (i) => groups.rating[i], show: (i) => number(groups.rating[i], 2) },
          { label: "error by chance, %", value: (i) => share(groups.chance[i]), show: (i) => number(share(groups.chance[i]), 1) },
        ]),
        ...letters.map((letter) => ({ label: headed(data.ranked ? data.primary : "rank error", letter) + (data.ranked ? "" : ", %"), value: error(letter), show: (i) => number(error(letter)(i), digits) })),
      ];
      if (letters.length > 1) columns.push({ label: "A minus B", value: difference, show: (i) => number(difference(i), digits, true) });
      const table = bigTable(data.ranked ? `${data.primary} by ${groups.what[0]}` : "Rank errors by condition", columns, 15, groups.what[1]);
      const [label, input] = search(`Search ${groups.what[1]}`);
      const minimum = make("select", {}, ...[1, 2, 3, 5, 10, 20].map((n) => make("option", { value: n }, String(n))));
      const frequent = groups.n.filter((n) => n >= 3).length;
      minimum.value = frequent >= 5 ? 3 : 1;
      const count = make("p", { role: "status" });
      function fill() {
        const query = input.value.trim().toLowerCase();
        const matching = groups.n.map((_, i) => i).filter((i) => groups.n[i] >= Number(minimum.value) && data.texts[groups.text[i]].toLowerCase().includes(query));
        count.textContent = `${matching.length.toLocaleString("en")} of ${counted(groups.n.length, groups.what)}`;
        table.set(matching);
      }
      input.addEventListener("input", fill);
      minimum.addEventListener("change", fill);
      byId("conditions").append(make("div", { class: "tools" }, label, make("label", {}, data.ranked ? "Minimum queries" : "Minimum rows", minimum), count), table.element);
      table.sort(1, "descending");
      return fill;
    }

    function disagreements() {
      const SIZE = 6;
      const [label, input] = search("Search texts");
      const closerFilter = make("select", {}, ...[["", "any"], ["A", "A"], ["B", "B"]].map(([value, label]) => make("option", { value }, label)));
      const count = make("p", { role: "status" });
      const list = make("ul", { class: "cards" });
      let shown = SIZE;
      const more = make("button", { type: "button", class: "further", onclick: () => {
        const next = shown;
        shown += 2 * SIZE;
        fill();
        focusOn(list.children[next]);
      } }, "Show more");
      const band = new Map((data.spans ?? []).map(([rating, first, last]) => [rating, [first, last]]));

      const closer = (i) => {
        const [a, b] = ["A", "B"].map((letter) => (data.ranked ? system(letter).rank : system(letter).error)[i]);
        if (a === null || b === null || Math.abs(a) === Math.abs(b)) return "";
        return Math.abs(a) < Math.abs(b) ? "A" : "B";
      };
      function matches(i, query) {
        if (closerFilter.value && closer(i) !== closerFilter.value) return false;
        return !query || data.columns.some(([key]) => text(key, i).toLowerCase().includes(query));
      }
      function strip(i) {
        const box = make("div", { class: "strip", "aria-hidden": "true" });
        const span = band.get(rating(i));
        if (span) {
          const [first, last] = span;
          const belongs = make("div", { class: "band" });
          belongs.style.left = `${first / 10}%`;
          belongs.style.width = `${(last - first) / 10}%`;
          box.append(belongs);
        }
        for (const letter of ["B", "A"]) {
          const sign = swatch(letter);
          sign.style.left = `${system(letter).place[i] / 10}%`;
          box.append(sign);
        }
        return box;
      }
      function figures(i) {
        const figure = (name, value) => make("div", {}, make("dt", {}, ...name), make("dd", {}, value));
        const prediction = (letter) => (data.ranked ? `rank ${shownPrediction(letter, i)}` : `${shownPrediction(letter, i, 3)}, at ${Math.round(system(letter).place[i] / 10)} %`);
        const first = data.ranked ? [] : [figure(["rating"], trimmed(rating(i), 3))];
        return make("dl", { class: "figures" }, ...first, ...letters.map((letter) => figure([swatch(letter), letter], prediction(letter))));
      }
      function card(i) {
        const better = closer(i);
        const row = make("span", { class: "detail" }, `${UNIT[0]} ${data.rows.number[i]}`);
        const verdict = data.ranked ? (better ? `${better} ranks the answer higher` : "both give the answer the same rank")
          : better ? `${better} is closer to the rating` : rating(i) === null ? "unrated" : "both are equally close to the rating";
        const condition = make("div", { class: "condition" }, entry(i, 0));
        // The texts of a query differ in kind, so each has its label.
        const texts = data.columns.slice(1).map(([key, label], j) => ({ label, column: j + 1, content: text(key, i) })).filter(({ content }) => content)
          .map(({ label, column }) => make("div", {}, ...(data.ranked ? [make("span", { class: "detail" }, label)] : []), entry(i, column)));
        return make("li", { class: "card" },
          make("header", {}, condition, row),
          make("div", { class: "texts" }, ...texts),
          strip(i), figures(i), make("span", { class: "detail" }, verdict));
      }
      function fill() {
        const query = input.value.trim().toLowerCase();
        const distance = (i) => Math.abs(system("A").place[i] - system("B").place[i]);
        const matching = everyRow.filter((i) => system("A").place[i] !== null && system("B").place[i] !== null && matches(i, query));
        matching.sort((a, b) => distance(b) - distance(a) || a - b);
        count.textContent = counted(matching.length, UNIT);
        list.replaceChildren(...matching.slice(0, shown).map(card));
        more.hidden = matching.length <= shown;
      }
      const reset = () => { shown = SIZE; fill(); };
      input.addEventListener("input", reset);
      closerFilter.addEventListener("change", reset);
      byId("disagreements").append(make("div", { class: "tools" }, label, make("label", {}, data.ranked ? "Ranks the answer higher" : "Closer to the rating", closerFilter), count), list, more);
      return reset;
    }
  }

  // -- learning curves --------------------------------------------------------------------------

  if (data.curves.length) {
    const select = byId("system-curves");
    select.append(...data.curves.map(({ name }, i) => make("option", { value: i }, name)));
    const best = data.curves.findIndex(({ name }) => name === data.chosen[0]);
    select.value = Math.max(best, 0);
    const mean = (values) => (values.includes(null) ? null : values.reduce((a, b) => a + b, 0) / values.length);
    // A mean over seeds ends where the shortest seed ends.
    const means = data.curves.map(({ name, seeds }) => {
      const length = Math.min(...seeds.map((seed) => seed.length));
      return Array.from({ length }, (_, epoch) => ({
        name,
        epoch: seeds[0][epoch][0],
        dev: mean(seeds.map((seed) => seed[epoch][2])),
      })).filter((point) => point.dev !== null);
    });
    const points = (i) => data.curves[i].seeds.flatMap((seed, s) => seed.map(([epoch, loss, dev]) => ({ name: data.curves[i].name, seed: data.curves[i].labels[s], epoch, loss, dev })));
    tabulate("curves", "Numbers of the learning curves", () => points(Number(select.value)), [
      { label: "system", text: "name", value: (row) => row.name },
      { label: "seed", value: (row) => row.seed },
      { label: "epoch", value: (row) => row.epoch },
      { label: "loss", value: (row) => row.loss, show: (row) => number(row.loss, 4) },
      { label: data.dev, value: (row) => row.dev, show: (row) => number(row.dev, 1) },
    ], 50);
    function update() {
      const i = Number(select.value);
      draw("dev", "dev", { chosen: points(i).filter((row) => row.dev !== null), others: means.filter((_, j) => j !== i).flat() });
      // Other systems may have other loss functions, so their losses are not comparable.
      draw("loss", "loss", { chosen: points(i).filter((row) => row.loss !== null), others: [] });
      refresh("curves");
    }
    select.addEventListener("change", update);
    update();
  }
})();
